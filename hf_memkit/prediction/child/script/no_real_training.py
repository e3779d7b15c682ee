"""A script whose training is predicted starts no other training: neither a launcher nor Python that could train.

| the script, or a library for it | what happens |
|---|---|
| starts a program that trains (`training_commands.py`) | the prediction ends, with the command and its line |
| trains in a process that it forks, or that multiprocessing or torch spawns | the same |
| starts another program | it runs |
"""

from __future__ import annotations

import contextlib
import multiprocessing.popen_forkserver
import multiprocessing.popen_spawn_posix
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import accelerate.launchers
import torch.multiprocessing

from hf_memkit.prediction.child.script.training_commands import training_command
from hf_memkit.prediction.child.users_code import MEMKIT, PYTHON, is_library, users_line
from hf_memkit.prediction.traced_training import Failed, Outcome

Refuse = Callable[[Outcome], NoReturn]

_TRACES: Final = "hf_memkit.prediction.child.serve"
"""What `hf_memkit.preset` starts where it sizes a batch: it trains nothing."""


def no_real_training(refuse: Refuse) -> None:
    """Until `train()` has been traced this process and its forks start no training. `refuse`: ends the script, and is
    given its result."""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in STARTS:
            return
        with contextlib.suppress(UnicodeError, TypeError, IndexError, OSError):  # the start itself will fail
            words, folder, environment = program_started(event, arguments)
            found = training_command(words, folder, environment)
            if found is not None and _TRACES not in words:
                instead = found.target or "the training script that it starts"
                refuse(_error(f"starts a real training: {found}. Give memkit what that runs: {instead}"))

    sys.addaudithook(audit)
    _nothing_is_spawned(refuse)


def trains_in_a_fork(refuse: Refuse) -> NoReturn:
    """For `Trainer.train()` in a process that the script has forked."""
    refuse(_error(f"calls train() in a process that it forks. {_HERE}"))


_HERE: Final = "Call it in the script's own process; --gpus N stands for the other ranks"


STARTS: Final = frozenset({"os.exec", "os.posix_spawn", "os.system", "pty.spawn", "subprocess.Popen"})
"""Audit events of Python that start a program (docs.python.org/3/library/audit_events.html). `os.spawn…` forks, and
that process raises `os.exec`."""


def program_started(event: str, arguments: tuple[Any, ...]) -> tuple[list[str], Path, Mapping[str, str]]:
    """Words, folder and variables of the program that an event of `STARTS` tells of."""
    folder = environment = None
    if event == "subprocess.Popen":
        program, rest, folder, environment = arguments
        words = [program, *list(rest)[1:]]
    elif event in ("os.exec", "os.posix_spawn"):
        program, rest, environment = arguments
        words = [program, *list(rest)[1:]]
    elif event == "os.system":
        words = ["sh", "-c", arguments[0]]
    else:
        words = list(arguments[0])
    variables: Mapping[str, str] = os.environ
    if environment is not None:
        variables = {os.fsdecode(name): os.fsdecode(each) for name, each in environment.items()}
    return list(map(os.fsdecode, words)), Path.cwd() / os.fsdecode(folder or ""), variables


def _nothing_is_spawned(refuse: Refuse) -> None:
    """A new Python that runs a function of the user's, in which nothing is replaced. Workers of pools and of data
    loaders start, whose function is a library's."""

    def start_processes(fn: Any, args: Any = (), *others: Any, **kwargs: Any) -> NoReturn:
        starts = next(filter(callable, args), fn)  # a launcher gives its own function the one to start
        refuse(_error(f"starts {_name(starts)} in processes of torch.multiprocessing. {_HERE}"))

    # The module's name is a function of its package (torch 2.13.0: multiprocessing/__init__.py).
    sys.modules["torch.multiprocessing.spawn"].start_processes = start_processes  # type: ignore[attr-defined]
    torch.multiprocessing.start_processes = start_processes  # type: ignore[attr-defined]
    # `notebook_launcher` would refuse libraries that memkit has imported (accelerate 1.15.0: launchers.py).
    accelerate.launchers.are_libraries_initialized = lambda *names: []
    kinds: tuple[Any, ...] = (multiprocessing.popen_spawn_posix.Popen, multiprocessing.popen_forkserver.Popen)
    for kind in kinds:
        kind._launch = _launching(kind._launch, refuse)


def _launching(launch: Any, refuse: Refuse) -> Any:
    def launched(popen: Any, process: Any) -> Any:
        target = getattr(process, "_target", None) or type(process).run
        code = getattr(getattr(target, "func", target), "__code__", None)
        if code is not None and not is_library(code.co_filename):
            refuse(_error(f"starts {_name(target)} in a new Python process. {_HERE}"))
        return launch(popen, process)

    return launched


def _name(function: Any) -> str:
    return f"{getattr(getattr(function, 'func', function), '__qualname__', function)}()"


def _error(what: str) -> Outcome:
    return Outcome(failed=Failed(False, "StartedTraining", what, _place(), ""))


def _place() -> str:
    """The user's line, or the library's that starts the process, if that is all that there is."""
    if line := users_line():
        return line
    for frame, number in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not file.startswith(("<", MEMKIT)) and (not file.startswith(PYTHON) or "-packages" in file):
            return f"{'/'.join(Path(file).parts[-3:])}, line {number}"
    return ""
