"""Processes that end when their parent process ends, even if the parent was killed.

Linux sends a parent-death signal when the *thread* that started a process ends (prctl(2), PR_SET_PDEATHSIG). So:

| the process | what it does |
|---|---|
| is forked by a long-lived thread | `end_with`, first thing |
| is a program, started by a long-lived thread | `Popen(preexec_fn=ends_with_this())` |
| is forked by any thread | `watch`: another thread of it waits for the parent's end |
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any, Final

_DEATH_SIGNAL: Final = 1  # linux/prctl.h: PR_SET_PDEATHSIG


def end_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Send this process the signal `by` when the thread that forked it ends."""
    _end_with(ctypes.CDLL(None).prctl, parent, by)


def describe_death(status: int) -> str | None:
    """How a process with this status of `os.waitpid` died: `"SIGKILL"`, `"exit code 1"`; None: it did not."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}" if code else None


def ends_with_this(by: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn` that sends the new program the signal `by` when this thread ends. SIGTERM is for launchers, which
    then end their ranks; SIGKILL for programs that may handle SIGTERM otherwise."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # before the fork: afterwards a lock may be held
    return lambda: _end_with(prctl, parent, by)


def _end_with(prctl: Any, parent: int, by: signal.Signals) -> None:
    prctl(_DEATH_SIGNAL, by)
    if os.getppid() != parent:  # the parent ended before this call
        os._exit(1)


def watch(parent: int) -> None:
    """End this process when `parent` has ended, whichever thread forked it."""
    watched = select.poll()
    try:
        watched.register(os.pidfd_open(parent), select.POLLIN)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent:  # the parent ended before this call, and another process has its number
        os._exit(1)

    def wait() -> None:
        watched.poll()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
