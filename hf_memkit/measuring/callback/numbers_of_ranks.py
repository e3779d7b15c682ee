"""Collect the latest numbers of all ranks on rank 0. Without collectives or waiting: the training thread stores its
numbers in a variable. Once a second another thread writes them to the process group's store, and on rank 0 reads those
of the others. The numbers of a dead rank no longer change."""

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
"""For an answer of the store. Only this thread waits for it, on its own connection."""
_LEAVE_S: Final = 0.5
"""Maximum wait for the thread at the end of a training. A thread blocked by the store longer is abandoned: it has
nothing but its connection, and ends with the process."""

_trainings = itertools.count()


@dataclass(frozen=True)
class RankSample:
    """Numbers that a rank published after `step`, first seen on rank 0 at `seen_s` by `time.monotonic`."""

    step: int
    numbers: dict[str, float]
    seen_s: float = field(default_factory=time.monotonic, compare=False)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.seen_s


@dataclass
class _Shared:
    """Data shared by the two threads. Each attribute is written by one of them, and always replaced as a whole."""

    mine: RankSample | None = None
    others: dict[int, RankSample] = field(default_factory=dict)
    failure: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)


class RankNumbers:
    """This rank's part of the exchange. `name`: key in `store`, the same on all ranks, another for each training."""

    def __init__(self, store: Any, rank: int, world_size: int, name: str) -> None:
        self.rank = rank
        self._shared = _Shared()
        self._thread = threading.Thread(
            target=_exchange, args=([store], rank, world_size, name, self._shared), name="memkit ranks", daemon=True
        )
        self._thread.start()
        # Also without `close`: a thread inside the store at interpreter shutdown could abort it.
        self._leave = weakref.finalize(self, _leave, self._shared, self._thread)

    def publish(self, step: int, numbers: Mapping[str, float]) -> None:
        self._shared.mine = RankSample(step, dict(numbers))

    def latest(self) -> dict[int, RankSample]:
        """On rank 0 the numbers of each rank that has published any; elsewhere this rank's own."""
        mine = self._shared.mine
        own = {self.rank: RankSample(mine.step, mine.numbers)} if mine is not None else {}
        return own | self._shared.others

    def close(self) -> None:
        """End the thread, or abandon it if the store blocks it. Safe to repeat."""
        self._leave()


def join_ranks() -> RankNumbers | None:
    """The exchange between processes that train together; None for one process, or without a process group."""
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return None
    store = distributed.distributed_c10d._get_default_store()
    # All ranks start the same trainings in the same order.
    name = f"memkit-report/{next(_trainings)}"
    return RankNumbers(store, distributed.get_rank(), distributed.get_world_size(), name)


def _exchange(stores: list[Any], rank: int, world_size: int, name: str, shared: _Shared) -> None:
    """Body of the thread. Any error ends it: a lost store does not return."""
    try:
        store = stores.pop().clone()  # no reference to the group's store is kept, so that it can be destroyed
        store.set_timeout(_TIMEOUT)
        sent = None
        while not shared.stop.wait(_INTERVAL_S):
            mine = shared.mine
            if mine is not None and mine is not sent:
                store.set(f"{name}/{rank}", json.dumps([mine.step, mine.numbers]))
                sent = mine
            if rank == 0:
                shared.others = _listen(store, world_size, name, shared.others)
    except Exception as error:
        shared.failure = describe(error)


def _listen(store: Any, world_size: int, name: str, known: dict[int, RankSample]) -> dict[int, RankSample]:
    """`known` with new values. Missing keys are not read: that would wait for them."""
    ranks = [rank for rank in range(1, world_size) if rank in known or store.check([f"{name}/{rank}"])]
    if not ranks:
        return known
    updated = dict(known)
    for rank, message in zip(ranks, store.multi_get([f"{name}/{rank}" for rank in ranks]), strict=True):
        sample = RankSample(*json.loads(message))
        if known.get(rank) != sample:
            updated[rank] = sample
    return updated


def _leave(shared: _Shared, thread: threading.Thread) -> None:
    shared.stop.set()
    thread.join(_LEAVE_S)
