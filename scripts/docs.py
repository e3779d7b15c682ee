#!/usr/bin/env python3
"""Writes every generated part of the pages; with --check compares them, then checks links, options and commands.

.venv/bin/python scripts/docs.py [--check]

One process for all: torch is imported once.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import evidence_tables

SCRIPTS = Path(__file__).resolve().parent
GENERATORS = (*sorted(path.stem for path in SCRIPTS.glob("*_docs.py")), "ds_configs_readme", "pictures")


def main(arguments: list[str]) -> int:
    evidence_tables.prepare()
    failed = 0
    for name in GENERATORS:
        started = time.monotonic()
        status = _generate(name, arguments)
        print(
            f"{'ok' if status == 0 else 'FAILED'}: scripts/{name}.py, {time.monotonic() - started:.0f} s", flush=True
        )
        failed += status != 0
    if "--check" in arguments:
        for line in _wrong():
            print(f"FAILED: {line}", flush=True)
            failed += 1
    print(f"{failed} failed" if failed else "All pages are current.")
    return 1 if failed else 0


def _generate(name: str, arguments: list[str]) -> int:
    """Exit status of one generator, in a copy of this process's variables."""
    before = dict(os.environ)
    try:
        return int(importlib.import_module(name).main(arguments))
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
