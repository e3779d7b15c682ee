"""Proofs of the rules on torchao's CPUOffloadOptimizer: its own code under the real Trainer, with stand-in streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchao.optim import CPUOffloadOptimizer
from transformers import Trainer, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.checks.configs import ds
from tests.checks.plain import plain_proof
from tests.checks.real import arguments, model, refused, rows
from tests.checks.registry import proof
from tests.techniques.standin_streams import standin_streams

# Epsilon is above the rounding noise that the keys' bias has for a gradient: AdamW would make whole steps of it.
_ADAM = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}
_SAME = 1e-4


def _trained(options: dict[str, Any] | None, *, dtype: torch.dtype = torch.float32, **more: Any) -> list[torch.Tensor]:
    """The weights after three steps; with Trainer's own AdamW if `options` is None."""
    unset_hf_deepspeed_config()
    set_seed(0)
    values = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_steps": 3, "optim": "adamw_torch",
              "adam_epsilon": 1e-6, **more}  # fmt: skip
    network = model().to(dtype)
    with standin_streams():
        optimizer = None if options is None else (CPUOffloadOptimizer, {"minimal_size": 1, **_ADAM, **options})
        Trainer(
            model=network, args=arguments(None, **values), train_dataset=rows(24), optimizer_cls_and_kwargs=optimizer
        ).train()
    return [parameter.detach() for parameter in network.parameters()]


def _apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@plain_proof("offload-clips-nothing", fails="silent")
def offload_clips_nothing() -> None:
    # AdamW takes little notice of a gradient's scale, unless it is as small as epsilon: hence so small a norm.
    unclipped = _trained(None, max_grad_norm=0)
    assert _apart(_trained({}, max_grad_norm=0), unclipped) < _SAME
    assert _apart(_trained(None, max_grad_norm=1e-7), unclipped) > 20 * _SAME
    assert _apart(_trained({}, max_grad_norm=1e-7), unclipped) < _SAME, "it was clipped"


@plain_proof("offload-drops-gradients", fails="silent")
def offload_drops_gradients() -> None:
    accumulated = {"max_grad_norm": 0, "gradient_accumulation_steps": 4}
    whole = _trained(None, **accumulated)
    assert _apart(_trained({"offload_gradients": False}, **accumulated), whole) < _SAME
    assert _apart(_trained({"offload_gradients": True}, **accumulated), whole) > 20 * _SAME


@proof("offload-on-several-cards", fails="silent")
def offload_on_several_cards() -> None:
    """What the other GPUs contribute is stood in for by a hook that triples the gradient: the host has not got it."""

    def tripled(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        result: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        result.set_result(3 * bucket.buffer())
        return result

    layer = nn.Linear(8, 8, bias=False)
    replica = DistributedDataParallel(layer)
    with standin_streams():
        optimizer = CPUOffloadOptimizer(layer.parameters(), minimal_size=1)
        replica.register_comm_hook(None, lambda state, bucket: tripled(bucket))
        replica(torch.ones(1, 8)).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.unique().tolist() == [3.0]
    assert optimizer.param_d2h_map[layer.weight].grad.unique().tolist() == [1.0]


@plain_proof("offload-rounds-updates", fails="silent")
def offload_rounds_updates() -> None:
    def moved(dtype: torch.dtype) -> float:
        small = {"learning_rate": 1e-6, "max_grad_norm": 0}
        before = [parameter.detach().to(dtype) for parameter in _untrained()]
        after = _trained({"lr": 1e-6}, dtype=dtype, **small)
        return sum(int((a != b).sum()) for a, b in zip(before, after, strict=True)) / sum(a.numel() for a in after)

    assert moved(torch.float32) > 0.9 and moved(torch.bfloat16) < 0.1


def _untrained() -> list[torch.Tensor]:
    set_seed(0)
    return list(model().parameters())


@proof("offload-twice", fails="late")
def offload_twice() -> None:
    def train(config: dict[str, Any]) -> None:
        unset_hf_deepspeed_config()
        with standin_streams():
            args = arguments(config)
            chosen = (CPUOffloadOptimizer, {"lr": 1e-2, "minimal_size": 1})
            Trainer(model=model(), args=args, train_dataset=rows(), optimizer_cls_and_kwargs=chosen).train()

    refused("IndexError", lambda: train(ds(2)))
    offloaded = ds(2, {"zero_optimization.offload_optimizer": {"device": "cpu"}})
    refused("object has no attribute 'defaults'", lambda: train(offloaded))
