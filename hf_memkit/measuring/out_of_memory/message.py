"""The sizes in an out-of-memory message."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from hf_memkit.common.units import GIB, MIB

Memory = Literal["device", "host", "pinned", "shared memory", "disk", "kernel", "none"]
"""Which memory ran out: the device's, RAM, page-locked RAM, /dev/shm, a disk, the on-chip memory of a kernel; or none,
in an error of an engine."""

_ROUNDING: Final = 0.01
"""Share by which a printed size may differ from the real one."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process on the GPU, as NVML lists it. In a container `pid` is the host's number, even for this process."""

    pid: int
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class OomMessage:
    """One out-of-memory message. Sizes are bytes; None if the text does not give them.

    Attributes:
        form: its name in `patterns.FORMS`.
        device_type: `cuda`, `rocm`, `xpu`, `mps`, `npu`, `mlu`, `hpu`, `tpu` (XLA) or `neuron`; None if unknown, or
            if the memory is not a device's.
        device: index of the GPU.
        free_bytes: as the driver reports it.
        allocated_bytes: PyTorch's tensors, private pools included.
        reserved_bytes: allocated and cached by PyTorch.
        allowed_bytes: the cap (`set_per_process_memory_fraction`, MPS's high watermark).
        private_pools_bytes: the allocated memory that only CUDA graphs may use.
        process_bytes: memory of this process on the GPU, with the CUDA context.
        other_bytes: MPS: memory of this process outside PyTorch's allocator.
        processes: the other processes that NVML lists.
        limit_bytes: kernel: the hardware limit; DeepSpeed: the size of one buffer.
        pid, process_name, resident_bytes: the process that was killed, and its host RAM.
        used_bytes, total_bytes: host RAM in use, and the machine's or the job's limit.
        in_cgroup: True for the limit of a container or job, False for the machine's.
        variable: name of the allocator's environment variable in this version of torch.
        quote: the message text, shortened, without control characters.
    """

    form: str
    library: str
    memory: Memory
    quote: str = ""
    device_type: str | None = None
    device: int | None = None
    requested_bytes: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    allowed_bytes: int | None = None
    private_pools_bytes: int | None = None
    process_bytes: int | None = None
    other_bytes: int | None = None
    processes: tuple[Process, ...] = ()
    limit_bytes: int | None = None
    pid: int | None = None
    process_name: str | None = None
    resident_bytes: int | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    in_cgroup: bool | None = None
    variable: str | None = None

    @property
    def cached_bytes(self) -> int | None:
        """Reserved − allocated: PyTorch's cache, in blocks between live tensors."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes

    @property
    def usable_bytes(self) -> int | None:
        """The cap of the process, or the total of the GPU."""
        return self.allowed_bytes or self.capacity_bytes

    @property
    def has_own_size(self) -> bool:
        """Whether `process_bytes` is plausible: in a container, NVML may print less than PyTorch reserved."""
        size, reserved = self.process_bytes, self.reserved_bytes
        return size is not None and (reserved is None or size >= (1 - _ROUNDING) * reserved)

    @property
    def other_processes(self) -> tuple[Process, ...]:
        """The processes except this one: in a container, the smallest that holds what PyTorch reserved."""
        if self.has_own_size or self.reserved_bytes is None:
            return self.processes
        large = [process for process in self.processes if (process.size_bytes or 0) >= self.reserved_bytes]
        own = min(large, key=lambda process: process.size_bytes or 0, default=None)
        return tuple(process for process in self.processes if process is not own)

    def to_json(self) -> dict[str, Any]:
        """The fields that the text gives; the others are absent."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["processes"] = [{"pid": process.pid, "size_bytes": process.size_bytes} for process in self.processes]
        values["cached_bytes"] = self.cached_bytes
        return {name: value for name, value in values.items() if value is not None and value != []}


def show(size_bytes: float) -> str:
    """A size in the unit that torch prints: `"3.87 GiB"`, `"435.5 MiB"`, `"40 bytes"`.

    `units.format_size` differs: it takes the next larger unit from a tenth of it on.
    """
    if size_bytes >= GIB:
        return f"{size_bytes / GIB:.2f} GiB"
    if size_bytes >= MIB:
        return f"{size_bytes / MIB:.1f} MiB"
    return f"{size_bytes / 1024:.1f} KiB" if size_bytes >= 1024 else f"{size_bytes:.0f} bytes"
