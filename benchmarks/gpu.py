"""Measures memkit on a GPU, offline, in slices of under nine minutes, and keeps the results as evidence.

    python benchmarks/gpu.py                           # what is not measured yet, most valuable first; exit code 1:
                                                       # time was up, run it again to go on
    python benchmarks/gpu.py --section deepspeed       # one section; --list shows its cases
    python benchmarks/gpu.py --rehearse                # the same path on a CPU; never evidence
    .venv/bin/python scripts/docs.py                  # every table, from the results

Every case runs in a process of its own. Its result is written to `benchmarks/results/SECTION.json` as soon as it is
known: fits, does not fit (out of memory), refused (with the reason), or failed (with the error). Without a GPU: one
line, and exit code 2. A section is a module here with `cases`, `measure` and `child`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs from a checkout that is not installed

from benchmarks import (
    deepspeed_section,
    predict_section,
    recipe_section,
    recipes_section,
    report_section,
    techniques_section,
)
from benchmarks.children import CASE_S
from benchmarks.provenance import RESULTS, provenance
from hf_memkit.hardware import this_machine, use_one_gpu

SLICE_S: Final = 8 * 60  # no case starts after this, so that a slice ends within nine minutes
STEPS: Final = 12

SECTIONS: Final[Mapping[str, ModuleType]] = {
    "predict": predict_section,
    "recipe": recipe_section,
    "recipes": recipes_section,
    "techniques": techniques_section,
    "deepspeed": deepspeed_section,
    "report": report_section,
}
"""In the order of value: what memkit says before a GPU is used comes first."""


def load_results(path: Path) -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in json.loads(path.read_text())["cases"]} if path.exists() else {}


def flush(path: Path, section: str, rows: Mapping[str, dict[str, Any]], *, rehearsal: bool) -> None:
    """Writes all results, whole: a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    content = {"schema": 1, "section": section, "rehearsal": rehearsal, "cases": list(rows.values())}
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def case_limit_s(section: str, case: Any) -> float:
    """After how many seconds a case is stopped: the section's own limit for it, or the common one."""
    own = getattr(SECTIONS[section], "case_limit_s", None)
    return float(CASE_S if own is None else own(case))


def run_section(
    section: str, path: Path, *, on_cpu: bool, max_steps: int, only: str | None, section_s: float = SLICE_S
) -> int:
    """Measures the cases of a section that have no result yet; 0 if all of them then have one, 1 if time ran out."""
    started = time.monotonic()
    rows = load_results(path)
    for case in SECTIONS[section].cases():
        if case.name in rows or (only is not None and only not in case.name):
            continue
        if time.monotonic() - started + case_limit_s(section, case) > section_s:
            print(f"time is up before {case.name}; run it again to go on")
            return 1
        measured = SECTIONS[section].measure(case, on_cpu=on_cpu, max_steps=max_steps)
        row = {"case": case.name, **asdict(case), **measured, **provenance()}
        rows[case.name] = row
        flush(path, section, rows, rehearsal=on_cpu)
        peak = f"{row['peak_allocated_gib']:.2f} GiB" if "peak_allocated_gib" in row else "no peak"
        print(
            f"{case.name}: {row['status']}, {peak}, {row.get('wall_time_s', 0):.0f} s {row.get('why', '')}", flush=True
        )
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=sorted(SECTIONS), help="what to measure; left out: everything")
    parser.add_argument("--list", action="store_true", help="show the section's cases")
    parser.add_argument("--only", help="only cases whose name contains this")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps a case")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--rehearse", action="store_true", help="run the path on a CPU; never evidence")
    parser.add_argument("--child", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    use_one_gpu()
    sections = [options.section] if options.section else list(SECTIONS)
    if options.child:
        return int(SECTIONS[options.section].child(options.child))
    if options.list:
        print("\n".join(str(case) for section in sections for case in SECTIONS[section].cases()))
        return 0
    if not options.rehearse and this_machine().gpu is None:
        print("benchmarks/gpu.py: this machine has no CUDA GPU; nothing was measured", file=sys.stderr)
        return 2
    until = time.monotonic() + SLICE_S
    for section in sections:
        path = options.out / f"{section}{'-rehearsal' * options.rehearse}.json"
        left = until - time.monotonic()
        if run_section(
            section, path, on_cpu=options.rehearse, max_steps=options.steps, only=options.only, section_s=left
        ):
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
