#!/usr/bin/env python3
"""Writes the examples of README.md: a recorded plan, and two commands that are run here; with --check only compares.

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

from evidence_tables import update

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from plan_docs import RESULTS, command_lines  # noqa: E402

LOG: Final = """\
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 23.64 GiB of \
which 812.44 MiB is free. Including non-PyTorch memory, this process has 22.84 GiB memory in use. Of the allocated \
memory 21.31 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated.
"""


def plan() -> str:
    """Up to the arguments that are to be pasted."""
    found = json.loads((RESULTS / "plan_example.json").read_text())["examples"]["one"]
    answer, paste = found["output"].split("\n\n")[:2]
    return (
        f"```bash\n{command_lines(found['command'])}\n```\n\n```text\n{_trimmed(answer)}\n\n{_trimmed(paste)}\n…\n```"
    )


def explain() -> str:
    """Up to the cause, and the first change."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.log").write_text(LOG)
        command = ["memkit", "explain", "train.log"]
        paragraphs = _run(command, folder).split("\n\n")
    return _shown(command, "\n\n".join(paragraphs[:3]) + "\n\n…")


def recipe() -> str:
    """A dry run."""
    command = ["memkit", "recipe", "gpt2-on-16gb", "--gpu", "T4", "--ram", "64GB", "--dry-run", "--short"]
    return _shown(command, _run(command, str(ROOT)))


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
    page = {ROOT / "README.md": {"example": plan(), "explain": explain(), "recipe": recipe()}}
    return update(page, arguments, "readme_docs.py")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
