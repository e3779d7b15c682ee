"""Memory problems over the steps of a training. In: the step records of one rank. Out: findings, mostly none.

| kind | rule |
|---|---|
| leak | what stays allocated after each step rises through every sixth of the steps, to the end and at one pace |
| longer batches | inputs became larger than any in the first quarter of the steps, and the peak with them |
| fragmentation | in several steps the allocator retries, with much of the reserved memory unused |
| another process | GPU memory that is not this process's rises and stays |

A false alarm does more harm than a miss: memory that varies, warms up, jumps, levels off, or has one high peak that
leaves room is normal. Only the steps since the last resume count, because counters and warm-up start again there.
Bounds that name no source are memkit's own. They give the right answer for each of the 28 trainings in
`tests/measuring/report/recorded_trainings.json.gz`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Final, Literal

from hf_memkit.catalog.fit import was_tight
from hf_memkit.common.terms import CATEGORIES

Kind = Literal["leak", "longer batches", "fragmentation", "another process"]
"""Memory problems over the steps of a training."""

Records = Sequence[Mapping[str, Any]]

MIN_STEPS: Final = 20
"""Fewer steps show no trend."""

_WARM_UP: Final = 5
"""First steps left out: optimizer states, caches and kernels come in them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A memory problem: the optimizer step at which it began, the evidence, and what to set or look for in the code.

    `figures`: by name, with the unit in the name (`_gib`, `_mib_per_step`); names with `projected_` are projections,
    the others measured.
    """

    kind: Kind
    first_step: int
    why: str
    fix: str
    figures: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(steps: Records, run: Mapping[str, Any] | None = None, *, ooms: Records = ()) -> list[Finding]:
    """Memory problems over these steps, in the order in which they began; empty for less than about 25 steps.

    Args:
        steps: the `step` records of one rank, in order. Any other field may be missing.
        run: the last `run` record: the step it was resumed at, the allocator's settings and the GPU's capacity.
        ooms: `oom` records, so that a longer batch that ended the run is recognised.
    """
    run = run or {}
    start, hardware = run.get("start_step", 0), run.get("hardware", {})
    steps = [step for step in steps if step["step"] > start]
    usable = _usable_gib(steps, hardware)
    findings = [
        _leak(steps, usable),
        _host_leak(steps),
        _longer_batches(steps, usable) or _longer_batch_at_the_end(steps, ooms),
        _fragmentation(steps, usable, str(hardware.get("allocator_settings"))),
        _another_process(steps, usable),
    ]
    return sorted((finding for finding in findings if finding), key=lambda finding: finding.first_step)


def _usable_gib(steps: Records, hardware: Mapping[str, Any]) -> float | None:
    """What PyTorch's allocator can have: the GPU less what lies outside the allocator, or less, where a cap is set."""
    capacity: float | None = next(
        (step["capacity_gib"] for step in steps if "capacity_gib" in step), hardware.get("capacity_gib")
    )
    if capacity is None:
        return None
    outside = [used - reserved for _, used, reserved in _known(steps, "device_used_gib", "reserved_gib")]
    return min(capacity * (hardware.get("allocator_cap_fraction") or 1.0), capacity - max(outside, default=0.0))


def _known(records: Records, *names: str) -> list[tuple[Any, ...]]:
    """The step and these fields, of the records that have them all."""
    fields = ("step", *names)
    return [tuple(record[name] for name in fields) for record in records if all(name in record for name in fields)]


# --- leak ---

_PARTS: Final = 6
"""The lowest values of six parts are compared: passing peaks do not count, and one jump is not even."""

_EVEN: Final = 0.5
"""Each part must bring half of the mean rise: an evaluation that leaks may come once in one part and twice in the
next. So must the last steps, over the lowest value of the last part: else the rise has ended."""

_LEAST_GIB: Final = 16 / 1024
_LEAST_SHARE: Final = 0.002
"""A leak on the GPU rises by 16 MiB (eight of the allocator's 2 MiB blocks) and by 0.2 % of what is allocated."""

_HOST_LEAST_GIB: Final = 64 / 1024
_HOST_LEAST_SHARE: Final = 0.1
"""A leak in host memory raises RSS by 64 MiB (one arena of glibc's malloc) and by a tenth: malloc and data loaders
creep."""


