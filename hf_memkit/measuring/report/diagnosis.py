"""Finds memory problems in the step records of one rank; most trainings have none.

A false alarm does more harm than a miss. Each rule is one function, with bounds that separate the 14 normal from the
14 other trainings in `tests/measuring/report/recorded_trainings.json.gz`. No recorded training shared its GPU; that
rule's bound is the memory of a second training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Final, Literal, NamedTuple

from hf_memkit.components.recompilation_guard_counts import MOST_LATE, SETTLED_AFTER

Kind = Literal["leak", "longer batches", "fragmentation", "another process", "recompilations"]

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
    hardware = run.get("hardware", {})
    steps = [step for step in steps if step["step"] > run.get("start_step", 0)]
    ooms = [oom for oom in ooms if steps and oom.get("step", 0) > steps[-1]["step"]]
    usable = _usable_gib(steps, hardware)
    findings = [
        _leak(steps, usable),
        _longer_batches(steps, ooms, usable),
        _fragmentation(steps, usable, str(hardware.get("allocator_settings"))),
        _another_process(steps, usable),
        _recompilations(steps, run.get("start_step", 0)),
    ]
    return sorted((finding for finding in findings if finding), key=lambda finding: finding.first_step)


def _usable_gib(steps: Records, hardware: Mapping[str, Any]) -> float | None:
    """GPU memory that PyTorch's allocator can use: without that of others, and at most its cap."""
    capacity: float | None = next(
        (step["capacity_gib"] for step in steps if "capacity_gib" in step), hardware.get("capacity_gib")
    )
    if capacity is None:
        return None
    known = _with(steps, "device_used_gib", "reserved_gib")
    outside = max((step["device_used_gib"] - step["reserved_gib"] for step in known), default=0.0)
    return min(capacity * (hardware.get("allocator_cap_fraction") or 1.0), capacity - outside)


def _with(records: Records, *names: str) -> Records:
    """The records that have all of these fields."""
    return [record for record in records if all(name in record for name in names)]


PARTS: Final = 6
"""A leak raises the lowest value of each of this many parts of the steps, and then the last ones."""

EVEN: Final = 0.5
"""Each rise is at least this share of the mean rise: a leaking evaluation may fall into one part twice."""

LEAST_RISE_GIB: Final = 16 / 1024
"""Minimum rise in all: eight of the allocator's blocks."""


def _leak(steps: Records, usable: float | None) -> Finding | None:
    """Memory allocated after each step grows evenly, over all steps or over the last half."""
    known = _with(steps[WARM_UP:], "allocated_gib")
    half = len(known) - len(known) // 2
    peaks = [step["peak_allocated_gib"] for step in _with(steps[-MIN_STEPS:], "peak_allocated_gib")]
    return _leak_from(known, 0, peaks, usable) or _leak_from(known, half, peaks, usable)


