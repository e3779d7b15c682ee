"""What an out-of-memory message says, as numbers; and text of unknown origin, made safe to show."""

from __future__ import annotations

import textwrap
import unicodedata
from dataclasses import dataclass, fields
from typing import Any, Literal

from hf_memkit.units import GIB, MIB

__all__ = ["Memory", "OomMessage", "Process", "paragraph", "printable", "show"]

Memory = Literal["device", "host", "shared memory", "kernel"]
"""Which memory ran out: the device's, the machine's RAM, /dev/shm, or what one GPU kernel may use on the chip."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process on the card, as NVML told torch. In a container `pid` may be the host's number of this very one."""

    pid: int
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class OomMessage:
    """One message. Sizes are bytes, and None where the text does not say.

    Attributes:
        form: which of the known forms it has (`hf_memkit.oom.patterns`).
        library: who wrote it, such as `"PyTorch"` or `"Linux"`.
        memory: which memory ran out.
        device_type: `cuda`, `rocm`, `xpu`, `mps`, `npu`, `hpu`; None where it is no device's memory or not said.
        device: index of the card.
        requested_bytes: what could not be allocated.
        capacity_bytes: all of the card.
        free_bytes: what the driver had left.
        allocated_bytes: what PyTorch's tensors took, private pools included.
        reserved_bytes: what PyTorch had taken from the driver; the rest of it is cached.
        allowed_bytes: the cap (`set_per_process_memory_fraction`, MPS's high watermark).
        private_pools_bytes: of the allocated, what only CUDA graphs' pools may use.
        process_bytes: all that this process held on the card, the CUDA context included.
        other_bytes: MPS: what this process held outside PyTorch's allocator.
        processes: the others that NVML listed.
        limit_bytes: kernel: what the chip has; DeepSpeed: what one buffer holds.
        pid, process_name: the process that was killed.
        resident_bytes: RAM that it held.
        in_cgroup: whether a container's or job's limit was hit rather than the machine's.
        variable: the allocator's environment variable, as this version of torch names it.
        quote: the message itself, bounded, without control characters.
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
    in_cgroup: bool | None = None
    variable: str | None = None

    @property
    def cached_bytes(self) -> int | None:
        """Reserved less allocated: in PyTorch's cache, in pieces between tensors that are in use."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes

    def to_json(self) -> dict[str, Any]:
        """What the text said; what it did not say is absent."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["processes"] = [{"pid": process.pid, "size_bytes": process.size_bytes} for process in self.processes]
        values["cached_bytes"] = self.cached_bytes
        return {name: value for name, value in values.items() if value is not None and value != []}


def printable(text: str, limit: int = 600) -> str:
    """`text` on one line and safe for a terminal: no control or direction characters, at most `limit` characters."""
    cleaned = "".join(
        " " if character.isspace() else character
        for character in text[: 4 * limit]
        if character.isspace() or not unicodedata.category(character).startswith("C")
    )
    joined = " ".join(cleaned.split())
    return joined if len(joined) <= limit else joined[: limit - 1] + "…"


def paragraph(text: str, width: int, indent: str = "  ") -> list[str]:
    """`text` as a sentence, in lines of at most `width` characters, safe for a terminal."""
    cleaned = printable(text, 2_000)
    if not cleaned[1:2].isupper():  # vLLM keeps its name
        cleaned = cleaned[:1].upper() + cleaned[1:]
    return textwrap.wrap(cleaned, max(40, width), initial_indent=indent, subsequent_indent=indent)


def show(size_bytes: float) -> str:
    """`"3.87 GiB"`, `"435.5 MiB"`, `"40 bytes"`: in the unit that torch takes, so that a figure reads as in the
    message (`units.format_size` takes the next larger one from a tenth of it on)."""
    if size_bytes >= GIB:
        return f"{size_bytes / GIB:.2f} GiB"
    if size_bytes >= MIB:
        return f"{size_bytes / MIB:.1f} MiB"
    return f"{size_bytes / 1024:.1f} KiB" if size_bytes >= 1024 else f"{size_bytes:.0f} bytes"
