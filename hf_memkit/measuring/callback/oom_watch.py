"""Hearing of the exception that ends a training. In: an exception on its way out. Out: one call for it.

Trainer sends no event when training raises. Two ways lead here: `sys.excepthook`, which Python calls when nobody has
caught the exception, and `oom_advice()`, for notebooks, where that hook is not called, and for scripts that catch.
Both only listen: the exception goes on as the same object with the same arguments and traceback. Of a Ctrl-C the
signal is heard too, and goes on to its handler: a script may catch what that raises, and another rank dies of the
connection that it cuts.
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
    """Waits for the exception that ends one training and tells `on_exception`, a method whose object it does not keep.
    One that has not passed through the Trainer with `callback` is not this training's: a script may have caught it."""

    def __init__(self, callback: object, on_exception: Callable[[BaseException], object]) -> None:
        self._callback = weakref.ref(callback)
        self._on_exception = weakref.WeakMethod(on_exception)
        self._links: list[_Link] = []
        self._process = os.getpid()
        self.ctrl_c = False
        """Whether a SIGINT has interrupted this training."""

    def start(self) -> None:
        """From now on; `stop` must follow, however training ends, or the exception itself."""
        _watches.add(self)
        _take_out_dead_hooks()
        sys.excepthook = hook = _Hook(self, sys.excepthook)
        self._links = [hook]
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._links.append(link := _CtrlC(self, handler))
            signal.signal(signal.SIGINT, link)

    def stop(self) -> None:
        """Hears nothing more, and takes its hooks away. Safe to repeat."""
        _watches.discard(self)
        for link in self._links:
            link.stop()
        self._links = []
        _take_out_dead_hooks()

    def interrupted_in(self, frame: FrameType | None) -> None:
        """A SIGINT has interrupted `frame`."""
        callback = self._callback()
        while frame is not None and callback is not None and not self.ctrl_c:
            self.ctrl_c = _is_trainer_with(callback, frame)
            frame = frame.f_back

    def hears(self, error: BaseException) -> bool:
        """Tells of `error`, if it comes from this training; True if it did."""
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
    """One in the chain of those who are called for an exception, or for a signal. Whoever took the place after it may
    call it: it can't be taken out then, and only passes on."""

    def __init__(self, watch: ExceptionWatch, before: Callable[..., Any]) -> None:
        self._watch: weakref.ref[ExceptionWatch] | None = weakref.ref(watch)
        self.before = before

    @property
    def watch(self) -> ExceptionWatch | None:
        """None once it has been stopped, or its training has been collected."""
        return self._watch() if self._watch is not None else None

    def stop(self) -> None:
        self._watch = None


class _Hook(_Link):
    """In `sys.excepthook`."""

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        watch = self.watch
        if watch is not None:
            with contextlib.suppress(BaseException):  # whatever happens here, the user's own exception is shown
                watch.hears(error)
        self.before(kind, error, traceback)


class _CtrlC(_Link):
    """Handles SIGINT."""

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        try:
            return self.before(number, frame)
        except BaseException:  # a handler that raises nothing has asked for a stop, and interrupted nothing
            if (watch := self.watch) is not None:
                with contextlib.suppress(Exception):
                    watch.interrupted_in(frame)
            raise


def _take_out_dead_hooks() -> None:
    """From the front of the chains; of many trainings that raised, a hook each would be left there."""
    while isinstance(hook := sys.excepthook, _Hook) and hook.watch is None:
        sys.excepthook = hook.before
    if threading.current_thread() is threading.main_thread():
        while isinstance(handler := signal.getsignal(signal.SIGINT), _CtrlC) and handler.watch is None:
            signal.signal(signal.SIGINT, handler.before)


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
        with contextlib.suppress(BaseException):  # as little as anything else may it take the error's place
            _tell(error)
        raise


def _tell(error: BaseException) -> None:
    """To the training that `error` comes from; an out-of-memory error of no training is explained by its text."""
    heard = [watch.hears(error) for watch in list(_watches)]
    advice = advice_from_text(error) if not any(heard) else None
    if advice is not None:
        add_note(error, advice)


def _is_trainer_with(callback: object, frame: FrameType) -> bool:
    from transformers import Trainer

    trainer = frame.f_locals.get("self")
    return isinstance(trainer, Trainer) and any(other is callback for other in trainer.callback_handler.callbacks)
