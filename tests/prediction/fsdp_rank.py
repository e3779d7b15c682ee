"""Trains small models with FSDP2 as one rank of several on a CPU, and prints what lives, as JSON.

    python -m tests.prediction.fsdp_rank real RANK RANKS PORT
    python -m tests.prediction.fsdp_rank fake RANK RANKS

Real ranks train with gloo; a fake one is alone, and its tensors are fake. The same tracer measures both.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.big_modeling import _attach_context_parallel_hooks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig

from hf_memkit.prediction.child.gpu.compiler import compile_module
from hf_memkit.prediction.child.gpu.fake_gpu import patch_fake_values
from hf_memkit.prediction.child.gpu.fsdp import patch_fsdp, skip_waits
from hf_memkit.prediction.child.libraries.pretrained import as_part
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.trace.trace import Trace

CASES: Final = (
    "llama",
    "llama, tied",
    "gpt2",
    "mixtral",
    "llama, checkpointing",
    "llama, accumulation",
    "llama, hsdp",
    "llama, tensor",
    "llama, sharded when loaded",
    "mixtral, tensor",
    "llama, compiled",
    "llama, context",
)
STEPS: Final = 5
VOCABULARY: Final = 1003
LENGTH: Final = 64

COPY_OF_GLOO: Final = "aten.split.Tensor"
"""The first operation on gloo's copy of what a reduce-scatter sends, which NCCL does not make: not counted."""


