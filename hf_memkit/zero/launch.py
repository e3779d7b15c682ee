"""What DeepSpeed expects of its surroundings when one process starts it without a launcher."""

from __future__ import annotations

import os
import socket

__all__ = ["single_process_environment"]


def single_process_environment() -> dict[str, str]:
    """The variables that a launcher would set, for one process; empty if a launcher did.

    Without them deepspeed.comm looks for MPI: `ModuleNotFoundError: No module named 'mpi4py'`.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
