"""Lets torch's FSDP2 (`fully_shard`) run on fake tensors, as the first of several ranks.

FSDP2 shards, gathers and reduces as it is; only the communication does nothing (`other_ranks.py`). It resizes storages
in place and allocates on several CUDA streams, both of which the tracer records. The private names of torch that this
needs are in this module. Files that it names are torch 2.13's in distributed/fsdp/_fully_shard, or accelerate 1.15's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hf_memkit.common.errors import Unmodelled
from hf_memkit.common.terms import Category
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.traced_training import FSDP_1, Fsdp

TESTED_WITH: Final = ("2.11.0", "2.13.0")
"""The earliest and the latest torch whose FSDP2 is compared with real ranks (tests/prediction/test_fsdp.py)."""

_missing: list[str] = []
"""Why FSDP2 of the installed torch cannot be traced; empty: it can."""


def uses_fsdp(trainer: Any) -> bool:
    """Whether FSDP shards the model of a Trainer."""
    return bool(getattr(trainer, "is_fsdp_enabled", False))


def fsdp_settings(trainer: Any) -> Fsdp | None:
    """The settings of a Trainer's FSDP; None without FSDP."""
    if not uses_fsdp(trainer):
        return None
    plugin = trainer.accelerator.state.fsdp_plugin
    return Fsdp(
        reshard_after_forward=bool(plugin.reshard_after_forward),
        cpu_offload=type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
        activation_checkpointing=bool(plugin.activation_checkpointing),
    )


def refuse_fsdp(trainer: Any) -> None:
    """Raises Unmodelled for a Trainer whose FSDP cannot be traced."""
    plugin = trainer.accelerator.state.fsdp_plugin
    if getattr(plugin, "fsdp_version", 1) != 2:
        raise Unmodelled(f"fsdp: {FSDP_1}")
    if _missing:
        raise Unmodelled(
            f"fsdp: torch {torch.__version__} lacks what the trace of FSDP2 needs ({_missing[0]}). Install torch "
            f"{TESTED_WITH[-1]}, or measure with memkit run"
        )


def patch_fsdp(tracer: StorageTracer) -> None:
    """Patches FSDP2, DTensor and storages, so that `tracer` records what FSDP2 allocates. If the installed torch lacks
    a private name, `refuse_fsdp` names it."""
    try:
        _watch_resized_storages(tracer)
        _propagate_shapes_untraced()
        _set_categories(tracer)
        _skip_sharded_files()
    except (ImportError, AttributeError) as error:
        _missing.append(str(error))
        return
    # _fsdp_init.py, `_init_default_mesh`: without a GPU, the default mesh would be on the CPU.
    vars(torch._C)["_get_accelerator"] = lambda *args: torch.device(tracer.device_type)
    # accelerator.py, `_prepare_fsdp2`, finds the optimizer's parameters by their addresses, which are 0 for all fakes.
    FakeTensor.data_ptr = lambda self: self.untyped_storage()._cdata  # type: ignore[method-assign]


def _watch_resized_storages(tracer: StorageTracer) -> None:
    """Gathered parameters keep their storage, whose memory is freed and allocated again (_fsdp_param.py,
    `alloc_storage`, `free_storage`)."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        if before != size:
            tracer.resized(storage, size)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]


def _propagate_shapes_untraced() -> None:
    """DTensor computes the shape of a result with fake tensors of the whole size. They must not be in the trace."""
    from torch.distributed.tensor import _sharding_prop
    from torch.utils._python_dispatch import _disable_current_modes

    propagator: Any = _sharding_prop.ShardingPropagator
    original = propagator._propagate_tensor_meta_non_cached

    def propagate(self: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return original(self, schema)

    propagator._propagate_tensor_meta_non_cached = propagate


def _set_categories(tracer: StorageTracer) -> None:
    """Counts gathered parameters and communicated copies as buffers, and gradients, whole or sharded, as gradients."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    def as_buffers(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer: Category = tracer.default
            tracer.default = "buffers"
            try:
                return function(*args, **kwargs)
            finally:
                tracer.default = outer

        return call

    group: Any = _fsdp_param_group
    group.foreach_all_gather = as_buffers(group.foreach_all_gather)
    group.foreach_all_gather_copy_out = as_buffers(group.foreach_all_gather_copy_out)
    reduce = as_buffers(group.foreach_reduce)

    def reduce_gradients(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        result = reduce(parameters, *args, **kwargs)
        tracer.label((parameter.sharded_param.grad for parameter in parameters), "gradients")
        return result

    group.foreach_reduce = reduce_gradients
    parameter_class: Any = _fsdp_param.FSDPParam
    original = parameter_class.init_unsharded_param

    def init_unsharded_param(self: Any) -> None:
        is_first = not hasattr(self, "_unsharded_param")
        original(self)
        if is_first and self._unsharded_param.requires_grad:
            self._unsharded_param.register_post_accumulate_grad_hook(
                lambda parameter: tracer.label((parameter.grad,), "gradients")
            )

    parameter_class.init_unsharded_param = init_unsharded_param


def _skip_sharded_files() -> None:
    """SHARDED_STATE_DICT: torch copies one shard after another to the host to write it; here nothing is written."""
    from torch.distributed import checkpoint

    vars(checkpoint)["save"] = lambda *args, **kwargs: None
