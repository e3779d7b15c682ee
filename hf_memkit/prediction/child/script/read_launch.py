"""What a launcher or a front end would start, read by its own code: nothing is started. The answer is a line of JSON,
a `ReadCommand`.

    python -m hf_memkit.prediction.child.script.read_launch --gpus 1 accelerate launch train.py

A front end (`trl sft`, `llamafactory-cli train`, `axolotl train`, `swift sft`) runs up to where it starts its
launcher, or the training: that is the command which is read, and which the answer has as `command`. It finds as many
GPUs as `--gpus N` says; with 0 those of this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import yaml

from hf_memkit.common.user_script import UserScript
from hf_memkit.common.when_imported import when_imported
from hf_memkit.prediction import wire
from hf_memkit.prediction.child.gpu.fake_gpu import no_function_has_rules, one_gpu
from hf_memkit.prediction.child.script.no_real_training import STARTS, program_started
from hf_memkit.prediction.child.script.training_commands import training_command
from hf_memkit.prediction.launch_command import FRONT_ENDS
from hf_memkit.prediction.trace.request import ReadCommand

_UNKNOWN: Final = 3
"""Stands for the number of GPUs of the machine that will train, which is unknown here. accelerate asks only whether
there are several."""

_OF_MACHINES: Final = ("machine_rank", "main_process_ip")
"""What accelerate needs to know where several machines train: without it, it fails."""

_NO_PYTHON: Final = "--no_python: the program is no Python script; omit it"


def read_launch(words: Sequence[str], gpus: int = 0) -> ReadCommand:
    """What a command would start. It begins with a launcher, a front end, or `python -m` and a launcher's module.

    Args:
        words: the command.
        gpus: what a front end finds; 0: the GPUs of this machine.

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
    if name in FRONT_ENDS:
        return _front_end(name, rest, gpus)
    if name.startswith("accelerate"):
        found = _accelerate(rest)
    elif name in ("torchrun", "torch.distributed.run", "torch.distributed.launch"):
        found = _torchrun(rest)
    else:
        found = _deepspeed(rest)
    return replace(found, at=len(words) - len(found.script.arguments) - 1)


