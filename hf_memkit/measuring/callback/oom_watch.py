"""Catch the exception that ends a training.

Trainer has no event for exceptions of training. They are seen in `sys.excepthook`, which Python calls for uncaught
exceptions, and in `oom_advice()`, for notebooks, where that hook is not called, and for scripts that catch exceptions.
The exception continues as the same object with the same arguments and traceback. For Ctrl-C the signal is also
recorded and passed to its handler: a script may catch the handler's exception, and another rank fails when its
connection is lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from hf_memkit.measuring.callback.oom_note import add_note, advice_from_text, frames

_watches: weakref.WeakSet[ExceptionWatch] = weakref.WeakSet()


class ExceptionWatch:
    """Waits for the exception that ends one training and calls `on_exception`, a method whose object is referenced
    weakly. An exception that has not passed through the Trainer with `callback` belongs to other code."""

    def __init__(self, callback: object, on_exception: Callable[[BaseException], object]) -> None:
        self._callback = weakref.ref(callback)
        self._on_exception = weakref.WeakMethod(on_exception)
        self._links: list[_Link] = []
        self._process = os.getpid()
        self.ctrl_c = False
        """Whether a SIGINT has interrupted this training."""

    def start(self) -> None:
        """Start watching. `stop` must be called when training ends without an exception."""
        _watches.add(self)
        _remove_dead_hooks()
        sys.excepthook = hook = _Hook(self, sys.excepthook)
        self._links = [hook]
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._links.append(link := _CtrlC(self, handler))
            signal.signal(signal.SIGINT, link)

    def stop(self) -> None:
        """Stop watching, and remove the hooks. Safe to repeat."""
        _watches.discard(self)
        for link in self._links:
            link.stop()
        self._links = []
        _remove_dead_hooks()

    def on_interrupt(self, frame: FrameType | None) -> None:
        """Record that a SIGINT has interrupted `frame`."""
        callback = self._callback()
        while frame is not None and callback is not None and not self.ctrl_c:
            self.ctrl_c = _is_trainer_with(callback, frame)
            frame = frame.f_back

    def handle(self, error: BaseException) -> bool:
        """Report `error` if it comes from this training; returns whether it does."""
        callback = self._callback()
        if self._process != os.getpid():  # a forked process has a copy of the hook; its end is not training's
            return False
        if callback is None or not any(_is_trainer_with(callback, frame) for frame in frames(error)):
            return False
        self.stop()
        if (on_exception := self._on_exception()) is not None:
            on_exception(error)
        return True


class _Link:
    """A handler of exceptions or signals. Later ones may still call it, so a stopped one only calls the previous."""

    def __init__(self, watch: ExceptionWatch, previous: Callable[..., Any]) -> None:
        self._watch: weakref.ref[ExceptionWatch] | None = weakref.ref(watch)
        self.previous = previous

    @property
    def watch(self) -> ExceptionWatch | None:
        """None once it has been stopped, or its training has been collected."""
        return self._watch() if self._watch is not None else None

    def stop(self) -> None:
        self._watch = None


class _Hook(_Link):
    """Handler in `sys.excepthook`."""

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        watch = self.watch
        if watch is not None:
            with contextlib.suppress(BaseException):  # the user's exception must be shown in any case
                watch.handle(error)
        self.previous(kind, error, traceback)


class _CtrlC(_Link):
    """Handler of SIGINT."""

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        try:
            return self.previous(number, frame)
        except BaseException:  # a handler that does not raise requests a stop without interrupting
            if (watch := self.watch) is not None:
                with contextlib.suppress(Exception):
                    watch.on_interrupt(frame)
            raise


def _remove_dead_hooks() -> None:
    """Remove stopped handlers from the front of the chains: otherwise each training that raised would leave one."""
    while isinstance(hook := sys.excepthook, _Hook) and hook.watch is None:
        sys.excepthook = hook.previous
    if threading.current_thread() is threading.main_thread():
        while isinstance(handler := signal.getsignal(signal.SIGINT), _CtrlC) and handler.watch is None:
            signal.signal(signal.SIGINT, handler.previous)


@contextlib.contextmanager
def oom_advice() -> Iterator[None]:
    """Adds advice to an out-of-memory error that leaves the block; also a decorator.

    ```python
    with oom_advice():
        trainer.train()
    ```

    The advice is a note on the exception, which Python prints below the traceback; the exception continues unchanged.
    With a `MemoryReportCallback` in the Trainer, the advice comes from this job's records, and the records show how
    the training ended; without one, the advice comes from the error's text.

    Notebooks, and scripts that catch exceptions of training, need `oom_advice()`. Other scripts with the callback do
    not.
    """
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(BaseException):  # nothing may replace the error
            _report(error)
        raise


def _report(error: BaseException) -> None:
    """Report `error` to its training; explain an out-of-memory error outside trainings by its text."""
    latest = [watch.handle(error) for watch in list(_watches)]
    advice = advice_from_text(error) if not any(latest) else None
    if advice is not None:
        add_note(error, advice)


def _is_trainer_with(callback: object, frame: FrameType) -> bool:
    from transformers import Trainer

    trainer = frame.f_locals.get("self")
    return isinstance(trainer, Trainer) and any(other is callback for other in trainer.callback_handler.callbacks)
