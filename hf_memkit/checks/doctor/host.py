"""The host: the CPU's bf16, RAM and its limits, shared memory, the disk for NVMe offload, and the Hub."""

from __future__ import annotations

import importlib.util
import resource
import shutil
from pathlib import Path
from typing import Final

import psutil

from hf_memkit.catalog.hardware import SLOW_BF16, bf16_slowdown, this_machine
from hf_memkit.catalog.memlock import can_lock
from hf_memkit.catalog.models import hub_reachable, hub_switched_off
from hf_memkit.checks.doctor.check import Check
from hf_memkit.common.commands import command
from hf_memkit.common.errors import MemkitError
from hf_memkit.common.units import MIB, format_gib
from hf_memkit.common.user_files import user_path
from hf_memkit.deepspeed.nvme import file_system, preflight

_RAM: Final = "RAM"
_DISK: Final = "Disk for NVMe offload"
_SHARED: Final = Path("/dev/shm")
_MORE_SHARED: Final = "docker run --shm-size=8g (or --ipc=host)"
_DOCKER_SHARED_BYTES: Final = 64 * MIB
"""Docker's default size of /dev/shm (docker run --shm-size)."""


def checks(nvme_path: str | None) -> list[Check]:
    """The CPU's bf16, RAM and its limit, lockable RAM, shared memory; problems of offloading to `nvme_path` (or the
    current folder), and the speed of `nvme_path`; the Hub."""
    # The software checks report missing packages.
    bf16 = [_bf16()] if importlib.util.find_spec("torch") is not None else []
    hub = [_hub()] if importlib.util.find_spec("huggingface_hub") is not None else []
    return [*bf16, _ram(), _locked(), _shared(), *_disk(nvme_path), *hub]


def _bf16() -> Check:
    """Measured. Slow bf16 needs no fix: rehearsals then multiply in fp32."""
    slowdown = bf16_slowdown()
    slow = slowdown >= SLOW_BF16
    times = f"{slowdown:.0f}" if slow else f"{slowdown:.1f}"
    then = ": rehearsals store bf16 and multiply in fp32" if slow else ""
    return Check("CPU", "bf16", "ok", f"matrix products take {times} times as long as in fp32{then}")


def _ram() -> Check:
    memory = psutil.virtual_memory()
    swap = psutil.swap_memory()
    limit = this_machine().ram_bytes
    finding = f"{format_gib(memory.total)}, {format_gib(memory.available)} available; swap {format_gib(swap.total)}"
    if limit < memory.total:
        finding = f"{format_gib(limit)} (the container's limit) of {finding}"
    return Check(_RAM, "RAM", "ok", finding)


def _locked() -> Check:
    """The limit of locked memory, which applies to NVMe buffers only, not to CUDA's pinned memory."""
    limit, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if limit == resource.RLIM_INFINITY else format_gib(limit)
    if can_lock(this_machine().ram_bytes):
        by = "" if limit == resource.RLIM_INFINITY else "; this process may exceed it (CAP_IPC_LOCK)"
        return Check(_RAM, "memlock", "ok", f"{shown}{by}")
    finding = f"{shown}: DeepSpeed aborts if its NVMe buffers are larger (offload to RAM is not affected)"
    return Check(_RAM, "memlock", "warning", finding, "ulimit -l unlimited (Docker: --ulimit memlock=-1)")


def _shared() -> Check:
    if not _SHARED.is_dir():
        return Check(_RAM, "/dev/shm", "warning", "missing; data loader workers and NCCL need it", _MORE_SHARED)
    size = shutil.disk_usage(_SHARED).total
    if size > _DOCKER_SHARED_BYTES:
        return Check(_RAM, "/dev/shm", "ok", format_gib(size))
    finding = f"{format_gib(size)}, Docker's default: data loader workers and NCCL fail if they need more"
    return Check(_RAM, "/dev/shm", "warning", finding, _MORE_SHARED)


def _disk(nvme_path: str | None) -> list[Check]:
    folder = user_path(nvme_path or ".").absolute()
    if not folder.exists():
        return [Check(_DISK, "folder", "missing", f"{nvme_path} does not exist", command("mkdir", "-p", folder))]
    result = preflight(nvme_path or folder, needed_bytes=0)
    results = []
    for problem in (*result.unusable, *result.shortages, *result.missing):
        finding, _, fix = problem.removeprefix("--nvme-path ").rpartition("; ")  # the fix follows the last semicolon
        results.append(Check(_DISK, "folder", "missing", finding, fix.removeprefix("run: ")))
    if not results:
        free = shutil.disk_usage(folder).free
        kind = file_system(folder) or "unknown file system"
        good = f"{folder} ({kind}): O_DIRECT works, {format_gib(free)} free"
        results = [Check(_DISK, "folder", "ok", good)]
    results += [Check(_DISK, "folder", "warning", note) for note in result.notes]
    if nvme_path is None:
        return [*results, Check(_DISK, "speed", "ok", "not measured; to measure it: memkit doctor --nvme-path DIR")]
    return results if result.unusable else [*results, _speed(nvme_path)]


def _speed(nvme_path: str) -> Check:
    import torch

    from hf_memkit.deepspeed.aio import measure

    try:
        measured = measure(user_path(nvme_path), cpu=not torch.cuda.is_available())
    except MemkitError as error:
        finding, _, fix = str(error).rpartition("; " if "; " in str(error) else ". ")
        return Check(_DISK, "speed", "warning", finding, fix)
    return Check(_DISK, "speed", "ok", measured.label)


def _hub() -> Check:
    """Whether the Hub answers, is switched off, or does not answer."""
    if hub_reachable():
        return Check("Hub", "huggingface.co", "ok", "reachable")
    without = "models and data must be local or cached"
    if off := hub_switched_off():
        names = " ".join(condition.partition("=")[0] for condition in off.split(" and "))
        finding = f"switched off by {off}; {without}"
        return Check("Hub", "huggingface.co", "warning", finding, f"unset {names}")
    finding = f"no answer; {without}"
    return Check("Hub", "huggingface.co", "warning", finding, "curl -sI https://huggingface.co (shows why)")
