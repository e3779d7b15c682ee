"""Check this machine for memkit: each check is ok, or names a fix. Changes nothing: no lock is deleted, nothing is
built, no file remains."""

from __future__ import annotations

from hf_memkit.checks.doctor.check import Check, Status

__all__ = ["Check", "Status", "diagnose"]


def diagnose(nvme_path: str | None = None) -> list[Check]:
    """All checks, in the order of the screen; takes some seconds, and some more with a folder `nvme_path` to test and
    measure."""
    from hf_memkit.checks.doctor import gpu, host, operators, software

    return [*software.checks(), *gpu.checks(), *operators.checks(), *host.checks(nvme_path)]
