"""The child process: loads the libraries once, then forks a process for each case.

A line of JSON comes in, `{"request": …, "result": PATH, "limit_s": …}`; a line goes out when the case is over,
`{"status": "done" | "died" | "timeout", "signal": …}`. What the case came to stands in the file at PATH. A case may
change its process as it likes, and die in it: the next one starts from the same loaded libraries.

    python -m hf_memkit.prediction.child.serve
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hf_memkit.prediction.child.quick_imports import load_again

__all__ = ["serve"]


def serve() -> None:
    """Answers requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print where they like
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # nothing is computed
    shim = _load()
    print(json.dumps({"ready": True, "shim": shim}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        answer, modules = _supervised(job)
        print(json.dumps(answer), file=answers, flush=True)
        load_again(modules)  # while nobody waits


def _load() -> str | None:
    """Imports what every case needs; returns why fake CUDA tensors cannot be used, or None if they can."""
    import torch

    from hf_memkit.prediction.child import cuda_device_guard
    from hf_memkit.prediction.child.fake_gpu import replace_compiler
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

        import hf_memkit.prediction.child.training  # noqa: F401 - each case would import it again
        from hf_memkit.prediction.child.fast_fakes import quick_dispatch
        from hf_memkit.prediction.child.tracer import StorageTracer
    quick_dispatch(StorageTracer)
    # Asked before they look whether a data set, or a model, is one of these libraries': it is not, as long as nobody
    # has imported them.
    transformers.trainer.is_datasets_available = lambda: is_loaded("datasets")
    accelerate.utils.other.is_deepspeed_available = lambda: is_loaded("deepspeed")
    return _forked(cuda_device_guard.self_test, 60)  # now: a backward pass loads much of what is loaded here anyway


def _supervised(job: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """How the case ended, and the modules that it imported."""
    result = Path(job["result"])
    modules = result.with_name("modules.json")
    if "script" in job:
        why = _forked(lambda: _script(job["script"], result), None)
    else:
        why = _forked(lambda: _case(job["request"], result, modules), float(job["limit_s"]))
    imported = json.loads(modules.read_text()) if why is None and modules.exists() else []
    return {"status": "done" if why is None else "died", "why": why}, imported


def _case(request: dict[str, Any], result: Path, modules: Path) -> None:
    """Traces one training and writes what came of it: a trace, or the error; and which modules it imported."""
    from hf_memkit.errors import MemkitError
    from hf_memkit.prediction.child.training import trace_training
    from hf_memkit.prediction.trace_request import TraceRequest

    before = set(sys.modules)
    try:
        started = time.monotonic()
        trace = trace_training(TraceRequest.from_json(request))
        content = {"trace": trace.to_json(), "seconds": time.monotonic() - started}
    except Exception as error:
        content = {
            "error": {
                "type": type(error).__name__,
                "message": str(error),
                "ours": isinstance(error, MemkitError),
                "traceback": traceback.format_exc()[-4000:],
            }
        }
    result.write_text(json.dumps(content))
    modules.write_text(json.dumps([name for name in sys.modules if name not in before]))


def _script(request: dict[str, Any], result: Path) -> None:
    from hf_memkit.prediction.child.script import run_script
    from hf_memkit.prediction.trace_request import ScriptRequest

    run_script(ScriptRequest.from_json(request), result)


def _forked(function: Callable[[], None], limit_s: float | None) -> str | None:
    """Runs `function` in a process of its own. None if it ended well, or how it ended: a signal, a time limit."""
    child = os.fork()
    if child == 0:
        _leave(function)
    watched = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([watched], [], [], limit_s)
        if not ready:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(watched)
    _, status = os.waitpid(child, 0)
    if not ready:
        return f"no answer within {limit_s:g} s"
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    code = os.waitstatus_to_exitcode(status)
    return None if code == 0 else f"exit code {code}"


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
