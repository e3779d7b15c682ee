"""The current phase of training, from callback events and hooks on the root module.

The boundaries of one optimizer step with two micro-batches:

```
 data │ forward │ backward │ data │ forward │ backward │ optimizer │ data …
      pre-hook  gradient   substep_end                 pre_optimizer step_end
                hook                                   _step
```

* Recomputation of checkpointed layers counts as backward: only the root module is hooked.
* Gradient clipping runs before `on_pre_optimizer_step` and counts as backward.
* Trainer has no event for the start of an evaluation or a save. The first forward of an evaluation, or the first event
  of either, renames the time since the last boundary (`_rename`). Generation and other forwards without gradients
  inside a step belong to the phase in which they run.
* DeepSpeed steps its optimizer inside `accelerator.backward`, before `on_pre_optimizer_step`. With `merge_optimizer`
  that event is no boundary; the recorder hooks the engine's optimizer instead, if it is one of torch's.
* Optimizers that step inside backward (LOMO, layer-wise GaLore) count as backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from hf_memkit.common.terms import Phase
from hf_memkit.measuring.memory.hooks import HookSet


class PhaseTracker:
    """Tracks the phases of one training.

    Args:
        on_boundary: called with the ended phase at each change.
        on_forward: called with the arguments before each training forward.

    Attributes:
        merge_optimizer: may be set until training begins.
        in_step: whether an optimizer step is running.
    """

    def __init__(
        self,
        on_boundary: Callable[[Phase], object],
        on_forward: Callable[[tuple[Any, ...], Mapping[str, Any]], object] | None = None,
    ) -> None:
        self.phase: Phase = "load"
        self._on_boundary = on_boundary
        self._on_forward = on_forward
        self.merge_optimizer = False
        self._hooks: HookSet | None = None
        self.in_step = False

    def attach(self, model: nn.Module, hooks: HookSet) -> None:
        """Hook the root module. `hooks.remove()` undoes it."""
        self._hooks = hooks
        hooks.before_forward(model, self._before_forward)
        hooks.after_forward(model, self._after_forward)

    def move_to(self, phase: Phase) -> None:
        """End the current phase, unless it is `phase`."""
        if phase != self.phase:
            ended, self.phase = self.phase, phase
            self._on_boundary(ended)

    def train_begin(self) -> None:
        self.move_to("data")

    def step_begin(self) -> None:
        self.in_step = True
        self.move_to("data")  # from evaluate, after a prediction that ended without on_evaluate

    def substep_end(self) -> None:
        self.move_to("data")

    def pre_optimizer_step(self) -> None:
        if not self.merge_optimizer:
            self.move_to("optimizer")

    def engine_step(self, *_: object) -> None:
        """Start of DeepSpeed's optimizer, during Trainer's backward."""
        if self.phase == "backward":
            self.move_to("optimizer")

    def step_end(self) -> None:
        self.in_step = False
        self.move_to("data")

    def prediction_step(self) -> None:
        self._rename("evaluate")

    def evaluate_end(self) -> None:
        self._rename("evaluate")
        self.move_to("data")

    def save_end(self) -> None:
        self._rename("save")
        self.move_to("data")

    def _rename(self, phase: Phase) -> None:
        """Assign the time since the last boundary to `phase`."""
        self.phase = phase

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not _is_training(module):
            if self.phase == "data" and not self.in_step and not module.training:
                self._rename("evaluate")
            return
        self.move_to("forward")
        if self._on_forward is not None:
            self._on_forward(args, kwargs)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not _is_training(module) or self._hooks is None:
            return
        tensors = _first_gradients(output)
        if not tensors:
            self.move_to("backward")
        for tensor in tensors:
            self._hooks.on_gradient(tensor, self.on_backward)

    def on_backward(self, *_: object) -> None:
        """A gradient was computed. Only the first of several counts, and only in forward."""
        if self.phase == "forward":
            self.move_to("backward")


def _is_training(module: nn.Module) -> bool:
    """False for an evaluation inside training, and for generation or a reference model without gradients."""
    return module.training and torch.is_grad_enabled()


def _first_gradients(output: Any) -> list[torch.Tensor]:
    """The tensors at which backward can begin; none if `output` has no loss. With a loss the other tensors are watched
    too: a `compute_loss` may use them instead, as custom ones do with logits and TRL 1.16's with `log_probs`. Without
    one, everything after forward (a loss computed outside, and its backward) counts as backward."""
    if not isinstance(output, Mapping):
        return []
    if not _has_gradient(output.get("loss")):
        return []
    return [value for value in output.values() if _has_gradient(value)]


def _has_gradient(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.requires_grad
