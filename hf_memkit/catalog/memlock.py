"""Whether this process may lock memory, found by trying.

DeepSpeed locks its buffers for NVMe with `mlock` (deepspeed 0.19.8: ops/csrc/pin_memory, `ds_page_aligned_alloc`),
which counts against RLIMIT_MEMLOCK; beyond it a C++ assertion aborts the process. CAP_IPC_LOCK lifts the limit, but
some containers show that capability without granting it. Memory that the CUDA driver locks does not count.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

_MLOCK_ONFAULT: Final = 1
"""mlock2(2): pages are locked on first touch. The limit counts them at once, and no RAM is used."""

_MAP_NORESERVE: Final = 0x4000
"""mmap(2) on Linux; `mmap.MAP_NORESERVE` exists from Python 3.13 on."""


def can_lock(size_bytes: int) -> bool:
    """Whether `size_bytes` more can be locked now. Touches no memory."""
    if size_bytes <= 0:
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        region = mmap.mmap(-1, size_bytes, flags=flags)
    except OSError:  # more than the address space or the overcommit setting allows
        return False
    start = ctypes.c_char.from_buffer(region)
    try:
        address = ctypes.c_void_p(ctypes.addressof(start))
        return bool(libc.mlock2(address, ctypes.c_size_t(size_bytes), _MLOCK_ONFAULT) == 0)
    finally:
        del start  # the region cannot be closed while something points into it
        region.close()