def _leak_from(known: Records, begin: int, last_peaks: list[float], usable: float | None) -> Finding | None:
    """The leak that shows in the steps from position `begin` of `known` on."""
    values = [step["allocated_gib"] for step in known]
    earlier, grown = values[:begin], values[begin:]
    size = len(grown)
    if size < MIN_STEPS:
        return None

    lows = [min(grown[size * part // PARTS : size * (part + 1) // PARTS]) for part in range(PARTS)]
    end = median(grown[-3:])
    rise = lows[-1] - lows[0]
    mean_rise = rise / (PARTS - 1)
    start = min([lows[0], *earlier])
    levels_off = rise < lows[0] - start  # more before than now
    uneven = any(after - before < EVEN * mean_rise for before, after in pairwise([*lows, end]))
    if uneven or levels_off or rise < LEAST_RISE_GIB:
        return None

    first, last = known[begin]["step"], known[-1]["step"]
    per_step = mean_rise * PARTS / (last - first)
    first_step = max(first - int((lows[0] - start) / per_step), known[0]["step"]) if earlier else 1
    figures: dict[str, float] = {
        "start_gib": start, "end_gib": end, "rise_gib": end - start, "rise_mib_per_step": 1024 * per_step,
        "last_step": last,
    }  # fmt: skip
    why = (
        f"memory still allocated after each step grows by {1024 * per_step:.3g} MiB a step and does not level off: "
        f"from {start:.2f} GiB to {end:.2f} GiB by step {last}"
    )

    if usable is not None and (room := usable - max([end, *last_peaks])) > 0:
        full = last + int(room / per_step)
        figures["projected_full_step"] = full
        why += f"; at this pace the GPU is full near step {full} (projection)"
    fix = (
        "find what each step keeps: a loss or output added to a list or a running sum without .item() or "
        ".detach() keeps its whole graph; so do outputs or hidden states stored by a callback, a metric or your "
        "compute_loss. If it grows only at evaluations, set eval_accumulation_steps or prediction_loss_only"
    )
    return Finding("leak", first_step, why, fix, figures)


QUARTER: Final = 1 / 4
"""Share of the steps that show the typical lengths, and in which longer ones matter."""

HIGHER: Final = 0.1
"""Lengths vary in any job. They matter where they raise the peak by this share of the GPU."""

NEARLY_FULL: Final = 0.9
"""In fewer steps, they matter where the peak reaches this share of the GPU: more is reserved than allocated."""


class Batch(NamedTuple):
    """A step or a micro-batch that ran out of memory, with the padded tokens of a micro-batch."""

    step: int
    peak_gib: float
    tokens: float


def _longer_batches(steps: Records, ooms: Records, usable: float | None) -> Finding | None:
    """Larger inputs than in the first steps raised the peak, or the largest input ran out of memory."""
    sizes = ("samples", "longest_sequence")
    batches = []
    for step in _with(steps, "peak_allocated_gib", *sizes, "micro_batches"):
        tokens = step["samples"] * step["longest_sequence"] / step["micro_batches"]
        batches.append(Batch(step["step"], step["peak_allocated_gib"], tokens))
    if len(batches) < MIN_STEPS or usable is None:
        return None

    count = max(MIN_STEPS // 2, int(QUARTER * len(batches)))
    before_gib = max(batch.peak_gib for batch in batches[:count])
    typical = max(batch.tokens for batch in batches[:count])
    longer = [
        batch for batch in batches[count:] if batch.peak_gib > before_gib + HIGHER * usable and batch.tokens > typical
    ]
    if len(longer) < QUARTER * len(batches) and all(batch.peak_gib < NEARLY_FULL * usable for batch in longer):
        longer = []

    at_least = ""
    if not longer:
        at_least = "at least "
        highest_gib = max(batch.peak_gib for batch in batches)
        largest = max(batch.tokens for batch in batches)
        for oom in _with(ooms, "allocated_gib", "requested_gib", *sizes):
            peak_gib = oom["allocated_gib"] + oom["requested_gib"]
            failed = Batch(oom["step"], peak_gib, oom["samples"] * oom["longest_sequence"])
            if failed.peak_gib > highest_gib and failed.tokens > largest:
                longer.append(failed)
    if not longer:
        return None

    highest = max(longer, key=lambda batch: batch.peak_gib)
    tokens = max(batch.tokens for batch in longer)
    why = (
        f"larger inputs raised the peak from {before_gib:.2f} GiB to {at_least}{highest.peak_gib:.2f} GiB of "
        f"{usable:.2f} GiB available; padded tokens of a micro-batch: up to {tokens:,.0f}, before {typical:,.0f}"
    )
    fix = (
        "cut or split the longest examples (max_length, packing), or lower per_device_train_batch_size and raise "
        "gradient_accumulation_steps. train_sampling_strategy='group_by_length' puts the longest batch first: a job "
        "that does not fit then fails in its first step"
    )
    figures = {
        "peak_before_gib": before_gib, "peak_gib": highest.peak_gib, "peak_step": highest.step,
        "size_before": typical, "size": tokens, "usable_gib": usable,
    }  # fmt: skip
    return Finding("longer batches", longer[0].step, why, fix, figures)


UNUSED: Final = 0.1
"""Rounding leaves some percent of the reserved memory unused in any job (torch: c10/core/AllocatorConfig.h). With less
than this share unused, the job is too large."""

RETRIES: Final = 3
"""One or two retries may come of one large request."""


def _fragmentation(steps: Records, usable: float | None, settings: str) -> Finding | None:
    """Several steps freed the cache and retried an allocation, although much reserved memory was unused."""
    known = _with(steps, "alloc_retries", "peak_allocated_gib", "peak_reserved_gib")
    highest_gib = 0.0
    retried: list[Mapping[str, Any]] = []
    for before, step in zip([*known[:1], *known], known, strict=False):
        highest_gib = max(highest_gib, step["peak_allocated_gib"])
        is_retry = step["alloc_retries"] > before["alloc_retries"]
        if is_retry and highest_gib <= (1 - UNUSED) * step["peak_reserved_gib"]:
            retried.append(step)
            peak_gib = highest_gib
    if len(retried) < RETRIES:
        return None

    reserved_gib = median(step["peak_reserved_gib"] for step in retried)
    retries = retried[-1]["alloc_retries"]
    figures = {
        "gap_gib": reserved_gib - peak_gib, "reserved_gib": reserved_gib, "peak_allocated_gib": peak_gib,
        "alloc_retries": retries, **({"usable_gib": usable} if usable is not None else {}),
    }  # fmt: skip
    of_gpu = f" of {usable:.2f} GiB available" if usable is not None else ""
    why = (
        f"PyTorch reserves {reserved_gib:.2f} GiB{of_gpu}, but no step allocated more than {peak_gib:.2f} GiB: the "
        f"unused memory is in pieces that are too small, and cudaMalloc was tried again {retries} times after the "
        "cache was freed"
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
    return Finding("fragmentation", retried[0]["step"], why, fix, figures)


LEAST_OTHERS_GIB: Final = 0.75
"""More than a desktop takes now and then, or this process's own context and communicators. A training takes more."""


def _another_process(steps: Records, usable: float | None) -> Finding | None:
    """GPU memory outside PyTorch grew in two successive readings; a single one may be taken during a change."""
    readings = _with(steps[WARM_UP:], "other_processes_gib")
    sizes = [step["other_processes_gib"] for step in readings]
    whose, not_this_process = "other processes on this GPU", ""
    if not readings:
        readings = _with(steps[WARM_UP:], "device_used_gib", "reserved_gib")
        sizes = [step["device_used_gib"] - step["reserved_gib"] for step in readings]
        whose = "GPU memory outside PyTorch"
        not_this_process = "; this process's CUDA context does not grow so late"

    limit_gib = sizes[0] + LEAST_OTHERS_GIB if sizes else 0.0
    grown = [step for step, gib, after in zip(readings, sizes, sizes[1:], strict=False) if min(gib, after) > limit_gib]
    if not grown:
        return None
    before_gib, most_gib = sizes[0], max(sizes)
    first_step = grown[0]["step"]
    figures = {
        "others_before_gib": before_gib, "others_gib": most_gib, "rise_gib": most_gib - before_gib,
        **({"capacity_gib": usable} if usable is not None else {}),
    }  # fmt: skip
    grew = f"grew from {max(0.0, before_gib):.2f} GiB to {most_gib:.2f} GiB, first seen at step {first_step}"
    fix = (
        "find the process with nvidia-smi (a notebook kernel, a second training, an inference server); end it, or "
        "move it to another GPU with CUDA_VISIBLE_DEVICES"
    )
    return Finding("another process", first_step, f"{whose} {grew}{not_this_process}", fix, figures)


def _recompilations(steps: Records, start: int) -> Finding | None:
    """torch.compile gave up, or compiled many graphs late. `start`: steps before this start of the job."""
    compiled = _with(steps, "compilation")
    given_up = [step for step in compiled if step["compilation"].get("given_up")]
    late = [step for step in compiled if step["step"] > start + SETTLED_AFTER]
    late_graphs = sum(step.get("compiled_graphs", 0) for step in late)
    if not given_up and late_graphs <= MOST_LATE:
        return None

    last = compiled[-1]["compilation"]
    if given_up:
        first_step = given_up[0]["step"]
        why = "torch.compile gave up: it compiled a function too often, and runs it uncompiled since"
    else:
        first_step = late[0]["step"]
        why = (
            f"torch.compile compiled {late_graphs} more graphs after the first {SETTLED_AFTER} steps; each took as "
            "long as in a first step"
        )
    if reasons := last.get("recompile_reasons"):
        why += f". The first reason to recompile: {reasons[0]}"
    fix = (
        "if the reason is a size, pad each batch to a larger multiple, so that there are fewer shapes (technique "
        "pad-to-multiple); TORCH_LOGS=recompiles prints all reasons"
    )
    figures = {name: last.get(name, 0) for name in ("graphs", "recompilations", "given_up")}
    figures["late_graphs"] = late_graphs
    return Finding("recompilations", first_step, why, fix, figures)
