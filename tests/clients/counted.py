"""The reader of the runs in which every storage is counted, as on a GPU: a CPU has no allocator of its own."""

from __future__ import annotations

from typing import Final

from tests.measuring.memory.live_storages import LiveStorages

LIVE: Final = LiveStorages()
