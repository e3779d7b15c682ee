"""Section `report`: what the memory report says, laid beside what the allocator says.

A training case trains twice in one process, the same each time. First with `phases=False` and a callback that reads
`torch.cuda.max_memory_*` between steps: nothing but torch's own counters. Then with the report as users have it.
Peaks, phases and categories of the second must agree with the first within 2 %. Other cases: running out of memory at
a cap, another process on the GPU, and what a step of about 100 ms costs more.

`status` is `holds`, `does not hold` (with `why`), `refused` (something is not installed) or `failed`.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from benchmarks.agreement import agree, agree_out_of_memory, verdict
from benchmarks.children import run_child
from benchmarks.report_cases import NEIGHBOUR_GIB, Case
from benchmarks.report_cases import cases as cases
from hf_memkit.errors import MemkitError
from hf_memkit.memory.records import read_records, steps
from hf_memkit.record_types import StepRecord

OVERHEAD_BAR: Final = 0.003  # of a step

NEEDED: Final = ("peak_allocated_error", "allocated_error", "phases_error", "categories_error", "other_share")


def measure(case: Case, *, on_cpu: bool, max_steps: int) -> dict[str, Any]:
    """Runs one case in a child process and returns its evidence."""
    why = refusal(case, on_cpu=on_cpu)
    if why is not None:
        return {"status": "refused", "why": why}
    folder = Path(tempfile.mkdtemp(prefix="memkit-benchmark-"))
    started = time.monotonic()
    try:
        job: dict[str, Any] = {"case": asdict(case), "on_cpu": on_cpu, "max_steps": max_steps}
        if case.deepspeed is not None:
            from benchmarks.deepspeed_section import build_operators
            from hf_memkit.zero.presets import load

            job["config"] = load(case.deepspeed)
            try:
                build_operators(job["config"], on_cpu=on_cpu)
            except MemkitError as error:
                return {"status": "refused", "why": str(error)}
        (folder / "job.json").write_text(json.dumps(job))
        environment = dict(case.environment)
        if on_cpu:
            environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        exit_code, output = run_child("report", str(folder), environment)
        return {**judge(case, folder, exit_code, output, on_cpu=on_cpu), "wall_time_s": time.monotonic() - started}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refusal(case: Case, *, on_cpu: bool) -> str | None:
    """Why this case does not run here, if so."""
    missing = [package for package in case.needs if find_spec(package) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    return "needs a GPU that two processes can share" if on_cpu and case.does == "neighbour" else None


def judge(case: Case, folder: Path, exit_code: int | None, output: str, *, on_cpu: bool) -> dict[str, Any]:
    """What the child's end, its records and its own readings come to."""
    path = folder / "memory-rank0.jsonl"
    records = read_records(path) if path.exists() else []
    made = steps(records)
    tail = " | ".join(line for line in output.splitlines()[-8:] if line.strip())[-1500:]
    result: dict[str, Any] = {"steps": len(made)}
    if made and "peak_allocated_gib" in made[-1]:
        result["peak_allocated_gib"] = max(step["peak_allocated_gib"] for step in made)
    if case.does == "run out":
        found = agree_out_of_memory(records, output, exit_code, case.phases, on_cpu=on_cpu)
        wrong = [*found["wrong"], *([] if on_cpu else judge_snapshot(found.get("oom", {}), folder))]
        why = {"why": "; ".join([*wrong, tail])} if wrong else {}
        printed = output.splitlines()[-25:]
        return {"status": "does not hold" if why else "holds", **why, **result, **found, "printed": printed}
    own = folder / "result.json"
    if exit_code != 0 or not own.exists():
        return {"status": "failed", "why": f"exit code {exit_code}: {tail}", **result}
    found = json.loads(own.read_text())
    if case.does == "overhead":
        return judge_overhead(found, bar=math.inf if on_cpu else OVERHEAD_BAR)  # a tiny model's steps are no measure
    wrong = [f"{key}: {value}" for key, value in found["complaints"].items()]
    result["left_gib"] = found["left_gib"]
    if case.does == "neighbour":
        wrong += judge_neighbour(found["truth"], made, found["findings"])
    else:
        wrong += [f"finding: {kind}" for kind in found["findings"]]
        result |= agree(made, found["truth"])
        if not on_cpu:
            judged = verdict(result, NEEDED)
            wrong += [judged["why"]] if "why" in judged else []
    looked_at = [step for step in made if "categories" in step]
    result |= {"findings": found["findings"], "example": looked_at[-1] if looked_at else made[-1] if made else None}
    return {"status": "does not hold", "why": "; ".join(wrong), **result} if wrong else {"status": "holds", **result}


def judge_snapshot(oom: dict[str, Any], folder: Path) -> list[str]:
    """What is wrong with the allocator's snapshot, if anything."""
    try:
        content = json.loads((folder / oom["snapshot"]).read_text())
    except (KeyError, OSError, ValueError) as error:
        return [f"snapshot: {type(error).__name__}: {error}"]
    return [] if content.get("segments") else ["the snapshot has no segments"]


def judge_overhead(rows: Sequence[dict[str, Any]], bar: float = OVERHEAD_BAR) -> dict[str, Any]:
    """The share of a step that the report's own code takes; what the others take stands beside it."""
    by_arm = {row["arm"]: row for row in rows}
    share = by_arm["memkit"]["inside_us"] / by_arm["nothing"]["step_us"]
    wrong = {"why": f"{share:.2%} of a step"} if share > bar else {}
    return {"status": "does not hold" if wrong else "holds", **wrong, "share_of_step": share, "arms": list(rows)}


def judge_neighbour(truth: Sequence[dict[str, Any]], made: Sequence[StepRecord], findings: Sequence[str]) -> list[str]:
    """What is wrong with how another process was seen, if anything."""
    began = next((row["step"] for row in truth if row.get("neighbour")), None)
    used = {step["step"]: step["device_used_gib"] for step in made if "device_used_gib" in step}
    before = [size for step, size in used.items() if began is not None and step < began]
    after = [size for step, size in used.items() if began is not None and step > began]
    if not before or not after:
        return [f"NVML was read at {len(before)} steps before the other process and {len(after)} after"]
    rise = max(after) - max(before)
    wrong = [] if NEIGHBOUR_GIB <= rise <= NEIGHBOUR_GIB + 2 else [f"use of the GPU rose by {rise:.2f} GiB"]
    return wrong + ([] if "another process" in findings else [f"findings: {list(findings)}"])


def child(folder: str) -> int:
    """The measured process. What it raises is left to Python, as a script of a user would."""
    from benchmarks import report_child

    job = json.loads((Path(folder) / "job.json").read_text())
    case = Case(**job.pop("case"))
    print(f"case {case.name}", file=sys.stderr)
    report_child.run(case, Path(folder), job)
    return 0
