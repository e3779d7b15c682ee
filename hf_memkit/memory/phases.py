"""Which phase training is in. In: callback events and hooks on the root module. Out: one call a boundary.

The boundaries of one optimizer step with two micro-batches:

```
 data │ forward │ backward │ data │ forward │ backward │ optimizer │ data …
      pre-hook  gradient   substep_end                 pre_optimizer step_end
                hook                                   _step
```

* Recomputation of checkpointed layers happens inside backward and counts as backward: only the root module is hooked.
* Gradient clipping runs before `on_pre_optimizer_step` and counts as backward.
* Trainer sends nothing when an evaluation or a save begins. Its first event names, after the fact, what has happened
  since the last boundary: that stretch is then called evaluate or save (`_rename`).
* DeepSpeed steps its optimizer inside `accelerator.backward`, before `on_pre_optimizer_step`. Callbacks cannot see the
  boundary, so with `merge_optimizer` both are phase backward and there is no phase optimizer.
* Optimizers that step inside backward (LOMO, layer-wise GaLore) do so in phase backward as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from hf_memkit.memory.hooks import HookSet
from hf_memkit.terms import Phase

__all__ = ["PhaseTracker"]


class PhaseTracker:
    """Follows the phases of one training.

    `on_boundary(ended)` is called at each change of phase, `on_forward(args, kwargs)` before each training forward.
    `merge_optimizer` may be set until training begins.
    """

    def __init__(
        self,
        on_boundary: Callable[[Phase], object],
        on_forward: Callable[[tuple[Any, ...], Mapping[str, Any]], object] | None = None,
        *,
        merge_optimizer: bool = False,
    ) -> None:
        self.phase: Phase = "load"
        self._on_boundary = on_boundary
        self._on_forward = on_forward
        self.merge_optimizer = merge_optimizer
        self._hooks: HookSet | None = None

    def attach(self, model: nn.Module, hooks: HookSet) -> None:
        """Hooks the root module. `hooks.remove()` undoes it."""
        self._hooks = hooks
        hooks.before_forward(model, self._before_forward)
        hooks.after_forward(model, self._after_forward)

    def move_to(self, phase: Phase) -> None:
        """Ends the current phase, unless it is the same one."""
        if phase != self.phase:
            ended, self.phase = self.phase, phase
            self._on_boundary(ended)

    def train_begin(self) -> None:
        self.move_to("data")

    def step_begin(self) -> None:
        self.move_to("data")  # from evaluate, after a prediction that ended without on_evaluate

    def substep_end(self) -> None:
        self.move_to("data")

    def pre_optimizer_step(self) -> None:
        if not self.merge_optimizer:
            self.move_to("optimizer")

    def step_end(self) -> None:
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
        """What has happened since the last boundary was `phase`."""
        self.phase = phase

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not _is_training(module):
            return
        self.move_to("forward")
        if self._on_forward is not None:
            self._on_forward(args, kwargs)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not _is_training(module) or self._hooks is None:
            return
        tensors = _backward_starts_at(output)
        if not tensors:
            self.move_to("backward")
        for tensor in tensors:
            self._hooks.on_gradient(tensor, self._gradient_arrived)

    def _gradient_arrived(self, gradient: torch.Tensor) -> None:
        # Only out of forward: with two hooked tensors (loss and logits) the first one counts.
        if self.phase == "forward":
            self.move_to("backward")


def _is_training(module: nn.Module) -> bool:
    """Not an evaluation inside training, nor a generation or a reference pass without gradients."""
    return module.training and torch.is_grad_enabled()


def _backward_starts_at(output: Any) -> list[torch.Tensor]:
    """The tensors at which a backward pass first shows; none if the loss is not in `output`.

    With a loss there, the logits are watched too: a `compute_loss` of the user's may take those and leave the loss.
    Without one, whatever comes after forward (a loss computed outside, and its backward) belongs to backward.
    """
    if not isinstance(output, Mapping):
        return []
    loss, logits = output.get("loss"), output.get("logits")
    if not _has_gradient(loss):
        return []
    return [loss, logits] if _has_gradient(logits) else [loss]


def _has_gradient(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.requires_grad
