#!/usr/bin/env python3
"""Writes the examples of README.md and the first of docs/predict.md: a recorded plan, and commands that are run here;
with --check only compares.

.venv/bin/python scripts/readme_docs.py [--check]
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from evidence_tables import RESULTS, ROOT, update
from plan_docs import command_lines

LOG: Final = """\
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 23.64 GiB of \
which 812.44 MiB is free. Including non-PyTorch memory, this process has 22.84 GiB memory in use. Of the allocated \
memory 22.09 GiB is allocated by PyTorch, and 248.00 MiB is reserved by PyTorch but unallocated.
"""


def plan() -> str:
    """Up to the arguments that are to be pasted."""
    content = json.loads((RESULTS / "plan_example.json").read_text())
    found = content["examples"]["one"]
    answer, paste = found["output"].split("\n\n")[:2]
    shown = f"{_trimmed(answer)}\n\n{_trimmed(paste)}\n…"
    took = f"That took {found['seconds']:.0f} s on {content['hardware']['cpu_count']} CPU cores."
    return f"```bash\n{command_lines(found['command'])}\n```\n\n```text\n{shown}\n```\n\n{took}"


def explain() -> str:
    """The cause, and the first two changes."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.log").write_text(LOG)
        command = ["memkit", "explain", "train.log"]
        output = _run(command, folder)
    happened, cause, fixes = (
        output[output.index(heading) :] for heading in ("What happened", "Cause:", "Generic fixes")
    )
    first_two = fixes[: fixes.index("  3. ")]
    paragraphs = [happened.split("\n\n")[0], "…", cause.split("\n\n")[0], "…", f"{first_two}  …"]
    return _shown(command, "\n\n".join(paragraphs))


def recipe() -> str:
    """A dry run."""
    command = ["memkit", "recipe", "gpt2-on-16gb", "--gpu", "T4", "--ram", "64GB", "--dry-run", "--short"]
    return _shown(command, _run(command, str(ROOT)))


def prediction() -> str:
    """One screen, and a page."""
    command = [
        "memkit", "predict", "--model", "gpt2-xl", "--preset", "resident", "--gpu", "RTX 4080", "--batch-size", "8",
        "--sequence-length", "1024", "--short", "--html", "prediction.html",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return _shown(command, _run(command, folder))


def _run(command: list[str], folder: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "hf_memkit", *command[1:]]
    ran = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if not ran.stdout:
        raise SystemExit(ran.stderr)
    return ran.stdout


def _shown(command: list[str], output: str) -> str:
    return f"```bash\n{shlex.join(command)}\n```\n\n```text\n{_trimmed(output)}\n```"


def _trimmed(output: str) -> str:
    return "\n".join(line.rstrip() for line in output.rstrip().splitlines())


def main(arguments: list[str]) -> int:
    pages = {
        ROOT / "README.md": {"example": plan(), "explain": explain(), "recipe": recipe()},
        ROOT / "docs" / "predict.md": {"first": prediction()},
    }
    return update(pages, arguments, "readme_docs.py")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
