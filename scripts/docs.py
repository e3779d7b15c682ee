#!/usr/bin/env python3
"""Writes the generated blocks of the pages; with --check compares them, then checks links, options and commands.

.venv/bin/python scripts/docs.py [--check] [NAME…]    # part of PAGE#BLOCK: plan.md, techniques/, README.md#recipe

What fills a block is registered in docs_code.py, docs_evidence.py, docs_sharded.py and docs_examples.py.
"""

from __future__ import annotations

import sys
import time

import docs_blocks
from docs_blocks import BLOCKS


def main(arguments: list[str]) -> int:
    docs_blocks.set_environment()
    import docs_checks
    import docs_code  # noqa: F401  (registers its blocks, as the next two do)
    import docs_evidence  # noqa: F401
    import docs_examples  # noqa: F401
    import docs_pictures
    import docs_sharded  # noqa: F401

    check, names = "--check" in arguments, [each for each in arguments if each != "--check"]
    known = [*("#".join(key) for key in BLOCKS), docs_pictures.NAME]
    if unknown := [name for name in names if not any(name in each for each in known)]:
        print(f"No block of a page has {', '.join(unknown)} in its name. Blocks: {', '.join(known)}")
        return 2
    failed = 0
    for name in known:
        if names and not any(each in name for each in names):
            continue
        started = time.monotonic()
        try:
            page, _, block = name.partition("#")
            current = docs_blocks.fill(page, block, check=check) if block else docs_pictures.update(check=check)
        except (SystemExit, Exception) as error:
            print(f"{type(error).__name__}: {error}")
            current = False
        failed += not current
        print(f"{'ok' if current else 'FAILED'}: {name}, {time.monotonic() - started:.0f} s", flush=True)
    if check and not names:
        for problem in docs_checks.problems():
            print(f"FAILED: {problem}", flush=True)
            failed += 1
    print(f"{failed} failed: `scripts/docs.py` writes what is not current." if failed else "All pages are current.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
