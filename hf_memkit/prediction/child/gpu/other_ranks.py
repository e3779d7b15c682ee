"""Simulates one rank of several, as started by `torchrun`, without other processes: collectives return at once."""

from __future__ import annotations

import functools
import os
from typing import Any, Final

import torch
import torch.distributed as dist

from hf_memkit.common.when_imported import when_imported
from hf_memkit.prediction.child.gpu.fsdp import patch_fsdp, skip_waits
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.child.tracer.work_recorder import active_recorder


def patch_ranks(processes: int, per_node: int, tracer: StorageTracer) -> None:
    """Replaces the process group and its collectives in this process."""
    import accelerate.data_loader
    import accelerate.utils.operations as operations
    from torch.testing._internal.distributed.fake_pg import FakeStore

    environment = {  # as `torchrun` sets it for rank 0
        "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(per_node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip
    os.environ.update(environment)
    torch.cuda.device_count = lambda: per_node
    start = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            start("fake", store=FakeStore(), rank=0, world_size=processes)

    def gathered(tensor: Any) -> Any:
        return operations.recursively_apply(
            lambda leaf: torch.cat([leaf[None] if leaf.ndim == 0 else leaf] * processes), tensor,
            error_on_other_type=True,
        )  # fmt: skip

    def objects(gathered_objects: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
        gathered_objects[:] = [value] * len(gathered_objects)

    dist.init_process_group = init_process_group
    for name in ("broadcast", "barrier", "all_gather", "reduce", "broadcast_object_list", "monitored_barrier"):
        setattr(dist, name, lambda *args, **kwargs: None)
    for name, collective in _COLLECTIVES.items():
        if hasattr(dist, name):
            setattr(dist, name, functools.partial(_record, collective))
    vars(dist)["all_gather_object"] = objects
    operations._gpu_gather = gathered
    operations._gpu_gather_object = lambda value: list(value) * processes
    operations._gpu_broadcast = lambda data, src=0: data
    operations.reduce = lambda tensor, reduction="mean", scale=1.0: tensor
    accelerate.data_loader.synchronize_rng_states = lambda *args, **kwargs: None
    when_imported("torch.distributed._functional_collectives", lambda _: skip_waits())
    when_imported("torch.distributed.fsdp._fully_shard._fsdp_param_group", lambda _: patch_fsdp(tracer))
    # Its gradient buckets are added to the trace later. `compiler_patches.py` splits compiled graphs.
    torch.nn.parallel.DistributedDataParallel = _Unwrapped  # type: ignore[misc]


_COLLECTIVES: Final = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "all_gather_single": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
}
"""Functions of `torch.distributed` → the collective. Those that end in `single` are torch 2.13's names."""


def _record(name: str, *tensors: Any, group: Any = None, **kwargs: Any) -> None:
    """Records a collective with the work of the trace, and does nothing else."""
    recording = active_recorder()
    if recording is None:
        return
    named = (kwargs[key] for key in ("tensor", "output_tensor", "output", "input_tensor", "input") if key in kwargs)
    given = [tensor for tensor in (*tensors, *named) if isinstance(tensor, torch.Tensor)]
    whole = max(given, key=lambda tensor: tensor.nbytes)
    recording.collective(name, whole.nbytes, whole.dtype, dist.get_process_group_ranks(group))


class _Unwrapped:
    """`DistributedDataParallel(model)` is the model."""

    def __new__(cls, module: Any, *args: Any, bucket_cap_mb: float | None = None, **kwargs: Any) -> Any:
        bucket_bytes.append(int((bucket_cap_mb or _BUCKET_MIB) * 2**20))
        return module


_BUCKET_MIB: Final = 25
"""Torch's default (torch 2.13: nn/parallel/distributed.py, `_DEFAULT_BUCKET_CAP_MB`)."""

bucket_bytes: Final[list[int]] = []
"""The size of the gradient buckets of each `DistributedDataParallel`; empty without one."""
