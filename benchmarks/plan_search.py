"""How long `memkit plan` searches beside the script's own preparation, and how many setups it judges.

    python benchmarks/plan_search.py        # results/plan_search.json

The script is that of `script_overhead.py`: it tokenises and groups a text, makes its model from a config, and trains
with Trainer. It is run up to its model, for what it takes by itself, then planned with an empty cache of traces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # also runs from a checkout that is not installed

from benchmarks.provenance import RESULTS, provenance  # noqa: E402
from benchmarks.script_overhead import MODELS, SCRIPT  # noqa: E402

JOBS: Final = (("GPT-2 XL", "RTX 3090"), ("GPT-2 XL", "T4"), ("Llama-3.1-8B", "A100 80GB"), ("Llama-3.1-8B", "L4"))
OWN: Final = ("--output_dir", "out", "--bf16", "--per_device_train_batch_size", "16")


def main() -> int:
    rows = [_row(model, gpu) for model, gpu in JOBS]
    content = {"command": "python benchmarks/plan_search.py", **provenance(), "rows": rows}
    (RESULTS / "plan_search.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


def _row(model: str, gpu: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "config.json").write_text(json.dumps(MODELS[model]))
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": name,
            "XDG_CACHE_HOME": str(folder / "cache"),
        }  # fmt: skip
        alone_s, _ = _timed([sys.executable, "train.py"], folder, {**environment, "WITHOUT_MODEL": "1"})
        command = ["plan", "train.py", "--gpu", gpu, "--ram", "128GB", "--json", "--", *OWN]
        planned_s, answer = _timed([sys.executable, "-m", "hf_memkit", *command], folder, environment)
    found = json.loads(answer)
    row = {
        "model": model, "gpu": gpu, "script_alone_s": alone_s, "plan_s": planned_s,
        "traced": len(found["setups"]), "excluded": len(found["excluded"]), "stopped": found["stopped"],
        "best": found["best"],
    }  # fmt: skip
    print(json.dumps(row))
    return row


def _timed(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[float, str]:
    began = time.monotonic()
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if ran.returncode not in (0, 1, 3):  # 3: stopped before it found one
        raise RuntimeError(ran.stderr[-2000:])
    return time.monotonic() - began, ran.stdout


if __name__ == "__main__":
    raise SystemExit(main())
