"""The `accelerate launch` config that starts a script with a DeepSpeed JSON."""

from __future__ import annotations

from typing import Any

__all__ = ["accelerate_config"]


def accelerate_config(deepspeed_file: str, *, stage: int, gpus: int = 1, nodes: int = 1) -> dict[str, Any]:
    """What `accelerate config` would write (accelerate 1.15: commands/config/config_args.py, `ClusterConfig`).

    Neither `mixed_precision` nor accumulation nor offload stands in it: with `deepspeed_config_file` accelerate
    refuses them, because their place is the JSON and TrainingArguments (accelerate: utils/dataclasses.py,
    `DeepSpeedPlugin`).

    Args:
        deepspeed_file: path of the JSON, as accelerate will read it: relative to where it is started.
        stage: the JSON's ZeRO stage. At 3 the model is split while it is loaded.
        gpus, nodes: processes on each machine, and machines.
    """
    deepspeed: dict[str, Any] = {"deepspeed_config_file": deepspeed_file, "zero3_init_flag": stage == 3}
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "deepspeed_config": deepspeed,
        "distributed_type": "DEEPSPEED",
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": nodes,
        "num_processes": gpus * nodes,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if nodes > 1:
        # `standard` starts every machine's own processes, as torchrun does; DeepSpeed's default needs pdsh and ssh.
        deepspeed["deepspeed_multinode_launcher"] = "standard"
        content |= {"main_process_ip": "SET-TO-THE-FIRST-MACHINE", "main_process_port": 29500}
    return content
