"""The machine of a job: this one, or one described by a GPU's name or size.

`this_machine()` inspects this machine; `named_gpu("T4")` and `gpu_of_size("16GB")` describe other GPUs. Capacities are
those that PyTorch reports, not the size on the box; `usable_bytes` excludes the CUDA context.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil

from hf_memkit.catalog.gpu_rates import VARIANTS, rates_of
from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS, VISIBLE_SHARE, KnownGpu
from hf_memkit.catalog.library_versions import torch_has_cuda
from hf_memkit.catalog.memlock import can_lock
from hf_memkit.common.errors import InputError
from hf_memkit.common.units import GB, GIB, MIB, format_gib, parse_size
from hf_memkit.common.user_files import user_path

CONTEXT_BYTES = 500 * MIB
"""Memory of the CUDA context and of loaded kernels, outside PyTorch's allocator, for GPUs where it was not measured
(`KnownGpu.context_mib`). Assumed: it is typically 300 to 600 MiB, and depends on GPU, driver and torch."""

SLOW_BF16 = 4.0
"""Minimum `bf16_slowdown()` of a CPU without bf16 instructions. Measured: below 1 with them, above 20 without."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        name: its common name.
        capacity_bytes: total memory that PyTorch reports.
        context_bytes: memory of the CUDA context in that total, measured or assumed (`CONTEXT_BYTES`).
        bf16: whether the GPU computes in bf16 (compute capability 8.0 and later). Older GPUs emulate it more slowly
            than fp32, which `torch.cuda.is_bf16_supported()` counts as support.
        source: source of these figures.
        here: whether the GPU is in this machine.
        capability: CUDA compute capability, such as 8.6; None if only a size is known.
    """

    name: str
    capacity_bytes: int
    bf16: bool
    source: str
    context_bytes: int = CONTEXT_BYTES
    here: bool = False
    capability: float | None = None

    @property
    def usable_bytes(self) -> int:
        """Bytes left for PyTorch's allocator."""
        return self.capacity_bytes - self.context_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "capacity_gib": self.capacity_bytes / GIB,
            "usable_gib": self.usable_bytes / GIB,
            "bf16": self.bf16,
            "source": self.source,
            "here": self.here,
        }


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of a job.

    Attributes:
        gpu: one GPU; None: the job runs on the CPU.
        ram_bytes: RAM, or the container's limit if set.
        disk_free_bytes: free space at `disk_path`, the folder for swap files.
        memlock_bytes: limit of page-locked memory; None: unlimited, as for a process with CAP_IPC_LOCK.
        output_free_bytes: free space for checkpoints, if they go to another disk; None: the same disk.
    """

    gpu: Gpu | None
    ram_bytes: int
    disk_free_bytes: int
    disk_path: str
    cpu_count: int
    memlock_bytes: int | None = None
    output_free_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu.to_json() if self.gpu else None,
            "ram_gib": self.ram_bytes / GIB,
            "disk_free_gib": self.disk_free_bytes / GIB,
            "disk_path": self.disk_path,
            "cpu_count": self.cpu_count,
        }

    def with_gpu(self, gpu: Gpu | None) -> Machine:
        return replace(self, gpu=gpu)

    def with_ram(self, ram_bytes: int) -> Machine:
        return replace(self, ram_bytes=ram_bytes)


def _key(name: str) -> str:
    """The same key for `"RTX 4060 Ti"`, `"rtx4060ti"` and `"NVIDIA-RTX-4060-Ti"`."""
    # nvidia-smi adds form factor and type of memory: "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3".
    return re.sub(r"nvidia|geforce|tesla|quadro|rtx|sxm(\d(?!\d))?|pcie|hbm\d?e?|[^a-z0-9]", "", name.lower())


_ALSO_CALLED: Final = {
    "h100": "H100 80GB",
    "p10016gb": "P100",
    "6000adageneration": "RTX 6000 Ada",
    "pro6000blackwellworkstationedition": "RTX PRO 6000",
    "pro6000blackwellserveredition": "RTX PRO 6000",
}
"""`_key` of further names → name. There is no H100 with less memory."""

_MOST_NAMED: Final = 3
"""Maximum number of GPUs that a message proposes."""


def named_gpu(name: str) -> Gpu:
    """The GPU called `name`, such as `"T4"` or `"RTX 4090"`. A GPU that exists as an SXM module and with PCIe is the
    module, unless `name` contains PCIe: `"A100 80GB PCIe"`.

    Raises:
        InputError: unknown name; proposes the nearest.
    """
    by_key = {_key(known): known for known in KNOWN_GPUS} | _ALSO_CALLED
    known_name = by_key.get(_key(name))
    if known_name is None:
        raise InputError(f"unknown GPU {name!r}; {_proposal(name, by_key)}")

    named = KNOWN_GPUS[known_name]
    if named.total_gib is not None:
        total_gib = named.total_gib
        how = f"what PyTorch reports ({named.thread})"
    else:
        total_gib = named.box_gb * VISIBLE_SHARE
        how = f"{VISIBLE_SHARE} of the {named.box_gb} GB on the box (no report)"
    pcie = f"{known_name} PCIe"  # a variant if its rates differ from the SXM module's
    return Gpu(
        name=pcie if "pcie" in name.lower() and rates_of(pcie) in VARIANTS.values() else known_name,
        capacity_bytes=int(total_gib * GIB),
        bf16=named.capability >= 8.0,
        source=f"named GPU: {total_gib:.2f} GiB, {how}; compute capability {named.capability}",
        capability=named.capability,
        context_bytes=_context_bytes(named),
    )


def _context_bytes(known: KnownGpu | None) -> int:
    if known is None or known.context_mib is None:
        return CONTEXT_BYTES
    return known.context_mib * MIB


_OTHER_MAKERS: Final = {
    "AMD": r"\b(mi\d{2,3}\w*|radeon|rx ?\d{4}\w*|w[67]\d00|instinct)\b",
    "Apple": r"^\s*(apple )?m[1-9]( (pro|max|ultra))?\s*$|\bmps\b",
    "Google": r"\btpu\b|^\s*v[2-7](e|p|-\d+)\s*$",
    "Huawei": r"\bascend\b|\bnpu\b|\b910[abc]?\b",
    "Intel": r"\barc\b|\bgaudi ?\d?\b|\bhpu\b|\bxpu\b|\bponte vecchio\b",
    "Amazon": r"\btrainium\d?\b|\binferentia\d?\b",
}
"""Maker → names of its accelerators."""


def _proposal(name: str, by_key: Mapping[str, str]) -> str:
    """What to write instead of the unknown name of a GPU; `by_key`: `_key` of every known name → the name."""
    if re.fullmatch(r"\s*[1-9]\d{0,2}\s*", name):
        return f"did you mean {name.strip()}GB?"
    for maker, pattern in _OTHER_MAKERS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return f"memkit predicts NVIDIA GPUs only, and this is one of {maker}'s"

    several = re.fullmatch(r"\s*(?P<count>\d{1,2})\s*[x×*]\s*(?P<gpu>\D.*)", name, re.IGNORECASE)
    several = several or re.fullmatch(r"(?P<gpu>.*\d.*?)\s*[x×*]\s*(?P<count>\d{1,2})\s*", name, re.IGNORECASE)
    if several:
        return f'for several GPUs of one machine write --gpu "{several["gpu"].strip()}" --gpus {several["count"]}'

    key = _key(name)
    if not name.strip():
        return "give a name or a size, such as T4 or 16GB"
    if not key:  # the shell has cut "RTX 4090" in two
        return 'a name with a space needs quotes: --gpu "RTX 4090"'
    longer = [known for known in by_key if known.startswith(key)]
    close = [known for known in difflib.get_close_matches(key, by_key, n=2) if _same_number(key, known)]
    near = [by_key[known] for known in longer or close]
    by_size = "give its memory instead, such as 16GB"
    listed = " or ".join(map(repr, dict.fromkeys(near[:_MOST_NAMED])))
    return f"did you mean {listed}? For another GPU {by_size}" if near else by_size


def _same_number(one: str, other: str) -> bool:
    """Whether the digits of two names are equal, or differ by missing digits or the last: GTX 1080 is no RTX 2080."""
    digits = ("".join(filter(str.isdigit, name)) for name in (one, other))
    shorter, longer = sorted(digits, key=len)
    if len(shorter) == len(longer) and shorter[:-1] == longer[:-1]:
        return True
    if one.isdigit():
        return False
    rest = iter(longer)
    return all(digit in rest for digit in shorter)


def gpu_of_size(size: str, option: str = "GPU memory") -> Gpu:
    """A GPU of this size with bf16 (Ampere or later).

    Args:
        size: size on the box, such as `"16GB"`, or the real capacity, such as `"15GiB"`.
        option: the option or argument that gave it, for messages.

    Raises:
        InputError: not a size, or too small for a CUDA context.
    """
    size_bytes = parse_size(size, option)
    exact = "gib" in size.lower() or "mib" in size.lower()
    capacity = size_bytes if exact else int(size_bytes / GB * VISIBLE_SHARE * GIB)
    if capacity <= CONTEXT_BYTES:
        raise InputError(
            f"{option}: {size!r}: the CUDA context alone takes {format_gib(CONTEXT_BYTES)}; give more, such as 16GB"
        )
    return Gpu(
        name=f"{size} GPU",
        capacity_bytes=capacity,
        bf16=True,
        source=f"by size: {format_gib(capacity)} visible to PyTorch, bf16 (Ampere or later) assumed",
    )


def _this_gpu() -> Gpu | None:
    """The first CUDA device that this process may use; None if there is none.

    NVML is asked, because torch would create a CUDA context. PyTorch reports NVML's total without its reserved part.
    """
    import pynvml

    if not torch_has_cuda():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if visible is None else visible.split(",")[0].strip()  # an index or a UUID
    try:
        pynvml.nvmlInit()
        if first in ("", "-1") or (visible is None and not pynvml.nvmlDeviceGetCount()):
            return None
        if first.isdigit():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(first))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(first)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        name = pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError:  # torch creates a CUDA context in this process
        import torch

        if not torch.cuda.is_available():
            return None
        properties = torch.cuda.get_device_properties(0)
        return _gpu_here(str(properties.name), int(properties.total_memory), properties.major, properties.minor)
    return _gpu_here(name, int(memory.total) - int(memory.reserved), major, minor)


def _gpu_here(name: str, capacity_bytes: int, major: int, minor: int) -> Gpu:
    known = next((known for named, known in KNOWN_GPUS.items() if _key(named) == _key(name)), None)
    return Gpu(
        name=name,
        capacity_bytes=capacity_bytes,
        bf16=major >= 8,
        source="this machine",
        here=True,
        capability=float(f"{major}.{minor}"),
        context_bytes=_context_bytes(known),
    )


def use_one_gpu() -> None:
    """Restrict this process to the first GPU that it may use. No effect in processes of a launcher, or without NVML.

    If Trainer sees several GPUs, it wraps the model in DataParallel and multiplies the batch. Call this before torch
    is imported: libraries that query CUDA on import (bitsandbytes, torchao) fix the choice.
    """
    import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if "LOCAL_RANK" in os.environ or visible == "":
        return
    # By default CUDA numbers the GPUs by speed and NVML by bus, so that an index would mean two GPUs.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0].strip()
        return
    try:
        pynvml.nvmlInit()
        if pynvml.nvmlDeviceGetCount() > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    except pynvml.NVMLError:
        return


def has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether a torch built for `architectures` (`sm_80`, `compute_90` …) runs on a GPU of this compute capability.
    A binary (`sm_`) runs on its minor version and later ones of the same major version, PTX on all later versions."""
    target = capability[0] * 10 + capability[1]
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        minimum = int("".join(filter(str.isdigit, number)) or 0)
        if minimum <= target and (kind == "compute" or minimum // 10 == capability[0]):
            return True
    return False


def torch_with_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> str:
    """The torch to install instead of one that was built for `architectures` and lacks this compute capability."""
    numbers = ("".join(filter(str.isdigit, architecture)) for architecture in architectures if "_" in architecture)
    newest = max((int(number[:-1] or 0) for number in numbers), default=0)
    age = "a newer" if capability[0] > newest else "an older"
    return f"a torch built for {age} CUDA (pytorch.org)"


def _ram_bytes() -> int:
    """Physical RAM, or the container's limit if that is lower (cgroup v2, then v1)."""
    total = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(path).read_text().strip())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        total = min(total, limit)
    return total


