"""FSDP2: torch's `fully_shard` splits weights, gradients and states between GPUs, through Trainer's own arguments."""

from __future__ import annotations

from typing import Any, Final

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import advice, technique

NEEDS_SEVERAL_GPUS: Final = (
    "FSDP2 splits a model between GPUs, and Trainer refuses it in one process; give several: --gpus 2"
)

_WHY: Final = (
    "version 2 (fully_shard); each layer is a unit that is gathered, used and freed again; a save writes the whole "
    "model, which from_pretrained reads (with SHARDED_STATE_DICT save_model writes nothing)"
)


@technique(
    "fsdp2",
    slot="engine",
    saves="each GPU holds its share of weights, gradients and optimizer states, and gathers one layer at a time",
    costs="the GPUs exchange all weights in every forward and backward pass, as with ZeRO-3; with accumulation each "
    "GPU keeps the whole gradient",
    not_when="there is one GPU: nothing is split, and Trainer refuses it",
)
def fsdp2(setup: Setup) -> Setup:
    """torch's FSDP2 through Trainer (`fsdp`, `fsdp_config`), which needs no engine beside torch and accelerate."""
    return _sharded(setup, {}, "each GPU holds its share of weights, gradients and optimizer states")


@technique(
    "fsdp2-offload",
    slot="engine",
    saves="the shares are in RAM as well: the GPU holds the layers in use and the activations",
    costs="about 16 bytes of RAM a parameter, shared by the GPUs of a machine; all weights cross the bus in every "
    "forward and backward pass, and the optimizer steps on the CPU",
    not_when="the shares fit on the GPUs (fsdp2 is faster), or RAM is short",
    settings={"arguments.fsdp_config": {"cpu_offload": True}},
    slows=True,
    offered={"optimizer": 2, "recomputation": 3, "anything": 3},
    only_with=("FSDP",),
    unless=("offload",),
    proof="gpu",
    gpu_only="torch copies the shares between a GPU and page-locked RAM",
)
def fsdp2_offload(setup: Setup) -> Setup:
    """FSDP2 with shares, gradients and optimizer states in RAM."""
    return _sharded(setup, {"cpu_offload": True}, "the shares are in RAM, the layers in use on the GPU")


advice(
    "fsdp-reshard", "offload", {"arguments.fsdp_config": {"reshard_after_forward": True}},
    saves="each layer's gathered weights are freed after its forward pass; now all of them stay until backward",
    costs="each layer is gathered once more in backward",
    slows=True, offered={"recomputation": 1, "anything": 1}, only_with=("FSDP",),
)  # fmt: skip
advice(
    "fsdp-sync-each-batch", "offload",
    {"arguments.accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
    saves="each GPU keeps its share of the gradient between micro-batches, instead of the whole gradient",
    costs="gradients are exchanged in every micro-batch instead of once a step",
    slows=True, offered={"recomputation": 2, "anything": 2}, only_with=("FSDP",),
)  # fmt: skip
advice(
    "fsdp-more-gpus", "offload", {"launch.processes": "more GPUs"},
    saves="each GPU then holds a smaller share of weights, gradients and optimizer states",
    costs="more GPUs; divide gradient_accumulation_steps, so that a step sees the same samples",
    offered={"optimizer": 3, "recomputation": 4, "anything": 4}, only_with=("FSDP",),
)  # fmt: skip


def _sharded(setup: Setup, options: dict[str, Any], saves: str) -> Setup:
    job = setup.resolved_for
    if job.processes == 1:
        is_resolved = job.model is not None
        setup = setup.with_problems([NEEDS_SEVERAL_GPUS]) if is_resolved else setup.with_notes(NEEDS_SEVERAL_GPUS)
    config: dict[str, Any] = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True,
        "state_dict_type": "FULL_STATE_DICT",
        **options,
    }
    quantization = setup.get("model.quantization")
    if quantization is None:
        config["cpu_ram_efficient_loading"] = True
        setup = setup.put(
            "environment.ACCELERATE_USE_FSDP", "true",
            "only then does from_pretrained read the weights in one process a machine (cpu_ram_efficient_loading); "
            "accelerate launch sets it",
        )  # fmt: skip
    else:
        storage = quantization["bnb_4bit_compute_dtype"]
        setup = setup.put(
            "model.quantization", {**quantization, "bnb_4bit_quant_storage": storage},
            f"NF4, doubly quantised; stored as {storage}, in which FSDP2 computes: it would cast any other float, and "
            "leave integers whole",
        )  # fmt: skip
    return setup.put_all(
        "arguments",
        fsdp=(True, saves),
        fsdp_config=(config, _WHY),
        ddp_backend=(
            "cuda:nccl,cpu:gloo",
            "NCCL alone cannot reduce what is in RAM (offloaded gradients, a whole model that is saved); accelerate "
            "launch chooses the same",
        ),
    )
