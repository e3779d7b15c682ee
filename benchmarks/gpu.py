"""Predictions beside trainings on a GPU, offline, in slices of under nine minutes, kept as evidence.

    python benchmarks/gpu.py                           # the cases of gpu_cases.py that are not measured yet; exit
                                                       # code 1: time was up, run it again to go on
    python benchmarks/gpu.py "train.py --bf16 True"    # these scripts instead, each with its arguments, in one word
    python benchmarks/gpu.py --rehearse                # the same path on a CPU; never evidence
    python benchmarks/gpu.py --predict-for H200 --ram 128GB --cpus 16 --results predict-h200
                                                       # on any machine: what trainings will be compared with; of
                                                       # those that are measured, the step time as it is priced now,
                                                       # and the prediction if there was none before
    python scripts/docs.py predict.md                  # the tables, from the results

Every case runs in a process of its own. Its result is written to `benchmarks/results/NAME.json` (`--results NAME`) as
soon as it is known: fits, does not fit (out of memory), refused (with the reason), or failed (with the error). Without
a GPU: one line, and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs from a checkout that is not installed

from benchmarks.gpu_cases import Case, cases
from benchmarks.gpu_measure import STEPS, case_limit_s, measure, predicted
from benchmarks.gpu_summary import errors
from benchmarks.provenance import RESULTS, provenance
from hf_memkit.catalog.hardware import Machine, described_machine, this_machine, use_one_gpu

SLICE_S: Final = 8 * 60  # no case starts after this, so that a slice ends within nine minutes
PREDICTED: Final = "predicted"
"""Status of a case that was predicted and not measured yet."""


def load_results(path: Path) -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in json.loads(path.read_text())["cases"]} if path.exists() else {}


def flush(path: Path, rows: Mapping[str, dict[str, Any]], *, rehearsal: bool) -> None:
    """Writes all results, whole: a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    content = {"schema": 1, "section": "predict", "rehearsal": rehearsal, "cases": list(rows.values())}
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def measure_all(wanted: Sequence[Case], path: Path, *, on_cpu: bool, max_steps: int, slice_s: float = SLICE_S) -> int:
    """Measures the cases that have no measurement yet; 0 if all of them then have one, 1 if time ran out."""
    started = time.monotonic()
    rows = load_results(path)
    for case in wanted:
        before = rows.get(case.name)
        if before is not None and before["status"] != PREDICTED:
            continue
        if time.monotonic() - started + case_limit_s(case) > slice_s:
            print(f"time is up before {case.name}; run it again to go on")
            return 1
        measured = measure(case, on_cpu=on_cpu, max_steps=max_steps, before=before)
        row = {"case": case.name, **asdict(case), **measured, **provenance()}
        rows[case.name] = row
        flush(path, rows, rehearsal=on_cpu)
        print("\n".join(lines_of(row)), flush=True)
    return 0


def lines_of(row: Mapping[str, Any]) -> list[str]:
    """What came of a case, then each phase's peak, predicted and measured."""
    peak = f"{row['peak_allocated_gib']:.2f} GiB" if "peak_allocated_gib" in row else "no peak"
    lines = [f"{row['case']}: {row['status']}, {peak}, {row.get('wall_time_s', 0):.0f} s {row.get('why', '')}"]
    for phase, peaks in row.get("prediction", {}).get("phases", {}).items():
        if phase in row.get("phases", {}):
            both = f"predicted {peaks['peak_allocated_gib']:.2f}, measured {row['phases'][phase]:.2f} GiB"
            lines.append(f"  {phase}: {both}")
    return lines


def predict_all(wanted: Sequence[Case], machine: Machine, path: Path) -> int:
    """Writes predictions for a machine that need not be this one."""
    rows = load_results(path)
    for case in wanted:
        before = rows.get(case.name, {})
        waits = before.get("status") == PREDICTED
        if case.kind in ("script", "history", "kernels") or (waits and "prediction" in before):
            continue
        if before and not waits and "step_time_ms" not in before:
            continue
        found = predicted(case, machine, on_cpu=False)
        if before and not waits:
            rows[case.name] = {**before, **_since(before, found)}
            flush(path, rows, rehearsal=False)
            continue
        rows[case.name] = {
            "case": case.name, **asdict(case), "status": PREDICTED, **found, "predicted_on": provenance()
        }  # fmt: skip
        flush(path, rows, rehearsal=False)
        said = found.get("why_not_predicted") or f"{found['prediction']['peak_allocated_gib']:.2f} GiB"
        print(f"{case.name}: {said}, {found['predicted_s']:.0f} s", flush=True)
    return 0


def _since(measured: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What is predicted of a training that is measured: the step time as it is priced now; and the whole prediction,
    by the version of torch, if there was none before."""
    step_s = found.get("predicted_step_s")
    if "prediction" in measured:
        return {"priced_since_s": step_s, "priced_on": provenance()} if step_s is not None else {}
    if "prediction" not in found:
        return {}

    where = provenance()
    errors_since = errors(found["prediction"], measured, step_s)
    since = {"prediction": found["prediction"], "step_s": step_s, "errors": errors_since, "predicted_on": where}
    return {"predicted_since": {**measured.get("predicted_since", {}), where["versions"]["torch"]: since}}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="training scripts; left out: the cases")
    parser.add_argument("--list", action="store_true", help="show the cases")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps a case")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--results", default="predict", metavar="NAME", help="name of their file: one a GPU")
    parser.add_argument("--rehearse", action="store_true", help="run the path on a CPU; never evidence")
    parser.add_argument("--slice", type=float, default=SLICE_S, metavar="SECONDS", help="when a slice ends")
    parser.add_argument("--predict-for", metavar="GPU", help="only predict, for this GPU")
    parser.add_argument("--ram", help="that machine's RAM")
    parser.add_argument("--cpus", type=int, help="that machine's CPU cores")
    options = parser.parse_args(arguments)
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    use_one_gpu()
    every = [Case(line, kind="script", script=line) for line in options.scripts] or cases()
    wanted = [case for case in every if options.only in case.name]
    if options.list:
        print("\n".join(map(str, wanted)))
        return 0
    if options.predict_for:
        machine = described_machine(options.predict_for, None, options.ram, None, option="--predict-for")
        machine = replace(machine, cpu_count=options.cpus or machine.cpu_count)
        return predict_all(wanted, machine, options.out / f"{options.results}.json")
    if not options.rehearse and this_machine().gpu is None:
        print("benchmarks/gpu.py: this machine has no CUDA GPU; nothing was measured", file=sys.stderr)
        return 2
    return measure_all(
        wanted, options.out / f"{options.results}{'-rehearsal' * options.rehearse}.json", on_cpu=options.rehearse,
        max_steps=options.steps, slice_s=options.slice,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
