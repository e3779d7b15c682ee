"""Use of a GPU outside torch's allocator, from NVIDIA's driver."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_memkit.common.units import GIB
from hf_memkit.measuring.memory.readers.base import RateLimitedReader

# The inode of the first PID namespace (PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h).
_FIRST_PID_NAMESPACE = 0xEFFFFFFC

_EVERY_S = 0.5

# A GPU's own reserve, which NVML counts and CUDA does not, is a few hundredths; a slice is a half at most.
_MUCH_MORE = 1.25


class NvmlReader(RateLimitedReader):
    """Use of the whole GPU, of this process outside torch's allocator, and of other processes. Rate-limited: listing a
    GPU's processes takes milliseconds."""

    def __init__(self, device: torch.device | int | None = None) -> None:
        super().__init__(_EVERY_S)
        index = device.index if isinstance(device, torch.device) else device
        self._index = torch.cuda.current_device() if index is None else index
        self._handle: Any = None

    def read(self) -> dict[str, float]:
        if not self._limit.is_due():
            return {}
        import pynvml

        properties = torch.cuda.get_device_properties(self._index)
        if self._handle is None:
            pynvml.nvmlInit()
            self._handle = _handle(pynvml, properties)
        # Version 2 separates the driver's reserve: half a GiB of an H100, which is not in torch's total either.
        memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle, version=pynvml.nvmlMemory_v2)
        if memory.total > _MUCH_MORE * properties.total_memory:
            return {}  # torch has one slice (MIG), and NVML counts all slices
        counters = {"device_used_gib": memory.used / GIB}
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        processes = [(process.pid, process.usedGpuMemory) for process in listed]
        reserved = torch.cuda.memory_reserved(self._index)
        own = bytes_of_this_process(processes, reserved)
        if own is not None:
            counters["outside_allocator_gib"] = (own - reserved) / GIB
            if all(used is not None for _, used in processes):
                counters["other_processes_gib"] = (sum(used or 0 for _, used in processes) - own) / GIB
        return counters


def _handle(pynvml: Any, properties: Any) -> Any:
    """NVML's handle of torch's GPU, by UUID or PCI address: NVML's numbers ignore CUDA_VISIBLE_DEVICES."""
    uuid = str(getattr(properties, "uuid", ""))
    for name in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(name)
        except pynvml.NVMLError:
            continue
    address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return pynvml.nvmlDeviceGetHandleByPciBusId(address)


def bytes_of_this_process(processes: Sequence[tuple[int, int | None]], reserved_bytes: int) -> int | None:
    """Bytes of this process among NVML's (pid, bytes), if it can be identified. In a container NVML may list process
    IDs of the host, and ours may belong to another process there. Then a list of one must be this process, because
    every process that uses the GPU is listed."""
    if reserved_bytes == 0:
        return None
    own = [used for pid, used in processes if pid == os.getpid()] if _in_first_pid_namespace() else []
    if not own and len(processes) == 1:
        own = [processes[0][1]]
    known = [used for used in own if used is not None]
    # Fewer bytes than the allocator's: another process, or a driver that does not count (WSL).
    return sum(known) if known and sum(known) >= reserved_bytes else None


def _in_first_pid_namespace() -> bool:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False
