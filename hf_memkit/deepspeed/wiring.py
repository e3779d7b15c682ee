"""Fixes for errors of DeepSpeed 0.19.8 under ZeRO-3, applied to the engine when training begins.

To collect the weights for a save (deepspeed: runtime/engine.py, `_zero3_consolidated_16bit_state_dict`) it copies with
`param.detach().cpu()`, which copies on a GPU only. On a CPU the tensors share memory that the next layer is gathered
into: `save_pretrained` stops at "shared tensors", or saves wrong weights. It also gathers each layer with
`modifier_rank=0`, which writes every weight back, to NVMe too, although a save only reads.

A resume with the optimizer on NVMe silently loses Adam's moments. `memkit run` restores them (nvme_resume.py); scripts
started without it refuse that resume here.
"""

from __future__ import annotations

import shlex
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import TrainerCallback


class DeepSpeedWiring(TrainerCallback):  # type: ignore[misc]
    """`engine` returns the engine of the training (`lambda: trainer.deepspeed`)."""

    def __init__(self, engine: Callable[[], Any]) -> None:
        self._engine = engine
        self._has_begun = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        engine, first_step, self._has_begun = self._engine(), not self._has_begun, True
        resumes = first_step and state.global_step > 0 and not hasattr(engine, "memkit_restored")
        if resumes and engine is not None and engine.zero_nvme_offload_optimizer():
            raise SystemExit(
                f"{args.output_dir}: this script alone cannot resume with the optimizer on NVMe: DeepSpeed loses its "
                f"moments. Type: memkit run {shlex.quote(args.output_dir)} --resume"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        engine = self._engine()
        if engine is not None and engine.zero_optimization_partition_weights():
            engine._zero3_consolidated_16bit_state_dict = _copying_state_dict(engine)


def _copying_state_dict(engine: Any) -> Callable[..., OrderedDict[str, Tensor] | None]:
    """Replacement of DeepSpeed's method that reads the weights without writing them back, and copies them. All ranks
    call it, because each holds a part of every weight; rank 0 gets the state dict, the others None."""

    def state_dict(exclude_frozen_parameters: bool = False) -> OrderedDict[str, Tensor] | None:
        import deepspeed

        keeps = deepspeed.comm.get_rank() == 0
        weights: OrderedDict[str, Tensor] = OrderedDict()
        first_name: dict[int, str] = {}
        engine.optimizer.checkpoint_event_prologue()
        for prefix, module in engine.module.named_modules():
            start = f"{prefix}." if prefix else ""
            with deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=None):
                for name, parameter in module.named_parameters(recurse=False) if keeps else ():
                    if exclude_frozen_parameters and not parameter.requires_grad:
                        continue
                    key = start + name
                    if parameter.ds_id in first_name:  # tied weights stay tied
                        weights[key] = weights[first_name[parameter.ds_id]]
                    else:
                        weights[key] = parameter.detach().to("cpu", copy=True)
                        first_name[parameter.ds_id] = key
                for name, buffer in module.named_buffers(recurse=False) if keeps else ():
                    if name not in module._non_persistent_buffers_set:
                        weights[start + name] = buffer.detach().to("cpu", copy=True)
        engine.optimizer.checkpoint_event_epilogue()
        return weights if keeps else None

    return state_dict
