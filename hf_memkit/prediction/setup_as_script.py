"""Traces a setup like a user's script, with `child/training/setup_trainer.py`, which creates the Trainer."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from hf_memkit.common.errors import TraceFailed
from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction.trace.request import SETUP, ScriptRequest
from hf_memkit.prediction.trace.trace import Trace
from hf_memkit.prediction.traced_training import Outcome, TracedTraining
from hf_memkit.prediction.worker import Worker
from hf_memkit.setup.setup import Setup

SETUP_SCRIPT: Final = UserScript(SETUP, is_module=True)  # the script without its argument, the file


@dataclass(frozen=True, slots=True)
class SetupJob:
    """A setup to train like a script, on example rows.

    Attributes:
        setup: with `model.architecture`, and `model.class` unless it is a causal language model. Its `eval_strategy`
            and `save_strategy` decide whether an evaluation and a checkpoint follow the steps.
    """

    setup: Setup
    sequence_length: int  # tokens of each example
    rows: int = 0  # at least; 0: enough for one optimizer step
    typical: Setup | None = None  # with the lengths of a typical batch, which most batches then have; None: all alike
    evaluation_batches: int = 2  # of one evaluation
    metrics: bool = False  # it computes metrics, for which predictions are kept
    padded: bool | None = None  # texts of a batch have different lengths; None: as `pads` in `child/example_inputs.py`
    trust_remote_code: bool = False  # whether the model's own code may run

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        values["typical"] = self.typical.to_json() if self.typical is not None else None
        return {**values, "setup": self.setup.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        values = dict(content)
        values["setup"] = Setup.from_json(content["setup"])
        values["typical"] = Setup.from_json(content["typical"]) if content["typical"] is not None else None
        return cls(**values)


@contextlib.contextmanager
def as_script(job: SetupJob) -> Iterator[UserScript]:
    """Yields the script that trains the setup."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "setup.json"
        path.write_text(json.dumps(job.to_json()))
        yield replace(SETUP_SCRIPT, arguments=(str(path),))


def trace_setup(worker: Worker, job: SetupJob, request: ScriptRequest) -> TracedTraining:
    """Traces the job in a process of `worker`. `request`: for `SETUP_SCRIPT`, with the GPU. Raises TraceFailed if the
    training raised, or its process died."""
    with as_script(job) as script:
        return _training_of(worker.run(replace(request, script=script)))


def trace_of(outcome: Outcome) -> Trace:
    """The trace of the typical steps, the worst step, and what follows them. Raises TraceFailed if there is none."""
    return _training_of(outcome).of_steps()["worst"]


def _training_of(outcome: Outcome) -> TracedTraining:
    """The traced training. Raises TraceFailed if there is none."""
    if outcome.training is not None:
        return outcome.training
    if (error := outcome.failed) is not None:
        message = f"{error.type}: {error.message}".removesuffix(": ") if error.by_script else error.message
        raise TraceFailed(message, kind=error.type, refused=not error.by_script, details=error.text)
    if outcome.untrained is not None:
        raise TraceFailed("a library ended the process before the training began", kind="worker")
    raise TraceFailed(f"the process that traced this training ended: {outcome.died}", kind=str(outcome.died))
