"""Trains small models with FSDP1 as one rank of two on a CPU, and prints what lives, as JSON.

    python -m tests.benchmarks.fsdp1_rank real RANK RANKS PORT
    python -m tests.benchmarks.fsdp1_rank fake RANK RANKS

Real ranks train with gloo; a fake one is alone, and its tensors are fake. The same tracer measures both.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from typing import Any, Final

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import fsdp1_on_fake_tensors as fsdp1
from hf_memkit.prediction.child.gpu.fake_gpu import patch_fake_values, patch_module_apply, swap_tensor
from hf_memkit.prediction.child.gpu.fsdp import patch_fsdp
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from tests.prediction.fsdp_rank import LENGTH, live_bytes, model_of

CASES: Final = ("full", "full, mixed", "lora", "lora, mixed", "lora, flat", "lora, flat, checkpointing")
STEPS: Final = 4


def wrapped(case: str) -> Any:
    """A small model in 16 bits; adapters are fp32 where FSDP casts them."""
    torch.set_default_dtype(torch.bfloat16)
    model = model_of("llama")
    torch.set_default_dtype(torch.float32)
    if "lora" in case:
        model.enable_input_require_grads()
        config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, config, autocast_adapter_dtype="mixed" in case)
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=fsdp_auto_wrap_policy(model), use_orig_params="flat" not in case,
        device_id=torch.device("cpu"), mixed_precision=low if "mixed" in case else None,
    )  # fmt: skip
    return fsdp1.with_checkpointed_units(model) if "checkpointing" in case else model


def train(case: str, kind: str) -> dict[str, int]:
    """Bytes of this rank's shards, of what is alive in a step, and of its peak; of several steps the least."""
    tracer = StorageTracer("cpu")
    patch_fsdp(tracer)
    with FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else contextlib.nullcontext(), tracer:
        model = wrapped(case)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        steps: list[dict[str, int]] = []
        for _ in range(STEPS):
            begin = len(tracer.trace.events)
            ids = torch.ones(2, LENGTH, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16, enabled="mixed" in case):
                loss = model(input_ids=ids, labels=ids).loss
            forward_end = len(tracer.trace.events)
            loss.backward()
            del loss, ids
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
    flat: list[Any] = [unit._flat_param for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._has_params]
    least = {moment: min(step[moment] for step in steps[1:]) for moment in steps[0]}
    return {"shards": sum(parameter.nbytes for parameter in flat), **least}


def main() -> None:
    kind, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    if kind == "real":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[4])
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    else:
        patch_fake_values()
        patch_module_apply()
        plain: Any = torch.Tensor.data
        FakeTensor.data = property(plain.__get__, swap_tensor)  # type: ignore[assignment]  # as in a script: `real_and_fake.py`
        fsdp1.allow()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    answers = {}
    for case in CASES:
        answers[case] = train(case, kind)
        gc.collect()
    print(json.dumps(answers), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
