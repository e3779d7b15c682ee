"""Reading memory counters. In: this machine. Out: flat numbers by name, `{"allocated_gib": 1.5, …}`.

No reader synchronises the device, collects garbage or empties a cache. A number that a device cannot give is absent,
never zero.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psutil
import torch

from hf_memkit.memory.guard import describe
from hf_memkit.units import GIB

__all__ = ["CudaReader", "HostReader", "MemoryReader", "NvmlReader", "ReaderGroup", "readers_for_this_machine"]

# The inode of the first PID namespace (PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h).
_FIRST_PID_NAMESPACE = 0xEFFFFFFC


@runtime_checkable
class MemoryReader(Protocol):
    """One source of memory counters."""

    device: torch.device | None
    """The device that the counters `*allocated_gib` are about, or None."""

    def read(self) -> dict[str, float]:
        """Counters as they are now."""

    def peak(self) -> dict[str, float]:
        """The highest values since the last `reset_peak`, names beginning with `peak_`."""

    def reset_peak(self) -> None:
        """Lets the peaks start again from what is in use now."""

    def capacity(self) -> dict[str, float]:
        """What does not change while the process lives."""


class CudaReader:
    """The counters of torch's CUDA caching allocator (ROCm builds of torch have the same)."""

    def __init__(self, device: torch.device | int | None = None) -> None:
        index = device.index if isinstance(device, torch.device) else device
        self.device: torch.device | None = torch.device(
            "cuda", torch.cuda.current_device() if index is None else index
        )

    def read(self) -> dict[str, float]:
        stats = torch.cuda.memory_stats(self.device)
        if not stats:  # nothing has used CUDA yet
            return {}
        allocated = stats["allocated_bytes.all.current"]
        reserved = stats["reserved_bytes.all.current"]
        return {
            "allocated_gib": allocated / GIB,
            "reserved_gib": reserved / GIB,
            "fragmentation_gib": (reserved - allocated) / GIB,
            "alloc_retries": stats["num_alloc_retries"],
        }

    def peak(self) -> dict[str, float]:
        stats = torch.cuda.memory_stats(self.device)
        if not stats:
            return {}
        return {
            "peak_allocated_gib": stats["allocated_bytes.all.peak"] / GIB,
            "peak_reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
        }

    def reset_peak(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats(self.device)

    def capacity(self) -> dict[str, float]:
        return {"capacity_gib": torch.cuda.get_device_properties(self.device).total_memory / GIB}


class NvmlReader:
    """What the driver counts and torch's allocator does not: other processes, the CUDA context, libraries."""

    def __init__(self, device: torch.device | int | None = None) -> None:
        self.device: torch.device | None = None
        self._torch_device = CudaReader(device).device
        self._handle: Any = None

    def read(self) -> dict[str, float]:
        import pynvml

        if self._handle is None:
            pynvml.nvmlInit()
            self._handle = _nvml_handle(pynvml, torch.cuda.get_device_properties(self._torch_device))
        counters = {"device_used_gib": pynvml.nvmlDeviceGetMemoryInfo(self._handle).used / GIB}
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        reserved = torch.cuda.memory_reserved(self._torch_device)
        used = _bytes_of_this_process([(process.pid, process.usedGpuMemory) for process in processes], reserved)
        if used is not None:
            counters["outside_allocator_gib"] = (used - reserved) / GIB
        return counters

    def peak(self) -> dict[str, float]:
        return {}

    def reset_peak(self) -> None:
        return None

    def capacity(self) -> dict[str, float]:
        return {}


class HostReader:
    """This process's memory in RAM."""

    def __init__(self) -> None:
        self.device: torch.device | None = None

    def read(self) -> dict[str, float]:
        # A new Process each time: an object made before a fork would read its parent.
        return {"host_rss_gib": psutil.Process().memory_info().rss / GIB}

    def peak(self) -> dict[str, float]:
        return {}

    def reset_peak(self) -> None:
        return None

    def capacity(self) -> dict[str, float]:
        return {}


def readers_for_this_machine(device: torch.device | None = None) -> list[MemoryReader]:
    """The readers for the device that training runs on (default: CUDA's current device if there is one)."""
    readers: list[MemoryReader] = [HostReader()]
    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        readers.append(CudaReader(device))
        if torch.version.hip is None:
            readers.append(NvmlReader(device))
    return readers


class ReaderGroup:
    """All readers as one. A reader that raises loses its numbers for that call; `errors` keeps its first message."""

    def __init__(self, readers: Sequence[MemoryReader]) -> None:
        self.readers = tuple(readers)
        self.errors: dict[str, str] = {}

    @property
    def device(self) -> torch.device | None:
        """The device whose allocator is being read."""
        return next((found for r in self.readers if (found := getattr(r, "device", None)) is not None), None)

    def read(self) -> dict[str, float]:
        return self._merge("read", lambda reader: reader.read())

    def peak(self) -> dict[str, float]:
        return self._merge("peak", lambda reader: reader.peak())

    def capacity(self) -> dict[str, float]:
        return self._merge("capacity", lambda reader: reader.capacity())

    def reset_peak(self) -> None:
        self._merge("reset_peak", lambda reader: reader.reset_peak() or {})  # type: ignore[func-returns-value]

    def _merge(self, method: str, call: Callable[[MemoryReader], dict[str, float]]) -> dict[str, float]:
        merged: dict[str, float] = {}
        for reader in self.readers:
            try:
                numbers = call(reader)
                merged.update({k: v for k, v in numbers.items() if v is not None and math.isfinite(v)})
            except Exception as error:
                self.errors.setdefault(f"{type(reader).__name__}.{method}", describe(error))
        return merged


def _nvml_handle(pynvml: Any, properties: Any) -> Any:
    """NVML's handle of the card that torch means.

    NVML counts every card of the machine, torch only those in CUDA_VISIBLE_DEVICES and maybe in another order, so the
    index must not be used; the UUID and the PCI address name the card itself.
    """
    uuid = str(getattr(properties, "uuid", ""))
    for name in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(name)
        except pynvml.NVMLError:
            continue
    address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return pynvml.nvmlDeviceGetHandleByPciBusId(address)


def _bytes_of_this_process(processes: Sequence[tuple[int, int | None]], reserved_bytes: int) -> int | None:
    """Which of the (pid, bytes) that NVML lists is this process, if that can be known.

    In a container NVML may list process numbers of the host, where ours could be somebody else's. There, a list of one
    can only be us, because a process that uses the card is on the list.
    """
    if reserved_bytes == 0:
        return None
    mine = [used for pid, used in processes if pid == os.getpid()] if _in_first_pid_namespace() else []
    if not mine and len(processes) == 1:
        mine = [processes[0][1]]
    known = [used for used in mine if used is not None]
    # Less than the allocator holds: not us after all, or a driver that does not count (WSL).
    return sum(known) if known and sum(known) >= reserved_bytes else None


def _in_first_pid_namespace() -> bool:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False
