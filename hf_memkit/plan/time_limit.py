"""How long a search goes on: as long as it is told, or by default while that pays."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hf_memkit.plan.candidate import Group
    from hf_memkit.plan.judgement import Judged


LIMIT_S: Final = 50.0
"""The default, from the script's own setup on: a whole plan then takes a minute more than the script's preparation, if
that runs once (benchmarks/plan_search.py). What is being traced is waited for; after Ctrl-C it is ended."""

MOST_TIMES: Final = 3
"""Times the default: a search goes on as long at most, while nothing fits or its improvements are large."""

_LARGE: Final = 0.9
"""Of the time of the best so far: what takes less is a large improvement."""

_RECENT: Final = 8
"""Setups: a large improvement among so many last ones promises another. Assumed."""


@dataclass(slots=True)
class TimeLimit:
    """
    Args:
        limit_s: nothing is begun that would end later, if it takes as long as the others on average. None: `LIMIT_S`,
            and up to `MOST_TIMES` as long while nothing fits or improvements are large.
        clock: seconds, from any moment on.
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
        """The time runs from here on."""
        self._began = self.clock()

    def has_time(self) -> bool:
        """Whether another setup may be judged."""
        took = self.clock() - self._began + self._judging_s / max(1, self._judgements)
        if took <= (LIMIT_S if self.limit_s is None else self.limit_s):
            return True
        if self.limit_s is not None or took > MOST_TIMES * LIMIT_S:
            return False
        return self._improved_at is None or self._judgements - self._improved_at < _RECENT

    def add(self, found: Judged, seconds: float) -> None:
        """Counts a setup, which took so long to judge. It is an improvement if it is the first of its group that fits,
        or takes much less time than the best of that."""
        with self._lock:
            self._judging_s += seconds
            self._judgements += 1
            if not found.fits or found.candidate.code:
                return
            group, best = found.candidate.group, self._best_s.get(found.candidate.group, None)
            step_s = found.seconds if found.is_priced and found.seconds else math.inf
            if best is None or step_s < _LARGE * best:
                self._improved_at = self._judgements
            self._best_s[group] = step_s if best is None else min(step_s, best)
