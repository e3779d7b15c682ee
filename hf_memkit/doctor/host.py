"""What the CPU computes in, RAM, shared memory, and how much of RAM may be locked."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Final

import psutil

from hf_memkit.doctor.check import Check
from hf_memkit.hardware import SLOW_BF16, bf16_slowdown, this_machine
from hf_memkit.memlock import can_lock
from hf_memkit.units import MIB, format_gib

__all__ = ["checks"]

_GROUP: Final = "RAM"
_SHARED: Final = Path("/dev/shm")
_DOCKER_SHARED_BYTES: Final = 64 * MIB
"""What a Docker container gets for /dev/shm where nothing is asked (docker run --shm-size)."""


def checks() -> list[Check]:
    """The CPU's bf16, RAM and its limit, lockable RAM, shared memory."""
    return [_bf16(), _ram(), _locked(), *_shared()]


def _bf16() -> Check:
    """Measured. Nothing has to be fixed where it is slow: rehearsals then multiply in fp32."""
    slowdown = bf16_slowdown()
    if slowdown < SLOW_BF16:
        return Check("CPU", "bf16", "ok", f"matrix products take {slowdown:.1f} times as long as in fp32")
    found = f"matrix products take {slowdown:.0f} times as long as in fp32: rehearsals store bf16 and multiply in fp32"
    return Check("CPU", "bf16", "ok", found)


def _ram() -> Check:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit = this_machine().ram_bytes
    found = f"{format_gib(memory.total)}, {format_gib(memory.available)} available; swap {format_gib(swap.total)}"
    if limit < memory.total:
        found = f"{format_gib(limit)} by the container's limit, of {found}"
    return Check(_GROUP, "RAM", "ok", found)


def _locked() -> Check:
    """Only NVMe buffers count here: CUDA's own pinned memory does not (see `hf_memkit.memlock`)."""
    limit, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if limit == resource.RLIM_INFINITY else format_gib(limit)
    if can_lock(this_machine().ram_bytes):
        by = "" if limit == resource.RLIM_INFINITY else ", and this process is above the limit (CAP_IPC_LOCK)"
        return Check(_GROUP, "memlock", "ok", f"{shown}{by}")
    found = f"{shown}: DeepSpeed is aborted where its buffers for NVMe are larger (offload to RAM is not touched)"
    return Check(_GROUP, "memlock", "warning", found, "ulimit -l unlimited (Docker: --ulimit memlock=-1)")


def _shared() -> list[Check]:
    if not _SHARED.is_dir():
        return [Check(_GROUP, "/dev/shm", "warning", "none: data loader workers and NCCL need it")]
    size = shutil.disk_usage(_SHARED).total
    if size > _DOCKER_SHARED_BYTES:
        return [Check(_GROUP, "/dev/shm", "ok", format_gib(size))]
    found = f"{format_gib(size)}, Docker's default: data loader workers and NCCL fail with more"
    return [Check(_GROUP, "/dev/shm", "warning", found, "docker run --shm-size=8g (or --ipc=host)")]
