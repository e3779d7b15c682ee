"""Ctrl-C and SIGTERM during training: finish the step, save a checkpoint, stop. A second one stops at once. All ranks
stop after the same step: signals reach them at different moments, and one stopped alone would block the others."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from transformers import TrainerCallback

_SAME_PRESS_S: Final = 1.0
"""A launcher and the terminal may both forward one Ctrl-C: signals within these seconds count as one."""


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """A context manager around `trainer.train()`.

    Attributes:
        requested: the signal that stopped the training, also if another rank received it; None: it was not stopped.

    Args:
        say: called with a message when training will stop.
        on_stop: called once, at the end of the last step.
        ranks: number of processes that train together.
        by_memkit: SIGTERM then keeps its default effect: the launching memkit sends SIGINT only, and torchrun
            sends SIGTERM when another rank has died and no step can be finished.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        on_stop: Callable[[], None],
        *,
        ranks: int = 1,
        by_memkit: bool = False,
    ) -> None:
        self.requested: signal.Signals | None = None
        self._say = say
        self._on_stop = on_stop
        self._ranks = ranks
        self._signals = (signal.SIGINT,) if by_memkit else (signal.SIGINT, signal.SIGTERM)
        self._received = 0
        self._received_s = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._group: Any = None

    def __enter__(self) -> StopOnSignal:
        for number in self._signals:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._received and now_s - self._received_s < _SAME_PRESS_S:
            return
        if self._received:
            raise KeyboardInterrupt
        self._received, self._received_s = number, now_s
        self._say("Stopping after this step, with a checkpoint. To stop now, without one, press Ctrl-C again.")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._ranks > 1:
            import torch.distributed as distributed

            # On the host, so that it never waits for a GPU.
            self._group = distributed.new_group(backend="gloo")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        received = self._received
        if self._group is not None:  # the same answer on each rank
            import torch
            import torch.distributed as distributed

            ranks = torch.tensor([received])
            distributed.all_reduce(ranks, distributed.ReduceOp.MAX, group=self._group)
            received = int(ranks.item())
        if received and state.global_step < state.max_steps:  # the last step ends as always
            self.requested = signal.Signals(received)
            self._on_stop()
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"  # off where the disk has no room for a checkpoint
            control.should_evaluate = False
        return control
