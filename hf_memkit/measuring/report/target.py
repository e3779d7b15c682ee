"""The prediction for a rehearsal's target, which runs on a GPU. A recipe writes it into the record's `facts`, in the
form of `memkit predict --json`. Facts may contain anything, so every value is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hf_memkit.common.answer.safe_text import printable
from hf_memkit.common.commands import command
from hf_memkit.common.terms import CATEGORIES, PHASES
from hf_memkit.measuring.out_of_memory.run_view import mapping
from hf_memkit.measuring.report.load import Run
from hf_memkit.measuring.report.sanitize import checked_number, number

_VERDICTS: Final = {
    "fits": "is predicted to fit on",
    "tight": "is predicted to be tight on",
    "does not fit": "is predicted not to fit on",
}


@dataclass(frozen=True, slots=True)
class Target:
    """The prediction of a run. What is None or empty was not predicted.

    Attributes:
        verdict: `fits`, `tight` or `does not fit`, with this machine's RAM and disk; `why` is its reason.
        gpu_verdict: the verdict for the GPU alone.
        reserved_gib: lowest and highest peak reserved.
        categories: GiB by category at the peak.
        host_gib: RAM that one machine needs, including page-locked RAM.
        ram_gib: RAM of the machine that rehearsed.
        is_measured: whether predictions of this kind were compared with measured runs.
    """

    gpu: str
    capacity_gib: float | None
    verdict: str | None
    gpu_verdict: str | None
    why: str
    peak_gib: float
    peak_phase: str | None
    reserved_gib: tuple[float, float]
    outside_gib: float
    categories: dict[str, float]
    phases: dict[str, float]
    host_gib: float | None
    ram_gib: float | None
    disk_gib: float | None
    rests_on: str
    is_measured: bool

    @property
    def needs_gib(self) -> float:
        """Maximum of GPU memory that it takes."""
        return self.reserved_gib[1] + self.outside_gib


def target_of(run: Run) -> Target | None:
    """The prediction for the run's target; None if the run is no rehearsal, or has no prediction."""
    facts = run.first.run.get("facts", {})
    fields = mapping(facts.get("target_prediction") if facts.get("rehearsal") is True else None)
    peak = number(fields, "peak_allocated_gib")
    ends = fields.get("peak_reserved_gib")
    if peak is None or not isinstance(ends, list) or len(ends) < 2:
        return None
    low, high = checked_number(ends[0]), checked_number(ends[1])
    if low is None or high is None:
        return None

    by_phase = mapping(fields.get("phases"))
    by_category = mapping(fields.get("categories"))
    phases = {phase: number(mapping(by_phase.get(phase)), "peak_allocated_gib") for phase in PHASES}
    categories = {category: number(by_category, f"{category}_gib") for category in CATEGORIES}
    host = [gib for name in ("host_rss_gib", "pinned_gib") if (gib := number(fields, name)) is not None]
    phase = fields.get("peak_phase")
    confidence = mapping(fields.get("confidence"))
    verdict = _verdict(fields.get("verdict"))
    return Target(
        gpu=printable(fields.get("gpu") or "the target's GPU", 60),
        capacity_gib=number(fields, "capacity_gib"),
        verdict=verdict,
        gpu_verdict=_verdict(fields.get("gpu_verdict")) or verdict,
        why=printable(fields.get("why") or "", 300),
        peak_gib=peak,
        peak_phase=phase if phase in PHASES else None,
        reserved_gib=(low, high),
        outside_gib=number(fields, "outside_allocator_gib") or 0.0,
        categories={name: gib for name, gib in categories.items() if gib is not None},
        phases={name: gib for name, gib in phases.items() if gib is not None},
        host_gib=sum(host) if host else None,
        ram_gib=number(fields, "ram_gib"),
        disk_gib=number(fields, "disk_gib"),
        rests_on=printable(confidence.get("rests_on") or "", 200),
        is_measured=confidence.get("measured_on") is not None,
    )


def sentence(target: Target) -> str:
    """`The target run is predicted to fit on RTX 4060: at most 5.5 of 7.8 GiB.`"""
    fits = _VERDICTS.get(target.gpu_verdict or "", "is predicted on")
    of = f" of {target.capacity_gib:.1f}" if target.capacity_gib else ""
    line = f"The target run {fits} {target.gpu}: at most {target.needs_gib:.1f}{of} GiB."
    if target.verdict == target.gpu_verdict:
        return line
    if target.host_gib and target.ram_gib and target.host_gib > target.ram_gib:
        return f"{line} It needs {target.host_gib:.1f} GiB of host RAM; this machine has {target.ram_gib:.1f} GiB."
    return f"{line} It needs more disk than this machine has free."


def figures_and_basis(target: Target) -> str:
    """Sentences: peak, reserved and host memory, and the basis of the prediction."""
    low, high = target.reserved_gib
    where = f" in {target.peak_phase}" if target.peak_phase else ""
    line = f"Predicted: peak allocated {target.peak_gib:.2f} GiB{where}, reserved {low:.2f}–{high:.2f} GiB"
    line += f", outside the allocator {target.outside_gib:.2f} GiB"
    line += f", host RAM {target.host_gib:.1f} GiB" if target.host_gib else ""
    line += f", disk {target.disk_gib:.1f} GiB" if target.disk_gib else ""
    measured = "" if target.is_measured else "; predictions of this kind were not yet compared with a GPU"
    basis = f" Computed from {target.rests_on}{measured}." if target.rests_on else ""
    return f"{line}.{basis}"


def next_command(run: Run, target: Target) -> str:
    """What to do after a rehearsal, with the command."""
    facts: Mapping[str, Any] = run.first.run.get("facts", {})
    recipe, variant = (printable(facts.get(name) or "NAME", 60) for name in ("recipe", "variant"))
    if target.gpu_verdict == "does not fit":
        return f"Choose another GPU or variant: {command('memkit', 'recipe', recipe, '--dry-run', '--gpu', 'NAME')}"
    return f"Run it on that GPU: {command('memkit', 'recipe', recipe, '--variant', variant)}"


def _verdict(value: Any) -> str | None:
    return value if isinstance(value, str) and value in _VERDICTS else None
