#!/usr/bin/env python3
"""Writes the table of docs/presets.md from the presets; with --check only compares.

.venv/bin/python scripts/preset_docs.py [--check]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "presets.md"


def table() -> str:
    """Each preset: for whom it is, its techniques with their pages, and how much of it arguments can say."""
    from hf_memkit.presets import PRESETS
    from hf_memkit.technique import TECHNIQUES

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
    text = PAGE.read_text()
    block = re.compile(r"(<!-- presets: begin -->\n).*?(<!-- presets: end -->)", re.DOTALL)
    assert block.search(text), "docs/presets.md has no block for the table"
    filled = block.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", text)
    if filled == text:
        return 0
    if "--check" in arguments:
        print("docs/presets.md is not what the presets say: run scripts/preset_docs.py")
        return 1
    PAGE.write_text(filled)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
