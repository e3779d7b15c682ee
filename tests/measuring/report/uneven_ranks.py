"""One rank of a recorded FSDP2 training, in which rank 0 has a row more of each embedding."""

from __future__ import annotations

from typing import Any

from torch import distributed

from tests.techniques import fsdp_worker
from tests.techniques.replicas_worker import start_as_rank


def train_rank(rank: int, port: int, folder: str) -> dict[str, Any]:
    """What this rank really held, as one of two ranks that a launcher started."""
    start_as_rank(rank, port)
    try:
        return fsdp_worker.train("plain", folder, 2, vocabulary=65)
    finally:
        distributed.destroy_process_group()
