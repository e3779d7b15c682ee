#!/usr/bin/env python3
"""Writes the outputs of docs/your-tools.md: launchers by running them here, front ends from their evidence; --check
compares.

.venv/bin/python scripts/tools_docs.py [--check]
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from evidence_tables import RESULTS, ROOT, output_of, shown, trimmed, update

from benchmarks.script_overhead import MODELS, SCRIPT

EVIDENCE: Final = RESULTS / "front_ends.json"
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
    lines = [
        f"```bash\n{_broken(command)}\n```",
        "",
        f"```text\n{_beginning(output['text'])}\n```",
        "",
        _jobs(content),
    ]
    return "\n".join(lines)


def _broken(command: str) -> str:
    before, _, own = command.partition(" -- ")
    return f"{before} -- \\\n    {own}" if len(command) > 100 else command


def _beginning(text: str, lines: int = 14) -> str:
    found = trimmed(text).splitlines()
    return "\n".join([*found[:lines], *(["…"] if len(found) > lines else [])])


def _jobs(content: Mapping[str, Any]) -> str:
    versions = next((row["source"] for row in content["jobs"] if "source" in row), "")
    lines = [
        f"Tried with a tiny model, on a CPU ({versions}): predicted beside trained there.",
        "",
        "| training | verdict | largest error of a phase |",
        "|---|---|---|",
    ]
    for row in content["jobs"]:
        errors = [abs(each) for each in row.get("errors", {}).values()]
        error = f"{max(errors):.3%}".replace("%", " %") if errors else row.get("not_compared", "not compared")
        lines.append(f"| {row['job']} | {row.get('verdict') or 'refused: ' + row.get('refused', '')} | {error} |")
    return "\n".join(lines)


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


def main(arguments: list[str]) -> int:
    return update(tables(), arguments, "tools_docs.py")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
