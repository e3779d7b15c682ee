"""Restores the states that DeepSpeed 0.19.8 loses at a resume with the optimizer on NVMe.

The engine then copies the swap files back and loads nothing else of the optimizer (deepspeed: runtime/engine.py
4456-4483): master weights return, but the new optimizer starts its moments from zero, because it does not know their
files, and states too small for the disk (of biases and norms) keep their initial values.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hf_memkit.common.errors import RunError

_MOMENTS = ("exp_avg", "exp_avg_sq")


class RestoreSwappedStates(TrainerCallback):  # type: ignore[misc]
    """Restores them when training begins, after Trainer has loaded `checkpoint`; nothing to do if the optimizer is not
    on NVMe.

    Args:
        engine: returns the engine of the training (`lambda: trainer.deepspeed`).
        checkpoint: folder to resume from.
    """

    def __init__(self, engine: Callable[[], Any], checkpoint: str | Path) -> None:
        self._engine = engine
        self._checkpoint = Path(checkpoint)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        engine = self._engine()
        if engine is not None and engine.zero_nvme_offload_optimizer():
            _restore(engine.optimizer, _saved_states(engine, self._checkpoint))
            engine.memkit_restored = True  # wiring.py


def _saved_states(engine: Any, checkpoint: Path) -> dict[str, Any]:
    """This process's part of the checkpoint: the optimizer states that were in memory when it was saved. A pickle may
    run any code, so only DeepSpeed's classes are accepted."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    tag = (checkpoint / "latest").read_text().strip()
    path = engine._get_zero_ckpt_name(str(checkpoint), tag)
    try:
        # Python 3.11.0 to 3.11.3 pickle a member of an enumeration as `getattr` of its class.
        members = [(_member, f"{module}.getattr") for module in ("builtins", "__builtin__")]
        with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, *members]):
            saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        unsafe = next((line for line in str(error).splitlines() if "GLOBAL" in line), None)
        why = f"not loaded, because it may run code: {unsafe}" if unsafe else "not an optimizer state of DeepSpeed"
        raise RunError(
            f"{path}: {why}. To start again, replace --resume with --overwrite (this deletes the run's checkpoints)"
        ) from error
    states: dict[str, Any] = saved["optimizer_state_dict"]
    return states


def _member(kind: Any, name: str) -> Any:
    """Replaces `getattr`, which could reach any object."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    if kind is not ZeroStageEnum:
        raise pickle.UnpicklingError(f"GLOBAL getattr of {kind}")
    return ZeroStageEnum[name]


def _restore(zero: Any, saved: dict[str, Any]) -> None:
    zero.checkpoint_event_prologue()
    zero._set_fp32_optimizer_param_groups()
    zero.optimizer.load_state_dict(saved["optimizer_state_dict"])
    zero._clear_fp32_optimizer_param_groups()
    groups = zip(zero.fp32_partitioned_groups_flat, saved["fp32_flat_groups"], strict=True)
    for number, (master, saved_master) in enumerate(groups):
        if zero._swappable_optimizer_subgroup(number):
            _link_moments(zero, master)
        else:
            master.data.copy_(saved_master.data)
            zero._reassign_or_swap_out_partitioned_parameters(number)
    zero.checkpoint_event_epilogue()


def _link_moments(zero: Any, master: Any) -> None:
    """Register this sub-group's moments as swapped, under DeepSpeed's names for them (deepspeed:
    runtime/swap_tensor/optimizer_utils.py 491, `_get_state_tensors`)."""
    state = zero.optimizer.state.get(master, {})
    moments = [state[name] for name in _MOMENTS if name in state]
    for name, moment in zip(_MOMENTS, moments, strict=False):
        moment.ds_id = f"{name}-{master.ds_id}"
    info = zero.optimizer_swapper.swap_params_info[master.ds_id]
    if moments and not info.has_state_tensors:
        info.add_state_tensors(moments)
