"""Entry of the child process: loads the libraries once, then forks a process for each case.

Input: a line of JSON per case, a `Case`. Output: a line when the case has ended, `{"why": …}`: how its process died,
or null. The case writes its result to the file that it names. File descriptors come through the socket whose number is
the argument. A case may change its process in any way, and crash it.

When standard input closes, because the asking process is done or dead, a running case is killed with all its
processes, and the folders that the asking process made for it are removed. A script's leftovers are removed when its
case ends.

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

from hf_memkit.common.ended_with_parent import describe_death, end_with
from hf_memkit.prediction import wire
from hf_memkit.prediction.child.output import flush_output
from hf_memkit.prediction.child.quick_imports import preload
from hf_memkit.prediction.trace.request import SETUP, Case, ReadCommand, ScriptRequest
from hf_memkit.prediction.traced_training import Failed, Outcome

_MODULES: Final = "modules.json"
"""File next to the result with the modules that the case imported, which are preloaded for the next cases."""

_ENDING: Final = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)

_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h


def serve() -> None:
    """Serves cases until standard input closes."""
    # The asking process ends this one, which then removes what a script left. All of a terminal or job get a signal.
    for number in (signal.SIGINT, *_ENDING):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    answers = os.fdopen(os.dup(1), "w")
    files = socket.socket(fileno=int(sys.argv[1]))
    files.set_inheritable(False)
    os.dup2(2, 1)  # libraries print to standard output
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # nothing is computed
    with _exits_with_stdin():
        shim = _load()
    if shim is None:  # a backward pass also loads much that cases need
        from hf_memkit.prediction.child.gpu.cuda_device_guard import self_test

        shim = _run_in_fork(self_test, 60)
    print(json.dumps({"ready": True, "shim": shim}), file=answers, flush=True)
    for line in sys.stdin:
        case = wire.loads(Case, line)
        descriptors = socket.recv_fds(files, 1, case.files)[1] if case.files else []
        why, modules = _run_case(case, descriptors, answers.fileno())
        for descriptor in descriptors:
            os.close(descriptor)
        print(json.dumps({"why": why}), file=answers, flush=True)
        preload(modules)  # nobody waits now


@contextlib.contextmanager
def _exits_with_stdin() -> Iterator[None]:
    """Within it this process exits as soon as standard input closes: loading takes seconds."""
    loaded = os.eventfd(0)

    def wait() -> None:
        poll = select.poll()
        poll.register(0, 0)
        poll.register(loaded, select.POLLIN)
        if loaded not in dict(poll.poll()):
            os._exit(0)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(loaded, 1)
        thread.join()
        os.close(loaded)


def _load() -> str | None:
    """Imports what every case needs; returns why fake CUDA tensors are unavailable, if known by now."""
    import torch

    from hf_memkit.prediction.child.gpu import cuda_device_guard
    from hf_memkit.prediction.child.gpu.fake_gpu import replace_compiler
    from hf_memkit.prediction.child.quick_imports import import_lazily, is_loaded, quick_imports

    torch.set_num_threads(1)
    try:
        cuda_device_guard.install()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    replace_compiler()  # functions that are compiled on import would load the compiler
    with quick_imports():
        import_lazily("datasets")
        import accelerate.utils.other
        import transformers.trainer

        import hf_memkit.prediction.child.script.script  # noqa: F401 - each case would import it again
        from hf_memkit.prediction.child.gpu.flash_attn_package import availability
        from hf_memkit.prediction.child.script import network
        from hf_memkit.prediction.child.tracer.fast_fakes import speed_up_dispatch
        from hf_memkit.prediction.child.tracer.tracer import StorageTracer
    speed_up_dispatch(StorageTracer)
    # Checks whether a data set or a model belongs to these libraries, which is impossible before they are imported.
    transformers.trainer.is_datasets_available = lambda: is_loaded("datasets")
    for names in (network.NAMES, availability()):
        list(names.places())
    accelerate.utils.other.is_deepspeed_available = lambda: is_loaded("deepspeed")
    return None


def _run_case(case: Case, files: list[int], answers: int) -> tuple[str | None, list[str]]:
    """Runs a case; returns how it died, and the modules that it imported if the script was memkit's own."""
    from hf_memkit.prediction.child.script.output_folder import RECORD, remove_recorded

    result = Path(case.result)
    modules = result.with_name(_MODULES)

    def clean_up() -> None:
        _kill_descendants()
        remove_recorded(result.with_name(RECORD))

    def abandon() -> None:
        clean_up()
        for folder in (str(result.parent), case.script.forks if case.script is not None else None):
            if folder is not None:  # the process that made it was killed
                shutil.rmtree(folder, ignore_errors=True)

    def run() -> None:
        os.close(answers)  # processes that the script starts may outlive this one
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # hides the requests
        if case.script is not None:
            _run_script(case.script, files, result)
        else:
            _parse_command(case, result)

    why = _run_in_fork(run, None, abandon)
    clean_up()
    imported = json.loads(modules.read_text()) if why is None and modules.exists() else []
    return why, imported