@dataclass(frozen=True, slots=True)
class _Rise:
    first_step: int
    last_step: int
    start: float
    end: float
    per_step: float

    def __str__(self) -> str:
        return (
            f"grows by {1024 * self.per_step:.3g} MiB a step and does not level off: from {self.start:.2f} GiB to "
            f"{self.end:.2f} GiB by step {self.last_step}"
        )

    def figures(self) -> dict[str, float]:
        return {
            "start_gib": self.start,
            "end_gib": self.end,
            "rise_gib": self.end - self.start,
            "rise_mib_per_step": 1024 * self.per_step,
            "last_step": self.last_step,
        }


def _steady_rise(values: Sequence[tuple[int, float]], least: float, share: float) -> _Rise | None:
    """The rise that (step, GiB) end with: of all, or of the last half, quarter and so on, for one that began late."""
    values = values[_WARM_UP:]
    size = len(values)
    while size >= MIN_STEPS:
        earlier, now = values[: len(values) - size], values[len(values) - size :]
        parts = [now[size * k // _PARTS : size * (k + 1) // _PARTS] for k in range(_PARTS)]
        lows, end = [min(gib for _, gib in part) for part in parts], median(gib for _, gib in now[-3:])
        gains = [b - a for a, b in pairwise(lows)]
        even = min(*gains, end - lows[-1]) >= _EVEN * fmean(gains)
        # What levels off rose more in as many steps before; what is collected now and then was higher.
        before = min([lows[0], *(gib for _, gib in earlier[-size:])])
        highest = max((gib for _, gib in earlier), default=-math.inf)
        rise = lows[-1] - lows[0]
        if even and rise - (lows[0] - before) >= max(least, share * abs(lows[0])) and end > highest:
            first, last = now[0][0], now[-1][0]
            per_step = rise / ((last - first) * len(gains) / _PARTS)
            begun = max(first - int((lows[0] - before) / per_step), earlier[-size:][0][0]) if earlier else 1
            return _Rise(begun, last, before, end, per_step)
        size //= 2
    return None


def _leak(steps: Records, usable: float | None) -> Finding | None:
    rise = _steady_rise(list(_floor(steps)), _LEAST_GIB, _LEAST_SHARE)
    if rise is None:
        return None
    figures = rise.figures()
    why = f"memory still allocated after each step {rise}"
    peaks = [peak for _, peak in _known(steps[-MIN_STEPS:], "peak_allocated_gib")]
    if usable is not None and (room := usable - max([rise.end, *peaks])) > 0:
        full = rise.last_step + int(room / rise.per_step)
        figures["projected_full_step"] = full
        why += f"; at this pace the GPU is full near step {full} (projection)"
    fix = (
        "find what each step keeps: a loss or output added to a list or a running sum without .item() or "
        ".detach() keeps its whole graph; so do outputs or hidden states stored by a callback, a metric or your "
        "compute_loss. If it grows only at evaluations, set eval_accumulation_steps or prediction_loss_only"
    )
    return Finding("leak", rise.first_step, why, fix, figures)


def _floor(steps: Records) -> Iterator[tuple[int, float]]:
    """What is allocated after each step, without growth that the records name, such as states of unfrozen layers."""
    first = named = None
    for step in steps:
        if held := step.get("held", {}).get("device"):
            named = sum(held.get(f"{name}_gib", 0.0) for name in CATEGORIES)
            first = named if first is None else first
        if "allocated_gib" in step:
            yield step["step"], step["allocated_gib"] - ((named or 0.0) - (first or 0.0))


def _host_leak(steps: Records) -> Finding | None:
    known = _known(steps, "host_rss_gib", "host_available_gib")
    rise = _steady_rise([(step, rss) for step, rss, _ in known], _HOST_LEAST_GIB, _HOST_LEAST_SHARE)
    if rise is None:
        return None
    # Pages of a memory-mapped dataset count as RSS, but stay available.
    if _steady_rise([(step, -available) for step, _, available in known], (rise.end - rise.start) / 2, 0.0) is None:
        return None
    full = rise.last_step + int(median(available for _, _, available in known[-MIN_STEPS:]) / rise.per_step)
    figures = {f"host_{name}": value for name, value in rise.figures().items()} | {"projected_host_full_step": full}
    why = (
        f"host memory (RSS of this process) {rise}; at this pace the machine's RAM is full near step {full} "
        "(projection)"
    )
    fix = (
        "find what each step keeps on the host: tensors moved to the CPU and stored, losses or outputs added to a "
        "list without .item(), a dataset or collator that caches what it reads, stored evaluation outputs"
    )
    return Finding("leak", rise.first_step, why, fix, figures)


# --- longer batches ---

_FIRST: Final = 1 / 4
"""The first quarter of the steps shows what is usual."""

_HIGHER: Final = 0.1
"""The peak must rise by a tenth of the GPU over its highest there: less is the spread of lengths in any job."""

_LASTING: Final = 1 / 4
"""… in a quarter of all steps. Were their order chance, the highest quarter would lie after the first quarter in one
of a hundred runs of 64 steps (0.75^16), and in fewer of longer ones."""

_APART: Final = 0.2
"""Fewer steps, even one, count where they come near the GPU's limit and are higher by a fifth of the GPU."""

_SHORTER: Final = (
    "cut or split the longest examples (max_length, packing), or lower per_device_train_batch_size and raise "
    "gradient_accumulation_steps. train_sampling_strategy='group_by_length' puts the longest batch first: a job that "
    "does not fit then fails in its first step"
)


def _longer_batches(steps: Records, usable: float | None) -> Finding | None:
    """Larger inputs that raised the peak, often or to nearly the whole GPU."""
    known = [
        (record["step"], record["peak_allocated_gib"], size, record.get("peak_reserved_gib", 0.0))
        for record in steps
        if "peak_allocated_gib" in record and (size := _padded_tokens(record))
    ]
    if len(known) < MIN_STEPS or usable is None:
        return None
    count = max(MIN_STEPS // 2, int(_FIRST * len(known)))
    first, later = known[:count], known[count:]
    before, usual = (max(row[i] for row in first) for i in (1, 2))
    over = [row for row in later if row[1] > before + _HIGHER * usable]
    if not over or median(row[2] for row in over) <= usual:
        return None
    peak_step, peak, *_ = max(over, key=lambda row: row[1])
    is_full = any(was_tight(reserved, usable, retries=0) for *_, reserved in over)
    if len(over) < _LASTING * len(known) and not (is_full and peak >= before + _APART * usable):
        return None
    size = max(row[2] for row in over)
    why = (
        f"larger inputs raised the peak from {before:.2f} GiB to {peak:.2f} GiB of {usable:.2f} GiB available; "
        f"padded tokens of a micro-batch: up to {size:,.0f}, before {usual:,.0f}"
    )
    figures = {
        "peak_before_gib": before, "peak_gib": peak, "peak_step": peak_step, "size_before": usual, "size": size,
        "usable_gib": usable,
    }  # fmt: skip
    return Finding("longer batches", over[0][0], why, _SHORTER, figures)


def _padded_tokens(step: Mapping[str, Any]) -> float:
    """The size of the largest micro-batch; 0 if it is unknown."""
    if not step.get("micro_batches"):
        return float(step.get("tokens", 0))
    return float(step.get("longest_sequence", 0) * step.get("samples", 0) / step["micro_batches"])


def _longer_batch_at_the_end(steps: Records, ooms: Records) -> Finding | None:
    """An out-of-memory error with a longer input than all before."""
    known = _known(steps, "longest_sequence", "peak_allocated_gib")
    ended = _known(ooms[-1:], "longest_sequence", "requested_gib", "allocated_gib")
    if len(known) < MIN_STEPS or not ended or ended[0][0] <= steps[-1]["step"]:
        return None
    longest, peak = (max(row[i] for row in known) for i in (1, 2))
    step, length, requested, allocated = ended[0]
    needed = allocated + requested
    if length <= longest or needed <= peak:
        return None
    why = (
        f"the batch of the out-of-memory error has a sequence of {length:,.0f} tokens; the longest before was "
        f"{longest:,.0f}. It needed at least {needed:.2f} GiB; the highest peak before was {peak:.2f} GiB"
    )
    figures = {
        "longest_sequence_before": longest, "longest_sequence": length, "peak_before_gib": peak,
        "needed_at_least_gib": needed,
    }  # fmt: skip
    return Finding("longer batches", step, why, _SHORTER, figures)


# --- fragmentation ---

_UNUSED: Final = 0.1
"""A tenth of what is reserved lies over the highest peak so far. Rounding to 2 MiB and segments of 20 MiB leave some
percent unused in any job (torch: c10/core/AllocatorConfig.h); with little unused, the job is too large."""

_RETRIES: Final = 3
"""Steps with a retry. One or two may come of one large request."""


def _fragmentation(steps: Records, usable: float | None, settings: str) -> Finding | None:
    """Retries, which free the cache and wait for the GPU, although much of the reserved memory was unused."""
    highest, retried = 0.0, []
    for before, step in pairwise(steps):
        highest = max(highest, *(each.get("peak_allocated_gib", 0.0) for each in (before, step)))
        unused = highest <= (1 - _UNUSED) * step.get("peak_reserved_gib", -math.inf)
        if unused and step.get("alloc_retries", -math.inf) > before.get("alloc_retries", math.inf):
            # An evaluation or a save that needed more than a step leaves a cache, which the next step frees.
            start = step.get("phases", {}).get("data", {}).get("peak_reserved_gib", 0.0)
            retried += [step] if start <= before.get("reserved_gib", math.inf) else []
    if len(retried) < _RETRIES:
        return None
    reserved, retries = median(step["peak_reserved_gib"] for step in retried), retried[-1]["alloc_retries"]
    figures = {
        "gap_gib": reserved - highest, "reserved_gib": reserved, "peak_allocated_gib": highest,
        "alloc_retries": retries, **({"usable_gib": usable} if usable is not None else {}),
    }  # fmt: skip
    of_gpu = f" of {usable:.2f} GiB available" if usable is not None else ""
    why = (
        f"PyTorch reserves {reserved:.2f} GiB{of_gpu}, but no step allocated more than {highest:.2f} GiB: the unused "
        f"memory is in pieces that are too small, and cudaMalloc was tried again {retries} times after the cache was "
        "freed"
    )
    fix = (
        "set PYTORCH_ALLOC_CONF=expandable_segments:True before the process starts; if that is not enough, make "
        "tensor sizes vary less (pad_to_multiple_of, packing)"
    )
    if "expandable_segments:True" in settings:
        fix = (
            "expandable_segments is already on: make tensor sizes vary less (pad_to_multiple_of, packing), "
            "or free the cache with torch_empty_cache_steps, which costs time"
        )
    return Finding("fragmentation", retried[0]["step"], why, fix, figures)


# --- another process ---

_LEAST_OTHERS_GIB: Final = 0.75
"""More than a desktop takes now and then, and than kernels and communicators add to this process's own context, where
that cannot be told apart. A second training takes more."""


def _another_process(steps: Records, usable: float | None) -> Finding | None:
    """What others hold rose and stayed: one high reading may be taken while memory changes hands, two in a row not."""
    others, own_known = _others(steps[_WARM_UP:])
    if len(others) < 3 or min(gib for _, gib in others) < -_LEAST_OTHERS_GIB:  # readings of another GPU
        return None
    before, most = others[0][1], max(gib for _, gib in others)
    risen = [a for a, b in pairwise(others) if min(a[1], b[1]) > before + _LEAST_OTHERS_GIB]
    if not risen:
        return None
    step = risen[0][0]
    figures = {
        "others_before_gib": before, "others_gib": most, "rise_gib": most - before,
        **({"capacity_gib": usable} if usable is not None else {}),
    }  # fmt: skip
    whose = "other processes on this GPU" if own_known else "GPU memory outside PyTorch"
    why = f"{whose} grew from {max(0.0, before):.2f} GiB to {most:.2f} GiB, first seen at step {step}"
    if not own_known:
        why += "; this process's CUDA context does not grow so late"
    fix = (
        "find the process with nvidia-smi (a notebook kernel, a second training, an inference server); end it, or "
        "move it to another GPU with CUDA_VISIBLE_DEVICES"
    )
    return Finding("another process", step, why, fix, figures)


def _others(steps: Records) -> tuple[list[tuple[int, float]], bool]:
    """What others hold, by step; and whether this process's own context is left out of it."""
    if listed := _known(steps, "other_processes_gib"):
        return listed, True
    if used := _known(steps, "device_used_gib", "reserved_gib", "outside_allocator_gib"):
        return [(step, used - reserved - own) for step, used, reserved, own in used], True
    return [
        (step, used - reserved) for step, used, reserved in _known(steps, "device_used_gib", "reserved_gib")
    ], False
