"""Stops a prediction whose script starts a real training in another process.

| the script, or a library on its behalf | result |
|---|---|
| starts a program that trains (`training_commands.py`) | the prediction ends, with the command and its line |
| trains in a process that it forks, or that multiprocessing or torch spawns | the same |
| starts another program | the program runs, and ends the prediction if it trains (`descendants.py`) |
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

from hf_memkit.prediction.child.script.descendants import Result, watch_descendants
from hf_memkit.prediction.child.script.file_guards import notice_program
from hf_memkit.prediction.child.script.training_commands import training_command
from hf_memkit.prediction.child.user_code import MEMKIT, PYTHON, is_library, users_line
from hf_memkit.prediction.traced_training import Failed, Outcome

Refuse = Callable[[Outcome], NoReturn]

_SERVER: Final = "hf_memkit.prediction.child.serve"
"""Module that `hf_memkit.preset` starts to size a batch; it trains nothing."""


def refuse_training_processes(refuse: Refuse, result: Result) -> None:
    """Refuses trainings here and in forks until `train()` is traced. `refuse` ends the script with its result."""
    renew_variables = watch_descendants(result)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in STARTS:
            return
        with contextlib.suppress(UnicodeError, TypeError, IndexError, OSError):  # starting the program will fail, too
            words, folder, _ = program_started(event, arguments)
            command = training_command(words, folder)
            if command is not None and _SERVER not in words:
                target = command.target or "the training script that it starts"
                refuse(_error(f"starts a real training: {command}. Give memkit what that runs: {target}"))
            notice_program(words)
        renew_variables()

    sys.addaudithook(audit)
    _refuse_spawning(refuse)


def refuse_forked_training(refuse: Refuse) -> NoReturn:
    """Refuses `Trainer.train()` in a process that the script has forked."""
    refuse(_error(f"calls train() in a process that it forks. {_FIX}"))


_FIX: Final = "Call it in the script's own process; --gpus N stands for the other ranks"


STARTS: Final = frozenset({"os.exec", "os.posix_spawn", "os.system", "pty.spawn", "subprocess.Popen"})
"""Audit events of Python for starting a program (docs.python.org/3/library/audit_events.html). `os.spawn…` forks, and
the new process raises `os.exec`."""


def program_started(event: str, arguments: tuple[Any, ...]) -> tuple[list[str], Path, Mapping[str, str]]:
    """(words, folder, environment variables) of the program in an event of `STARTS`."""
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
        variables = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    return list(map(os.fsdecode, words)), Path.cwd() / os.fsdecode(folder or ""), variables


def _refuse_spawning(refuse: Refuse) -> None:
    """Refuses new Python processes that run a function of the user's, without memkit's patches. Workers of pools and
    data loaders run a library's function, and start."""

    def start_processes(fn: Any, args: Any = (), *others: Any, **kwargs: Any) -> NoReturn:
        started = next(filter(callable, args), fn)  # a launcher passes the user's function as an argument
        refuse(_error(f"starts {_name(started)} in processes of torch.multiprocessing. {_FIX}"))

    # As an attribute of its package, the module's name is a function (torch 2.13.0: multiprocessing/__init__.py).
    sys.modules["torch.multiprocessing.spawn"].start_processes = start_processes  # type: ignore[attr-defined]
    torch.multiprocessing.start_processes = start_processes  # type: ignore[attr-defined]
    # `notebook_launcher` would refuse because memkit has imported libraries (accelerate 1.15.0: launchers.py).
    accelerate.launchers.are_libraries_initialized = lambda *names: []
    kinds: tuple[Any, ...] = (multiprocessing.popen_spawn_posix.Popen, multiprocessing.popen_forkserver.Popen)
    for kind in kinds:
        kind._launch = _launching(kind._launch, refuse)


def _launching(launch: Any, refuse: Refuse) -> Any:
    def launched(popen: Any, process: Any) -> Any:
        target = getattr(process, "_target", None) or type(process).run
        code = getattr(getattr(target, "func", target), "__code__", None)
        if code is not None and not is_library(code.co_filename):
            refuse(_error(f"starts {_name(target)} in a new Python process. {_FIX}"))
        return launch(popen, process)

    return launched


def _name(function: Any) -> str:
    return f"{getattr(getattr(function, 'func', function), '__qualname__', function)}()"


def _error(message: str) -> Outcome:
    return Outcome(failed=Failed(False, "StartedTraining", message, _place(), ""))


def _place() -> str:
    """The user's line, else the library's line that starts the process."""
    if line := users_line():
        return line
    for frame, number in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not file.startswith(("<", MEMKIT)) and (not file.startswith(PYTHON) or "-packages" in file):
            return f"{'/'.join(Path(file).parts[-3:])}, line {number}"
    return ""
