"""`fits`, `tight` or `does not fit`: predicted bytes against what a machine has, and why, in words.

The allocator frees its cache and tries again before it fails, so that a job completes in less than it reserves if left
alone. Both ends count:

```
smallest cap + slack > usable                      does not fit (for certain, or within the slack)
smallest cap + slack ≤ usable < reserved + slack   tight
reserved + slack ≤ usable                          fits
```

How much slack there is follows from what the numbers rest on. The slack of traces is fitted on one half of the
trainings that others measured on GPUs, and judged on the other half (docs/predict.md, "How the slack was set").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, Self, get_args

from hf_memkit.catalog.hardware import Gpu, Machine
from hf_memkit.common.units import MIB, format_size

Level = Literal["trace", "cpu trace"]
"""What the numbers were computed from: a trace on fake CUDA tensors, or one on fake CPU tensors (CPU's kernels and
autocast rules)."""

LEVELS: Final[tuple[Level, ...]] = get_args(Level)

SLACK_SHARE: Final[dict[Level, float]] = {"trace": 0.05, "cpu trace": 0.10}
"""The share of the smallest cap, and of the reserved bytes, that a verdict adds to them:

* trace: 5 %, the worst error that is accepted of a predicted peak; what `CONTEXT_SLACK_BYTES` is fitted beside.
* cpu trace: other kernels, another attention, other autocast lists; assumed. torch accepts ±10 % for its own tracker
  of traced steps against CUDA (pytorch: test/distributed/_tools/test_mem_tracker.py, `delta=0.1`).
"""

CONTEXT_SLACK_BYTES: Final = 200 * MIB
"""The CUDA context is assumed at 500 MiB (`hardware.CONTEXT_BYTES`) and grows in training, as libraries load kernels
when they are first used. Of traces: the least multiple of 50 MiB with which 95 % of the fitting half's trainings are
covered, `fitted_slack_mib` in benchmarks/published_summary.py, which a test compares with this."""


@dataclass(frozen=True, slots=True)
class Confidence:
    """What a prediction rests on.

    Attributes:
        level: what its numbers were computed from.
        rests_on: the same in words, such as `"two optimizer steps of transformers.Trainer on fake CUDA tensors"`.
        measured_on: the GPU, and the evidence file, on which such predictions were compared with a measured run; None:
            none yet.
    """

    level: Level
    rests_on: str
    measured_on: str | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"confidence level {self.level!r} must be one of {LEVELS}")
        if not self.rests_on:
            raise ValueError("a confidence must say what it rests on")

    def with_slack(self, size_bytes: int) -> int:
        """A smallest cap, or reserved bytes, and the room that a verdict leaves beside them."""
        return size_bytes + round(SLACK_SHARE[self.level] * size_bytes) + CONTEXT_SLACK_BYTES

    @property
    def slack(self) -> str:
        """`"5 % and 200 MiB of slack"`."""
        return f"{round(100 * SLACK_SHARE[self.level])} % and {CONTEXT_SLACK_BYTES // MIB} MiB of slack"

    @property
    def measured(self) -> str:
        """`"measured on RTX 4090 (results/gpu.json)"`, or that it is not."""
        return f"measured on {self.measured_on}" if self.measured_on else "not yet measured on a GPU"

    def __str__(self) -> str:
        return f"{self.level} ({self.rests_on}); {self.measured}"

    def to_json(self) -> dict[str, Any]:
        return {"level": self.level, "rests_on": self.rests_on, "measured_on": self.measured_on}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        return cls(content["level"], content["rests_on"], content["measured_on"])


FULL_SHARE: Final = 0.92
"""Of what PyTorch reports as the GPU's total. Where a process takes more, the allocator may free its cache and ask
again, and steps become several times slower: runs of OpenTau on 80 GiB GPUs lost a third of their speed at 97 %,
torchtitan's fitting plan three quarters (OpenTau PR 273; pytorch/torchtitan PR 4636)."""

Verdict = Literal["fits", "tight", "does not fit"]
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict (None: no GPU is known), and why."""

    verdict: Verdict | None
    why: str


def judge(
    machine: Machine,
    *,
    peak_reserved_bytes: tuple[int, int],
    smallest_cap_bytes: int,
    outside_allocator_bytes: int,
    confidence: Confidence,
    memory_fraction: float = 1.0,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
) -> Judgement:
    """Whether the job fits the machine.

    Args:
        machine: GPU, RAM and disk in question.
        peak_reserved_bytes, smallest_cap_bytes, outside_allocator_bytes, confidence, memory_fraction: as of a
            `Prediction`.
        host_bytes: RAM of one machine with all its processes, page-locked RAM included; None: not modelled.
        disk_bytes: what training keeps on disk; None: not modelled.
    """
    on_gpu = _gpu(
        machine.gpu, peak_reserved_bytes[1], smallest_cap_bytes, outside_allocator_bytes, confidence, memory_fraction
    )
    lacks = []
    if host_bytes is not None and host_bytes > machine.ram_bytes:
        lacks.append(
            f"it needs {format_size(host_bytes)} of RAM; the machine has {format_size(machine.ram_bytes)} "
            "(--ram; default: this machine's)"
        )
    if disk_bytes is not None and disk_bytes > machine.disk_free_bytes:
        lacks.append(
            f"it needs {format_size(disk_bytes)} of disk; {machine.disk_path} has "
            f"{format_size(machine.disk_free_bytes)} free"
        )
    if not lacks:
        return on_gpu
    why = "; ".join((*lacks, f"on the GPU: {on_gpu.why}"))
    return Judgement("does not fit" if on_gpu.verdict is not None else None, why)


def usable_bytes(capacity_bytes: int, outside_allocator_bytes: int, memory_fraction: float) -> int:
    """What the allocator may take of a GPU, beside what lies outside it and by torch's own limit."""
    return max(0, min(capacity_bytes - outside_allocator_bytes, int(memory_fraction * capacity_bytes)))


def _gpu(
    gpu: Gpu | None, reserved: int, cap: int, outside: int, confidence: Confidence, memory_fraction: float
) -> Judgement:
    if gpu is None:
        return Judgement(None, "no GPU to judge by; name one: --gpu NAME or --gpu 16GB")
    usable = usable_bytes(gpu.capacity_bytes, outside, memory_fraction)
    available = f"{gpu.name} has {format_size(usable)} available"
    if usable < gpu.capacity_bytes - outside:
        available = f"per_process_memory_fraction {memory_fraction:g} allows {format_size(usable)} of {gpu.name}"
    least, most = confidence.with_slack(cap), confidence.with_slack(reserved)
    if most <= usable:
        is_full = reserved + outside > FULL_SHARE * gpu.capacity_bytes
        slow = f". That is above {100 * FULL_SHARE:.0f} % of the GPU: steps can be slow, and memkit plan rejects it"
        return Judgement(
            "fits",
            f"the allocator takes at most {format_size(reserved)} ({format_size(most)} with "
            f"{confidence.slack}); {available}{slow if is_full else ''}",
        )
    if least <= usable:
        return Judgement(
            "tight",
            f"the allocator takes up to {format_size(reserved)} ({format_size(most)} with "
            f"{confidence.slack}); {available}; training completes in {format_size(cap)} "
            f"({format_size(least)} with slack), but slowly: the allocator must often free its cache",
        )
    if cap <= usable:
        return Judgement(
            "does not fit",
            f"{available}; it needs at least {format_size(cap)} ({format_size(least)} with {confidence.slack}): "
            f"too close",
        )
    return Judgement("does not fit", f"{available}; it needs at least {format_size(cap)}")
