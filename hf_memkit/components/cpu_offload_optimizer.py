"""AdamW with states and gradients in host RAM: torchao's CPUOffloadOptimizer, made safe under Trainer.

A trainer part (`trainer_options`). It needs a CUDA or XPU GPU, torch, transformers and torchao 0.16 or later.

torchao copies a gradient to the host as soon as backward has computed it (torchao 0.18.0: optim/cpu_offload.py,
`backward_hook`). Later changes of gradients on the GPU silently have no effect. Therefore:

- gradients are clipped here, on the host, and Trainer's `max_grad_norm` must be 0;
- gradients are freed on the GPU only without accumulation, because torchao would use only the last micro-batch's;
- several processes, DeepSpeed, FSDP and loss scaling (fp16) are refused.

Also, the learning rate of the small tensors on the GPU must change. accelerate loads an empty state into every
optimizer (accelerate 1.15.0: optimizer.py, `AcceleratedOptimizer.__init__`). torch then replaces the parameter groups,
but torchao's `param_groups` keeps the old ones of these tensors, which a schedule changes in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torchao.optim import cpu_offload


class CPUOffloadAdamW(cpu_offload.CPUOffloadOptimizer):  # type: ignore[misc]
    """torch's fused AdamW: on the host for parameters of at least `minimal_size` elements, on the GPU for the rest.

    Args:
        params: as for any optimizer; frozen ones are omitted.
        max_grad_norm: total norm to which gradients are clipped before the step; 0: no clipping.
        offload_gradients: free a gradient's memory on the GPU as soon as it is on the host.
        minimal_size: minimum elements of a parameter that steps on the host.
        options: of `torch.optim.AdamW`.
    """

    def __init__(
        self,
        params: Any,
        *,
        max_grad_norm: float = 0.0,
        offload_gradients: bool = False,
        minimal_size: int = 4096,
        **options: Any,
    ) -> None:
        super().__init__(params, AdamW, offload_gradients=offload_gradients, minimal_size=minimal_size, **options)
        self.max_grad_norm = max_grad_norm
        # torchao does not call Optimizer.__init__; without this there are no step hooks and no defaults, which
        # schedulers and measuring tools expect of an optimizer.
        Optimizer.__setstate__(self, {"defaults": dict(options)})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The current groups, because torchao's list goes stale when a state is loaded."""
        optimizers = [*([self.d_opt] if self.d_opt is not None else []), *self.optim_dict.values()]
        return [group for optimizer in optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The states, on GPU and host, by the parameter on the GPU."""
        on_gpu = dict(self.d_opt.state) if self.d_opt is not None else {}
        host = {p: o.state[self.param_d2h_map[p]] for p, o in self.optim_dict.items() if o.state}
        return {**on_gpu, **host}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        if self.max_grad_norm > 0:
            for copied in self.queue.values():
                copied.synchronize()
            small = self.d_opt.param_groups if self.d_opt is not None else []
            parameters = [self.param_d2h_map[parameter] for parameter in self.queue]
            parameters += [parameter for group in small for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        super().step()
        return loss


def trainer_options(
    *,
    model: Any,
    processing_class: Any,
    arguments: Any,
    max_grad_norm: float = 1.0,
    offload_gradients: bool | None = None,
) -> dict[str, Any]:
    """`optimizer_cls_and_kwargs` for Trainer.

    Args:
        model: not used: torchao skips frozen parameters.
        processing_class: not used.
        arguments: learning rate, betas and epsilon come from these TrainingArguments.
        max_grad_norm: total norm to which gradients are clipped; 0: no clipping.
        offload_gradients: whether a gradient is freed on the GPU once it is in RAM; None: unless they accumulate.

    Raises:
        RuntimeError: there is no CUDA or XPU GPU.
        ValueError: torchao's optimizer would silently train wrongly with these arguments.
    """
    if cpu_offload.get_available_devices()[-1] not in ("cuda", "xpu"):
        raise RuntimeError("torchao's CPUOffloadOptimizer needs a CUDA or XPU GPU. Omit it on this machine")

    accumulation = arguments.gradient_accumulation_steps
    problems = []
    if arguments.world_size > 1 or arguments.n_gpu > 1:
        gpus = max(arguments.world_size, arguments.n_gpu)
        problems.append(f"{gpus} GPUs: cpu_offload_optimizer supports one. Train on one GPU, or omit it")
    if arguments.deepspeed or arguments.fsdp:
        engine = "deepspeed" if arguments.deepspeed else "fsdp"
        problems.append(f"{engine}: it offloads in its own way. Omit {engine} or cpu_offload_optimizer")
    if arguments.fp16:
        problems.append("fp16=True: gradients would be unscaled on their way to RAM. Write bf16=True, or omit it")
    if arguments.max_grad_norm:
        problems.append(
            f"max_grad_norm={arguments.max_grad_norm}: would clip nothing, because the gradients are in RAM already. "
            "Write max_grad_norm=0, and set max_grad_norm of cpu_offload_optimizer instead"
        )
    if offload_gradients and accumulation > 1:
        problems.append(
            f"offload_gradients=True: with gradient_accumulation_steps={accumulation} only the gradients of the last "
            "micro-batch would be used. Omit offload_gradients"
        )
    if problems:
        raise ValueError("\n".join(problems))

    options = {
        "lr": arguments.learning_rate,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_epsilon,
        "max_grad_norm": max_grad_norm,
        "offload_gradients": accumulation == 1 if offload_gradients is None else offload_gradients,
    }
    return {"optimizer_cls_and_kwargs": (CPUOffloadAdamW, options)}
