"""Traces a setup as a user's script is traced: `child/training/setup_trainer.py`, which makes the Trainer of a
file."""

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
from hf_memkit.prediction.traced_training import Outcome
from hf_memkit.prediction.worker import Worker
from hf_memkit.setup.setup import Setup

SETUP_SCRIPT: Final = UserScript(SETUP, is_module=True)
"""The script, before there is a file for it."""


@dataclass(frozen=True, slots=True)
class SetupTraining:
    """What the script trains.

    Attributes:
        setup: with `model.architecture`; `model.class` where it is no causal language model. Its `eval_strategy` and
            `save_strategy` say whether an evaluation, and a checkpoint, follow the steps.
        sequence_length: tokens of each example.
        rows: of the training data, at least; 0: enough for one optimizer step.
        usual: the setup with the lengths of a usual batch, which most batches have then. None: all batches are alike.
        evaluation_batches: how many batches an evaluation has.
        metrics: whether it computes metrics of the predictions, which are kept for them.
        padded: whether the texts of a batch are unequally long; None: as `pads` in `child/example_inputs.py` has it.
        trust_remote_code: whether the model's own code may be run.
    """

    setup: Setup
    sequence_length: int
    rows: int = 0
    usual: Setup | None = None
    evaluation_batches: int = 2
    metrics: bool = False
    padded: bool | None = None
    trust_remote_code: bool = False

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        values["usual"] = self.usual.to_json() if self.usual is not None else None
        return {**values, "setup": self.setup.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        values = dict(content)
        values["setup"] = Setup.from_json(content["setup"])
        values["usual"] = Setup.from_json(content["usual"]) if content["usual"] is not None else None
        return cls(**values)


@contextlib.contextmanager
def as_script(training: SetupTraining) -> Iterator[UserScript]:
    """The script that trains it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "setup.json"
        path.write_text(json.dumps(training.to_json()))
        yield replace(SETUP_SCRIPT, arguments=(str(path),))


def trace_setup(worker: Worker, training: SetupTraining, request: ScriptRequest) -> Trace:
    """The trace of the training in a process of `worker`. `request`: of `SETUP_SCRIPT`: the GPU.

    Raises:
        TraceFailed: the training raised, or its process died.
    """
    with as_script(training) as script:
        return trace_of(worker.run(replace(request, script=script)))


def trace_of(found: Outcome) -> Trace:
    """The usual steps, the worst step, and what follows them.

    Raises:
        TraceFailed: there is no trace.
    """
    if found.training is not None:
        return found.training.of_steps()["worst"]
    if (error := found.failed) is not None:
        message = f"{error.type}: {error.message}".removesuffix(": ") if error.by_script else error.message
        raise TraceFailed(message, kind=error.type, refused=not error.by_script, details=error.text)
    if found.untrained is not None:
        raise TraceFailed("a library ended the process before the training began", kind="worker")
    raise TraceFailed(f"the process that traced this training ended: {found.died}", kind=str(found.died))
