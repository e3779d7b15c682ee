"""Stops a script with its own training loop: `loss.backward()` and `optimizer.step()` outside `Trainer.train()`.

On fake tensors the loop would run to its end for nothing, so the script ends at its first optimizer step. Backward
passes without steps are allowed above `train()`, such as LoRA-GA's initialisation by gradients.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_memkit.common.resources import documentation
from hf_memkit.prediction.child.user_code import users_line

_BACKWARD: Final = 64  # more backward passes without an optimizer step are a loop, too, whose optimizer is not torch's

_REAL_STEPS: Final = 1_000
"""Allowed steps of optimizers with real parameters, because a script may fit a small model before."""


class OwnLoop(BaseException):
    """Ends the script; a BaseException, so that the script's `except Exception` does not catch it."""

    def __init__(self) -> None:
        super().__init__(
            "the script has its own training loop: backward and an optimizer step outside of Trainer.train(), and "
            "memkit traces only Trainer's. Train with Trainer, or name the model and its sizes instead of the script: "
            f"--model NAME --batch-size 8 --sequence-length 512 ({documentation('your-script.md')})"
        )


class OwnLoops:
    """Watches backward passes and optimizer steps in this process."""

    def __init__(self) -> None:
        self.watches = True  # an optimizer step ends the script; False within `Trainer.train()`
        self.place = ""  # line of the first backward pass on fake tensors
        self._backward = self._steps = 0

    def install(self) -> None:
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots = tensors if isinstance(tensors, tuple | list) else (tensors,)
            outermost = torch._C._current_graph_task_id() == -1  # checkpointing calls it within backward
            if self.watches and outermost and any(isinstance(root, FakeTensor) for root in roots):
                self.place = self.place or users_line()
                self._backward += 1
                if self._backward > _BACKWARD:
                    raise OwnLoop
            backward(tensors, *args, **kwargs)

        scaled = torch.amp.GradScaler.step

        @functools.wraps(scaled)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._step(optimizer)  # the scaler skips the step if it takes made-up gradients for infinite
            return scaled(scaler, optimizer, *args, **kwargs)

        torch.autograd.backward = watched
        torch.amp.GradScaler.step = step  # type: ignore[method-assign, assignment]
        register_optimizer_step_pre_hook(self._step)

    def _step(self, optimizer: Any, *_: Any) -> None:
        if not self.watches:
            return
        self._steps += 1
        fake = any(isinstance(p, FakeTensor) for group in optimizer.param_groups for p in group["params"])
        if fake or self._steps > _REAL_STEPS:
            self.place = self.place or users_line()
            raise OwnLoop
