"""What the usual tools say of the same training, each asked in a process of its own.

    python benchmarks/predict_peers.py "torch MemTracker" REQUEST

REQUEST is JSON: `config`, `batch`, `length`; where it is not fp32 weights with bf16 autocast and a fused AdamW also
`dtype`, of weights without autocast.

Prints one line of JSON: `{"answer_gib": …, "of": what it counts}`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs from a checkout that is not installed

GIB: Final = 2**30


def memtracker(asked: Mapping[str, Any]) -> dict[str, Any]:
    """torch.distributed._tools.MemTracker around a step written by hand: it knows no Trainer. It answers no question
    for a value, so that transformers makes the mask that a compiled run would have."""
    from hf_memkit.prediction.child.gpu import cuda_device_guard
    from hf_memkit.prediction.child.gpu.attention import install_cuda_attention
    from hf_memkit.prediction.child.gpu.fake_gpu import patch_cuda_device, patch_module_apply

    cuda_device_guard.install()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers.initialization import no_init_weights

    patch_cuda_device((8, 0), 80 * GIB)
    patch_module_apply()
    install_cuda_attention((8, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with no_init_weights(), torch.device("cuda:0"):
            model = _model(asked["config"])
            model.tie_weights()
        dtype = getattr(torch, asked.get("dtype", "float32"))
        if dtype is not torch.float32:
            model.to(dtype)
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), fused="dtype" not in asked, foreach="dtype" in asked)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for step in range(2):
                tokens = torch.zeros(asked["batch"], asked["length"], dtype=torch.int64, device="cuda:0")
                with torch.autocast("cuda", torch.bfloat16, enabled="dtype" not in asked):
                    loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del loss
                if step == 0:
                    tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")
    total = max(sum(size for name, size in sizes.items() if str(name) == "Total") for sizes in peak.values())
    return {"answer_gib": total / GIB, "of": "a step written by hand; no reserved bytes, no workspaces"}


def accelerate(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What `accelerate estimate-memory` computes: the largest of weights, gradients and optimizer step."""
    import torch
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with torch.device("meta"):
        model = _model(asked["config"])
    dtype = asked.get("dtype", "float32")
    usage = estimate_training_usage(calculate_maximum_sizes(model)[0], dtype)
    return {"answer_gib": max(usage.values()) / GIB, "of": f"training with Adam, {dtype}; no activations, no loss"}


def deepspeed(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSpeed's estimator for ZeRO-2 without offload computes for one GPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    with torch.device("meta"):
        model = _model(asked["config"])
    total = sum(parameter.numel() for parameter in model.parameters())
    gpu_bytes, _ = estimate_zero2_model_states_mem_needs(total, cpu_offload=False)
    return {"answer_gib": gpu_bytes / GIB, "of": "model states of ZeRO-2 on one GPU; no activations, no loss"}


PEERS: Final[Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "torch MemTracker": memtracker,
    "accelerate estimate-memory": accelerate,
    "DeepSpeed estimator": deepspeed,
}


def _model(config: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


if __name__ == "__main__":
    answer = PEERS[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps(answer), flush=True)
    os._exit(0)  # threads of the fake GPU end badly
