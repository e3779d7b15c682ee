"""The disk for NVMe offload: whether DeepSpeed can swap to it, and how fast."""

from __future__ import annotations

import shutil
from typing import Final

from hf_memkit.doctor.check import Check
from hf_memkit.errors import MemkitError
from hf_memkit.units import format_gib
from hf_memkit.user_files import user_path
from hf_memkit.zero.nvme import Preflight, file_system, preflight

__all__ = ["checks"]

_GROUP: Final = "Disk for NVMe offload"


def checks(nvme_path: str | None) -> list[Check]:
    """What stands in the way in `nvme_path` (or the current folder), and the speed of `nvme_path`."""
    folder = user_path(nvme_path or ".").absolute()
    found = preflight(nvme_path or folder, needed_bytes=0)
    results = [*_problems(found, nvme_path or str(folder))]
    if not results:
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        kind = file_system(folder) or "unknown file system"
        good = f"{folder} ({kind}): O_DIRECT works, {format_gib(free)} free"
        results = [Check(_GROUP, "folder", "ok", good)]
    results += [Check(_GROUP, "folder", "warning", note) for note in found.notes]
    if nvme_path is None:
        return [*results, Check(_GROUP, "speed", "ok", "not measured; with a folder: memkit doctor --nvme-path DIR")]
    return results if found.unusable else [*results, _speed(nvme_path)]


def _problems(found: Preflight, folder: str) -> list[Check]:
    """Each problem ends with what mends it, after the last semicolon."""
    results = []
    for problem in (*found.unusable, *found.shortages, *found.missing):
        what, _, fix = problem.removeprefix("--nvme-path ").rpartition("; ")
        results.append(Check(_GROUP, "folder", "missing", what, fix.removeprefix("run: ")))
    return results


def _speed(nvme_path: str) -> Check:
    import torch

    from hf_memkit.zero.aio import measure

    try:
        with_folder = user_path(nvme_path)
        if not with_folder.is_dir():
            return Check(_GROUP, "speed", "warning", f"{nvme_path} does not exist yet", f"mkdir -p {nvme_path}")
        measured = measure(with_folder, cpu=not torch.cuda.is_available())
    except MemkitError as error:
        what, _, fix = str(error).rpartition("; ")
        return Check(_GROUP, "speed", "warning", what, fix)
    return Check(_GROUP, "speed", "ok", measured.label)
