"""What this machine can do for memkit: each line says that it is well, or what mends it.

Looks and tries, changes nothing: it deletes no lock, builds nothing, and leaves no file behind.
"""

from __future__ import annotations

from hf_memkit.doctor.line import STATUSES, Line, Status

__all__ = ["STATUSES", "Line", "Status", "diagnose"]


def diagnose(nvme_path: str | None = None) -> list[Line]:
    """Looks at everything, in the order in which it is shown; takes some seconds.

    Args:
        nvme_path: a folder whose disk is measured too, which takes some seconds more. None: the current folder is
            tried and not measured.
    """
    from hf_memkit.doctor import disk, gpu, host, hub, operators, software

    return [
        *software.lines(),
        *gpu.lines(),
        *operators.lines(),
        *host.lines(),
        *disk.lines(nvme_path),
        *hub.lines(),
    ]
