#!/usr/bin/env python3
"""Writes the table of docs/presets.md from the presets; with --check only compares.

.venv/bin/python scripts/preset_docs.py [--check]
"""

from __future__ import annotations

import sys

from evidence_tables import ROOT, update

from hf_memkit.presets import PRESETS
from hf_memkit.technique import TECHNIQUES


def table() -> str:
    """Each preset: for whom it is, its techniques with their pages, and how much of it arguments can say."""
    lines = ["| preset | for whom | techniques |", "|---|---|---|"]
    for name, preset in PRESETS.items():
        links = [
            f"[{each}](techniques/{TECHNIQUES[each].family}.md#{each})"
            + ("*" if each in preset.where_possible else "")
            for each in preset.techniques
        ]
        lines.append(f"| `{name}` | {preset.for_whom} | {', '.join(links)} |")
    if any(preset.where_possible for preset in PRESETS.values()):
        lines += ["", "\\* left out, with a note, where it does not apply to the model."]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    return update({ROOT / "docs" / "presets.md": {"presets": table()}}, arguments, "preset_docs.py")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
