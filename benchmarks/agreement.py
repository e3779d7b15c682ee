"""Whether records agree with what was read beside them. In: records, independent readings. Out: errors as shares."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hf_memkit.oom import parse_message
from hf_memkit.units import GIB

BAR: Final = 0.02  # categories and peaks may be this share away from the allocator's
FIRST_STEPS: Final = 2  # left out: libraries make their workspaces then, once in a process

Record = Mapping[str, Any]


def agree(steps: Sequence[Record], truth: Sequence[Record]) -> dict[str, Any]:
    """Step records laid beside independent readings of the same steps, in a second training that is the same.

    Args:
        steps: records with `phases` and `categories`, where there is an allocator.
        truth: of each step `step`, `peak_allocated_gib` and `peak_reserved_gib` by `torch.cuda.max_memory_*` since
            the step before, `allocated_gib` at its end, `device_used_gib` by `cudaMemGetInfo`, and `weights_gib` and
            `optimizer_gib` counted tensor by tensor; what could not be read is absent.

    Returns:
        The largest error of each kind as a share of what was read (`…_error`), the median share of `other` in the
        categories, and how many steps were compared. What could not be compared is absent. `…_gap_gib` are median
        differences and no errors: two trainings may fill the allocator's cache differently, and NVML counts what the
        driver keeps for itself, `cudaMemGetInfo` does not.
    """
    read = {row["step"]: row for row in truth}
    both = [(step, read[step["step"]]) for step in steps if step["step"] > FIRST_STEPS and step["step"] in read]
    errors: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    others: list[float] = []
    for step, row in both:
        for name in ("peak_allocated_gib", "allocated_gib"):
            if name in step and name in row:
                errors.setdefault(name, []).append(_share(step[name], row[name]))
        for name in ("peak_reserved_gib", "device_used_gib"):
            if name in step and name in row:
                gaps.setdefault(name, []).append(step[name] - row[name])
        phases = [phase["peak_allocated_gib"] for phase in step.get("phases", {}).values()]
        if phases and "peak_allocated_gib" in row:
            errors.setdefault("phases", []).append(_share(max(phases), row["peak_allocated_gib"]))
        found = _by_category(step.get("categories", {}))
        if found and "peak_allocated_gib" in row:
            errors.setdefault("categories", []).append(_share(sum(found.values()), row["peak_allocated_gib"]))
            others.append(found.get("other", 0.0) / row["peak_allocated_gib"])
        held = _by_category(step.get("held", {}).get("device", {}))
        for name in ("weights", "optimizer"):
            if name in held and row.get(f"{name}_gib"):
                errors.setdefault(f"held_{name}", []).append(_share(held[name], row[f"{name}_gib"]))
    result: dict[str, Any] = {"compared_steps": len(both), "looked_at_steps": len(others)}
    result |= {f"{name.removesuffix('_gib')}_error": max(found) for name, found in errors.items()}
    result |= {name.replace("_gib", "_gap_gib"): statistics.median(found) for name, found in gaps.items()}
    if others:
        result["other_share"] = statistics.median(others)
    return result


def verdict(result: Mapping[str, Any], needed: Sequence[str], bar: float = BAR) -> dict[str, Any]:
    """`{"status": "holds"}`, or `"does not hold"` with `why`: an error above the bar, or a needed one missing."""
    above = [f"{name} {value:.1%}" for name, value in result.items() if name.endswith("_error") and not value <= bar]
    missing = [f"no {name}" for name in needed if name not in result]
    wrong = above + missing
    return {"status": "does not hold", "why": ", ".join(wrong)} if wrong else {"status": "holds"}


def agree_out_of_memory(
    records: Sequence[Record], output: str, exit_code: int | None, phases: Sequence[str], *, on_cpu: bool = False
) -> dict[str, Any]:
    """What stands in the way of calling an out-of-memory record right, as `wrong`; and the record itself.

    `on_cpu`: the error was made up, for a job on a CPU, where there may be nothing to change.
    """
    found = [record for record in records if record.get("kind") == "oom"]
    wrong = [] if exit_code == 1 else [f"exit code {exit_code}, not 1"]
    if len(found) != 1:
        return {"wrong": [*wrong, f"{len(found)} oom records"]}
    oom = found[0]
    message = parse_message(oom.get("error", ""))
    if oom.get("phase") not in phases:
        wrong.append(f"phase {oom.get('phase')}, expected {' or '.join(phases)}")
    if message is None or not message.requested_bytes:
        wrong.append("its message does not say what was requested")
    elif _share(oom.get("requested_gib", 0.0), message.requested_bytes / GIB) > BAR:
        wrong.append(f"requested_gib {oom.get('requested_gib')}, the message says {message.requested_bytes / GIB:.3f}")
    if "categories" in oom and _share(sum(oom["categories"].values()), oom["allocated_gib"]) > BAR:
        wrong.append("its categories do not add up to what is allocated")
    changes = oom.get("changes", [])
    if len(changes) > 3 or not (changes or on_cpu):
        wrong.append(f"{len(changes)} changes")
    if not all(change["key"].rpartition(".")[2] in output for change in changes):
        wrong.append("a change is not in the exception's note")
    ends = [record for record in records if record.get("kind") == "end"]
    if not ends or ends[-1].get("status") != "failed":
        wrong.append("no end record that says failed")
    return {"wrong": wrong, "oom": dict(oom)}


def _share(value: float, reference: float) -> float:
    share = abs(value - reference) / reference if reference else math.inf
    return share if math.isfinite(share) else math.inf


def _by_category(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name.removesuffix("_gib"): size for name, size in sizes.items()}