def this_machine(disk_path: str | Path = ".", *, gpu: Gpu | None = None) -> Machine:
    """This machine, with the free disk at `disk_path` or its nearest existing parent.

    Args:
        gpu: used instead of this machine's; None: ask for it, which can import torch.
    """
    path = user_path(disk_path).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    ram_bytes = _ram_bytes()
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        gpu=_this_gpu() if gpu is None else gpu,
        ram_bytes=ram_bytes,
        disk_free_bytes=shutil.disk_usage(path).free,
        disk_path=str(path),
        cpu_count=len(os.sched_getaffinity(0)),
        memlock_bytes=None if soft == resource.RLIM_INFINITY or can_lock(ram_bytes) else soft,
    )


@functools.cache
def bf16_slowdown() -> float:
    """Time of a product of bf16 matrices on this CPU, divided by its time in fp32; measured in a tenth of a second.

    The CPU's instruction sets are not enough: torch's build and oneDNN's settings decide too. The factors are not
    transposed, as in the backward pass of a linear layer: the slowest case without bf16 instructions.
    """
    import torch

    def seconds(dtype: torch.dtype) -> float:
        left = torch.ones(256, 256, dtype=dtype)
        right = torch.ones(256, 256, dtype=dtype)
        times = []
        for _ in range(4):  # the first one also prepares the kernel
            started = time.perf_counter()
            torch.mm(left, right)
            times.append(time.perf_counter() - started)
        return min(times[1:])

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine several threads would mostly wait for one another
    try:
        return seconds(torch.bfloat16) / seconds(torch.float32)
    finally:
        torch.set_num_threads(threads)