def model_of(case: str) -> Any:
    """A small model, whose parameters are no multiples of the number of ranks."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False}
    if case.startswith("gpt2"):
        return GPT2LMHeadModel(
            GPT2Config(
                n_embd=192, n_layer=3, n_head=4, n_positions=128, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, **sizes
            )
        )
    sizes |= {
        "hidden_size": 192,
        "intermediate_size": 528 if "tensor" in case else 504,  # the first: half of a row has whole 16 bytes
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if case.startswith("mixtral"):
        return MixtralForCausalLM(MixtralConfig(num_local_experts=3, num_experts_per_tok=3, **sizes))
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings="tied" in case, **sizes))


def distributed_model(case: str, ranks: int) -> Any:
    """A model that transformers shards before its weights are loaded; here they are zero."""
    tensor_ranks = 2 if "tensor" in case else 1
    sizes = DistributedConfig(tp_size=tensor_ranks, fsdp_size=ranks // tensor_ranks, fsdp_mixed_precision=True)
    with torch.device("meta"):
        model = model_of(case)
    config, _, meshes = type(model).prepare_distribute_model(sizes)
    model = type(model).maybe_distribute_model(model, config, meshes)
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                local = torch.zeros(getattr(tensor, "_local_tensor", tensor).shape)
                whole = as_part(local, tensor) if hasattr(tensor, "device_mesh") else local
                table[name] = torch.nn.Parameter(whole) if table is module._parameters else whole
    return model


def meshes_of(case: str, ranks: int) -> dict[str, DeviceMesh]:
    """The ranks that share parameters (`fsdp`), and those that share sequences (`context`)."""
    if "hsdp" in case:
        return {"fsdp": init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))}
    if "context" in case:
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("shard", "context"))
        return {"fsdp": mesh["shard", "context"]._flatten("both"), "context": mesh["context"]}
    return {"fsdp": init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))}


@contextlib.contextmanager
def split_rows(case: str, meshes: dict[str, DeviceMesh]) -> Iterator[dict[str, torch.Tensor]]:
    """A batch. If ranks share sequences, each has a part of each row within the context, as in Trainer."""
    ids = torch.ones(2, LENGTH, dtype=torch.long)
    if "context" not in meshes:
        yield {"input_ids": ids, "labels": ids}
        return
    batch = {"input_ids": ids, "shift_labels": ids.clone(), "labels": ids.clone()}
    batch["position_ids"] = torch.arange(LENGTH).repeat(2, 1)
    buffers = list(batch.values())
    with context_parallel(
        meshes["context"], buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
    ):
        yield batch


def install_flash_attention() -> None:
    """Lets CPUs run the operator that attention is on a GPU, for which alone torch has a ring. What the operator
    returns has the shapes that it has on a GPU."""

    def scaled_dot_product_attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]

    def flash(
        query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, mask: bool = False,
        *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        sums = torch.zeros(query.shape[:3])
        seed = torch.zeros(2, dtype=torch.uint64)
        offset = torch.zeros((), dtype=torch.uint64)
        return torch.zeros_like(query), sums, None, None, query.shape[2], key.shape[2], seed, offset, torch.zeros(0)

    def flash_backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    F.scaled_dot_product_attention = scaled_dot_product_attention
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    kernels.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")
    _KERNELS.append(kernels)


_KERNELS: Final[list[torch.library.Library]] = []
"""They are removed with the library."""


def train(case: str, kind: str, ranks: int) -> dict[str, int]:
    """Bytes of this rank's shards, of what is alive in a step, and of its peak.

    Of several steps after the first, the least counts: gloo's thread frees what was sent some time after it is done.
    """
    tracer = StorageTracer("cpu")
    patch_fsdp(tracer)
    meshes = meshes_of(case, ranks)
    policy: dict[str, Any] = {
        "mesh": meshes["fsdp"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    with FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else contextlib.nullcontext(), tracer:
        if "tensor" in case or "loaded" in case:
            model = distributed_model(case, ranks)
        else:
            model = model_of(case)
            layers = model.transformer.h if case.startswith("gpt2") else model.model.layers
            if "checkpointing" in case:
                for number, layer in enumerate(layers):
                    layers[number] = checkpoint_wrapper(layer, preserve_rng_state=False)
            for layer in layers:
                fully_shard(layer, **policy)
            fully_shard(model, **policy)
        if "context" in case:
            _attach_context_parallel_hooks(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = model
        if "compiled" in case and kind == "fake":
            run = compile_module(torch.compile, model, backend="aot_eager")
        elif "compiled" in case:
            run = torch.compile(model, backend="aot_eager")
        micro_batches = 2 if "accumulation" in case else 1
        steps: list[dict[str, int]] = []
        for _ in range(STEPS):
            begin = len(tracer.trace.events)
            for micro_batch in range(micro_batches):
                if micro_batches > 1:
                    model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
                with split_rows(case, meshes) as batch:
                    loss = run(**batch).loss
                    forward_end = len(tracer.trace.events)
                    loss.backward()
                    del loss, batch
            backward_end = len(tracer.trace.events)
            optimizer.step()
            optimizer.zero_grad()
            live = live_bytes(tracer.trace)
            steps.append(
                {
                    "after forward": live[forward_end - 1],
                    "after backward": live[backward_end - 1],
                    "after step": live[-1],
                    "peak": max(live[begin:]),
                }
            )
    least = {moment: min(step[moment] for step in steps[1:]) for moment in steps[0]}
    shards = [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
    return {
        "shards": sum(shard.nbytes for shard in shards),
        "padded": sum(shard.untyped_storage().nbytes() for shard in shards),
        **least,
    }


def live_bytes(trace: Trace) -> list[int]:
    """Bytes that are alive after each event."""
    sizes = [
        0 if trace.operations[operation] == COPY_OF_GLOO else size
        for size, operation in zip(trace.sizes_bytes, trace.operation_of, strict=True)
    ]
    return list(itertools.accumulate(sizes[event - 1] if event > 0 else -sizes[-event - 1] for event in trace.events))


def main() -> None:
    kind, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    set_rotate_method("allgather")  # accelerate's default
    if kind == "real":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[4])
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    else:
        patch_fake_values()
        skip_waits()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    answers = {}
    for case in CASES:
        if "context" in case:  # the last
            install_flash_attention()
        answers[case] = train(case, kind, ranks)
        gc.collect()
    print(json.dumps(answers), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
