"""The prediction of a script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_memkit.common.units import format_gib
from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction.prediction import Prediction
from hf_memkit.prediction.traced_training import BatchShapes, TracedTraining
from hf_memkit.setup.setup import Setup


@dataclass(frozen=True, slots=True)
class ScriptPrediction:
    """The prediction of a script, and the training that it is of."""

    prediction: Prediction
    script: UserScript
    traced: TracedTraining  # without its trace
    setup: Setup  # the job, and other settings that decide memory
    batches: BatchNeeds | None = None  # needs of batches other than the worst


@dataclass(frozen=True, slots=True)
class BatchNeeds:
    """Memory needs of batches other than the worst, to which the prediction applies."""

    shapes: BatchShapes
    typical: Prediction  # of the median batch
    smaller: Mapping[str, Prediction]  # a change → of the worst batch with it; empty if the worst fits unchanged

    def sentence(self, worst: Prediction) -> str:
        """`"A typical batch, 8 × 212 tokens, needs 9.10 GiB; the worst, 8 × 4096 tokens, needs 13.30 GiB"`."""
        typical, maximum = (format_gib(prediction.total_bytes[1]) for prediction in (self.typical, worst))
        shapes = self.shapes
        if typical == maximum:
            return f"A typical batch, {shapes.typical}, needs as much as the worst, {shapes.worst}: {maximum}"
        return (
            f"A typical batch, {shapes.typical}, needs {typical}; the worst, {shapes.worst}, needs {maximum}; 95 of "
            f"100 are no larger than {shapes.high}"
        )
