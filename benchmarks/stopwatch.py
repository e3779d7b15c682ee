"""Time spent inside chosen functions, each without what others of them took. In: functions by name. Out: µs a step."""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any


class Stopwatch:
    """Adds up, for one thread. `lap` begins a step and ends the one before; what lies outside of steps does not count.

    Args:
        clock: seconds; `time.thread_time` leaves out what other processes took from this one.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.laps_us: list[float] = []
        self.parts_us: dict[str, float] = {}
        self.calls = 0
        self._inside: list[float] = []
        self._lap_us: dict[str, float] = {}
        self._begun = False
        self._thread = threading.get_ident()

    def lap(self) -> None:
        """What was spent since the last lap belongs to the step that ends now."""
        if self._begun:
            self.laps_us.append(sum(self._lap_us.values()))
            for part, spent_us in self._lap_us.items():
                self.parts_us[part] = self.parts_us.get(part, 0.0) + spent_us
        self._begun = True
        self._lap_us.clear()

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """`function`, whose time counts for `part`, less that of timed functions that it calls."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._inside.append(0.0)
            started_s = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                took_s = self._clock() - started_s
                own_s = took_s - self._inside.pop()
                self.calls += 1
                self._lap_us[part] = self._lap_us.get(part, 0.0) + own_s * 1e6
                if self._inside:
                    self._inside[-1] += took_s

        return wrapper


@contextmanager
def watching(stopwatch: Stopwatch, functions: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Times functions while the context lasts.

    Args:
        functions: part → names such as `"package.module:Class.method"` or `"package.module:function"`; `Class.on_*`
            means all methods of the class that begin so.

    Raises:
        AttributeError: a name is not there (any more).
    """
    with ExitStack() as undo:
        for part, names in functions.items():
            for owner, name in (found for text in names for found in _resolve(text)):
                own = name in vars(owner)
                original = getattr(owner, name)
                setattr(owner, name, stopwatch.timed(original, part))
                undo.callback(setattr, owner, name, original) if own else undo.callback(delattr, owner, name)
        yield


def _resolve(text: str) -> list[tuple[Any, str]]:
    module, _, path = text.partition(":")
    owner: Any = importlib.import_module(module)
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    if not name.endswith("*"):
        getattr(owner, name)
        return [(owner, name)]
    names = sorted(found for found in vars(owner) if found.startswith(name[:-1]) and callable(getattr(owner, found)))
    if not names:
        raise AttributeError(f"nothing in {owner} begins with {name[:-1]!r}")
    return [(owner, found) for found in names]
