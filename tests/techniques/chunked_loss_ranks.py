"""Two processes on a CPU: the loss in chunks where the weights are copied, split, or gathered by hooks.

Run by torchrun from `test_technique_chunked_loss_ranks.py`; the first process prints a JSON line.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
import torch.distributed as dist

from hf_memkit.parts.chunked_loss import install
from tests.techniques.tiny_models import batch, causal_model

CHUNK = 7


def differences(own: Any, chunked: Any, read: Any) -> list[float]:
    """Of the loss, and the largest of the gradients."""
    inputs = {**batch(2 + dist.get_rank()), "num_items_in_batch": 31}
    losses = [float(step(inputs)) for step in (own, chunked)]
    theirs, ours = (read(step) for step in (own, chunked))
    assert theirs and len(theirs) == len(ours)
    return [abs(losses[0] - losses[1]), max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True))]


class Plain:
    """A model behind DistributedDataParallel or `fully_shard`."""

    def __init__(self, model: Any, wrapped: Any) -> None:
        self.model, self.wrapped = model, wrapped

    def __call__(self, inputs: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = self.wrapped(**inputs).loss
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[torch.Tensor]:
        found = [value.grad for value in self.model.parameters()]
        return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in found]


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
        import deepspeed

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


def main() -> None:
    dist.init_process_group("gloo")
    found: dict[str, list[float]] = {}
    for kind, wrap in (("replicated", replicated), ("sharded", sharded), ("stage 3", Stage3)):
        for model_type in ("gpt2", "llama"):
            model = causal_model(model_type)
            with_part = copy.deepcopy(model)
            install(with_part, chunk_tokens=CHUNK)
            found[f"{kind}, {model_type}"] = differences(wrap(model), wrap(with_part), lambda step: step.gradients())
    if dist.get_rank() == 0:
        print("RANKS " + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
