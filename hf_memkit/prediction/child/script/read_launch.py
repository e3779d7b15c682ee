"""Parses a command with the launcher's or front end's own code, without starting anything; prints a `ReadCommand`.

    python -m hf_memkit.prediction.child.script.read_launch --gpus 1 accelerate launch train.py

A front end (`trl sft`, `llamafactory-cli train`, `axolotl train`, `swift sft`) runs until it would start its launcher
or the training; that command is parsed, and returned as `command`. The front end sees as many GPUs as `--gpus N` says;
with 0 those of this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import yaml

from hf_memkit.common.commands import command
from hf_memkit.common.user_script import UserScript
from hf_memkit.common.when_imported import when_imported
from hf_memkit.prediction import wire
from hf_memkit.prediction.child.gpu.fake_gpu import patch_cuda_device, skip_own_functions
from hf_memkit.prediction.child.script.refuse_training_processes import STARTS, program_started
from hf_memkit.prediction.child.script.training_commands import training_command
from hf_memkit.prediction.launch_command import FRONT_ENDS
from hf_memkit.prediction.trace.request import TORCHRUN, ReadCommand

_UNKNOWN: Final = 3
"""Assumed number of GPUs of the machine that will train. accelerate only tests whether there are several."""

_STARTED_BY_TORCHRUN: Final = {TORCHRUN: "none"}
"""The name of a run that is given none, in the environment of its ranks."""

_REQUIRED_FOR_NODES: Final = ("machine_rank", "main_process_ip")
"""Options without which accelerate fails if several machines train."""

_NO_PYTHON: Final = "--no_python: the program is no Python script; omit it"


def read_launch(words: Sequence[str], gpus: int = 0) -> ReadCommand:
    """Parses a command that begins with a launcher, a front end, or `python -m` and a launcher's module; raises the
    launcher's error. `gpus`: number of GPUs that a front end sees; 0: those of this machine."""
    name, rest = Path(words[0]).name, list(words[1:])
    if name.startswith("python"):
        index = words.index("-m")
        name, rest = words[index + 1], list(words[index + 2 :])
    if name == "accelerate":
        if rest[:1] != ["launch"]:
            raise ValueError(f"accelerate {' '.join(rest[:1])} trains nothing; write accelerate launch")
        rest = rest[1:]
    if name in FRONT_ENDS:
        return _front_end(name, rest, gpus)
    if name.startswith("accelerate"):
        parsed = _accelerate(rest)
    elif name in ("torchrun", "torch.distributed.run", "torch.distributed.launch"):
        parsed = _torchrun(rest)
    else:
        parsed = _deepspeed(rest)
    return replace(parsed, at=len(words) - len(parsed.script.arguments) - 1)


