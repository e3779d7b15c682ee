"""What this machine can do for memkit: each check says that it is well, or how to fix it.

Looks and tries, changes nothing: it deletes no lock, builds nothing, and leaves no file behind.
"""

from __future__ import annotations

from hf_memkit.doctor.check import STATUSES, Check, Status

__all__ = ["STATUSES", "Check", "Status", "diagnose"]


def diagnose(nvme_path: str | None = None) -> list[Check]:
    """Looks at everything, in the order in which it is shown; takes some seconds.

    Args:
        nvme_path: a folder whose disk is measured too, which takes some seconds more. None: the current folder is
            tried and not measured.
    """
    from hf_memkit.doctor import gpu, host, operators, software

    return [*software.checks(), *gpu.checks(), *operators.checks(), *host.checks(nvme_path)]
