"""Two processes on a CPU: the loss in chunks where the weights are copied, split, or gathered by hooks. And Liger's
real kernel in a third one, in Triton's interpreter, where Triton is installed.

Run from `test_technique_chunked_loss_ranks.py`, with TRITON_INTERPRET set; prints a JSON line. The libraries are
imported once for all three, which takes most of the time.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import multiprocessing
import os
import socket
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from hf_memkit.components import chunked_loss_sum
from hf_memkit.components.chunked_loss import install
from tests.techniques.tiny_models import batch, causal_model, summed_in_fp64

CHUNK = 7


def differences(own: Any, chunked: Any, read: Any) -> list[float]:
    """Of the loss, and the largest of the gradients."""
    inputs = {**batch(2 + dist.get_rank()), "num_items_in_batch": 31}
    with summed_in_fp64():
        expected = float(own(inputs))
    actual = float(chunked(inputs))
    theirs, ours = (read(step) for step in (own, chunked))
    assert theirs and len(theirs) == len(ours)
    return [abs(actual - expected), max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True))]


class Plain:
    """A model behind DistributedDataParallel or `fully_shard`."""

    def __init__(self, model: Any, wrapped: Any) -> None:
        self.model, self.wrapped = model, wrapped

    def __call__(self, inputs: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = self.wrapped(**inputs).loss
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[torch.Tensor]:
        actual = [value.grad for value in self.model.parameters()]
        return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in actual]


def replicated(model: Any) -> Plain:
    return Plain(model, torch.nn.parallel.DistributedDataParallel(model))


def sharded(model: Any) -> Plain:
    from torch.distributed.fsdp import fully_shard

    for layer in model.transformer.h if hasattr(model, "transformer") else model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return Plain(model, model)


class Stage3:
    """DeepSpeed's third stage: each process holds a piece of every weight."""

    def __init__(self, model: Any) -> None:
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def __call__(self, inputs: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = self.engine(**inputs).loss
        self.engine.backward(loss)
        return loss.detach()

    def gradients(self) -> list[torch.Tensor]:
        from deepspeed.utils import safe_get_full_grad

        return [safe_get_full_grad(value).clone() for value in self.engine.module.parameters()]


def rank(number: int, port: int) -> dict[str, list[float]]:
    """What one of the two processes finds, by kind and model."""
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    dist.init_process_group("gloo")
    actual: dict[str, list[float]] = {}
    for kind, wrap in (("replicated", replicated), ("sharded", sharded), ("stage 3", Stage3)):
        for model_type in ("gpt2", "llama"):
            model = causal_model(model_type)
            with_part = copy.deepcopy(model)
            install(with_part, chunk_tokens=CHUNK)
            actual[f"{kind}, {model_type}"] = differences(wrap(model), wrap(with_part), lambda step: step.gradients())
    dist.barrier()
    dist.destroy_process_group()
    return actual


def liger() -> dict[str, list[float]]:
    """How far Liger's kernel is from the checkpointed loop: of the loss, and the largest of the gradients."""
    chunked_loss_sum._why_not_liger = lambda hidden: ""  # it would ask for a GPU
    actual: dict[str, list[float]] = {}
    for model_type in ("gpt2", "llama"):
        for smoothing in (0.0, 0.1):
            model = causal_model(model_type)
            fused = copy.deepcopy(model)
            install(model, engine="loop", label_smoothing=smoothing, chunk_tokens=CHUNK)
            install(fused, engine="liger", label_smoothing=smoothing)
            losses = [one(**batch(), num_items_in_batch=31).loss for one in (model, fused)]
            for loss in losses:
                loss.backward()
            pairs = zip(model.parameters(), fused.parameters(), strict=True)
            gradient = max(float((theirs.grad - ours.grad).abs().max()) for theirs, ours in pairs)
            actual[f"liger, {model_type}, {smoothing}"] = [abs(float(losses[0] - losses[1])), gradient]
    return actual


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("fork")) as pool:
        running = [pool.submit(rank, number, port) for number in range(2)]
        if importlib.util.find_spec("triton") and importlib.util.find_spec("liger_kernel"):
            running.append(pool.submit(liger))
        first, second, *rest = (each.result() for each in running)
    larger = {name: [max(pair) for pair in zip(first[name], second[name], strict=True)] for name in first}
    print("FOUND " + json.dumps({name: value for actual in (larger, *rest) for name, value in actual.items()}))


if __name__ == "__main__":
    main()