def _accelerate(words: list[str]) -> ReadCommand:
    """accelerate 1.15.0: commands/launch.py, `launch_command`; utils/launch.py."""
    import torch
    from accelerate.commands import launch
    from accelerate.utils import launch as variables

    torch.cuda.is_available = lambda: True  # on the machine that will train
    torch.cuda.device_count = lambda: _UNKNOWN
    torch.cuda.is_bf16_supported = lambda *_: True
    arguments: Any = launch.launch_command_parser().parse_args(words)
    given = arguments.num_processes
    try:
        arguments, defaults, precision_of_config = launch._validate_launch_command(arguments)
    except (AttributeError, TypeError, ValueError, yaml.YAMLError) as error:
        from accelerate.commands.config.config_args import default_config_file

        path, why = Path(arguments.config_file or default_config_file), " ".join(str(error).split())
        raise ValueError(
            f"{why}; to find the mistake: {command('memkit', 'check', path)}" if path.is_file() else why
        ) from error
    if arguments.tpu or getattr(arguments, "compute_environment", "LOCAL_MACHINE") == "AMAZON_SAGEMAKER":
        raise ValueError("a TPU or SageMaker; memkit predicts GPUs: set distributed_type and compute_environment")
    nodes = int(arguments.num_machines or 1)
    if nodes > 1 and (missing := [name for name in _REQUIRED_FOR_NODES if getattr(arguments, name) is None]):
        raise ValueError(f"--num_machines {nodes}: give accelerate --{' and --'.join(missing)} too")
    processes = int(arguments.num_processes or 1)
    on_cpu = arguments.cpu or getattr(arguments, "use_cpu", False)
    if arguments.use_deepspeed and not on_cpu:
        fields = list(defaults.deepspeed_config.keys()) if defaults else []
        fields += ["mixed_precision"] if precision_of_config else []
        arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
        environment = variables.prepare_deepspeed_cmd_env(arguments)[1]
    elif (arguments.use_fsdp or arguments.use_megatron_lm or arguments.multi_gpu) and not on_cpu:
        environment = {**variables.prepare_multi_gpu_env(arguments), **_STARTED_BY_TORCHRUN}
    else:
        environment, processes = variables.prepare_simple_launcher_cmd_env(arguments)[1], 1
    all_gpus = defaults is None and given is None and processes == _UNKNOWN
    return ReadCommand(
        _script(arguments),
        gpus=None if all_gpus else max(1, processes // nodes),
        nodes=nodes,
        environment={name: value for name, value in environment.items() if os.environ.get(name) != value},
    )


def _torchrun(words: list[str]) -> ReadCommand:
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    arguments = get_args_parser().parse_args(words)
    minimum, maximum = parse_min_max_nnodes(arguments.nnodes)
    if minimum != maximum:
        raise ValueError(f"--nnodes {arguments.nnodes}: give one number of machines")
    per_node = arguments.nproc_per_node
    return ReadCommand(
        _script(arguments),
        gpus=int(per_node) if str(per_node).isdigit() else None,
        nodes=maximum,
        environment={**_STARTED_BY_TORCHRUN, **({"ACCELERATE_USE_CPU": "true"} if per_node == "cpu" else {})},
    )


def _deepspeed(words: list[str]) -> ReadCommand:
    """deepspeed 0.19.8: launcher/runner.py, `parse_args`, `parse_inclusion_exclusion`."""
    from deepspeed.launcher import runner

    arguments = runner.parse_args(words)
    if arguments.no_python:
        raise ValueError(_NO_PYTHON)
    if arguments.exclude or arguments.autotuning:
        raise ValueError("--exclude and --autotuning are not read; write --include, or --num_gpus")
    gpus, nodes = arguments.num_gpus, arguments.num_nodes
    if arguments.include:  # "host1:0,1@host2:0,1"
        hosts = [host.partition(":")[2] for host in arguments.include.split("@")]
        counts = {len(host.split(",")) if host else 0 for host in hosts}
        if len(counts) > 1:
            raise ValueError(f"--include {arguments.include}: give each machine as many GPUs")
        gpus, nodes = counts.pop(), len(hosts)
    elif Path(arguments.hostfile).is_file():
        slots = runner.fetch_hostfile(arguments.hostfile)
        nodes = nodes if nodes > 0 else len(slots)
        gpus = gpus if gpus > 0 else min(slots.values())
    script = UserScript(arguments.user_script, bool(arguments.module), tuple(arguments.user_args))
    return ReadCommand(script, gpus=gpus if gpus > 0 else None, nodes=max(1, nodes))


_GPU: Final = (9, 0)  # compute capability for which no front end refuses bf16


class _Started(BaseException):
    """Command that a front end would start; a BaseException, which front ends do not catch."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(" ".join(words))
        self.words, self.environment = list(words), dict(environment)


def _front_end(name: str, words: list[str], gpus: int) -> ReadCommand:
    (script,) = entry_points(group="console_scripts", name=name) or (None,)
    if script is None:
        raise ValueError(f"no command {name} is installed in the environment of {sys.executable}")
    if gpus:
        import torch

        when_imported("torch._dynamo.trace_rules", skip_own_functions)
        patch_cuda_device(_GPU, 2**40)
        torch.cuda.device_count = lambda: gpus
    before, output = dict(os.environ), sys.stdout
    sys.argv = [name, *words]
    package = re.compile(rf"(.*/)?{script.module.partition('.')[0]}[./]")

    def starts_itself(command: Sequence[str]) -> bool:
        return Path(command[0]).name.startswith("python") and any(map(package.match, command[1:3]))

    def raise_on_start(event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS:
            command, folder, environment = program_started(event, arguments)
            if starts_itself(command) or training_command(command, folder) is not None:
                raise _Started(command, environment)

    def run_exp(*args: Any, **kwargs: Any) -> None:
        raise _Started([sys.executable, "-m", "llamafactory.launcher", *sys.argv[1:]], os.environ)

    sys.addaudithook(raise_on_start)
    _patch_accelerate_launch()
    # LLaMA-Factory trains in its own process on one GPU; its launchers start this module (0.9.5: launcher.py).
    sys.modules["llamafactory.train.tuner"] = tuner = ModuleType("llamafactory.train.tuner")
    vars(tuner)["run_exp"] = run_exp
    sys.stdout = sys.stderr
    try:
        script.load()()
    except _Started as started:
        command = started.words
        changed = {key: value for key, value in started.environment.items() if before.get(key) != value}
    except SystemExit as exit_:
        if exit_.code:
            raise  # its output is shown
        raise ValueError("starts no training") from None
    else:
        raise ValueError("starts no training")
    finally:
        sys.stdout = output
        os.environ.clear()
        os.environ.update(before)
    os.environ.update(changed)
    if Path(command[0]).name.startswith("python") and "torch.distributed.run" not in command:
        index = command.index("-m") + 1 if "-m" in command[:2] else 1
        script_ = UserScript(command[index], index == 2, tuple(command[index + 1 :]))
        parsed = ReadCommand(script_, index, is_launcher=False)
    else:
        parsed = read_launch(command)
    return replace(parsed, environment={**changed, **parsed.environment}, command=tuple(command))


def _patch_accelerate_launch() -> None:
    """Handles TRL's function call of accelerate's launcher (trl 1.16.0: cli/accelerate_launcher.py; 0.18: cli.py)."""
    from accelerate.commands import launch

    make = launch.launch_command_parser

    def parser(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        parse = made.parse_args

        def parse_args(words: Any = None, *more: Any, **options: Any) -> Any:
            namespace = parse(words, *more, **options)
            namespace.memkit_words = list(words or ())
            return namespace

        made.parse_args = parse_args
        return made

    def command(arguments: Any) -> None:
        script = arguments.training_script
        options = arguments.memkit_words[: arguments.memkit_words.index(script)]
        raise _Started(["accelerate", "launch", *options, script, *arguments.training_script_args], os.environ)

    launch.launch_command_parser, launch.launch_command = parser, command


def _script(arguments: argparse.Namespace) -> UserScript:
    if arguments.no_python:
        raise ValueError(_NO_PYTHON)
    return UserScript(arguments.training_script, bool(arguments.module), tuple(arguments.training_script_args))


if __name__ == "__main__":
    try:
        answer = read_launch(sys.argv[3:], int(sys.argv[2]))
    except Exception as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        answer = ReadCommand(error=text)
    print(wire.dumps(answer))
