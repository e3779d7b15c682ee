"""Writes the examples and tables of docs/report.md and docs/measuring.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from evidence_tables import RESULTS, ROOT, excerpt, output_of, shown, table

from tests.measuring.report.synthetic_records import Record, healthy, out_of_memory, write


def report(records: list[Record]) -> str:
    """The text of a run."""
    command = "memkit report out"
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "out", records)
        return shown(command, output_of(command, Path(folder)))


def step() -> str:
    """A step's record."""
    command = """grep -m 1 '"kind":"step"' out/memory-rank0.jsonl | python -m json.tool"""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "out", healthy())
        found = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env={**os.environ, "PATH": search},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    parts = (('    "step"', '    "capacity_gib"'), ('    "categories"', '    "held"'))
    return shown(command, excerpt(found, *parts))


def overhead_table() -> str:
    """What is added to a step, of every evidence file; the machine stands above each table."""
    parts = []
    for path in sorted(RESULTS.glob("report_overhead-*.json")):
        evidence = json.loads(path.read_text())
        model, long = evidence["model"], evidence["long"]
        rows = []
        for row in evidence["arms"]:
            spread = row.get("added_us_range")
            added = f"{row['added_us']:.0f} ({spread[0]:.0f} to {spread[1]:.0f})" if spread else "–"
            inside = f"{row['inside_us']:.0f}" if "inside_us" in row else "–"
            rows.append([row["what"], f"{row['step_us']:.0f}", added, inside])
        parts += [
            f"`{path.relative_to(ROOT)}`: {model['parameter_tensors']} parameter tensors, {evidence['rounds']} rounds "
            f"of {evidence['steps']} steps, torch {evidence['versions']['torch']}.",
            table("with | a step, µs | added, µs (lowest to highest round) | inside its own code, µs", rows),
            f"Over {long['steps']:,} steps, inside, phases and categories on: median "
            f"{long['first_tenth_median_us']:.0f} µs in the first tenth, {long['last_tenth_median_us']:.0f} µs in the "
            f"last; the records came to {long['file_bytes'] / 1e6:.1f} MB.",
        ]
    return "\n\n".join(parts)


def tables() -> dict[Path, dict[str, str]]:
    """Each page's tables."""
    return {
        ROOT / "docs" / "report.md": {
            "healthy": report(healthy()),
            "oom": report(out_of_memory()),
        },
        ROOT / "docs" / "measuring.md": {"step": step(), "overhead": overhead_table()},
    }
