"""The disk for NVMe offload: whether DeepSpeed can swap to it, and how fast."""

from __future__ import annotations

import shutil
from typing import Final

from hf_memkit.doctor.line import Line
from hf_memkit.errors import MemkitError
from hf_memkit.units import format_gib
from hf_memkit.user_files import user_path
from hf_memkit.zero.nvme import Preflight, file_system, preflight

__all__ = ["lines"]

_GROUP: Final = "Disk for NVMe offload"


def lines(nvme_path: str | None) -> list[Line]:
    """What stands in the way in `nvme_path` (or the current folder), and the speed of `nvme_path`."""
    folder = user_path(nvme_path or ".").absolute()
    found = preflight(nvme_path or folder, needed_bytes=0)
    lines = [*_problems(found, nvme_path or str(folder))]
    if not lines:
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        kind = file_system(folder) or "unknown file system"
        good = f"{folder} ({kind}): O_DIRECT works, {format_gib(free)} free"
        lines = [Line(_GROUP, "folder", "ok", good)]
    lines += [Line(_GROUP, "folder", "warning", note) for note in found.notes]
    if nvme_path is None:
        return [*lines, Line(_GROUP, "speed", "ok", "not measured; with a folder: memkit doctor --nvme-path DIR")]
    return lines if found.unusable else [*lines, _speed(nvme_path)]


def _problems(found: Preflight, folder: str) -> list[Line]:
    """Each problem line ends with what mends it, after the last semicolon."""
    lines = []
    for problem in (*found.unusable, *found.shortages, *found.missing):
        what, _, fix = problem.removeprefix("--nvme-path ").rpartition("; ")
        lines.append(Line(_GROUP, "folder", "missing", what, fix.removeprefix("run: ")))
    return lines


def _speed(nvme_path: str) -> Line:
    import torch

    from hf_memkit.zero.aio import measure

    try:
        with_folder = user_path(nvme_path)
        if not with_folder.is_dir():
            return Line(_GROUP, "speed", "warning", f"{nvme_path} does not exist yet", f"mkdir -p {nvme_path}")
        measured = measure(with_folder, cpu=not torch.cuda.is_available())
    except MemkitError as error:
        what, _, fix = str(error).rpartition("; ")
        return Line(_GROUP, "speed", "warning", what, fix)
    return Line(_GROUP, "speed", "ok", measured.label)
