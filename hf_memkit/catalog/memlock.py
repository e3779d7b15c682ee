"""Whether this process may lock memory, tried rather than read from a limit.

DeepSpeed's buffers for NVMe are locked with `mlock` (deepspeed 0.19.8: ops/csrc/pin_memory, `ds_page_aligned_alloc`),
which counts against RLIMIT_MEMLOCK; beyond it the process is aborted by a C++ assertion. A process with CAP_IPC_LOCK
is above the limit, except in some containers that show the capability and do not grant it: so it is tried. Memory
that CUDA locks for copies (`torch.Tensor.pin_memory`) does not count: the driver does that.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

_MLOCK_ONFAULT: Final = 1
"""mlock2(2): pages are locked when they are first touched. The limit counts them at once, and no RAM is used."""

_MAP_NORESERVE: Final = 0x4000
"""mmap(2) on Linux; `mmap.MAP_NORESERVE` exists from Python 3.13 on."""


def can_lock(size_bytes: int) -> bool:
    """Whether `size_bytes` can be locked now, besides what this process has locked already. Touches no memory."""
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
