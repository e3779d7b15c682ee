"""The prediction of a setup as plain data, computed from a trace and its replay.

`Prediction(…).with_verdict(machine)` adds the verdict. docs/reference.md has the names of its JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from html import escape
from typing import Any, Final, Self

from hf_memkit.catalog import fit
from hf_memkit.catalog.fit import VERDICTS, Verdict
from hf_memkit.catalog.hardware import Machine
from hf_memkit.common.terms import CATEGORIES, PHASES, Category, Phase
from hf_memkit.common.units import GIB, format_size
from hf_memkit.prediction.confidence import Confidence
from hf_memkit.prediction.time.compile_time import compile_seconds
from hf_memkit.prediction.trace.trace import ZEROS
from hf_memkit.prediction.traced_training import Compilation

PhasePeak = tuple[int, int | None]  # peak allocated and peak reserved bytes of a phase; None: not modelled

_SMALLEST_PART: Final = 0.001  # share of the peak below which a category is not listed


def size_text(size_bytes: int | None) -> str:
    """`"1.53 GiB"`, or `"not modelled"`."""
    if size_bytes is None:
        return "not modelled"
    return format_size(size_bytes) if size_bytes else "0"


def with_rest(categories: Mapping[Category, int], total_bytes: int) -> dict[Category, int]:
    """All categories, with the rest of `total_bytes` added to `other`: blocks of the allocator exceed the requests.
    Raises ValueError if the categories exceed the total."""
    rest = total_bytes - sum(categories.values())
    if rest < 0:
        raise ValueError(f"categories add up to {total_bytes - rest} bytes, more than {total_bytes}")
    result = {name: categories.get(name, 0) for name in CATEGORIES}
    return {**result, "other": result["other"] + rest}


def list_parts(sizes: Mapping[str, int], total_bytes: int) -> str:
    """`"1.54 GiB of activations and loss saved for backward, 0.49 GiB of …"`, without parts below 1 % of the total."""
    return ", ".join(f"{format_size(size)} of {kind}" for kind, size in sizes.items() if size > 0.01 * total_bytes)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes that one training needs on each GPU and on each machine, and how reliable they are.

    Attributes:
        peak_reserved_bytes: minimum and maximum that the allocator takes from the driver: it depends on the order of
            frees, which differs between runs.
        peak_phase, peak_operation, peak_module: where the peak is; operation and module are empty without a trace.
        host_rss_bytes, pinned_bytes, disk_bytes: RAM, page-locked RAM and disk of one machine with all its processes;
            None: not modelled.
        warnings: costly problems that do not affect the verdict, shown below it, a sentence each.
        modules: parts of the peak by (module, category), for comparisons (`comparison.py`); not in the JSON, and empty
            without a trace.
        activations: the part of the peak that compiling changes, by kind (`TracePeak`); not in the JSON.
    """

    peak_allocated_bytes: int  # maximum of tensors on a GPU, in blocks of the allocator
    peak_reserved_bytes: tuple[int, int]
    outside_allocator_bytes: int  # memory of the process on the GPU outside the allocator: CUDA context, NCCL
    smallest_cap_bytes: int  # minimum that the allocator needs; it frees its cache before it fails
    phases: Mapping[Phase, PhasePeak]  # peaks of each modelled phase
    categories: Mapping[Category, int]  # parts of the peak; all categories, adding up to `peak_allocated_bytes`
    peak_phase: Phase
    peak_operation: str
    peak_module: str
    confidence: Confidence  # what the numbers rest on
    source: str  # what computed them, such as the versions of the traced libraries
    capacity_bytes: int | None = None  # of the GPU, as PyTorch reports it; None: no GPU is known
    host_rss_bytes: int | None = None
    pinned_bytes: int | None = None
    disk_bytes: int | None = None
    verdict: Verdict | None = None  # None if no GPU is known
    why: str = ""  # reason of the verdict
    notes: tuple[str, ...] = field(default=())  # bounds and assumptions, a sentence each
    warnings: tuple[str, ...] = field(default=())
    memory_fraction: float = 1.0  # share of the GPU that torch lets the process use (`per_process_memory_fraction`)
    compilation: Compilation | None = None  # None: nothing is compiled by inductor
    modules: Mapping[tuple[str, Category], int] = field(default_factory=dict, compare=False, repr=False)
    activations: Counter[str] = field(default_factory=Counter, compare=False, repr=False)

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
        """Whether it needs at least 1 % less of the GPU."""
        return self.total_bytes[1] < 0.99 * other.total_bytes[1]

    @property
    def total_bytes(self) -> tuple[int, int]:
        """Minimum and maximum that the process takes of the GPU: reserved, and outside the allocator."""
        low, high = self.peak_reserved_bytes
        return low + self.outside_allocator_bytes, high + self.outside_allocator_bytes

    @property
    def largest_category(self) -> Category:
        """The category with the largest part of the peak."""
        return max(self.categories, key=lambda name: self.categories[name])

    @property
    def usable_bytes(self) -> int:
        """What the allocator may take of the GPU."""
        return max(0, self.room_bytes - self.outside_allocator_bytes)

    @property
    def room_bytes(self) -> int:
        """What the process may take of the GPU."""
        return fit.room_bytes(self.capacity_bytes or 0, self.outside_allocator_bytes, self.memory_fraction)

    @property
    def limit_bytes(self) -> int:
        """The maximum that it may take of the GPU to fit."""
        return fit.limit_bytes(self.room_bytes, self.confidence.level)

    @property
    def least_bytes(self) -> int:
        """The least of the GPU in which it completes, with slack."""
        slack = fit.slack_bytes(self.smallest_cap_bytes, self.confidence.level)
        return self.smallest_cap_bytes + slack + self.outside_allocator_bytes

    @property
    def lacks_room(self) -> bool:
        """Whether the GPU is too small or tight; if it is not and the job does not fit, RAM or disk is too small."""
        return self.verdict == "tight" or self.least_bytes > self.room_bytes

    def with_verdict(self, machine: Machine) -> Prediction:
        """The prediction with the verdict for this machine and its GPU's capacity."""
        gpu = machine.gpu
        sized = replace(self, capacity_bytes=gpu.capacity_bytes if gpu is not None else None)
        verdict: Verdict | None = None
        why = "no GPU to judge by; name one: --gpu NAME or --gpu 16GB"
        if gpu is not None:
            verdict = fit.verdict(sized.total_bytes[1], sized.least_bytes, sized.room_bytes, self.confidence.level)
            why = sized._why(verdict, gpu.name)
        ram_bytes = (self.host_rss_bytes or 0) + (self.pinned_bytes or 0)
        hint = " (--ram; default: this machine's)"
        if short := fit.host_shortages(machine, ram_bytes, self.disk_bytes or 0, hint):
            why = "; ".join((*short, why if verdict is None else f"on the GPU it {why}"))
            verdict = "does not fit" if verdict is not None else None
        return replace(sized, verdict=verdict, why=why)

    def _why(self, verdict: Verdict, gpu: str) -> str:
        """The reason for the verdict of the GPU alone."""
        least = self.smallest_cap_bytes + self.outside_allocator_bytes
        level, room = self.confidence.level, self.room_bytes
        needs = self.total_bytes[1]
        if verdict == "does not fit":
            needs = least if least > room else self.least_bytes
        # One decimal: a prediction is no more exact. More only where two sizes would look the same.
        digits = next((count for count in (1, 2, 3) if _in_gib(needs, count) != _in_gib(room, count)), 1)
        short = partial(_in_gib, digits=digits)
        has = f"{gpu} has {short(room)}"
        if room < (self.capacity_bytes or 0):
            has = f"per_process_memory_fraction {self.memory_fraction:g} allows {short(room)} of {gpu}"
        if verdict == "does not fit":
            slack = f" ({short(self.least_bytes)} with {fit.slack_text(level)} of slack)" if least <= room else ""
            return f"needs at least {short(least)}{slack}; {has}{': too close' if slack else ''}"
        why = f"needs up to {short(self.total_bytes[1])}; {has}"
        if verdict == "fits":
            return why
        slow = "the allocator may free its cache and try again, which is slow"
        return f"{why}; it completes, but above {fit.full_share_text(level)} of that {slow}"

    def with_compilation(self, compilation: Compilation | None) -> Prediction:
        """The prediction with notes on what compiled code holds at the peak; None: inductor has compiled nothing."""
        notes = []
        parts = list_parts(self.activations, self.peak_allocated_bytes)
        if parts and (compilation is not None or ZEROS in parts):
            notes.append(f"compiled code holds at the peak: {parts}")
        if ZEROS in parts:
            notes.append(
                "torch_compile adds zeros for outputs that the loss does not use, such as logits (pytorch#131794). "
                "hf_memkit.components.chunked_loss.install(model) makes a model return none (technique chunked-loss)"
            )
        return replace(self, compilation=compilation).with_notes(*notes)

    def with_notes(self, *notes: str) -> Prediction:
        """The prediction with these notes added, without duplicates."""
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, *notes))))

    def with_warnings(self, *warnings: str) -> Prediction:
        """The prediction with these warnings added, without empty ones and duplicates."""
        return replace(self, warnings=tuple(dict.fromkeys((*self.warnings, *filter(None, warnings)))))

    @property
    def headline(self) -> str:
        """The verdict and its reason, or that no GPU is known."""
        if self.verdict is None:
            return "NO VERDICT: no GPU is known"
        return f"{self.verdict.upper()}: {self.why}"

    @property
    def peak(self) -> str:
        """The peak with its phase, operation and module."""
        where = f"in {self.peak_phase}"
        if self.peak_operation:
            where += f", at {self.peak_operation}"
        if self.peak_module:
            where += f" of {self.peak_module}"
        return f"Peak allocated on the GPU: {size_text(self.peak_allocated_bytes)}, {where}"

    @property
    def largest_parts(self) -> list[tuple[Category, int]]:
        """Categories above a thousandth of the peak, largest first."""
        held = sorted(self.categories.items(), key=lambda item: -item[1])
        return [(name, size) for name, size in held if size > _SMALLEST_PART * self.peak_allocated_bytes]

    def summary(self) -> list[str]:
        """The peak, its categories, the phases and the confidence: sentences without a full stop."""
        phases = ", ".join(f"{name} {size_text(allocated)}" for name, (allocated, _) in self.phases.items())
        return [
            self.peak,
            f"Made of: {', '.join(f'{name} {size_text(size)}' for name, size in self.largest_parts)}",
            f"By phase: {phases}",
            f"Confidence: {self.confidence.level}, {self.confidence.measured}",
        ]

    def __str__(self) -> str:
        """The verdict, warnings, the peak, its categories and the phases; `repr` has all numbers."""
        warnings = (f"Warning: {warning}" for warning in self.warnings)
        return "\n".join(f"{line}." for line in (self.headline, *warnings, *self.summary()))

    def _repr_html_(self) -> str:
        """HTML for notebooks: the verdict, warnings, and the peak's categories as a table."""
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
        compiles: dict[str, Any] = {}
        if self.compilation is not None:
            seconds = list(compile_seconds(self.compilation))
            compiles["compilation"] = {**asdict(self.compilation), "seconds": seconds}
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
            **compiles,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The prediction from `to_json`; ignores other keys."""
        low, high = content["peak_reserved_gib"]
        names = ("peak_allocated", "outside_allocator", "capacity", "smallest_cap", "host_rss", "pinned", "disk")
        sizes: dict[str, Any] = {f"{name}_bytes": _bytes(content[f"{name}_gib"]) for name in names}
        same = ("peak_phase", "peak_operation", "peak_module", "source", "verdict", "why")
        compiles = content.get("compilation")
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
            compilation=Compilation(compiles["graphs"], compiles["calls"]) if compiles else None,
        )


def _in_gib(size_bytes: int, digits: int) -> str:
    return f"{size_bytes / GIB:.{digits}f} GiB"


def _gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / GIB


def _bytes(gib: float | None) -> int | None:
    """Whole bytes: division by a power of two is exact."""
    return None if gib is None else round(gib * GIB)
