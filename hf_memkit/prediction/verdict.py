"""`fits`, `tight` or `does not fit`: predicted bytes against what a machine has, and why, in words.

The allocator frees its cache and tries again before it fails, so that a job completes in less than it reserves if left
alone. Both ends count:

```
smallest cap + slack > usable                      does not fit (for certain, or within the slack)
smallest cap + slack ≤ usable < reserved + slack   tight
reserved + slack ≤ usable                          fits
```
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from hf_memkit.hardware import Gpu, Machine
from hf_memkit.prediction.confidence import Confidence
from hf_memkit.units import format_size

__all__ = ["VERDICTS", "Judgement", "Verdict", "judge"]

Verdict = Literal["fits", "tight", "does not fit"]
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict (None: no card is known), and why."""

    verdict: Verdict | None
    why: str


def judge(
    machine: Machine,
    *,
    peak_reserved_bytes: tuple[int, int],
    smallest_cap_bytes: int,
    outside_allocator_bytes: int,
    confidence: Confidence,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
) -> Judgement:
    """Whether the job fits the machine.

    Args:
        machine: card, RAM and disk in question.
        peak_reserved_bytes: low and high end of what the allocator takes from the driver.
        smallest_cap_bytes: the least that the allocator may be given.
        outside_allocator_bytes: context and libraries, which the card has to hold beside it.
        confidence: says how much room is left.
        host_bytes: RAM of one machine with all its processes, page-locked RAM included; None: not modelled.
        disk_bytes: what training keeps on disk; None: not modelled.
    """
    on_card = _card(machine.gpu, peak_reserved_bytes[1], smallest_cap_bytes, outside_allocator_bytes, confidence)
    lacks = []
    if host_bytes is not None and host_bytes > machine.ram_bytes:
        lacks.append(
            f"it needs {format_size(host_bytes)} of RAM, and the machine has {format_size(machine.ram_bytes)} "
            f"(--ram says another)"
        )
    if disk_bytes is not None and disk_bytes > machine.disk_free_bytes:
        lacks.append(
            f"it needs {format_size(disk_bytes)} of disk, and {machine.disk_path} has "
            f"{format_size(machine.disk_free_bytes)} free"
        )
    if not lacks:
        return on_card
    why = "; ".join((*lacks, f"on the card: {on_card.why}"))
    return Judgement("does not fit" if on_card.verdict is not None else None, why)


def _card(gpu: Gpu | None, reserved: int, cap: int, outside: int, confidence: Confidence) -> Judgement:
    if gpu is None:
        return Judgement(None, "no card to judge by; name one: --gpu NAME or --gpu-memory 16GB")
    usable = gpu.capacity_bytes - outside
    leaves = f"{gpu.name} leaves {format_size(usable)}"
    least, most = confidence.cap_with_slack(cap), confidence.reserved_with_slack(reserved)
    if most <= usable:
        return Judgement(
            "fits",
            f"the allocator takes at most {format_size(reserved)} ({format_size(most)} with "
            f"{confidence.reserved_slack}), and {leaves}",
        )
    if least <= usable and confidence.level == "formula":
        return Judgement(
            "tight",
            f"{leaves}; by formula it needs {format_size(cap)} ({format_size(least)} with {confidence.cap_slack}, "
            f"{format_size(most)} with {confidence.reserved_slack} for what the allocator takes beyond); a trace "
            f"would tell",
        )
    if least <= usable:
        return Judgement(
            "tight",
            f"left alone, the allocator takes up to {format_size(reserved)} ({format_size(most)} with "
            f"{confidence.reserved_slack}), and {leaves}; in {format_size(cap)} ({format_size(least)} with slack) it "
            f"completes all the same, but has to free its cache and ask again, which is slow",
        )
    if cap <= usable:
        return Judgement(
            "does not fit",
            f"{leaves}, and it completes in no less than {format_size(cap)}: with {confidence.cap_slack} that is "
            f"{format_size(least)}, too close to promise",
        )
    return Judgement("does not fit", f"{leaves}, and it completes in no less than {format_size(cap)}")