def _accelerate(words: list[str]) -> ReadCommand:
    """accelerate 1.15.0: commands/launch.py, `launch_command`; utils/launch.py."""
    import torch
    from accelerate.commands import launch
    from accelerate.utils import launch as variables

    torch.cuda.is_available = lambda: True  # of the machine that will train
    torch.cuda.device_count = lambda: _UNKNOWN
    torch.cuda.is_bf16_supported = lambda *_: True
    arguments: Any = launch.launch_command_parser().parse_args(words)
    given = arguments.num_processes
    try:
        arguments, defaults, precision_of_config = launch._validate_launch_command(arguments)
    except (AttributeError, TypeError, ValueError, yaml.YAMLError) as error:
        from accelerate.commands.config.config_args import default_config_file

        path, why = Path(arguments.config_file or default_config_file), " ".join(str(error).split())
        raise ValueError(f"{why}; to find the mistake: memkit check {path}" if path.is_file() else why) from error
    if arguments.tpu or getattr(arguments, "compute_environment", "LOCAL_MACHINE") == "AMAZON_SAGEMAKER":
        raise ValueError("a TPU or SageMaker; memkit predicts GPUs: set distributed_type and compute_environment")
    nodes = int(arguments.num_machines or 1)
    if nodes > 1 and (missing := [name for name in _OF_MACHINES if getattr(arguments, name) is None]):
        raise ValueError(f"--num_machines {nodes}: give accelerate --{' and --'.join(missing)} too")
    processes = int(arguments.num_processes or 1)
    on_cpu = arguments.cpu or getattr(arguments, "use_cpu", False)
    if arguments.use_deepspeed and not on_cpu:
        fields = list(defaults.deepspeed_config.keys()) if defaults else []
        fields += ["mixed_precision"] if precision_of_config else []
        arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
        environment = variables.prepare_deepspeed_cmd_env(arguments)[1]
    elif (arguments.use_fsdp or arguments.use_megatron_lm or arguments.multi_gpu) and not on_cpu:
        environment = variables.prepare_multi_gpu_env(arguments)
    else:
        environment, processes = variables.prepare_simple_launcher_cmd_env(arguments)[1], 1
    everything = defaults is None and given is None and processes == _UNKNOWN
    return ReadCommand(
        _script(arguments),
        gpus=None if everything else max(1, processes // nodes),
        nodes=nodes,
        environment={name: each for name, each in environment.items() if os.environ.get(name) != each},
    )


def _torchrun(words: list[str]) -> ReadCommand:
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    arguments = get_args_parser().parse_args(words)
    least, most = parse_min_max_nnodes(arguments.nnodes)
    if least != most:
        raise ValueError(f"--nnodes {arguments.nnodes}: give one number of machines")
    each = arguments.nproc_per_node
    return ReadCommand(
        _script(arguments),
        gpus=int(each) if str(each).isdigit() else None,
        nodes=most,
        environment={"ACCELERATE_USE_CPU": "true"} if each == "cpu" else {},
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
        hosts = [each.partition(":")[2] for each in arguments.include.split("@")]
        counts = {len(each.split(",")) if each else 0 for each in hosts}
        if len(counts) > 1:
            raise ValueError(f"--include {arguments.include}: give each machine as many GPUs")
        gpus, nodes = counts.pop(), len(hosts)
    elif Path(arguments.hostfile).is_file():
        slots = runner.fetch_hostfile(arguments.hostfile)
        nodes = nodes if nodes > 0 else len(slots)
        gpus = gpus if gpus > 0 else min(slots.values())
    script = UserScript(arguments.user_script, bool(arguments.module), tuple(arguments.user_args))
    return ReadCommand(script, gpus=gpus if gpus > 0 else None, nodes=max(1, nodes))


_GPU: Final = (9, 0)
"""Its compute capability: no front end refuses bf16 there."""


class _Started(BaseException):
    """What a front end starts: nothing of it catches this."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(" ".join(words))
        self.words, self.environment = list(words), dict(environment)


def _front_end(name: str, words: list[str], gpus: int) -> ReadCommand:
    (script,) = entry_points(group="console_scripts", name=name) or (None,)
    if script is None:
        raise ValueError(f"no command {name} is installed in the environment of {sys.executable}")
    if gpus:
        import torch

        when_imported("torch._dynamo.trace_rules", no_function_has_rules)
        one_gpu(_GPU, 2**40)
        torch.cuda.device_count = lambda: gpus
    before, output = dict(os.environ), sys.stdout
    sys.argv = [name, *words]
    sys.addaudithook(_ends_where_it_starts)
    _accelerate_is_a_program()
    _trains_at_once()
    sys.stdout = sys.stderr
    try:
        script.load()()
    except _Started as started:
        command = started.words
        changed = {key: each for key, each in started.environment.items() if before.get(key) != each}
    except SystemExit as left:
        if left.code:
            raise  # what it has said is shown
        raise ValueError("starts no training") from None
    else:
        raise ValueError("starts no training")
    finally:
        sys.stdout = output
        os.environ.clear()
        os.environ.update(before)
    os.environ.update(changed)
    if Path(command[0]).name.startswith("python") and "torch.distributed.run" not in command:
        at = command.index("-m") + 1 if "-m" in command[:2] else 1
        found = ReadCommand(UserScript(command[at], at == 2, tuple(command[at + 1 :])), at, is_launcher=False)
    else:
        found = read_launch(command)
    return replace(found, environment={**changed, **found.environment}, command=tuple(command))


def _ends_where_it_starts(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTS:
        words, folder, environment = program_started(event, arguments)
        if training_command(words, folder, environment) is not None:
            raise _Started(words, environment)


def _accelerate_is_a_program() -> None:
    """TRL calls accelerate's launcher as a function (trl 1.16.0: cli/accelerate_launcher.py; 0.18: cli.py)."""
    from accelerate.commands import launch

    make = launch.launch_command_parser

    def parser(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        parse = made.parse_args

        def parse_args(words: Any = None, *more: Any, **options: Any) -> Any:
            found = parse(words, *more, **options)
            found.memkit_words = list(words or ())
            return found

        made.parse_args = parse_args
        return made

    def command(arguments: Any) -> None:
        at = arguments.memkit_words.index(arguments.training_script)
        options = arguments.memkit_words[:at]
        words = [*options, arguments.training_script, *arguments.training_script_args]
        raise _Started(["accelerate", "launch", *words], os.environ)

    launch.launch_command_parser, launch.launch_command = parser, command


def _trains_at_once() -> None:
    """LLaMA-Factory trains in its own process on one GPU; its launchers start this module (llamafactory 0.9.5:
    launcher.py)."""

    def run_exp(*args: Any, **kwargs: Any) -> None:
        raise _Started([sys.executable, "-m", "llamafactory.launcher", *sys.argv[1:]], os.environ)

    sys.modules["llamafactory.train.tuner"] = tuner = ModuleType("llamafactory.train.tuner")
    vars(tuner)["run_exp"] = run_exp


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
    print(wire.written(answer))
