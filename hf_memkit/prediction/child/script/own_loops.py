"""A training loop that the script writes itself: `loss.backward()` and `optimizer.step()` outside of
`Trainer.train()`. With fake tensors it would run to its end for nothing: it stops at its first optimizer step. Some
backward passes alone may stand above `train()`: an initialisation by gradients, as LoRA-GA's."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_memkit.common.resources import documentation
from hf_memkit.prediction.child.users_code import users_line

_BACKWARD: Final = 64
"""So many backward passes without an optimizer step are a loop, too: its step is no torch optimizer's."""

_REAL_STEPS: Final = 1_000
"""Of optimizers whose parameters are real: a small part that a script fits by itself may end before."""


class OwnLoop(BaseException):
    """The script goes no further. No `except Exception` of its own keeps it."""

    def __init__(self) -> None:
        super().__init__(
            "the script has its own training loop: backward and an optimizer step outside of Trainer.train(), and "
            "memkit traces only Trainer's. Train with Trainer, or name the model and its sizes instead of the script: "
            f"--model NAME --batch-size 8 --sequence-length 512 ({documentation('your-script.md')})"
        )


class OwnLoops:
    """Watches this process.

    Attributes:
        watches: whether its first step ends the script; False within `Trainer.train()`.
        place: the line of the first backward pass on fake tensors; empty: there was none.
    """

    def __init__(self) -> None:
        self.watches = True
        self.place = ""
        self._backward = self._steps = 0

    def install(self) -> None:
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            several = tensors if isinstance(tensors, tuple | list) else (tensors,)
            outermost = torch._C._current_graph_task_id() == -1  # checkpoints call it, too
            if self.watches and outermost and any(isinstance(each, FakeTensor) for each in several):
                self.place = self.place or users_line()
                self._backward += 1
                if self._backward > _BACKWARD:
                    raise OwnLoop
            backward(tensors, *args, **kwargs)

        scaled = torch.amp.GradScaler.step

        @functools.wraps(scaled)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._step(optimizer)  # which the scaler leaves out where it takes made-up gradients for infinite
            return scaled(scaler, optimizer, *args, **kwargs)

        torch.autograd.backward = watched
        torch.amp.GradScaler.step = step  # type: ignore[method-assign, assignment]
        register_optimizer_step_pre_hook(self._step)

    def _step(self, optimizer: Any, *_: Any) -> None:
        if not self.watches:
            return
        self._steps += 1
        fake = any(isinstance(each, FakeTensor) for group in optimizer.param_groups for each in group["params"])
        if fake or self._steps > _REAL_STEPS:
            self.place = self.place or users_line()
            raise OwnLoop
