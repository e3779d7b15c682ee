"""What a launcher would start, read by its own parser: nothing is started.

In: a command, as words. Out: a line of JSON: the script, its arguments and where it stands, GPUs on each machine,
machines, and the variables that its processes get. accelerate reads its config file, too.

    python -m hf_memkit.prediction.child.read_launch accelerate launch --config_file zero3.yaml train.py
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["read_launch"]

_UNKNOWN: Final = 3
"""Stands for the number of GPUs of the machine that will train, which is unknown here. accelerate asks only whether
there are several."""

_NO_PYTHON: Final = "--no_python: the program is no Python script; omit it"

Found = dict[str, Any]


def read_launch(words: Sequence[str]) -> Found:
    """What a command would start. It begins with a launcher, or with `python -m` and a launcher's module.

    Raises:
        Exception: what the launcher raises.
    """
    name, rest = Path(words[0]).name, list(words[1:])
    if name.startswith("python"):
        at = words.index("-m")
        name, rest = words[at + 1], list(words[at + 2 :])
    if name == "accelerate":
        if rest[:1] != ["launch"]:
            raise ValueError(f"accelerate {' '.join(rest[:1])} trains nothing; write accelerate launch")
        rest = rest[1:]
    if name.startswith("accelerate"):
        found = _accelerate(rest)
    elif name in ("torchrun", "torch.distributed.run", "torch.distributed.launch"):
        found = _torchrun(rest)
    else:
        found = _deepspeed(rest)
    return {**found, "at": len(words) - len(found["arguments"]) - 1}


def _accelerate(words: list[str]) -> Found:
    """accelerate 1.15.0: commands/launch.py, `launch_command`; utils/launch.py."""
    import torch
    from accelerate.commands import launch
    from accelerate.utils import launch as variables

    torch.cuda.is_available = lambda: True  # of the machine that will train
    torch.cuda.device_count = lambda: _UNKNOWN
    torch.cuda.is_bf16_supported = lambda *_: True
    arguments: Any = launch.launch_command_parser().parse_args(words)
    given = arguments.num_processes
    arguments, defaults, precision_of_config = launch._validate_launch_command(arguments)
    if arguments.tpu or getattr(arguments, "compute_environment", "LOCAL_MACHINE") == "AMAZON_SAGEMAKER":
        raise ValueError("a TPU or SageMaker; memkit predicts GPUs: set distributed_type and compute_environment")
    nodes = int(arguments.num_machines or 1)
    processes = int(arguments.num_processes or 1)
    on_cpu = arguments.cpu or getattr(arguments, "use_cpu", False)
    if arguments.use_deepspeed and not on_cpu:
        fields = list(defaults.deepspeed_config) if defaults else []
        fields += ["mixed_precision"] if precision_of_config else []
        arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
        environment = variables.prepare_deepspeed_cmd_env(arguments)[1]
    elif (arguments.use_fsdp or arguments.use_megatron_lm or arguments.multi_gpu) and not on_cpu:
        environment = variables.prepare_multi_gpu_env(arguments)
    else:
        environment, processes = variables.prepare_simple_launcher_cmd_env(arguments)[1], 1
    everything = defaults is None and given is None and processes == _UNKNOWN
    return {
        **_script(arguments),
        "gpus": None if everything else max(1, processes // nodes),
        "nodes": nodes,
        "environment": {name: each for name, each in environment.items() if os.environ.get(name) != each},
    }


def _torchrun(words: list[str]) -> Found:
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    arguments = get_args_parser().parse_args(words)
    least, most = parse_min_max_nnodes(arguments.nnodes)
    if least != most:
        raise ValueError(f"--nnodes {arguments.nnodes}: give one number of machines")
    each = arguments.nproc_per_node
    return {
        **_script(arguments), "gpus": int(each) if str(each).isdigit() else None, "nodes": most,
        "environment": {"ACCELERATE_USE_CPU": "true"} if each == "cpu" else {},
    }  # fmt: skip


def _deepspeed(words: list[str]) -> Found:
    """deepspeed 0.19.8: launcher/runner.py, `parse_args`, `parse_inclusion_exclusion`."""
    from deepspeed.launcher import runner

    arguments = runner.parse_args(words)
    if arguments.no_python:
        raise ValueError(_NO_PYTHON)
    if arguments.exclude or arguments.autotuning:
        raise ValueError("--exclude and --autotuning are not read; write --include, or --num_gpus")
    gpus, nodes = arguments.num_gpus, arguments.num_nodes
    if arguments.include:  # "host1:0,1@host2:0,1"
        hosts = [each.partition(":")[2] for each in arguments.include.split("@")]
        counts = {len(each.split(",")) if each else 0 for each in hosts}
        if len(counts) > 1:
            raise ValueError(f"--include {arguments.include}: give each machine as many GPUs")
        gpus, nodes = counts.pop(), len(hosts)
    elif Path(arguments.hostfile).is_file():
        slots = runner.fetch_hostfile(arguments.hostfile)
        nodes = nodes if nodes > 0 else len(slots)
        gpus = gpus if gpus > 0 else min(slots.values())
    script = {
        "script": arguments.user_script, "is_module": bool(arguments.module), "arguments": list(arguments.user_args),
    }  # fmt: skip
    return {**script, "gpus": gpus if gpus > 0 else None, "nodes": max(1, nodes), "environment": {}}


def _script(arguments: argparse.Namespace) -> Found:
    if arguments.no_python:
        raise ValueError(_NO_PYTHON)
    given = list(arguments.training_script_args)
    return {"script": arguments.training_script, "is_module": bool(arguments.module), "arguments": given}


if __name__ == "__main__":
    try:
        answer = read_launch(sys.argv[1:])
    except Exception as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        answer = {"error": text}
    print(json.dumps(answer))
