"""What `memkit plan` answers for a training script, as docs/plan.md and README.md show it.

    python benchmarks/plan_example.py        # results/plan_example.json; with a name of COMMANDS, that one again

The script is `examples/train.py`: a model of Llama-3.2-1B's shapes in fp32, trained with Trainer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # also runs from a checkout that is not installed

from benchmarks.provenance import RESULTS, provenance  # noqa: E402

SCRIPT: Final = ROOT / "examples" / "train.py"
OWN: Final = ("--output_dir", "out", "--bf16", "--per_device_train_batch_size", "16")
COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "first": ("--gpu", "A100 40GB"),
    "one": ("--gpu", "A100 40GB", "--ram", "128GB", "--write", "plan.yaml", "--html", "plan.html", "--short"),
    "compared": (
        "--gpus-to-compare", "L4,A100 40GB,A100 80GB,H100 80GB",
        "--price", "L4=0.8,A100 40GB=1.3,A100 80GB=1.8,H100 80GB=2.5", "--ram", "128GB", "--short",
    ),
}  # fmt: skip
"""Prices are made up: they are the user's."""


def main(again: list[str]) -> int:
    path = RESULTS / "plan_example.json"
    found = json.loads(path.read_text())["examples"] if again else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(SCRIPT, folder)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": name, "COLUMNS": "80"}
        for which in again or COMMANDS:
            words = ["plan", "train.py", *COMMANDS[which], "--", *OWN]
            began = time.monotonic()
            ran = subprocess.run(
                [sys.executable, "-m", "hf_memkit", *words],
                cwd=folder, env=environment, capture_output=True, text=True,
            )  # fmt: skip
            if ran.returncode not in (0, 1, 3):  # 3: stopped before it found one
                raise RuntimeError(ran.stderr[-2000:])
            seconds = time.monotonic() - began
            print(f"{which}: {seconds:.0f} s")
            found[which] = {"command": ["memkit", *words], "output": ran.stdout, "seconds": seconds}
            if (page := folder / "plan.html").exists():
                found[which]["page"] = _content(page.read_text())
                page.unlink()
    content = {"command": "python benchmarks/plan_example.py", **provenance(), "examples": found}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def _content(page: str) -> dict[str, Any]:
    """What `hf_memkit.common.answer.document.document` made the page of: the rest is the same in every page."""
    parts = re.search(
        r"<title>(.*?)</title>.*<main>\n(.*).*</main>\n<script type=\"application/json\" id=\"charts\">(.*?)</script>",
        page,
        re.DOTALL,
    )
    assert parts is not None
    return {"title": parts[1], "body": parts[2], "charts": json.loads(parts[3])}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
