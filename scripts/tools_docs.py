"""Writes the outputs of docs/your-tools.md: launchers by running them here, front ends from their evidence."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from evidence_tables import RESULTS, ROOT, output_of, shown, table, trimmed

from benchmarks.script_overhead import MODELS, SCRIPT

EVIDENCE: Final = RESULTS / "front_ends.json"
_LINES: Final = 14
"""Of an output, at most."""

_ARGUMENTS: Final = "output_dir: out\nbf16: true\ngradient_accumulation_steps: 4\n"


def launchers() -> dict[str, str]:
    """A prediction of a launcher's command, and a check of its YAML."""
    import trl

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copyfile(Path(trl.__file__).parent / "accelerate_configs" / "zero3.yaml", folder / "zero3.yaml")
        (folder / "train.py").write_text(SCRIPT)
        (folder / "config.json").write_text(json.dumps(MODELS["GPT-2 XL"]))
        (folder / "args.yaml").write_text(_ARGUMENTS)
        predicted = (
            'memkit predict --gpu "A100 80GB" --ram 512GB --short -- \\\n    accelerate launch '
            "--config_file zero3.yaml train.py --output_dir out --bf16"
        )
        text = (folder / "zero3.yaml").read_text()
        found = {"launcher": shown(predicted, output_of(predicted, folder))}
        changed = text.replace("  zero_stage: 3", "  zero_stage: 3\n  gradient_accumulation_steps: 8")
        (folder / "zero3.yaml").write_text(changed)
        checked = "memkit check zero3.yaml --args args.yaml"
        return {**found, "check": shown(checked, output_of(checked, folder))}


def front_end(content: Mapping[str, Any], verb: str) -> str:
    """What its first training was answered, and how near its trainings came."""
    output = content["outputs"][verb]
    words = [shlex.quote(word) for word in output["words"]]
    command = f"memkit {' '.join(words)}"
    before, _, own = command.partition(" -- ")
    command = f"{before} -- \\\n    {own}" if len(command) > 100 else command
    lines = trimmed(output["text"]).splitlines()
    beginning = "\n".join([*lines[:_LINES], *["…"] * (len(lines) > _LINES)])
    return f"{shown(command, beginning)}\n\n{_jobs(content)}"


def _jobs(content: Mapping[str, Any]) -> str:
    versions = next((row["source"] for row in content["jobs"] if "source" in row), "")
    rows = []
    for row in content["jobs"]:
        errors = [abs(each) for each in row.get("errors", {}).values()]
        error = f"{max(errors):.3%}".replace("%", " %") if errors else row.get("not_compared", "not compared")
        rows.append([row["job"], row.get("verdict") or f"refused: {row['refused']}", error])
    said = f"Tried with a tiny model, on a CPU ({versions}): predicted beside trained there."
    return f"{said}\n\n{table('training | verdict | largest error of a phase', rows)}"


def tables() -> dict[Path, dict[str, str]]:
    """The page's blocks."""
    content = json.loads(EVIDENCE.read_text())
    verbs = {"trl": "predict", "llama-factory": "plan", "ms-swift": "predict", "axolotl": "plan"}
    return {
        ROOT / "docs" / "your-tools.md": {
            **launchers(),
            **{name: front_end(content[name], verb) for name, verb in verbs.items()},
        }
    }
