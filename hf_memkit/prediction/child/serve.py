"""The child process: loads the libraries once, then forks a process for each case.

A line of JSON comes in, a `Case`; a line goes out when the case is over, `{"why": …}`: how its process died, null if
it did not. What it came to stands in the file that the case names. Files come through the socket whose number is the
argument. A case may change its process as it likes, and die in it.

When standard input ends, because the one that asks is done or gone, a case that runs is ended, with all that it
started, and the folders are removed that the other one made for it; so is what a script leaves when its case is over.

    python -m hf_memkit.prediction.child.serve SOCKET
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

import psutil

from hf_memkit.common.ended_with_parent import end_with
from hf_memkit.prediction import wire
from hf_memkit.prediction.child.quick_imports import load_again
from hf_memkit.prediction.trace.request import SETUP, Case, ReadCommand, ScriptRequest
from hf_memkit.prediction.traced_training import Failed, Outcome

_MODULES: Final = "modules.json"
"""Beside the result: what the case imported, which is imported here for the cases after it."""

_TAKES_ORPHANS: Final = 36  # linux/prctl.h: PR_SET_CHILD_SUBREAPER


def serve() -> None:
    """Answers requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the one that asks ends all of this
    ctypes.CDLL(None).prctl(_TAKES_ORPHANS, 1)
    answers = os.fdopen(os.dup(1), "w")
    files = socket.socket(fileno=int(sys.argv[1]))
    files.set_inheritable(False)
    os.dup2(2, 1)  # libraries print where they like
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # nothing is computed
    with _ended_with_input():
        shim = _load()
    if shim is None:  # a backward pass loads much of what is loaded anyway
        from hf_memkit.prediction.child.gpu.cuda_device_guard import self_test

        shim = _forked(self_test, 60)
    print(json.dumps({"ready": True, "shim": shim}), file=answers, flush=True)
    for line in sys.stdin:
        case = wire.read(Case, line)
        given = socket.recv_fds(files, 1, case.files)[1] if case.files else []
        why, modules = _supervised(case, given, answers.fileno())
        for number in given:
            os.close(number)
        print(json.dumps({"why": why}), file=answers, flush=True)
        load_again(modules)  # while nobody waits


@contextlib.contextmanager
def _ended_with_input() -> Iterator[None]:
    """Loading takes seconds. Within it this process ends as soon as standard input does."""
    loaded = os.eventfd(0)

    def wait() -> None:
        poll = select.poll()
        poll.register(0, 0)
        poll.register(loaded, select.POLLIN)
        if loaded not in dict(poll.poll()):
            os._exit(0)

    waits = threading.Thread(target=wait)
    waits.start()
    try:
        yield
    finally:
        os.eventfd_write(loaded, 1)
        waits.join()
        os.close(loaded)


def _load() -> str | None:
    """Imports what every case needs; returns why fake CUDA tensors cannot be used, as far as that is known."""
    import torch

    from hf_memkit.prediction.child.gpu import cuda_device_guard
    from hf_memkit.prediction.child.gpu.fake_gpu import replace_compiler
    from hf_memkit.prediction.child.quick_imports import import_late, is_loaded, quick_imports

    torch.set_num_threads(1)
    try:
        cuda_device_guard.install()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    replace_compiler()  # what is to be compiled already when it is imported would load the compiler
    with quick_imports():
        import_late("datasets")
        import accelerate.utils.other
        import transformers.trainer

        import hf_memkit.prediction.child.script.script  # noqa: F401 - each case would import it again
        from hf_memkit.prediction.child.tracer.fast_fakes import quick_dispatch
        from hf_memkit.prediction.child.tracer.tracer import StorageTracer
    quick_dispatch(StorageTracer)
    # Asked before they look whether a data set, or a model, is one of these libraries': it is not, as long as nobody
    # has imported them.
    transformers.trainer.is_datasets_available = lambda: is_loaded("datasets")
    accelerate.utils.other.is_deepspeed_available = lambda: is_loaded("deepspeed")
    return None


