"""Runs a user's script in the child process until its training is traced, and explains why if it is not."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
import termios
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from hf_memkit.catalog.environments import Environment
from hf_memkit.catalog.hardware import Machine
from hf_memkit.catalog.library_versions import is_on
from hf_memkit.common.commands import command
from hf_memkit.common.errors import InputError, ScriptFailed, TraceFailed
from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction.allocator.settings import parse_settings
from hf_memkit.prediction.launch_command import DEEPSPEED, PARALLELISM, launchers_engine
from hf_memkit.prediction.trace.request import LIVE, SETUP, Device, ScriptRequest
from hf_memkit.prediction.traced_training import ULYSSES, BatchLengths, Outcome, TracedTraining
from hf_memkit.prediction.worker import Worker, lent_worker, shared_worker
from hf_memkit.setup.request import refuse_below_one
from hf_memkit.setup.techniques.allocator import user_settings


@dataclass(frozen=True, slots=True)
class ScriptJob:
    """A script, and where it is to train."""

    script: UserScript
    machine: Machine
    gpus: int = 1  # on each machine
    nodes: int = 1
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))  # that the script gets
    ram_is_given: bool = False  # the machine's RAM is the one in question; else it is if the GPU is this machine's
    began: float = field(default_factory=time.time)  # as in `ScriptRequest`
    other: Environment | None = None  # whose libraries it runs with; None: this process's


def is_live(script: UserScript) -> bool:
    """Whether the script is memkit's own, for objects of this process (`from_trainer.py`) or a setup."""
    return script.target in (LIVE, SETUP)


def name_of(script: UserScript) -> str:
    """`"train.py"` or `"-m trl.scripts.sft"`: the name of a script in sentences."""
    if is_live(script):
        return "this Trainer" if script.target == LIVE else "this setup"
    return script.name


def refuse_unpredictable(job: ScriptJob) -> None:
    """Raises the errors of `predict_script` that are known before anything runs."""
    refuse_below_one(gpus=job.gpus, nodes=job.nodes)
    refuse_unreadable(job.script, here=job.other is None)
    refuse_engine(job.script, job.environment)
    if (settings := user_settings(job.environment)) is not None:
        parse_settings(settings[1])  # refuses what torch would refuse, and what is not modelled


def refuse_unreadable(script: UserScript, *, here: bool = True) -> None:
    """Refuses a script that cannot run, before it runs: raises ScriptFailed if its syntax is wrong, and InputError if
    it cannot be read or found. `here`: in this environment, whose modules are known."""
    if is_live(script):
        return
    if script.is_module:
        package = script.target.partition(".")[0]
        if here and importlib.machinery.PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None:
            raise InputError(
                f"-m {script.target}: no module {package!r}; check its name, or run memkit where `python -m` finds it"
            )
        return
    path = Path(script.target)
    if path.suffix in (".json", ".yaml", ".yml"):
        raise InputError(
            f"{path}: not a Python script. For an argument file write --model NAME {command('--args', path)}; for a "
            f"recipe {command('--recipe', path)}; for a DeepSpeed JSON {command('memkit', 'check', path)}"
        )
    if path.is_dir():
        path /= "__main__.py"
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        text = "".join(traceback.format_exception_only(error))
        raise ScriptFailed(f"{script}: Python cannot parse it ({type(error).__name__})", text=text) from None


def refuse_engine(script: UserScript, environment: Mapping[str, str]) -> None:
    """Raises InputError if variables of `accelerate launch` choose an engine that is not modelled."""
    if is_live(script):
        return
    if is_on(environment.get(PARALLELISM)):
        if (ranks := environment.get(_ULYSSES_RANKS, "1")) != "1":
            raise InputError(f"{_ULYSSES_RANKS}={ranks}: {ULYSSES}")
        if not is_on(environment.get(DEEPSPEED)):  # with FSDP2, or without an engine, it is traced
            environment = {name: value for name, value in environment.items() if name != PARALLELISM}

    variable, engine = launchers_engine(environment) or ("", "")
    is_alone = engine != "FSDP" or not is_on(environment.get(DEEPSPEED))
    if engine not in ("", "DeepSpeed", "FSDP") or not is_alone:
        name = variable.partition("=")[0]
        fix = f"unset {name}" if name in os.environ else "change distributed_type, or the launcher's --use_… option,"
        raise InputError(
            f"{variable}: accelerate trains with {engine}, and this answer would be without it; {fix} to have an "
            "answer without it"
        )
    if is_on(environment.get(_ON_CPU)):
        raise InputError(f"{_ON_CPU}={environment[_ON_CPU]}: this training runs on the CPU; omit --cpu, or unset it")
    if (compiler := environment.get(_COMPILER, "no")).lower() not in ("no", ""):
        raise InputError(
            f"{_COMPILER}={compiler}: predicted only as an argument of the script. Set dynamo_backend to no, and give "
            f"the script torch_compile_backend={compiler.lower()}"
        )


@contextlib.contextmanager
def script_worker(other: Environment | None) -> Iterator[tuple[Worker, int | None]]:
    """(a worker for one script, file descriptor of its standard input): a copy of this process's, because the script
    may ask for input, or an empty one if it is closed."""
    try:
        stdin = os.dup(0)
    except OSError:
        stdin = os.open(os.devnull, os.O_RDONLY)
    before = termios.tcgetattr(stdin) if os.isatty(stdin) else None
    try:
        with lent_worker(other.python if other is not None else None) as worker:
            yield worker, stdin
    finally:
        # A script that is killed while it reads cannot restore the terminal's settings.
        if before is not None and termios.tcgetattr(stdin) != before:
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)
        os.close(stdin)