def _run_script(request: ScriptRequest, files: list[int], result: Path) -> None:
    """Runs a user's script with its own standard input and output. An error before its first line, such as
    incompatible libraries, is a result, too."""
    if files:
        stdin, output = files
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        request = replace(request, stdin=stdin)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    faulthandler.enable(all_threads=False)  # prints the line of a SIGSEGV
    try:
        from hf_memkit.prediction.child.script.script import run_script

        before = set(sys.modules)
        run_script(request, result)
        if request.script.target == SETUP:
            imported = [name for name in sys.modules if name not in before]
            result.with_name(_MODULES).write_text(json.dumps(imported))
    except Exception as error:
        failed = Failed(True, type(error).__name__, str(error), "", traceback.format_exc())
        result.write_text(wire.dumps(Outcome(failed=failed)))


def _parse_command(case: Case, result: Path) -> None:
    """Parses a launcher's command; the parser prints errors before it exits."""
    printed = result.with_name("printed")
    output = os.open(printed, os.O_RDWR | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(case.environment)
    os.chdir(case.folder)
    try:
        from hf_memkit.prediction.child.script.read_launch import read_launch

        parsed = read_launch(list(case.command))
    except Exception as error:
        parsed = ReadCommand(error=(str(error).strip().splitlines() or [type(error).__name__])[0])
    except SystemExit as exit_:
        sys.stdout.flush()
        why = "starts no training; omit --help"
        if exit_.code:
            lines = [line for line in printed.read_text(errors="replace").splitlines() if line.strip()]
            why = lines[-1].rpartition("error: ")[2] if lines else f"its parser ended: exit code {exit_.code}"
        parsed = ReadCommand(error=why)
    result.write_text(wire.dumps(parsed))


def _run_in_fork(
    function: Callable[[], None], limit_s: float | None, abandon: Callable[[], None] | None = None
) -> str | None:
    """Runs `function` in a forked process; returns None, or how it died: exit code, signal, time limit. If standard
    input closes, calls `abandon` and exits."""
    server = os.getpid()
    child = os.fork()
    if child == 0:
        for ending in _ENDING:
            signal.signal(ending, signal.SIG_DFL)
        end_with(server)
        _run_and_exit(function)
    watched = os.pidfd_open(child)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.register(0, 0)  # reports when the other end closes
    try:
        events = dict(poll.poll(None if limit_s is None else 1000 * limit_s))
        if watched not in events:
            os.kill(child, signal.SIGKILL)
        if events.get(0, 0) & select.POLLHUP:
            (abandon or _kill_descendants)()
            os._exit(0)
    finally:
        os.close(watched)
    _, status = os.waitpid(child, 0)
    if not events:
        return f"no answer within {limit_s:g} s"
    return describe_death(status)


def _kill_descendants() -> None:
    """Kills all processes below this one; orphans of a case became its children."""
    until = time.monotonic() + 5
    running = True
    while running and time.monotonic() < until:
        running = False
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    running = True
                    process.kill()
        if running:
            time.sleep(0.01)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _run_and_exit(function: Any) -> NoReturn:
    """Runs `function` and ends the process at once, without destructors. After a case they look for a GPU that does
    not exist; in the server itself they ended it with SIGSEGV."""
    code = 1
    with contextlib.suppress(BaseException):
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
    flush_output()
    os._exit(code)


# Python keeps the frames of nested calls in pieces of memory of 16 KiB, and asks the system for each and gives it back
# again and again where the depth of calls varies around its end, as in dynamo. The piece that holds a frame as large
# as this has room for all calls within it.
_run_and_exit.__code__ = _run_and_exit.__code__.replace(co_stacksize=70_000)


if __name__ == "__main__":
    _run_and_exit(serve)