def _supervised(case: Case, files: list[int], answers: int) -> tuple[str | None, list[str]]:
    """How the case died, and the modules that it imported, if the script was memkit's own."""
    from hf_memkit.prediction.child.script.trainers_folder import MADE, remove_made

    result = Path(case.result)
    modules = result.with_name(_MODULES)

    def over() -> None:
        _end_what_is_left()
        remove_made(result.with_name(MADE))

    def given_up() -> None:
        over()
        for folder in (str(result.parent), case.script.forks if case.script is not None else None):
            if folder is not None:  # whoever made it was killed
                shutil.rmtree(folder, ignore_errors=True)

    def does() -> None:
        os.close(answers)  # what the script starts may outlive this process
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # never the requests
        if case.script is not None:
            _script(case.script, files, result)
        else:
            _command(case, result)

    why = _forked(does, None, given_up)
    over()
    return why, json.loads(modules.read_text()) if why is None and modules.exists() else []


def _script(request: ScriptRequest, files: list[int], result: Path) -> None:
    """Runs a user's script with its own standard input and output. What fails before its first line is a result, too:
    a library that another one does not fit, say."""
    if files:
        stdin, output = files
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        request = replace(request, stdin=stdin)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    faulthandler.enable(all_threads=False)  # shows the line of a SIGSEGV
    try:
        from hf_memkit.prediction.child.script.script import run_script

        before = set(sys.modules)
        run_script(request, result)
        if request.script.target == SETUP:
            imported = [name for name in sys.modules if name not in before]
            result.with_name(_MODULES).write_text(json.dumps(imported))
    except Exception as error:
        failed = Failed(True, type(error).__name__, str(error), "", traceback.format_exc())
        result.write_text(wire.written(Outcome(failed=failed)))


def _command(case: Case, result: Path) -> None:
    """Reads the command of a launcher, whose parser says what is wrong before it ends the process."""
    printed = result.with_name("printed")
    output = os.open(printed, os.O_RDWR | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(case.environment)
    os.chdir(case.folder)
    try:
        from hf_memkit.prediction.child.script.read_launch import read_launch

        found = read_launch(list(case.command))
    except Exception as error:
        found = ReadCommand(error=(str(error).strip().splitlines() or [type(error).__name__])[0])
    except SystemExit as left:
        sys.stdout.flush()
        lines = [line for line in printed.read_text(errors="replace").splitlines() if line.strip()]
        why = lines[-1] if lines and left.code else f"its parser ended: exit code {left.code}"
        found = ReadCommand(error=why.rpartition("error: ")[2] if left.code else "starts no training; omit --help")
    result.write_text(wire.written(found))


def _forked(
    function: Callable[[], None], limit_s: float | None, given_up: Callable[[], None] | None = None
) -> str | None:
    """Runs `function` in a process of its own. None if it ended well, or how it ended: a signal, a time limit. Where
    nobody waits any more, `given_up` is called last."""
    server = os.getpid()
    child = os.fork()
    if child == 0:
        end_with(server)
        _leave(function)
    watched = os.pidfd_open(child)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.register(0, 0)  # reports when the other end is closed
    try:
        happened = dict(poll.poll(None if limit_s is None else 1000 * limit_s))
        if watched not in happened:
            os.kill(child, signal.SIGKILL)
        if happened.get(0, 0) & select.POLLHUP:
            (given_up or _end_what_is_left)()
            os._exit(0)
    finally:
        os.close(watched)
    _, status = os.waitpid(child, 0)
    if not happened:
        return f"no answer within {limit_s:g} s"
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    code = os.waitstatus_to_exitcode(status)
    return None if code == 0 else f"exit code {code}"


def _end_what_is_left() -> None:
    """Ends all processes below this one: orphans of a case are this one's children."""
    until = time.monotonic() + 5
    left = True
    while left and time.monotonic() < until:
        left = False
        for each in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.status() != psutil.STATUS_ZOMBIE:
                    left = True
                    each.kill()
        if left:
            time.sleep(0.01)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _leave(function: Any) -> NoReturn:
    """Runs `function` and ends the process at once. An ordinary exit runs destructors: after a case they look for a
    GPU that does not exist, and in the server itself they have been seen to end it with SIGSEGV."""
    code = 1
    with contextlib.suppress(BaseException):
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(serve)
