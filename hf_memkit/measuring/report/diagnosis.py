"""Finds memory problems in the step records of one rank; most trainings have none.

A false alarm does more harm than a miss. Each rule is one function, with bounds that separate the 14 normal from the
14 other trainings in `tests/measuring/report/recorded_trainings.json.gz`. No recorded training shared its GPU; that
rule's bound is the memory of a second training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, Final, Literal

Kind = Literal["leak", "longer batches", "fragmentation", "another process"]

Records = Sequence[Mapping[str, Any]]

MIN_STEPS: Final = 20
"""Fewer steps show no trend."""

WARM_UP: Final = 5
"""First steps left out: optimizer states, caches and kernels are allocated in them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A memory problem: the optimizer step at which it began, the evidence and the fix.

    `figures` have their unit in the name. Those with `projected_` are projections, the others are measured.
    """

    kind: Kind
    first_step: int
    why: str
    fix: str
    figures: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(steps: Records, run: Mapping[str, Any] | None = None, *, ooms: Records = ()) -> list[Finding]:
    """The memory problems in these steps, in the order in which they began.

    Args:
        steps: the `step` records of one rank, in order. Any field but `step` may be missing.
        run: the last `run` record. Steps before its `start_step` do not count: a resume resets counters and warm-up.
        ooms: the `oom` records. The batch that caused one may be the longest.
    """
    run = run or {}
    start, hardware = run.get("start_step", 0), run.get("hardware", {})
    steps = [step for step in steps if step["step"] > start]
    ooms = [oom for oom in ooms if steps and oom.get("step", 0) > steps[-1]["step"]]
    usable = _usable_gib(steps, hardware)
    findings = [
        _leak(steps, usable),
        _longer_batches(steps, ooms, usable),
        _fragmentation(steps, usable, str(hardware.get("allocator_settings"))),
        _another_process(steps, usable),
    ]
    return sorted((finding for finding in findings if finding), key=lambda finding: finding.first_step)


def _usable_gib(steps: Records, hardware: Mapping[str, Any]) -> float | None:
    """GPU memory that PyTorch's allocator can use: without that of others, and at most its cap."""
    capacity: float | None = next(
        (step["capacity_gib"] for step in steps if "capacity_gib" in step), hardware.get("capacity_gib")
    )
    if capacity is None:
        return None
    outside = [used - reserved for _, used, reserved in _known(steps, "device_used_gib", "reserved_gib")]
    return min(capacity * (hardware.get("allocator_cap_fraction") or 1.0), capacity - max(outside, default=0.0))


def _known(records: Records, *names: str) -> list[tuple[Any, ...]]:
    """`step` and these fields, of the records that have all of them."""
    fields = ("step", *names)
    return [tuple(record[name] for name in fields) for record in records if all(name in record for name in fields)]


PARTS: Final = 6
EVEN: Final = 0.5
LEAST_RISE_GIB: Final = 16 / 1024
"""A leak raises the lowest value of each sixth of the steps, and then the last ones, by half of the mean rise or more:
a leaking evaluation may fall into one part twice. In all it raises them by 16 MiB, eight of the allocator's blocks."""


