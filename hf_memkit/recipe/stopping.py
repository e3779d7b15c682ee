"""Ctrl-C and SIGTERM during training: finish the step, save a checkpoint, stop. A second one stops at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from transformers import TrainerCallback

__all__ = ["StopOnSignal"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """Use as a context manager around `trainer.train()`; `requested` tells afterwards whether a signal came.

    `on_stop` is called once, at the end of the step in which training is told to stop.
    """

    def __init__(self, say: Callable[[str], None], on_stop: Callable[[], None]) -> None:
        self.requested = False
        self._say = say
        self._on_stop = on_stop
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopOnSignal:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._say("Stopping after this step, with a checkpoint. Press Ctrl-C again to stop at once, without one.")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self.requested:
            self._on_stop()
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"  # off where the disk has no room for a checkpoint
            control.should_evaluate = False
        return control
