"""What becomes of a candidate: its memory and its time, on each GPU in question, from one trace.

*Fits* is stricter than the verdict of `memkit predict`: what the allocator may reserve at most and what lies outside
it take at most 92 % of the GPU (`verdict.FULL_SHARE`): beyond that steps become several times slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hf_memkit.catalog.hardware import Machine
from hf_memkit.common.units import format_gib
from hf_memkit.plan.candidate import SetupCandidate
from hf_memkit.prediction.prediction import Prediction
from hf_memkit.prediction.time.step_time import StepTime
from hf_memkit.prediction.traced_training import PlanFacts, TracedTraining
from hf_memkit.prediction.verdict import FULL_SHARE


@dataclass(frozen=True, slots=True)
class Judgement:
    """
    Attributes:
        candidate: which.
        prediction: what it needs; None: it could not be traced.
        step_time: of one optimizer step of usual batches; None: not known.
        fits: whether it does, by `FULL_SHARE`, with RAM and disk.
        why: why it does not, or cannot be predicted; empty if it fits.
        tokens: of one optimizer step of usual batches on all GPUs; None: it is none of tokens.
        training: what was traced, without its trace; None: it could not be.
        row_products: products whose two sides are the rows of a micro-batch (`judge_trace.py`).
        is_other: whether it would be another training than the script's, such as one with other last batches.
        steps_on_cpu: whether DeepSpeed's optimizer steps on the CPU.
        run_seconds: of the whole training, its evaluations and saves: (low, middle, high); None: not known.
    """

    candidate: SetupCandidate
    prediction: Prediction | None = None
    step_time: StepTime | None = None
    fits: bool = False
    why: str = ""
    tokens: int | None = None
    training: TracedTraining | None = None
    row_products: frozenset[tuple[int, int, int]] = frozenset()
    is_other: bool = False
    steps_on_cpu: bool = False
    run_seconds: tuple[float, float, float] | None = None

    @property
    def facts(self) -> PlanFacts:
        """Of a candidate that was traced."""
        assert self.training is not None
        return self.training.facts

    @property
    def needs_bytes(self) -> int:
        """The most that the process may take of the GPU."""
        return self.prediction.total_bytes[1] if self.prediction is not None else 0

    @property
    def usable_bytes(self) -> int:
        """What a setup that fits may take at most."""
        capacity = self.prediction.capacity_bytes if self.prediction is not None else None
        return int(FULL_SHARE * capacity) if capacity else 0

    @property
    def lacks_host(self) -> bool:
        """Whether RAM or disk is what does not suffice: no smaller micro-batch helps."""
        found = self.prediction
        return not self.fits and found is not None and found.verdict == "does not fit" and not found.lacks_room

    @property
    def seconds(self) -> float | None:
        """Of a step, the middle of its range; None: not known, or something in it has no time."""
        return self.step_time.seconds[1] if self.step_time is not None else None

    @property
    def is_priced(self) -> bool:
        """Whether its time may be ranked: everything in it has one."""
        return self.step_time is not None and not self.step_time.unknown

    @property
    def swaps(self) -> bool:
        """Whether it keeps something on a disk."""
        return self.prediction is not None and bool(self.prediction.disk_bytes)

    @property
    def tokens_per_second(self) -> float | None:
        """On all GPUs."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None


def usable_bytes(machine: Machine) -> int:
    """What a setup that fits may take at most of its GPU."""
    return int(FULL_SHARE * machine.gpu.capacity_bytes) if machine.gpu is not None else 0


def fits(prediction: Prediction, machine: Machine) -> tuple[bool, str]:
    """(whether it does, why not)."""
    if machine.gpu is None:
        return False, "no GPU to judge by; name one: --gpu NAME or --gpu 16GB"
    usable, needs = usable_bytes(machine), prediction.total_bytes[1]
    if needs > usable:
        return False, (
            f"needs up to {format_gib(needs)}; {100 * FULL_SHARE:.0f} % of {machine.gpu.name} is {format_gib(usable)}"
        )
    if prediction.verdict == "does not fit" or (prediction.memory_fraction < 1 and prediction.verdict == "tight"):
        return False, prediction.why
    return True, ""


def judge_prediction(candidate: SetupCandidate, prediction: Prediction, machine: Machine, **known: Any) -> Judgement:
    """A candidate whose trace is known."""
    does, why = fits(prediction, machine)
    return replace(Judgement(candidate, prediction, fits=does, why=why), **known)