_SIZE: Final = re.compile(r"\s*[0-9.]+\s*[gmt](i?b)?\s*", re.IGNORECASE)


def described_gpu(gpu: str | None, gpu_memory: str | None = None, *, option: str = "--gpu") -> Gpu | None:
    """The described GPU; None if neither `gpu` nor `gpu_memory` is given.

    Args:
        gpu: a GPU's name, or a size with its unit such as `"16GB"`.
        gpu_memory: a size; with a name, the memory of that GPU to use.
        option: where `gpu` comes from, for messages: an option, or a function's argument `gpu`.

    Raises:
        InputError: an unknown GPU, not a size, or more memory than the GPU has; names the option.
    """
    memory_option = "--gpu-memory" if option.startswith("--") else "gpu_memory"
    if gpu is None:
        return gpu_of_size(gpu_memory, memory_option) if gpu_memory is not None else None
    if not gpu_memory and _SIZE.fullmatch(gpu):
        return gpu_of_size(gpu, option)

    size = gpu_of_size(gpu_memory, memory_option) if gpu_memory else None
    try:
        named = named_gpu(gpu)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None
    if size is None:
        return named
    if size.capacity_bytes > _ROUNDED_UP * named.capacity_bytes:
        has = f"{named.name} has {named.capacity_bytes / GIB:.2f} GiB"
        raise InputError(f"{memory_option} {gpu_memory}: {has}. Give less, or omit --gpu or --gpu-memory")
    if size.capacity_bytes >= named.capacity_bytes:
        return named
    return replace(named, capacity_bytes=size.capacity_bytes, source=f"{named.source}; capacity as given")


_ROUNDED_UP: Final = 1.1
"""Tolerance for a size on the box, of which the driver reserves a part: a T4 of 16 GB shows 14.56 GiB."""


def described_machine(
    gpu: str | None, gpu_memory: str | None, ram: str | None, path: str | None, *, option: str = "--gpu"
) -> Machine:
    """This machine, with its GPU, RAM and swap folder replaced by the described ones; None: this machine's.

    Raises:
        InputError: an unknown GPU or a wrong size; names the `option`.
    """
    ram_option = "--ram" if option.startswith("--") else "ram"
    ram_bytes = parse_size(ram, ram_option) if ram is not None else None
    machine = this_machine(path or ".", gpu=described_gpu(gpu, gpu_memory, option=option))
    return machine.with_ram(ram_bytes) if ram_bytes else machine
