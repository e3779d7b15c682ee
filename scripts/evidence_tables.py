"""Pages whose tables stand between `<!-- evidence: NAME -->`, or `fields: NAME`, and `<!-- end -->`: filled, or only
compared."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))  # for `benchmarks`, which no installation has


def update(tables: Mapping[Path, Mapping[str, str]], arguments: list[str], script: str) -> int:
    """Writes `{page: {name: table}}` into the pages; with --check only says which are stale. The exit status."""
    stale = {page: text for page, blocks in tables.items() if (text := filled(page, blocks)) != page.read_text()}
    for page, text in stale.items():
        if "--check" in arguments:
            print(f"{page.relative_to(ROOT)} is not current: run scripts/{script}")
        else:
            page.write_text(text)
    return 1 if stale and "--check" in arguments else 0


def filled(page: Path, blocks: Mapping[str, str]) -> str:
    """The page with these tables.

    Raises:
        SystemExit: it has no place for one of them.
    """
    text = page.read_text()
    for name, table in blocks.items():
        block = re.compile(f"(<!-- (?:evidence|fields): {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not block.search(text):
            raise SystemExit(f"{page}: no block for {name}")
        text = block.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)
    return text
