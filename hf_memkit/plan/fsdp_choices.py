"""FSDP2 in plans: the settings that may change in a script that has it, and FSDP2 as an engine for other scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hf_memkit.plan.candidate import FSDP_CONFIG, Choice
from hf_memkit.prediction.traced_training import TracedTraining

NAME: Final = "FSDP2"

IN_LAUNCHER: Final = "FSDP is enabled by accelerate's config; to plan its settings, write fsdp and fsdp_config instead"

NO_DTENSORS: Final = "it does not step FSDP2's sharded weights (DTensor)"

SHARDED_WHEN_LOADED: Final = "it does not read weights that are sharded when loaded (DTensor)"

_GLOO_BESIDE_NCCL: Final = {"environment.ACCELERATE_USE_FSDP": "true", "environment.FSDP_OFFLOAD_PARAMS": "true"}
"""With these variables accelerate adds gloo to NCCL, which cannot reduce gradients in RAM (accelerate 1.15.0: state.py
226-234). Trainer's parser refuses the flag for that, `--ddp_backend cuda:nccl,cpu:gloo`."""

_SYNCED: Final = "gradients sharded in each micro-batch"

_ADDED: Final[Mapping[str, Any]] = {
    "min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False,
}  # fmt: skip
"""Keys that Trainer adds to a config (transformers 5.23.0: training_args.py, `_process_fsdp_args`)."""


def is_sharded_when_loaded(own: TracedTraining) -> bool:
    """Whether weights are sharded from `from_pretrained` on: by tensor parallelism, or DistributedConfig's FSDP2."""
    return own.sharded and own.fsdp is None


def kept_layout(own: TracedTraining) -> str:
    """The sentence of an answer about hybrid, context or tensor parallelism, which plans do not change."""
    sizes = ", ".join(f"{name}={size}" for name, size in own.parallel_sizes.items())
    return f"every setup keeps the script's {sizes}"


def _own_config(own: TracedTraining) -> dict[str, Any]:
    """The script's `fsdp_config`, as it wrote it."""
    config = own.arguments.fsdp_config or {}
    return {key: value for key, value in config.items() if key not in _ADDED or value != _ADDED[key]}


def _synced(own: TracedTraining) -> dict[str, Any]:
    """The setting with which each micro-batch reduces gradients; empty if the script has it. Without it, every GPU
    keeps the whole gradient until the last one (transformers 5.23.0: trainer.py 1897-1901)."""
    config = own.arguments.accelerator_config or {}
    accumulation = config.get("gradient_accumulation_kwargs") or {}
    if accumulation.get("sync_each_batch"):
        return {}
    synced = {**accumulation, "sync_each_batch": True}
    return {"arguments.accelerator_config": {**config, "gradient_accumulation_kwargs": synced}}


def without_checkpointing(own: TracedTraining, left_out: dict[str, str]) -> Iterator[Choice | None]:
    """No checkpointing for a script that has FSDP's own, and None: its own. Trainer refuses both forms at once."""
    if own.arguments.fsdp:
        off = {f"arguments.{FSDP_CONFIG}": _own_config(own), f"{FSDP_CONFIG}.activation_checkpointing": False}
        yield Choice("checkpointing", "no checkpointing", off)
    else:
        left_out["no checkpointing"] = IN_LAUNCHER
    yield None


def sharding(own: TracedTraining) -> Iterator[Choice]:
    """Other settings of a script's FSDP2, in order of falling memory use. If accelerate enables it by its config, only
    what Trainer itself sets."""
    if own.fsdp is None:
        return
    if synced := _synced(own):
        yield Choice("sharding", _SYNCED, synced, costs_time=True)
    if not own.arguments.fsdp:
        return
    base = {f"arguments.{FSDP_CONFIG}": _own_config(own)}
    reshards = f"{FSDP_CONFIG}.reshard_after_forward"
    if own.fsdp.reshard_after_forward:
        yield Choice("sharding", "weights stay gathered", base | {reshards: False})
    else:
        yield Choice("sharding", "weights gathered twice", base | {reshards: True}, costs_time=True)
    if not own.fsdp.cpu_offload:
        offload = {reshards: True, f"{FSDP_CONFIG}.cpu_offload": True, **_GLOO_BESIDE_NCCL}
        offload |= _synced(own)  # a whole gradient on the GPU would be larger than the shares that it frees
        yield Choice("sharding", "FSDP2 offload", base | offload, costs_time=True)


def engine(own: TracedTraining, left_out: dict[str, str]) -> Iterator[Choice]:
    """FSDP2 for a script that has another engine or none; `left_out` receives the reason if it is not possible."""
    obstacles = {
        "the model's class is none of transformers: its layers are unknown": not own.facts.model.of_transformers,
        "the model is quantised": own.facts.model.quantised,
        "the script creates its own optimizer": own.facts.own_optimizer,
        "the script loads its model with device_map": own.facts.model.device_map,
        "memkit plans it with bf16 or fp32": bool(own.arguments.fp16),
    }
    if why := next((each for each, is_there in obstacles.items() if is_there), ""):
        left_out[NAME] = why
        return
    settings: dict[str, Any] = {"arguments.fsdp": True, f"arguments.{FSDP_CONFIG}": {"version": 2}}
    if own.arguments.deepspeed:
        settings["arguments.deepspeed"] = None
    copies = own.arguments.bf16 and "float32" in own.model.trained_dtypes
    result = "computes from 16-bit copies of the weights" if copies else ""
    yield Choice("engine", NAME, settings, result=result, costs_time=True)
    synced, arguments = _synced(own), own.arguments
    if synced and arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps > 1:
        yield Choice("engine", f"{NAME}, {_SYNCED}", settings | synced, result=result, costs_time=True)
