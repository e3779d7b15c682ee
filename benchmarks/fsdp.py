"""Transfers and hooks of FSDP1's full shard, which plans do not propose, for published trainings on two GPUs."""

from __future__ import annotations

from typing import Final

from hf_memkit.catalog.models import ModelFacts
from hf_memkit.common.range import Range
from hf_memkit.deepspeed.traffic import StepTraffic, Traffic, nonempty

UNIT: Final = Range(0, 0.25e-3, 0.5e-3)
"""Host time for the hooks of one FSDP unit in one forward or backward. Measured on one busy core of an AMD EPYC: 0.17
to 0.55 ms (torch 2.13; 16 small layers of Llama, alone and with LoRA, each matrix of which is a unit, with and without
reentrant checkpointing), with a process group that sends nothing, on a CPU, so without calls of CUDA and NCCL. GPU
machines have faster cores. The host is at most two gathers ahead of the GPU (torch 2.13:
distributed/fsdp/_limiter_utils.py), too few to hide small units; at best all is hidden."""


def fsdp_traffic(
    model: ModelFacts, *, gpus: int, accumulation: int, element_bytes: int, frozen_bytes: int = 0,
    reentrant: bool = False,
) -> StepTraffic:  # fmt: skip
    """Weights gathered for forward and for backward, gradients reduce-scattered in the last micro-batch.

    Args:
        gpus: GPUs of one machine.
        accumulation: micro-batches a step.
        element_bytes: bytes of a gathered weight and of a reduced gradient.
        frozen_bytes: stored bytes of gathered frozen weights.
        reentrant: Trainer's activation checkpointing with `use_reentrant`, which gathers once more in backward
            (transformers 5.23: training_args.py 2797): counted in torch 2.13 for layers that are each a unit; the
            other form gathers no more than without checkpointing.
    """
    remote = (gpus - 1) / gpus
    trained = element_bytes * model.parameters
    gathered = remote * (trained + frozen_bytes)
    layers = max(1, model.layers)
    forward, tail = accumulation * gathered, accumulation * gathered / layers
    backward = forward * (2 if reentrant else 1)
    source = "torch 2.13: distributed/fsdp/_runtime_utils.py: one layer ahead"
    rows = nonempty(
        Traffic("all-gather of weights, forward", "gpus", forward, "forward", accumulation, tail, source),
        Traffic("all-gather of weights, backward", "gpus", backward, "backward", accumulation, tail, source),
        Traffic("reduce-scatter of gradients", "gpus", remote * trained, "backward", 1, remote * trained / layers,
                "torch 2.13: distributed/fsdp/_runtime_utils.py; transformers 5.23: trainer.py 1907, no_sync"),
    )  # fmt: skip
    return StepTraffic(rows, gpus=gpus, on_gpu=1 / gpus)


def unit_passes(units: int, *, accumulation: int, reentrant: bool) -> int:
    """Number of times in a step that one of `units` (modules wrapped separately, and the model) is gathered, computed
    and resharded."""
    return accumulation * (3 if reentrant else 2) * units
