#!/usr/bin/env python3
"""Writes the examples of docs/plan.md as they were typed and answered; with --check only compares.

.venv/bin/python scripts/plan_docs.py [--check]
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from evidence_tables import update

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def example(which: str, path: Path = RESULTS / "plan_example.json") -> str:
    """A plan, as it was typed and answered."""
    if not path.exists():
        return "Not recorded yet."
    content = json.loads(path.read_text())
    found = content["examples"][which]
    before, _, behind = shlex.join(found["command"]).replace("'", '"').partition(" -- ")
    options = before.replace(" --", " \\\n    --")
    answer = f"```bash\n{options} -- \\\n    {behind}\n```\n\n```text\n{_trimmed(found['output'])}\n```"
    cores = content["hardware"]["cpu_count"]
    return f"{answer}\n\nThat took {found['seconds']:.0f} s on {cores} CPU cores. Made by `{content['command']}`."


def _trimmed(output: str) -> str:
    return "\n".join(line.rstrip() for line in output.rstrip().splitlines())


def tables() -> dict[Path, dict[str, str]]:
    """Each page's examples."""
    return {ROOT / "docs" / "plan.md": {"example": example("one"), "compared": example("compared")}}


def main(arguments: list[str]) -> int:
    return update(tables(), arguments, "plan_docs.py")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
