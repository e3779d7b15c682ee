"""What a setup will need before it is run. In: what a trace and a replay gave. Out: plain data.

`Prediction(…).judged(machine)` adds the verdict. The JSON has the names of docs/reference.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Final, Self

from hf_memkit.catalog.hardware import Machine
from hf_memkit.common.terms import CATEGORIES, PHASES, Category, Phase
from hf_memkit.common.units import GIB, format_size
from hf_memkit.prediction.verdict import VERDICTS, Confidence, Verdict, judge, usable_bytes

PhasePeak = tuple[int, int | None]
"""Peak allocated and peak reserved of a phase, bytes; None: not modelled."""


_SMALLEST_PART: Final = 0.001
"""Share of the peak below which a category is not listed."""


def size_text(size_bytes: int | None) -> str:
    """`"1.53 GiB"`, or that it was not modelled."""
    if size_bytes is None:
        return "not modelled"
    return format_size(size_bytes) if size_bytes else "0"


def with_rest(categories: Mapping[Category, int], total_bytes: int) -> dict[Category, int]:
    """Every category, and in `other` what `total_bytes` has beyond them: the allocator's blocks are larger than what
    was asked for.

    Raises:
        ValueError: the categories hold more than that.
    """
    rest = total_bytes - sum(categories.values())
    if rest < 0:
        raise ValueError(f"categories add up to {total_bytes - rest} bytes, more than {total_bytes}")
    found = {name: categories.get(name, 0) for name in CATEGORIES}
    return {**found, "other": found["other"] + rest}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes that one training needs on each GPU, and on each machine, with how far they can be trusted.

    Attributes:
        peak_allocated_bytes: highest that tensors take on a GPU, in blocks of the allocator.
        peak_reserved_bytes: lowest and highest of what the allocator takes from the driver: the order of frees, which
            decides it, differs from run to run.
        outside_allocator_bytes: what the process holds on the GPU beside the allocator: CUDA context, NCCL.
        smallest_cap_bytes: the least that the allocator may be given; it frees its cache before it fails.
        phases: peaks of each phase that was modelled.
        categories: what the peak is made of; all categories, adding up to `peak_allocated_bytes`.
        peak_phase, peak_operation, peak_module: where the peak is; operation and module are empty where no trace says.
        confidence: what the numbers rest on.
        source: what computed them, such as the versions of the libraries that were traced.
        capacity_bytes: the GPU's, as PyTorch reports it; None: no GPU is known.
        host_rss_bytes, pinned_bytes, disk_bytes: RAM, page-locked RAM and disk of one machine with all its processes;
            None: not modelled.
        verdict: None where no GPU is known.
        why: the verdict's reason.
        notes: what was bounded or assumed, a sentence each.
        warnings: what the verdict does not weigh, and costs much: shown under it, a sentence each.
        memory_fraction: the share of the GPU that torch lets the process take (`per_process_memory_fraction`).
        modules: what the peak is made of, by module and category, to compare (`comparison.py`); not in the JSON, and
            empty where no trace says.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: tuple[int, int]
    outside_allocator_bytes: int
    smallest_cap_bytes: int
    phases: Mapping[Phase, PhasePeak]
    categories: Mapping[Category, int]
    peak_phase: Phase
    peak_operation: str
    peak_module: str
    confidence: Confidence
    source: str
    capacity_bytes: int | None = None
    host_rss_bytes: int | None = None
    pinned_bytes: int | None = None
    disk_bytes: int | None = None
    verdict: Verdict | None = None
    why: str = ""
    notes: tuple[str, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())
    memory_fraction: float = 1.0
    modules: Mapping[tuple[str, Category], int] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        low, high = self.peak_reserved_bytes
        if low > high:
            raise ValueError(f"peak_reserved_bytes {self.peak_reserved_bytes}: the low end is above the high one")
        if unknown := set(self.phases) - set(PHASES):
            raise ValueError(f"phases {sorted(unknown)}: must be among {PHASES}")
        if set(self.categories) != set(CATEGORIES):
            raise ValueError(f"categories {sorted(self.categories)}: must be all of {CATEGORIES}")
        if sum(self.categories.values()) != self.peak_allocated_bytes:
            raise ValueError(
                f"categories add up to {sum(self.categories.values())} bytes, and the peak is "
                f"{self.peak_allocated_bytes}"
            )
        if self.verdict is not None and self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r}: must be one of {VERDICTS}")
        object.__setattr__(self, "phases", {name: self.phases[name] for name in PHASES if name in self.phases})
        object.__setattr__(self, "categories", {name: self.categories[name] for name in CATEGORIES})

    def needs_less_than(self, other: Prediction) -> bool:
        """Whether it does so clearly, by a hundredth of what the process takes."""
        return self.total_bytes[1] < 0.99 * other.total_bytes[1]

    @property
    def total_bytes(self) -> tuple[int, int]:
        """Lowest and highest that the process takes of the GPU: reserved, and what is outside the allocator."""
        low, high = self.peak_reserved_bytes
        return low + self.outside_allocator_bytes, high + self.outside_allocator_bytes

    @property
    def largest_category(self) -> Category:
        """What most of the peak is."""
        return max(self.categories, key=lambda name: self.categories[name])

    @property
    def usable_bytes(self) -> int:
        """What the allocator may take of the GPU."""
        return usable_bytes(self.capacity_bytes or 0, self.outside_allocator_bytes, self.memory_fraction)

    @property
    def lacks_room(self) -> bool:
        """Whether the GPU is too small, or just large enough; where it does not fit all the same, RAM or disk is."""
        return self.verdict == "tight" or self.confidence.with_slack(self.smallest_cap_bytes) > self.usable_bytes

    def judged(self, machine: Machine) -> Prediction:
        """Another prediction, with the verdict for this machine and its GPU's capacity."""
        host = [size for size in (self.host_rss_bytes, self.pinned_bytes) if size is not None]
        names = ("peak_reserved_bytes", "smallest_cap_bytes", "outside_allocator_bytes", "confidence",
                 "memory_fraction", "disk_bytes")  # fmt: skip
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        found = judge(machine, **own, host_bytes=sum(host) if host else None)
        capacity = machine.gpu.capacity_bytes if machine.gpu is not None else None
        return replace(self, capacity_bytes=capacity, verdict=found.verdict, why=found.why)

    def with_notes(self, *notes: str) -> Prediction:
        """Another prediction with these notes added, each once."""
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, *notes))))

    def with_warnings(self, *warnings: str) -> Prediction:
        """Another prediction with these warnings, each once; empty ones are omitted."""
        return replace(self, warnings=tuple(dict.fromkeys((*self.warnings, *filter(None, warnings)))))

    @property
    def headline(self) -> str:
        """The verdict and its reason, or that no GPU is known."""
        if self.verdict is None:
            return "NO VERDICT: no GPU is known"
        return f"{self.verdict.upper()}: {self.why}"

    @property
    def peak(self) -> str:
        """Where the peak is: phase, and operation and module where a trace shows them."""
        where = f"in {self.peak_phase}"
        if self.peak_operation:
            where += f", at {self.peak_operation}"
        if self.peak_module:
            where += f" of {self.peak_module}"
        return f"Peak allocated on the GPU: {size_text(self.peak_allocated_bytes)}, {where}"

    @property
    def largest_parts(self) -> list[tuple[Category, int]]:
        """Categories of the peak from a thousandth of it on, the largest first."""
        held = sorted(self.categories.items(), key=lambda item: -item[1])
        return [(name, size) for name, size in held if size > _SMALLEST_PART * self.peak_allocated_bytes]

    def summary(self) -> list[str]:
        """The peak, its categories, the phases and the confidence, a sentence each without its full stop."""
        phases = ", ".join(f"{name} {size_text(allocated)}" for name, (allocated, _) in self.phases.items())
        return [
            self.peak,
            f"Made of: {', '.join(f'{name} {size_text(size)}' for name, size in self.largest_parts)}",
            f"By phase: {phases}",
            f"Confidence: {self.confidence.level}, {self.confidence.measured}",
        ]

    def __str__(self) -> str:
        """The verdict, warnings, the peak, its categories and the phases: `repr` has every number."""
        warnings = (f"Warning: {warning}" for warning in self.warnings)
        return "\n".join(f"{line}." for line in (self.headline, *warnings, *self.summary()))

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict, warnings, and the peak's categories as a table."""
        rows = "".join(
            f"<tr><td>{name}</td><td style='text-align:right'>{size_text(size)}</td>"
            f"<td style='text-align:right'>{100 * size / self.peak_allocated_bytes:.0f} %</td></tr>"
            for name, size in self.largest_parts
        )
        warnings = "".join(f"<p>Warning: {escape(warning)}.</p>" for warning in self.warnings)
        confidence = self.summary()[-1]
        return (
            f"<p><b>{escape(self.headline)}.</b></p>{warnings}<p>{escape(self.peak)}.</p>"
            f"<table>{rows}</table><p>{escape(confidence)}.</p>"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "peak_allocated_gib": self.peak_allocated_bytes / GIB,
            "peak_reserved_gib": [size / GIB for size in self.peak_reserved_bytes],
            "outside_allocator_gib": self.outside_allocator_bytes / GIB,
            "capacity_gib": _gib(self.capacity_bytes),
            "memory_fraction": self.memory_fraction,
            "smallest_cap_gib": self.smallest_cap_bytes / GIB,
            "phases": {
                name: {"peak_allocated_gib": allocated / GIB, "peak_reserved_gib": _gib(reserved)}
                for name, (allocated, reserved) in self.phases.items()
            },
            "categories": {f"{name}_gib": size / GIB for name, size in self.categories.items()},
            "peak_phase": self.peak_phase,
            "peak_operation": self.peak_operation,
            "peak_module": self.peak_module,
            "host_rss_gib": _gib(self.host_rss_bytes),
            "pinned_gib": _gib(self.pinned_bytes),
            "disk_gib": _gib(self.disk_bytes),
            "verdict": self.verdict,
            "why": self.why,
            "warnings": list(self.warnings),
            "confidence": self.confidence.to_json(),
            "notes": list(self.notes),
            "source": self.source,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The prediction that `to_json` gave; other keys are left alone."""
        low, high = content["peak_reserved_gib"]
        names = ("peak_allocated", "outside_allocator", "capacity", "smallest_cap", "host_rss", "pinned", "disk")
        sizes: dict[str, Any] = {f"{name}_bytes": _bytes(content[f"{name}_gib"]) for name in names}
        same = ("peak_phase", "peak_operation", "peak_module", "source", "verdict", "why")
        return cls(
            **sizes,
            **{name: content[name] for name in same},
            peak_reserved_bytes=(round(low * GIB), round(high * GIB)),
            phases={
                name: (round(peaks["peak_allocated_gib"] * GIB), _bytes(peaks["peak_reserved_gib"]))
                for name, peaks in content["phases"].items()
            },
            categories={name: round(content["categories"][f"{name}_gib"] * GIB) for name in CATEGORIES},
            confidence=Confidence.from_json(content["confidence"]),
            notes=tuple(content["notes"]),
            warnings=tuple(content.get("warnings", ())),
            memory_fraction=content.get("memory_fraction", 1.0),
        )


def _gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / GIB


def _bytes(gib: float | None) -> int | None:
    """Whole bytes: dividing by a power of two lost nothing."""
    return None if gib is None else round(gib * GIB)
