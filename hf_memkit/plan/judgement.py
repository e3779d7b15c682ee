"""The predicted memory, time and verdict of a candidate.

A plan proposes only what `fits` (catalog/fit.py). A `tight` candidate completes, but may be several times slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hf_memkit.plan.candidate import Candidate
from hf_memkit.prediction.prediction import Prediction
from hf_memkit.prediction.time.step_time import StepTime
from hf_memkit.prediction.traced_training import PlanFacts, TracedTraining


@dataclass(frozen=True, slots=True)
class Judgement:
    """The predicted memory and time of a candidate, and whether it fits.

    Attributes:
        prediction: its memory; None if it could not be traced.
        step_time: time of one optimizer step of typical batches; None if unknown.
        fits: whether its verdict is `fits`.
        why: why it does not fit, or cannot be predicted; empty if it fits.
        tokens: tokens of one optimizer step of typical batches on all GPUs; None if the data has no tokens.
        training: the traced training, without its trace; None if it could not be traced.
        row_products: products whose two sides are the rows of a micro-batch (`judge_trace.py`).
        is_other: whether it is another training than the script's, such as one with other last batches.
        steps_on_cpu: whether DeepSpeed's optimizer steps on the CPU.
        run_seconds: (low, middle, high) of the whole training with compiling, evaluations and saves; None if unknown.
        compiling_s: seconds that torch.compile takes in the first steps of a run; 0 if nothing is compiled.
    """

    candidate: Candidate
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
    compiling_s: float = 0.0

    @property
    def facts(self) -> PlanFacts:
        """Facts about the training of a traced candidate."""
        assert self.training is not None
        return self.training.facts

    @property
    def needs_bytes(self) -> int:
        """Maximum of GPU memory that the process may take."""
        return self.prediction.total_bytes[1] if self.prediction is not None else 0

    @property
    def tight(self) -> bool:
        """Whether it completes, but may be slow."""
        return not self.is_other and self.prediction is not None and self.prediction.verdict == "tight"

    @property
    def limit_bytes(self) -> int:
        """Maximum of GPU memory that a setup may take to fit."""
        return self.prediction.limit_bytes if self.prediction is not None else 0

    @property
    def over_bytes(self) -> int:
        """How much more GPU memory it needs than the limit; negative if it needs less."""
        return self.needs_bytes - self.limit_bytes

    @property
    def lacks_host(self) -> bool:
        """Whether RAM or disk is too small, so that no smaller micro-batch helps."""
        if self.fits or self.prediction is None:
            return False
        return self.prediction.verdict == "does not fit" and not self.prediction.lacks_room

    @property
    def seconds(self) -> float | None:
        """Likely time of a step; None if unknown."""
        return self.step_time.seconds[1] if self.step_time is not None else None

    @property
    def mean_seconds(self) -> float | None:
        """`seconds` with a step's share of compiling, if the length of the run is known. Setups are ranked by it: in a
        short run compiling takes longer than it saves."""
        if self.seconds is None or not self.compiling_s or self.run_seconds is None:
            return self.seconds
        return self.seconds + self.compiling_s / (self.facts.length.steps or 1)

    @property
    def is_priced(self) -> bool:
        """Whether the time of all its operations is known, so that it can be ranked."""
        return self.step_time is not None and not self.step_time.unknown

    @property
    def swaps(self) -> bool:
        """Whether it keeps states or weights on a disk."""
        return self.prediction is not None and bool(self.prediction.disk_bytes)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second on all GPUs."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None


def judge_prediction(candidate: Candidate, prediction: Prediction, **known: Any) -> Judgement:
    """The judgement of a traced candidate. `known`: further fields."""
    fits = prediction.verdict == "fits"
    return replace(Judgement(candidate, prediction, fits=fits, why="" if fits else prediction.why), **known)