def _leak(steps: Records, usable: float | None) -> Finding | None:
    """Memory allocated after each step grows evenly, over all steps or over the last half."""
    known = _known(steps[WARM_UP:], "allocated_gib")
    for size in (len(known), len(known) // 2):
        earlier, values = known[:-size], known[-size:]
        if size < MIN_STEPS:
            return None
        lows = [min(gib for _, gib in values[size * k // PARTS : size * (k + 1) // PARTS]) for k in range(PARTS)]
        end = median(gib for _, gib in values[-3:])
        rise, mean_gain = lows[-1] - lows[0], (lows[-1] - lows[0]) / (PARTS - 1)
        start = min([lows[0], *(gib for _, gib in earlier)])
        even = all(after - before >= EVEN * mean_gain for before, after in pairwise([*lows, end]))
        if even and rise >= max(LEAST_RISE_GIB, lows[0] - start):  # What levels off rose more before.
            break
    else:
        return None
    first, last = values[0][0], values[-1][0]
    per_step = mean_gain * PARTS / (last - first)
    begun = max(first - int((lows[0] - start) / per_step), earlier[0][0]) if earlier else 1
    figures: dict[str, float] = {
        "start_gib": start, "end_gib": end, "rise_gib": end - start, "rise_mib_per_step": 1024 * per_step,
        "last_step": last,
    }  # fmt: skip
    why = (
        f"memory still allocated after each step grows by {1024 * per_step:.3g} MiB a step and does not level off: "
        f"from {start:.2f} GiB to {end:.2f} GiB by step {last}"
    )
    peaks = [peak for _, peak in _known(steps[-MIN_STEPS:], "peak_allocated_gib")]
    if usable is not None and (room := usable - max([end, *peaks])) > 0:
        full = last + int(room / per_step)
        figures["projected_full_step"] = full
        why += f"; at this pace the GPU is full near step {full} (projection)"
    fix = (
        "find what each step keeps: a loss or output added to a list or a running sum without .item() or "
        ".detach() keeps its whole graph; so do outputs or hidden states stored by a callback, a metric or your "
        "compute_loss. If it grows only at evaluations, set eval_accumulation_steps or prediction_loss_only"
    )
    return Finding("leak", begun, why, fix, figures)


QUARTER: Final = 1 / 4
HIGHER: Final = 0.1
NEARLY_FULL: Final = 0.9
"""Lengths vary in any job. They matter where the peak rises by a tenth of the GPU over the first quarter of the steps,
and does so in a quarter of all steps or reaches nine tenths of the GPU. That is allocated memory: the allocator
reserves some percent more, so that the GPU is full."""


def _longer_batches(steps: Records, ooms: Records, usable: float | None) -> Finding | None:
    """Larger inputs than in the first steps raised the peak, or the largest input ran out of memory."""
    sizes = ("samples", "longest_sequence")
    known = [
        (step, peak, samples * longest / micro_batches)
        for step, peak, samples, longest, micro_batches in _known(steps, "peak_allocated_gib", *sizes, "micro_batches")
    ]
    if len(known) < MIN_STEPS or usable is None:
        return None
    count = max(MIN_STEPS // 2, int(QUARTER * len(known)))
    before, typical = (max(row[i] for row in known[:count]) for i in (1, 2))
    over = [row for row in known[count:] if row[1] > before + HIGHER * usable and row[2] > typical]
    if len(over) < QUARTER * len(known) and all(row[1] < NEARLY_FULL * usable for row in over):
        over = []
    highest, largest = (max(row[i] for row in known) for i in (1, 2))
    failed = [
        (step, allocated + requested, samples * longest)
        for step, allocated, requested, samples, longest in _known(ooms, "allocated_gib", "requested_gib", *sizes)
        if allocated + requested > highest and samples * longest > largest
    ]
    if not (over or failed):
        return None
    over, at_least = (over, "") if over else (failed, "at least ")
    peak_step, peak, _ = max(over, key=lambda row: row[1])
    size = max(size for *_, size in over)
    why = (
        f"larger inputs raised the peak from {before:.2f} GiB to {at_least}{peak:.2f} GiB of {usable:.2f} GiB "
        f"available; padded tokens of a micro-batch: up to {size:,.0f}, before {typical:,.0f}"
    )
    fix = (
        "cut or split the longest examples (max_length, packing), or lower per_device_train_batch_size and raise "
        "gradient_accumulation_steps. train_sampling_strategy='group_by_length' puts the longest batch first: a job "
        "that does not fit then fails in its first step"
    )
    figures = {
        "peak_before_gib": before, "peak_gib": peak, "peak_step": peak_step, "size_before": typical, "size": size,
        "usable_gib": usable,
    }  # fmt: skip
    return Finding("longer batches", over[0][0], why, fix, figures)


UNUSED: Final = 0.1
RETRIES: Final = 3
"""Rounding leaves some percent of the reserved memory unused in any job (torch: c10/core/AllocatorConfig.h); with
less than a tenth, the job is too large. One or two retries may come of one large request."""


def _fragmentation(steps: Records, usable: float | None, settings: str) -> Finding | None:
    """Several steps freed the cache and retried an allocation, although much reserved memory was unused."""
    known = _known(steps, "alloc_retries", "peak_allocated_gib", "peak_reserved_gib")
    highest = list(accumulate((peak for _, _, peak, _ in known), max))
    retried = [
        (step, retries, peak, reserved)
        for (_, before, *_), (step, retries, _, reserved), peak in zip(known, known[1:], highest[1:], strict=False)
        if retries > before and peak <= (1 - UNUSED) * reserved
    ]
    if len(retried) < RETRIES:
        return None
    peak, reserved = retried[-1][2], median(row[3] for row in retried)
    retries = retried[-1][1]
    figures = {
        "gap_gib": reserved - peak, "reserved_gib": reserved, "peak_allocated_gib": peak,
        "alloc_retries": retries, **({"usable_gib": usable} if usable is not None else {}),
    }  # fmt: skip
    of_gpu = f" of {usable:.2f} GiB available" if usable is not None else ""
    why = (
        f"PyTorch reserves {reserved:.2f} GiB{of_gpu}, but no step allocated more than {peak:.2f} GiB: the unused "
        f"memory is in pieces that are too small, and cudaMalloc was tried again {retries} times after the cache was "
        "freed"
    )
    vary_less = "make tensor sizes vary less (pad_to_multiple_of, packing)"
    fix = (
        "set PYTORCH_ALLOC_CONF=expandable_segments:True before the process starts; if that is not enough, "
        f"{vary_less}"
    )
    if "expandable_segments:True" in settings:
        fix = (
            f"expandable_segments is already on: {vary_less}, or free the cache with torch_empty_cache_steps, which "
            "costs time"
        )
    return Finding("fragmentation", retried[0][0], why, fix, figures)


LEAST_OTHERS_GIB: Final = 0.75
"""More than a desktop takes now and then, or this process's own context and communicators. A training takes more."""


def _another_process(steps: Records, usable: float | None) -> Finding | None:
    """GPU memory outside PyTorch grew in two successive readings; a single one may be taken during a change."""
    own_known = True
    others = _known(steps[WARM_UP:], "other_processes_gib")
    if not others:
        own_known = False
        used = _known(steps[WARM_UP:], "device_used_gib", "reserved_gib")
        others = [(step, device - reserved) for step, device, reserved in used]
    if not others:
        return None
    before, most = others[0][1], max(gib for _, gib in others)
    risen = [step for (step, gib), (_, after) in pairwise(others) if min(gib, after) > before + LEAST_OTHERS_GIB]
    if not risen:
        return None
    figures = {
        "others_before_gib": before, "others_gib": most, "rise_gib": most - before,
        **({"capacity_gib": usable} if usable is not None else {}),
    }  # fmt: skip
    whose = "other processes on this GPU" if own_known else "GPU memory outside PyTorch"
    why = f"{whose} grew from {max(0.0, before):.2f} GiB to {most:.2f} GiB, first seen at step {risen[0]}"
    if not own_known:
        why += "; this process's CUDA context does not grow so late"
    fix = (
        "find the process with nvidia-smi (a notebook kernel, a second training, an inference server); end it, or "
        "move it to another GPU with CUDA_VISIBLE_DEVICES"
    )
    return Finding("another process", risen[0], why, fix, figures)
