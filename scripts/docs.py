#!/usr/bin/env python3
"""Writes every generated part of the pages; with --check compares them, then checks links, options and commands.

.venv/bin/python scripts/docs.py [--check] [NAME…]    # NAME_docs.py, or pictures; then only these

Each `*_docs.py` has a function `tables()`: what it makes of each page. One process for all: torch is imported once.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import evidence_tables

GENERATORS = (*sorted(p.stem.removesuffix("_docs") for p in Path(__file__).parent.glob("*_docs.py")), "pictures")


def main(arguments: list[str]) -> int:
    evidence_tables.prepare()
    check, names = "--check" in arguments, [each for each in arguments if each != "--check"]
    failed = 0
    for name in names or GENERATORS:
        started = time.monotonic()
        status = _generate(name, check=check)
        print(f"{'ok' if status == 0 else 'FAILED'}: {name}, {time.monotonic() - started:.0f} s", flush=True)
        failed += status != 0
    if check and not names:
        for line in _wrong():
            print(f"FAILED: {line}", flush=True)
            failed += 1
    print(f"{failed} failed" if failed else "All pages are current.")
    return 1 if failed else 0


def _generate(name: str, *, check: bool) -> int:
    """Exit status of one generator, in a copy of this process's variables."""
    before = dict(os.environ)
    try:
        if name == "pictures":
            return int(importlib.import_module(name).update(check=check))
        return evidence_tables.update(importlib.import_module(f"{name}_docs").tables(), f"docs.py {name}", check=check)
    except SystemExit as error:
        print(error)
        return 1
    finally:
        os.environ.clear()
        os.environ.update(before)


def _wrong() -> Iterator[str]:
    import pages
    import shown_commands

    for check in pages.CHECKS:
        yield from check()
    yield from shown_commands.failures()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
