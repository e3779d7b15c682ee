"""Check this machine for memkit: each check is ok, or names a fix. Deletes no lock, builds nothing, leaves no file."""

from __future__ import annotations

from hf_memkit.checks.doctor.check import Check, Status

__all__ = ["Check", "Status", "diagnose"]


def diagnose(nvme_path: str | None = None) -> list[Check]:
    """All checks, in the screen's order. Takes some seconds; more to test and measure a folder `nvme_path`."""
    from hf_memkit.checks.doctor import gpu, host, operators, software

    return [*software.checks(), *gpu.checks(), *operators.checks(), *host.checks(nvme_path)]
