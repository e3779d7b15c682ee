"""torchao's 8- and 4-bit AdamW, with fp32 states for parameters that torchao does not quantise.

torchao keeps the states of small or indivisible parameters in the parameter's dtype (torchao: optim/adam.py,
`_new_buffer`). In bf16 the second moment then never falls: with beta2 = 0.999 a step lowers it by at most 0.1 %, and
bf16 cannot distinguish numbers closer than 0.4 %. It rises only if a squared gradient is several times larger. In
GPT-2 this affects norms and biases, and the word embedding if it is not padded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchao import optim


class _Fp32States:
    """Mixin: every state tensor is quantised or fp32, never 16-bit, also after a resume. `compiled=False` runs the
    same step uncompiled, with more temporaries, for machines where compiling takes longer than the run."""

    state: dict[Any, dict[str, Any]]
    param_groups: list[dict[str, Any]]

    def __init__(self, params: Any, *, compiled: bool = True, **options: Any) -> None:
        super().__init__(params, **options)  # type: ignore[call-arg]
        self.compiled = compiled

    def step(self, closure: Any = None) -> Any:
        if self.compiled:
            return super().step(closure)  # type: ignore[misc]
        with torch.compiler.set_stance("force_eager"):
            return super().step(closure)  # type: ignore[misc]

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        buffer: Tensor = super()._new_buffer(p, signed)  # type: ignore[misc]
        # Quantised states are a tensor subclass with a nominal dtype; they stay unchanged.
        narrow = type(buffer) is Tensor and buffer.dtype in (torch.bfloat16, torch.float16)
        return buffer.float() if narrow else buffer

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # torch casts loaded states to the parameter's dtype (torch/optim/optimizer.py,
        # _process_value_according_to_param_policy): the fp32 values would come back rounded to bf16.
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        super().load_state_dict(state_dict)  # type: ignore[misc]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, index in zip(parameters, indices, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                # Neither quantised nor the step count, which has no dimensions.
                if type(value) is Tensor and value.dtype is torch.float32 and value.dim() > 0:
                    self.state[parameter][name] = value.to(device=parameter.device, copy=True)


class AdamW8bit(_Fp32States, optim.AdamW8bit):  # type: ignore[misc]
    """`torchao.optim.AdamW8bit` with fp32 states for parameters that it does not quantise."""


class AdamW4bit(_Fp32States, optim.AdamW4bit):  # type: ignore[misc]
    """`torchao.optim.AdamW4bit` with fp32 states for parameters that it does not quantise."""
