"""Lets torch's FSDP2 (`fully_shard`) run on fake tensors, as the first of several ranks.

FSDP2 shards, gathers and reduces as it is; only the communication does nothing (`other_ranks.py`). It resizes storages
in place and allocates on streams of its own: the tracer is told both. Private names of torch are in this module.
Sources are of torch 2.13 (distributed/fsdp/_fully_shard) and accelerate 1.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from hf_memkit.common.terms import Category
from hf_memkit.prediction.child.tracer.tracer import StorageTracer


def patch_fsdp(tracer: StorageTracer) -> None:
    """Patches what FSDP2 and DTensor ask the GPU, and tells `tracer` what passes the dispatcher."""
    # _fsdp_init.py, `_init_default_mesh`: the mesh of a machine without a GPU would be on the CPU.
    vars(torch._C)["_get_accelerator"] = lambda *args: torch.device(tracer.device_type)
    # accelerator.py, `_prepare_fsdp2`: finds an optimizer's parameters by their addresses, which are all 0.
    FakeTensor.data_ptr = lambda self: self.untyped_storage()._cdata  # type: ignore[method-assign]
    _watch_resized_storages(tracer)
    _name_shapes_alone()
    _set_categories(tracer)


def _watch_resized_storages(tracer: StorageTracer) -> None:
    """Gathered parameters keep their storage, which is emptied and filled (`alloc_storage`, `free_storage`)."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        if before != size:
            tracer.resized(storage, size)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]


def _name_shapes_alone() -> None:
    """DTensor computes the shape of a result with fake tensors of the whole size, which are no memory."""
    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate(self: Any, schema: Any) -> Any:
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            return original(self, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]


def _set_categories(tracer: StorageTracer) -> None:
    """Counts gathered parameters and what is sent as buffers, and gradients as gradients, whole or sharded."""

    def as_category(category: Category, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer, tracer.default = tracer.default, category
            try:
                return function(*args, **kwargs)
            finally:
                tracer.default = outer

        return call

    for name in ("foreach_all_gather", "foreach_all_gather_copy_out"):
        setattr(_fsdp_param_group, name, as_category("buffers", getattr(_fsdp_param_group, name)))
    reduce = as_category("buffers", _fsdp_param_group.foreach_reduce)

    def reduce_gradients(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        result = reduce(parameters, *args, **kwargs)
        tracer.label((parameter.sharded_param.grad for parameter in parameters), "gradients")
        return result

    _fsdp_param_group.foreach_reduce = reduce_gradients  # type: ignore[assignment]
    parameter_class: Any = _fsdp_param.FSDPParam
    original = parameter_class.init_unsharded_param

    def init_unsharded_param(self: Any) -> None:
        first = not hasattr(self, "_unsharded_param")
        original(self)
        if first and self._unsharded_param.requires_grad:
            self._unsharded_param.register_post_accumulate_grad_hook(
                lambda parameter: tracer.label((parameter.grad,), "gradients")
            )

    parameter_class.init_unsharded_param = init_unsharded_param
