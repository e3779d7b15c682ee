"""Lets torch's FSDP1 (`FullyShardedDataParallel`) run on fake tensors, and trains as libraries did when it was in use.

Published trainings of that time are predicted with it. Users' trainings are not: memkit refuses FSDP1 (`refuse_fsdp`).
A row's script imports this module (`published_sharded.py`), and accelerate wraps its model. Torch's own code then
flattens, gathers, reshards and reduces; only the communication does nothing (`prediction/child/gpu/other_ranks.py`).

Files that are named are torch 2.13's in distributed/fsdp, where no other is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

from hf_memkit.prediction.child.gpu import fsdp


def allow() -> None:
    """Lets memkit's child process trace FSDP1. Called once, at the beginning of a script."""
    vars(fsdp)["refuse_fsdp"] = lambda trainer: None
    keep_autograd_on_assignment()
    vars(dist)["_broadcast_coalesced"] = broadcast_coalesced


def keep_autograd_on_assignment() -> None:
    """Lets `tensor.data = value` keep the tensor's node in autograd, as it does outside of memkit, which swaps fakes.

    A flat parameter's hooks are at that node. Its `data` is the shard, the gathered parameters, or an fp32 copy, one
    after the other (_flat_param.py, `_use_sharded_flat_param`, `_use_unsharded_flat_param`).
    """
    plain, swap = torch.Tensor.data, FakeTensor.data

    def assign(self: Any, value: torch.Tensor) -> None:
        if isinstance(value, FakeTensor):
            plain.__set__(self, value)  # type: ignore[attr-defined]
            self.fake_device = value.fake_device  # a shard that waits in RAM is moved to the GPU so, too
        else:
            swap.__set__(self, value)  # type: ignore[attr-defined]

    FakeTensor.data = property(plain.__get__, assign)  # type: ignore[assignment, attr-defined]


def broadcast_coalesced(group: Any, tensors: Sequence[torch.Tensor], bucket_bytes: int, source: int = 0) -> None:
    """What the first rank allocates to send its weights: buckets, of which two are in flight (torch 2.13:
    csrc/distributed/c10d/reducer.cpp, `broadcast_coalesced`)."""
    with torch.no_grad():
        for bucket in _take_tensors(tensors, bucket_bytes):  # type: ignore[no-untyped-call]
            flat = _flatten_dense_tensors(bucket)  # type: ignore[no-untyped-call]  # the last one is alive, too
            for tensor, sent in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):  # type: ignore[no-untyped-call]
                tensor.copy_(sent)


def keep_weights_in_ram(model: Any) -> None:
    """Moves the scales of a 4-bit model to the GPU, whose weights wait in RAM until FSDP shards them, a unit at a time
    (transformers 4.48.1: modeling_utils.py, `_load_state_dict_into_meta_model`; fsdp_qlora: train.py,
    `load_and_quantize`)."""
    for parameter in model.parameters():
        if hasattr(parameter, "quant_state"):
            parameter.quant_state.to("cuda")


def checkpoint_units(trainer: Any) -> None:
    """Checkpoints each layer of a Trainer's model as a unit of FSDP, as soon as it is wrapped."""
    wrap = trainer.accelerator.prepare_model
    trainer.accelerator.prepare_model = lambda *args, **options: with_checkpointed_units(wrap(*args, **options))


def with_checkpointed_units(model: Any) -> Any:
    """The model, wrapped by FSDP, with a checkpoint around each layer's unit, so that a recomputation gathers and
    reshards it, too.

    The loop over layers did so (transformers 4.48.1: models/llama/modeling_llama.py, `_gradient_checkpointing_func`,
    by default reentrant: modeling_utils.py, 2538). Today a layer checkpoints itself, within its unit
    (transformers 5.23: modeling_layers.py, `GradientCheckpointingLayer`).
    """
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        if hasattr(unit.module, "gradient_checkpointing"):
            vars(unit)["forward"] = functools.partial(_recomputed, unit.forward)
    return model


def _recomputed(forward: Callable[..., Any], hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
    return checkpoint(functools.partial(forward, **options), hidden, *args, use_reentrant=True)


def add_rotary_tables(model: Any, dtype: torch.dtype) -> None:
    """Gives each layer the cosines and sines of all positions that it had as buffers (transformers 4.37.2:
    models/llama/modeling_llama.py, `LlamaRotaryEmbedding`)."""
    config = model.config
    size = (2, config.max_position_embeddings, config.hidden_size // config.num_attention_heads)
    for layer in model.model.layers:
        layer.self_attn.register_buffer("rotary_tables", torch.zeros(size, dtype=dtype), persistent=False)


def keep_first_outputs(model: Any, name: str, kept: list[torch.Tensor]) -> None:
    """Keeps in `kept` what modules called `name` return in the first forward of a reentrant checkpoint.

    gpt_bigcode's KV cache was a view of what `c_attn` returned, which therefore lived to the end of the forward
    (transformers 4.48.1: models/gpt_bigcode/modeling_gpt_bigcode.py, `GPTBigCodeAttention`, `presents`).
    """

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if not torch.is_grad_enabled():
            kept.append(output)

    for path, module in model.named_modules():
        if path.endswith(f".{name}"):
            module.register_forward_hook(keep)
