"""How fast a host's RAM and NVMe drive are, where nobody has measured this one.

A CPU optimizer (ZeRO-Offload) is bound by RAM, ZeRO-Infinity by the drive. Hosts differ more than GPUs of one name:
whoever has measured (`zero/aio.py` does for a drive) takes that instead.
"""

from __future__ import annotations

from typing import Final

from hf_memkit.rates import Figure, HostRates

__all__ = ["DESKTOP", "SERVER", "host_rates"]

_DEVICES: Final = "chsasank/device-benchmarks@7ccc883 README.md, copies of a tensor"
_DEEP_NVME: Final = (
    "deepspeedai/DeepSpeed@edaa72212 blogs/deepnvme/06-2025: four PCIe 4.0 drives together {} GB/s, one a quarter"
)
_READ: Final = Figure(2.5, _DEEP_NVME.format(10))
_WRITE: Final = Figure(1.25, _DEEP_NVME.format(5))

DESKTOP: Final = HostRates(Figure(29, f"{_DEVICES}: Ryzen 9 5900X; 14 to 49 elsewhere", measured=True), _READ, _WRITE)
SERVER: Final = HostRates(
    Figure(96, f"{_DEVICES}: Xeon Platinum 8358; 80 to 137 for EPYC and Xeon since 2019", measured=True), _READ, _WRITE
)

_SERVER_CPUS: Final = 33
"""From this number of logical CPUs on a host has a server's memory channels: desktops end at 32. A slice of a server
with fewer cannot fill its channels either."""


def host_rates(cpu_count: int) -> HostRates:
    """Of a host with this many logical CPUs (`hardware.Machine.cpu_count`)."""
    return SERVER if cpu_count >= _SERVER_CPUS else DESKTOP