def script_request(job: ScriptJob) -> ScriptRequest:
    """The request to the child: the script, and the GPU that it will see."""
    gpu = job.machine.gpu
    capability = gpu.capability if gpu is not None else None
    if capability is None:
        capability = 8.0 if gpu is None or gpu.bf16 else 7.5
    request = ScriptRequest(
        job.script,
        folder=str(Path.cwd()),
        environment=dict(job.environment),
        capability=(int(capability), round(capability * 10) % 10),
        processes=job.gpus * job.nodes,
        per_node=job.gpus,
        began=job.began,
    )
    if gpu is not None:
        request = replace(request, capacity_bytes=gpu.capacity_bytes, gpu_name=f"NVIDIA {gpu.name}")
    return request


def run_and_trace(job: ScriptJob, worker: Worker, *, micro_batch_size: int | None = None) -> TracedTraining:
    """Traces a script's training; raises the errors of `predict_script`. `micro_batch_size`: as in `ScriptRequest`."""
    device, notes = trace_device(worker, job.script)
    request = replace(script_request(job), device=device, micro_batch_size=micro_batch_size)
    traced = training_of(job.script, run_in_worker(worker, request))
    return replace(traced, notes=(*notes, *traced.notes, *traced.notices))


def lengths_of(script: UserScript, machine: Machine, columns: Sequence[str]) -> BatchLengths:
    """Column lengths in a script's worst and typical batch, without a trace; raises the errors of `predict_script`."""
    request = script_request(ScriptJob(script, machine))
    worker = shared_worker()
    device, _ = trace_device(worker, script)
    outcome = run_in_worker(worker, replace(request, device=device, lengths_of=tuple(columns)))
    if outcome.lengths is None:
        raise _error_without_training(script, outcome)
    return outcome.lengths


def trace_device(worker: Worker, script: UserScript) -> tuple[Device, tuple[str, ...]]:
    """The device on which the worker traces scripts, and a note. Raises InputError if the worker does not start."""
    with worker_errors(script):
        worker.wait()
    return ("cuda" if worker.shim_error is None else "cpu"), tuple(cpu_notes(worker))


def cpu_notes(worker: Worker) -> list[str]:
    """A note if a worker that has started traces on the CPU."""
    if worker.shim_error is None:
        return []
    return [f"traced on fake CPU tensors, because fake CUDA tensors fail with this torch: {worker.shim_error}"]


def run_in_worker(worker: Worker, request: ScriptRequest) -> Outcome:
    """The script's outcome. Raises InputError if the worker dies."""
    with worker_errors(request.script):
        return worker.run(request)


@contextlib.contextmanager
def worker_errors(script: UserScript) -> Iterator[None]:
    """Within it the death of a worker becomes an InputError, with the last lines of its output."""
    try:
        yield
    except TraceFailed as failure:
        error = InputError(f"{name_of(script)} cannot be traced here: {failure}")
        if failure.details:  # such as the traceback of an import error
            error.add_note("\n".join(failure.details.splitlines()[-_LAST_LINES:]))
        raise error from failure


_LAST_LINES: Final = 20
_ULYSSES_RANKS: Final = "PARALLELISM_CONFIG_SP_SIZE"
_ON_CPU: Final = "ACCELERATE_USE_CPU"
_COMPILER: Final = "ACCELERATE_DYNAMO_BACKEND"


FIX_IT: Final = "fix it and try again"
"""The fix of a script that raised for an unknown reason."""


def training_of(script: UserScript, outcome: Outcome) -> TracedTraining:
    """The training of an outcome. Raises InputError or ScriptFailed if there is none, as `predict_script`."""
    if outcome.training is None:
        raise _error_without_training(script, outcome)
    return outcome.training


def _error_without_training(script: UserScript, outcome: Outcome) -> InputError:
    """The error for an outcome without a training."""
    if outcome.untrained is not None:
        message = f"{name_of(script)} ended without calling Trainer.train(): there is no training to trace"
        exited = outcome.untrained.exit
        if isinstance(exited, str):
            return ScriptFailed(message, text=exited)
        if exited:
            return InputError(f"{message} (exit code {exited})")
        if not any("do_train" in argument for argument in script.arguments):
            message += " (only Trainer's loop can be traced; many scripts train only with --do_train)"
        return InputError(message)
    if (error := outcome.failed) is not None:
        place = error.place or name_of(script)
        if not error.by_script:
            return InputError(f"{place}: {error.message}")
        message = f"{error.type}: {error.message}" if error.message else error.type
        fix = f"{FIX_IT}; report it if it happens only under memkit"
        if "Using fsdp only works in distributed training" in error.message:
            fix = "give the number of GPUs, such as --gpus 2"
        return ScriptFailed(
            f"{place}: {message.rstrip('.!')}; {fix}", text=error.text, place=place, arguments=error.arguments,
            refused_arguments=error.refused_arguments,
        )  # fmt: skip
    early = "before two steps were traced"
    if outcome.died == "SIGKILL":
        return InputError(
            f"{name_of(script)}: ended by SIGKILL {early}, usually because RAM ran out; to check, run: "
            f"sudo dmesg -T | grep -i 'killed process'. Free RAM, or read fewer rows"
        )
    why = outcome.died or "exit code 0"
    what = f": ended by {why}" if why.startswith("SIG") else f" ended its process ({why})"
    fix = "Call train() without memkit; report this if that works"
    if not is_live(script):
        target = ("-m", script.target) if script.is_module else (script.target,)
        alone = command("python", *target, *script.arguments)
        fix = f"Run it without memkit: {alone}; if that trains, measure it with memkit run"
    return InputError(f"{name_of(script)}{what} {early}. {fix}")
