"""Lets FSDP2 shard a model on a CPU, for rehearsals: accelerate alone would silently copy it to each process there.

It tells accelerate's state that this process trains with FSDP, before Trainer makes its Accelerator. accelerate's own
code then calls `fully_shard`, and torch's gloo gathers and reduces (accelerate 1.15.0: state.py 1010,
accelerator.py 1674). One process without a launcher forms a group alone, with whole shards.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch import nn


def trainer_options(*, model: nn.Module, processing_class: Any, arguments: Any) -> dict[str, Any]:
    """Changes accelerate's state for the Trainer that is made next; gives that no argument.

    Args:
        model, processing_class: not used.
        arguments: the TrainingArguments, with `fsdp` and `use_cpu`.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    precision = "bf16" if arguments.bf16 else "no"
    state: Any = AcceleratorState(
        mixed_precision=precision, cpu=True, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True
    )
    plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
    if arguments.bf16:
        plugin.set_mixed_precision(precision)
    state.fsdp_plugin = plugin
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # from which accelerate copies it anew
    return {}
