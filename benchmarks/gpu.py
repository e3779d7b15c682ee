"""Measures memkit on a GPU, offline, in slices of under nine minutes, and keeps the results as evidence.

    python benchmarks/gpu.py                           # what is not measured yet, most valuable first; exit code 1:
                                                       # time was up, run it again to go on
    python benchmarks/gpu.py --section deepspeed       # one section; --list shows its cases
    python benchmarks/gpu.py --at-once 3               # libraries load beside another case's training: memory only
    python benchmarks/gpu.py --rehearse                # the same path on a CPU; never evidence
    python benchmarks/gpu.py --predict-for "H100 80GB" --ram 128GB --cpus 16
                                                       # on any machine: what section predict will be compared with
    .venv/bin/python scripts/docs.py                  # every table, from the results

Every case runs in a process of its own. Its result is written to `benchmarks/results/SECTION.json` as soon as it is
known: fits, does not fit (out of memory), refused (with the reason), or failed (with the error). Without a GPU: one
line, and exit code 2. A section is a module here with `cases`, `measure` and `child`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
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
from benchmarks.children import CASE_S, TURN
from benchmarks.provenance import RESULTS, provenance
from hf_memkit.hardware import Machine, described_machine, this_machine, use_one_gpu

SLICE_S: Final = 8 * 60  # no case starts after this, so that a slice ends within nine minutes
STEPS: Final = 12
PREDICTED: Final = "predicted"
"""Status of a case that was predicted and not measured yet."""

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
    section: str,
    path: Path,
    *,
    on_cpu: bool,
    max_steps: int,
    only: str | None,
    section_s: float = SLICE_S,
    at_once: int = 1,
) -> int:
    """Measures the cases of a section that have no measurement yet; 0 if all of them then have one, 1 if time ran out.

    Several `at_once` wait for one another before they use the GPU (`children.take_gpu`). Their libraries load at the
    same time, which slows the host of the one that trains: rows then have no times.
    """
    started = time.monotonic()
    rows = load_results(path)
    writing, time_is_up = threading.Lock(), threading.Event()

    def measure(case: Any) -> None:
        before = rows.get(case.name)
        if (before is not None and before["status"] != PREDICTED) or (only is not None and only not in case.name):
            return
        if time_is_up.is_set() or time.monotonic() - started + case_limit_s(section, case) > section_s:
            if not time_is_up.is_set():
                print(f"time is up before {case.name}; run it again to go on")
            time_is_up.set()
            return
        known = {"before": before} if before is not None else {}
        measured = SECTIONS[section].measure(case, on_cpu=on_cpu, max_steps=max_steps, **known)
        row = {"case": case.name, **asdict(case), **measured, **provenance()}
        if at_once > 1:
            row = without_times(row)
        with writing:
            rows[case.name] = row
            flush(path, section, rows, rehearsal=on_cpu)
        peak = f"{row['peak_allocated_gib']:.2f} GiB" if "peak_allocated_gib" in row else "no peak"
        took = f"{measured.get('wall_time_s', 0):.0f} s"
        print(f"{case.name}: {row['status']}, {peak}, {took} {row.get('why', '')}", flush=True)

    if at_once == 1:
        for case in SECTIONS[section].cases():
            measure(case)
        return int(time_is_up.is_set())
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        os.environ[TURN] = str(Path(folder) / "turn")
        try:
            for done in [pool.submit(measure, case) for case in SECTIONS[section].cases()]:
                done.result()
        except BaseException:
            time_is_up.set()  # what has not begun will not
            raise
    return int(time_is_up.is_set())


def without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what it says of speed."""
    kept = {key: value for key, value in row.items() if key not in ("step_time_ms", "tokens_per_s", "wall_time_s")}
    if "errors" in kept:
        kept["errors"] = {key: value for key, value in kept["errors"].items() if key != "step_time"}
    if "runs" in kept:
        kept["runs"] = {key: without_times(run) for key, run in kept["runs"].items()}
    return kept


def predict_section_for(machine: Machine, path: Path, only: str | None) -> int:
    """Writes predictions of section `predict` for a machine that need not be this one."""
    rows = load_results(path)
    for case in predict_section.cases():
        if (
            case.kind in ("calibrate", "script", "history")
            or case.name in rows
            or (only is not None and only not in case.name)
        ):
            continue
        found = predict_section.predicted(case, machine, on_cpu=False)
        rows[case.name] = {
            "case": case.name, **asdict(case), "status": PREDICTED, **found, "predicted_on": provenance()
        }  # fmt: skip
        flush(path, "predict", rows, rehearsal=False)
        said = found.get("why_not_predicted") or f"{found['prediction']['peak_allocated_gib']:.2f} GiB"
        print(f"{case.name}: {said}, {found['predicted_s']:.0f} s", flush=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=sorted(SECTIONS), help="what to measure; left out: everything")
    parser.add_argument("--list", action="store_true", help="show the section's cases")
    parser.add_argument("--only", help="only cases whose name contains this")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps a case")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--rehearse", action="store_true", help="run the path on a CPU; never evidence")
    parser.add_argument("--slice", type=float, default=SLICE_S, metavar="SECONDS", help="when a slice ends")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="load N cases together, for memory only")
    parser.add_argument("--predict-for", metavar="GPU", help="only predict section predict, for this GPU")
    parser.add_argument("--ram", help="that machine's RAM")
    parser.add_argument("--cpus", type=int, help="that machine's CPU cores")
    parser.add_argument("--child", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    use_one_gpu()
    sections = [options.section] if options.section else list(SECTIONS)
    if options.child:
        return int(SECTIONS[options.section].child(options.child))
    if options.list:
        print("\n".join(str(case) for section in sections for case in SECTIONS[section].cases()))
        return 0
    if options.predict_for:
        machine = described_machine(options.predict_for, None, options.ram, None, option="--predict-for")
        machine = replace(machine, cpu_count=options.cpus or machine.cpu_count)
        return predict_section_for(machine, options.out / "predict.json", options.only)
    if not options.rehearse and this_machine().gpu is None:
        print("benchmarks/gpu.py: this machine has no CUDA GPU; nothing was measured", file=sys.stderr)
        return 2
    until = time.monotonic() + options.slice
    for section in sections:
        path = options.out / f"{section}{'-rehearsal' * options.rehearse}.json"
        left = until - time.monotonic()
        if run_section(
            section,
            path,
            on_cpu=options.rehearse,
            max_steps=options.steps,
            only=options.only,
            section_s=left,
            at_once=options.at_once,
        ):
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
