"""Adafactor with stochastic rounding, so that bf16 weights keep small updates.

transformers' Adafactor computes its step in fp32 and copies the result into the bf16 weight, rounded to nearest
(transformers 5.23.0: optimization.py, Adafactor.step): an update below 1/256 of a weight is lost every time.
Stochastic rounding goes up or down with the probability that makes the mean correct.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_FLOOR = 1e-30
"""Added to squared gradients (Shazeer & Stern 2018, section 5: epsilon 1)."""
_CLIP = 1.0
"""Maximum root mean square of an update, before the learning rate (section 6: d)."""
_DECAY = -0.8
"""The second moment of step t keeps 1 - t ** _DECAY of the previous one (section 7.2)."""


class Adafactor(Optimizer):
    """Adafactor (Shazeer & Stern 2018, arXiv 1804.04235), with stochastic rounding of bf16 weights.

    fp32 weights get the same values as with transformers' Adafactor with `scale_parameter=False, relative_step=False`
    and no momentum. `bf16_stochastic_round=False` rounds bf16 weights to nearest.

    States are fp32 for weights of any dtype: a number per row and per column of a matrix, per element of a vector. A
    step holds up to four fp32 tensors of one parameter.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, *, bf16_stochastic_round: bool = True
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.bf16_stochastic_round = bf16_stochastic_round

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, float(group["lr"]), float(group["weight_decay"]))
        return loss

    def _step_one(self, parameter: Tensor, rate: float, decay: float) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            if parameter.dim() < 2:
                state["exp_avg_sq"] = torch.zeros_like(gradient)
            else:
                state["exp_avg_sq_row"] = gradient.new_zeros(gradient.shape[:-1])
                state["exp_avg_sq_col"] = gradient.new_zeros(gradient.shape[:-2] + gradient.shape[-1:])
        state["step"] += 1

        keeps = 1.0 - state["step"] ** _DECAY
        update = gradient.square().add_(_FLOOR)
        if parameter.dim() < 2:
            squares = state["exp_avg_sq"].mul_(keeps).add_(update, alpha=1.0 - keeps)
            update = squares.rsqrt().mul_(gradient)
        else:
            rows = state["exp_avg_sq_row"].mul_(keeps).add_(update.mean(dim=-1), alpha=1.0 - keeps)
            columns = state["exp_avg_sq_col"].mul_(keeps).add_(update.mean(dim=-2), alpha=1.0 - keeps)
            by_row = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = torch.mul(by_row, columns.unsqueeze(-2).rsqrt(), out=update).mul_(gradient)
        del gradient

        root_mean_square = update.norm(2) / update.numel() ** 0.5
        update.div_((root_mean_square / _CLIP).clamp_(min=1.0)).mul_(rate)
        weights = parameter.float()  # a copy of 16-bit weights; fp32 weights themselves
        if decay:
            weights.add_(weights, alpha=-decay * rate)
        weights.sub_(update)
        del update
        if parameter.dtype == torch.bfloat16 and self.bf16_stochastic_round:
            parameter.copy_(round_stochastically(weights))
        elif weights is not parameter:
            parameter.copy_(weights)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # torch casts loaded states to the parameter's dtype (torch/optim/optimizer.py,
        # _process_value_according_to_param_policy): fp32 states would come back rounded to bf16.
        super().load_state_dict(state_dict)
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(device=parameter.device, copy=True)


def round_stochastically(values: Tensor) -> Tensor:
    """Casts `values` from fp32 to bf16; each rounds up with the probability of its distance from the number below. A
    random number below 2**16 is added to the 16 bits that are cut off."""
    bits = values.view(torch.int32)
    bits = bits + torch.randint(0, 2**16, bits.shape, dtype=torch.int32, device=bits.device)
    # Infinities and NaN stay unchanged; the sum would change them.
    rounded = torch.where(values.isfinite(), (bits & -65536).view(torch.float32), values)
    return rounded.bfloat16()
