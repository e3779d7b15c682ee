"""Fields of a `run` record: plain data about Trainer's arguments, model, optimizer and machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from hf_memkit._version import __version__
from hf_memkit.common.units import GIB
from hf_memkit.measuring.memory.cgroup import boot_id, limit_bytes, oom_kills, process_start_ticks
from hf_memkit.measuring.memory.optimizer_state import optimizer_chain
from hf_memkit.measuring.record_types import HardwareFacts, HostFacts, RunRecord

_PACKAGES = (
    "torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "bitsandbytes", "torchao", "liger-kernel",
)  # fmt: skip

_ARGUMENTS = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "auto_find_batch_size",
    "max_steps", "num_train_epochs", "optim", "optim_args", "max_grad_norm", "learning_rate", "bf16", "fp16",
    "bf16_full_eval", "fp16_full_eval", "eval_accumulation_steps", "prediction_loss_only", "torch_empty_cache_steps",
    "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "train_sampling_strategy",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "fsdp", "seed",
    # TRL's, which decide how long a sequence gets.
    "max_length", "packing", "padding_free", "activation_offloading",
)  # fmt: skip

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def versions() -> dict[str, str]:
    """Versions of memkit, python and installed packages, without importing them."""
    installed = {"hf_memkit": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def process_facts(args: Any) -> RunRecord:
    """`rank`, `world_size` and `host`, with which a report checks whether the process is alive."""
    process = psutil.Process()
    host: HostFacts = {"hostname": socket.gethostname(), "pid": os.getpid(), "process_started": process.create_time()}
    if (ticks := process_start_ticks(os.getpid())) is not None:
        host["process_start_ticks"] = ticks
    if (boot := boot_id()) is not None:
        host["boot_id"] = boot
    if (kills := oom_kills()) is not None:
        host["oom_kills"] = kills
    return {"rank": args.process_index, "world_size": args.world_size, "host": host}


def hardware(device: torch.device | None) -> HardwareFacts:
    """The machine, and the training's GPU if any."""
    facts: HardwareFacts = {}
    if (cores := os.cpu_count()) is not None:
        facts["cpu_count"] = cores
    facts["ram_gib"] = psutil.virtual_memory().total / GIB
    limit = limit_bytes()
    if limit is not None:
        facts["ram_limit_gib"] = limit / GIB
    facts["device_name"] = platform.processor() or platform.machine()
    facts["device_type"] = "cpu" if device is None else device.type
    if device is None or device.type == "cpu":
        return facts
    settings = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), None)
    if settings is not None:
        facts["allocator_settings"] = settings
    if device.type == "mps":
        return {**facts, "device_count": 1}
    module = torch.get_device_module(device)
    facts["device_name"] = module.get_device_name(device)
    facts["device_count"] = module.device_count()
    # Below 1 the allocator is capped (in a test on a bigger GPU, for example), and fails before the GPU is full.
    # An allocator without a cap may return a larger number, and a custom one may lack the method.
    with contextlib.suppress(AttributeError, RuntimeError):
        facts["allocator_cap_fraction"] = min(1.0, module.get_per_process_memory_fraction(device))
    return facts


def memory_arguments(args: Any) -> dict[str, Any]:
    """The training arguments that affect memory, under current names."""
    facts: dict[str, Any] = {}
    for name in _ARGUMENTS:
        value = getattr(args, name, None)
        if value is not None:
            facts[name] = getattr(value, "value", value)  # of an enum
    # transformers 5.23 renamed gradient_checkpointing; either name may have been used, and either may be None.
    values = (getattr(args, "activation_checkpointing", None), getattr(args, "gradient_checkpointing", None))
    facts["activation_checkpointing"] = any(values)
    if fsdp := _fsdp_settings():
        facts |= {"fsdp": True, "fsdp_config": fsdp}
    zero = _zero(args)
    if zero is None:
        return facts
    if isinstance(stage := zero.get("stage", 0), int):
        facts["deepspeed_stage"] = stage
    places = {name: zero.get(name, {}).get("device", "none") for name in ("offload_optimizer", "offload_param")}
    return facts | {f"deepspeed_{name}": str(place) for name, place in places.items() if place != "none"}


def is_deepspeed(args: Any, optimizer: Any = None) -> bool:
    """Whether DeepSpeed runs the optimizer, inside backward."""
    wrapped = any(name.startswith("DeepSpeed") for name in optimizer_chain(optimizer))
    return wrapped or getattr(args, "deepspeed_plugin", None) is not None


def swap_folders(args: Any) -> tuple[Path, ...]:
    """ZeRO-Infinity's folders, each once; empty without it."""
    zero = _zero(args) or {}
    paths = [zero.get(part, {}) for part in ("offload_optimizer", "offload_param")]
    folders = [str(part["nvme_path"]) for part in paths if part.get("device") == "nvme" and part.get("nvme_path")]
    return tuple(Path(path) for path in dict.fromkeys(folders))


def model_facts(model: nn.Module) -> RunRecord:
    """Class, size and settings that affect activations; a parameter split by ZeRO-3 or FSDP2 counts whole."""
    dtypes: dict[str, int] = {}
    trainable = 0
    for parameter in model.parameters():
        size = int(getattr(parameter, "ds_numel", parameter.numel()))
        name = str(parameter.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + size
        trainable += size if parameter.requires_grad else 0
    facts: RunRecord = {
        "model_class": class_name(model),
        "parameters": sum(dtypes.values()),
        "trainable_parameters": trainable,
        "weights_dtypes": dtypes,
    }
    if is_fsdp2(model):
        facts["engine"] = "FSDP2"
    config = getattr(model, "config", None)
    if config is not None:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        if isinstance(kind := getattr(config, "model_type", None), str):
            facts["model_type"] = kind
        if isinstance(vocabulary := getattr(text, "vocab_size", None), int):
            facts["vocabulary"] = vocabulary
        if isinstance(attention := getattr(config, "_attn_implementation", None), str):
            facts["attention"] = attention
    return facts


def is_fsdp2(module: nn.Module) -> bool:
    """Whether torch's `fully_shard` made this module a unit, which changes its class in place."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def class_name(module: nn.Module) -> str:
    """Name of the module's class; under FSDP2, of the class that it had before."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if is_fsdp2(module) else name


def _fsdp_settings() -> dict[str, Any]:
    """Settings of FSDP in effect, whether Trainer or accelerate's launcher set them; empty without FSDP."""
    from accelerate.state import AcceleratorState

    state = AcceleratorState._shared_state
    plugin = state.get("fsdp_plugin")
    if plugin is None or "FSDP" not in str(state.get("distributed_type")):
        return {}
    offload = plugin.cpu_offload
    of_version_1 = getattr(offload, "offload_params", False)
    reshard = plugin.reshard_after_forward
    return {
        "version": plugin.fsdp_version,
        "reshard_after_forward": getattr(reshard, "name", reshard),
        "cpu_offload": of_version_1 or type(offload).__name__ == "CPUOffloadPolicy",
        "activation_checkpointing": plugin.activation_checkpointing,
        "cpu_ram_efficient_loading": plugin.cpu_ram_efficient_loading,
        "state_dict_type": getattr(plugin.state_dict_type, "name", plugin.state_dict_type),
    }


def _zero(args: Any) -> Mapping[str, Any] | None:
    """`zero_optimization` of DeepSpeed's configuration; None without DeepSpeed."""
    config = getattr(getattr(getattr(args, "deepspeed_plugin", None), "hf_ds_config", None), "config", None)
    if not isinstance(config, dict):
        return None
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        return {}
    return {name: {} if value is None else value for name, value in zero.items()}
