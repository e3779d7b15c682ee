"""Decides when a search stops: at the user's limit, or by default when it no longer improves the plan."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hf_memkit.plan.judgement import Judgement
    from hf_memkit.setup.techniques.registry import Group


LIMIT_S: Final = 50.0
"""Seconds of a search by default, without the trace of the unchanged script. With that trace a plan takes about a
minute longer than the script's preparation, if that runs once (benchmarks/plan_search.py). Traces that have begun are
completed; after Ctrl-C they are ended."""

MOST_TIMES: Final = 3
"""A search takes at most this many times the default, while nothing fits or it still improves a lot."""

_LARGE: Final = 0.9
"""An improvement is large if the step takes at most this share of the best time so far."""

_RECENT: Final = 8
"""Number of last judgements that must contain a large improvement, or the search stops. Assumed."""


@dataclass(slots=True)
class TimeLimit:
    """
    Args:
        limit_s: seconds. A candidate is not started if it would end later, at the average time of the others. None:
            `LIMIT_S`, and up to `MOST_TIMES` as long while nothing fits or improvements are large.
        clock: returns seconds.
    """

    limit_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    _began: float = 0.0
    _judging_s: float = 0.0
    _judgements: int = 0
    _best_s: dict[Group, float] = field(default_factory=dict)
    _improved_at: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Starts the clock."""
        self._began = self.clock()

    @property
    def default_or_limit_s(self) -> float:
        """The limit without the longer time of a search that still improves."""
        return LIMIT_S if self.limit_s is None else self.limit_s

    @property
    def left_s(self) -> float:
        """Seconds until `default_or_limit_s`."""
        return max(0.0, self._began + self.default_or_limit_s - self.clock())

    def has_time(self, needs_s: float | None = None) -> bool:
        """Whether another candidate may be judged. `needs_s`: seconds that takes; None: the average of the others."""
        if needs_s is None:
            needs_s = self._judging_s / max(1, self._judgements)
        took = self.clock() - self._began + needs_s
        if took <= self.default_or_limit_s:
            return True
        if self.limit_s is not None or took > MOST_TIMES * LIMIT_S:
            return False
        return self._improved_at is None or self._judgements - self._improved_at < _RECENT

    def add(self, judgement: Judgement, seconds: float) -> None:
        """Counts a judgement that took `seconds` to make. It is a large improvement if it is the first of its group
        that fits, or clearly faster than the best of its group."""
        with self._lock:
            self._judging_s += seconds
            self._judgements += 1
            if not judgement.fits or judgement.candidate.code:
                return
            group = judgement.candidate.group
            best = self._best_s.get(group)
            step_s = judgement.seconds if judgement.is_priced and judgement.seconds else math.inf
            if best is None or step_s < _LARGE * best:
                self._improved_at = self._judgements
            self._best_s[group] = step_s if best is None else min(step_s, best)
