"""The folder that ZeRO-Infinity swaps to: tried before anything is written, and held while the run lasts.

What is done here is done once a machine, by the first of its processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from hf_memkit.recipe.ranks import Ranks
from hf_memkit.setup import Setup
from hf_memkit.zero import nvme
from hf_memkit.zero.stage_3 import SWAP_BUFFERS

__all__ = ["Swap", "nvme_path"]


def nvme_path(setup: Setup) -> str | None:
    """Where DeepSpeed swaps to, or None."""
    zero = setup.get("deepspeed.config", {}).get("zero_optimization", {})
    paths = [zero.get(part, {}).get("nvme_path") for part in ("offload_param", "offload_optimizer")]
    return next((str(path) for path in paths if path), None)


class Swap:
    """The setup's swap folder on this machine; does nothing where the setup swaps nothing."""

    def __init__(self, setup: Setup, ranks: Ranks) -> None:
        self._path = nvme_path(setup)
        self._needed_bytes = setup.ledger.total_bytes("disk")
        locked = sum(row.size_bytes for row in setup.ledger.rows if row.term in SWAP_BUFFERS)
        self._locked_bytes = locked // ranks.local_world_size
        self._ranks = ranks

    def try_folder(self) -> None:
        """Tries all that DeepSpeed will do there, and leaves nothing behind.

        Raises:
            InputError, DoesNotFitError, MissingPackageError: see `hf_memkit.zero.nvme.Preflight`.
        """
        if self._path is not None and self._ranks.leads_machine:
            nvme.preflight(
                self._path, needed_bytes=self._needed_bytes, locked_bytes=self._locked_bytes
            ).raise_problems()

    @contextlib.contextmanager
    def held(self, say: Callable[[str], None]) -> Iterator[None]:
        """Keeps the folder for this run; no rank enters before it is held, and nothing swapped stays behind."""
        if self._path is None:
            yield
            return
        folder = (
            nvme.ready(self._path, say, needed_bytes=self._needed_bytes, locked_bytes=self._locked_bytes)
            if self._ranks.leads_machine
            else contextlib.nullcontext()
        )
        with folder:
            self._ranks.wait_for_all("swap folder")
            yield

    def size_bytes(self) -> int:
        """What all processes of this machine have swapped there by now."""
        return nvme.swap_bytes(self._path) if self._path else 0
