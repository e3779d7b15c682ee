"""What all ranks measured, known on rank 0. In: each rank's latest numbers. Out: those of the ranks heard so far.

No collective and no wait: the training thread puts its numbers into a variable. Once a second another thread writes
them to the store that the process group was made with, and on rank 0 reads what the others wrote. A rank that has died
is one whose numbers stay what they were.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from hf_memkit.measuring.memory.error_barrier import describe

_INTERVAL_S: Final = 1.0
_TIMEOUT: Final = timedelta(seconds=5)
"""For an answer of the store. Only this thread waits for it, on a connection of its own."""
_LEAVE_S: Final = 0.5
"""How long the end of a training waits for the thread. One that a store keeps longer is left behind: it holds nothing
but its connection, and dies with the process."""

_trainings = itertools.count()


@dataclass(frozen=True)
class Heard:
    """The numbers that a rank published after `step`, first seen on rank 0 `age_s` seconds ago."""

    step: int
    numbers: dict[str, float]
    age_s: float


@dataclass
class _Shared:
    """What the two threads exchange. Each attribute is written by one of them, and always replaced as a whole."""

    mine: tuple[int, dict[str, float]] | None = None
    others: dict[int, tuple[int, dict[str, float], float]] = field(default_factory=dict)
    failure: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)


class RankNumbers:
    """This rank's part in telling rank 0. `name`: a place in `store`, the same on all ranks, another for each
    training."""

    def __init__(self, store: Any, rank: int, world_size: int, name: str) -> None:
        self.rank = rank
        self._shared = _Shared()
        self._thread = threading.Thread(
            target=_exchange,
            args=([store], rank, world_size, name, self._shared),
            name="memkit ranks",
            daemon=True,
        )
        self._thread.start()
        # Also when nobody calls `close`: a thread inside the store when the interpreter shuts down could abort it.
        self._leave = weakref.finalize(self, _leave, self._shared, self._thread)

    def publish(self, step: int, numbers: Mapping[str, float]) -> None:
        """This rank's numbers from now on."""
        self._shared.mine = (step, dict(numbers))

    def heard(self) -> dict[int, Heard]:
        """On rank 0 the numbers of each rank that has published any; elsewhere this rank's own."""
        now_s = time.monotonic()
        others, mine = self._shared.others, self._shared.mine
        known = {rank: Heard(step, numbers, now_s - seen_s) for rank, (step, numbers, seen_s) in others.items()}
        return {self.rank: Heard(*mine, age_s=0.0), **known} if mine is not None else known

    def close(self) -> None:
        """Ends the thread, or leaves it behind if the store keeps it. Safe to repeat."""
        self._leave()


def join_ranks() -> RankNumbers | None:
    """For the processes that train together; None for one alone, or where no process group holds them together."""
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return None
    store = distributed.distributed_c10d._get_default_store()
    # All ranks begin the same trainings in the same order.
    name = f"memkit-report/{next(_trainings)}"
    return RankNumbers(store, distributed.get_rank(), distributed.get_world_size(), name)


def _exchange(stores: list[Any], rank: int, world_size: int, name: str, shared: _Shared) -> None:
    """The thread. Whatever goes wrong ends it: a store that is gone does not come back."""
    try:
        own = stores.pop().clone()  # of the process group's nothing is kept: its owner may want to take it down
        own.set_timeout(_TIMEOUT)
        sent = None
        while not shared.stop.wait(_INTERVAL_S):
            mine = shared.mine
            if mine is not None and mine is not sent:
                own.set(f"{name}/{rank}", json.dumps(mine))
                sent = mine
            if rank == 0:
                shared.others = _listen(own, world_size, name, shared.others)
    except Exception as error:
        shared.failure = describe(error)


def _listen(
    store: Any, world_size: int, name: str, known: dict[int, tuple[int, dict[str, float], float]]
) -> dict[int, tuple[int, dict[str, float], float]]:
    """`known`, with what has come since. A key that is not there is not read: that would wait for it."""
    ranks = [rank for rank in range(1, world_size) if rank in known or store.check([f"{name}/{rank}"])]
    if not ranks:
        return known
    news = dict(known)
    for rank, message in zip(ranks, store.multi_get([f"{name}/{rank}" for rank in ranks]), strict=True):
        step, numbers = json.loads(message)
        if rank not in known or known[rank][:2] != (step, numbers):
            news[rank] = (step, numbers, time.monotonic())
    return news


def _leave(shared: _Shared, thread: threading.Thread) -> None:
    shared.stop.set()
    thread.join(_LEAVE_S)
