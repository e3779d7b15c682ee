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
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_memkit.prediction.child.gpu.fake_gpu import patch_fake_values
from hf_memkit.prediction.child.gpu.fsdp import patch_fsdp
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
        "intermediate_size": 504,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if case.startswith("mixtral"):
        return MixtralForCausalLM(MixtralConfig(num_local_experts=3, num_experts_per_tok=3, **sizes))
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings="tied" in case, **sizes))


def train(case: str, kind: str, ranks: int) -> dict[str, int]:
    """Bytes of this rank's shards, of what is alive in a step, and of its peak.

    Of several steps after the first, the least counts: gloo's thread frees what was sent some time after it is done.
    """
    tracer = StorageTracer("cpu")
    patch_fsdp(tracer)
    shape, names = ((2, ranks // 2), ("replicate", "shard")) if "hsdp" in case else ((ranks,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    with FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else contextlib.nullcontext(), tracer:
        model = model_of(case)
        layers = model.transformer.h if case.startswith("gpt2") else model.model.layers
        if "checkpointing" in case:
            for number, layer in enumerate(layers):
                layers[number] = checkpoint_wrapper(layer, preserve_rng_state=False)
        for layer in layers:
            fully_shard(layer, **policy)
        fully_shard(model, **policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        micro_batches = 2 if "accumulation" in case else 1
        steps: list[dict[str, int]] = []
        for _ in range(STEPS):
            begin = len(tracer.trace.events)
            for micro_batch in range(micro_batches):
                if micro_batches > 1:
                    model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
                ids = torch.ones(2, LENGTH, dtype=torch.long)
                loss = model(input_ids=ids, labels=ids).loss
                forward_end = len(tracer.trace.events)
                loss.backward()
                del loss
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
    shards = [parameter._local_tensor for parameter in model.parameters()]
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
    if kind == "real":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[4])
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    else:
        patch_fake_values()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    answers = {}
    for case in CASES:
        answers[case] = train(case, kind, ranks)
        gc.collect()
    print(json.dumps(answers), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
