"""How fast a host moves bytes: its RAM and its disk. Measured here in a second or two, given, or assumed.

A GB is 10**9 bytes. The rates of GPUs are in `gpu_rates.py`.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Final

from hf_memkit.errors import InputError
from hf_memkit.rates import Figure

__all__ = ["HostRates", "assumed_host", "given_host", "measured_host"]

_BLOCK_BYTES: Final = 128 << 20
"""Bytes of each thread's block: larger than its share of any cache."""

_ROUNDS_S: Final = 0.3
"""Seconds for each number of threads."""

_DEVICES: Final = "chsasank/device-benchmarks@7ccc883 README.md"
_UPDATES: Final = 1.5
"""How many bytes updates in place move beside copies that count two bytes and move three, because a line is fetched
before it is written (McCalpin, STREAM). 1.73 on one core of an AMD EPYC with the copies of that benchmark."""
_DESKTOP_RAM: Final = Figure(
    _UPDATES * 29, f"assumed: 1.5 × copies of a tensor, {_DEVICES}: 29 by a Ryzen 9 5900X; 14 to 49 elsewhere"
)
_SERVER_RAM: Final = Figure(
    _UPDATES * 96,
    f"assumed: 1.5 × copies of a tensor, {_DEVICES}: 96 by a Xeon Platinum 8358; 80 to 137 on servers since 2019",
)
_SERVER_CORES: Final = 33
"""From this number of logical CPUs on a host has a server's memory channels: desktops end at 32. A slice of a server
with fewer cannot fill its channels either."""
_ASSUMED_CORE: Final = Figure(15.0, "assumed: one core")
_ASSUMED_READ: Final = Figure(
    3.69, "assumed: as DeepSpeed's handle reads from a PNY CS3040 (deepspeed: docs/_tutorials/deepnvme.md)"
)
_ASSUMED_WRITE: Final = Figure(
    3.18, "assumed: as DeepSpeed's handle writes to a PNY CS3040 (deepspeed: docs/_tutorials/deepnvme.md)"
)


@dataclass(frozen=True, slots=True)
class HostRates:
    """
    Attributes:
        cores: that this process may use.
        ram_gb_per_s: bytes read and written, 10^9 a second, by all cores together.
        core_gb_per_s: the same by one core.
        nvme_read_gb_per_s, nvme_write_gb_per_s: of the disk that DeepSpeed swaps to.
    """

    cores: int
    ram_gb_per_s: Figure
    core_gb_per_s: Figure
    nvme_read_gb_per_s: Figure
    nvme_write_gb_per_s: Figure


def assumed_host(cores: int) -> HostRates:
    """A host of which only the cores are known, with one disk."""
    return HostRates(cores, _assumed_ram(cores), _ASSUMED_CORE, _ASSUMED_READ, _ASSUMED_WRITE)


def _assumed_ram(cores: int) -> Figure:
    return _SERVER_RAM if cores >= _SERVER_CORES else _DESKTOP_RAM


def given_host(
    cores: int,
    *,
    ram_gb_per_s: float | None = None,
    nvme_read_gb_per_s: float | None = None,
    nvme_write_gb_per_s: float | None = None,
) -> HostRates:
    """A host as the user describes it; what is None is assumed.

    Raises:
        InputError: a figure is not above 0.
    """

    def figure(name: str, value: float | None, assumed: Figure) -> Figure:
        if value is None:
            return assumed
        if not value > 0:
            raise InputError(f"{name}={value}: give a figure above 0, in GB/s")
        return Figure(value, "given by the user")

    if cores < 1:
        raise InputError(f"cores={cores}: give at least 1")
    return HostRates(
        cores,
        figure("ram_gb_per_s", ram_gb_per_s, _assumed_ram(cores)),
        _ASSUMED_CORE,
        figure("nvme_read_gb_per_s", nvme_read_gb_per_s, _ASSUMED_READ),
        figure("nvme_write_gb_per_s", nvme_write_gb_per_s, _ASSUMED_WRITE),
    )


def measured_host() -> HostRates:
    """This host, in a second: updates in place by one thread, and by one on each core. The disk is assumed:
    `zero/aio.py` measures one, in the folder that is swapped to, and takes longer."""
    cores = len(os.sched_getaffinity(0))
    one, every = _update_gb_per_s(1), _update_gb_per_s(cores)
    how = f"measured on this host, {_BLOCK_BYTES >> 20} MiB updated in place"
    return HostRates(
        cores,
        Figure(max(one, every), f"{how}, {cores} threads", measured=True),
        Figure(one, f"{how}, 1 thread", measured=True),
        _ASSUMED_READ,
        _ASSUMED_WRITE,
    )


def _update_gb_per_s(threads: int) -> float:
    """Bytes read and written by updates in place in `threads` threads: what Adam on the host does. A copy would count
    less than it moves, because a line is fetched before it is written (McCalpin, STREAM). numpy lets other threads run
    meanwhile."""
    import numpy as np

    together = Barrier(threads)

    def updates(_: int) -> float:
        block = np.ones(_BLOCK_BYTES // 4, np.float32)  # touches every page
        together.wait()
        moved, start = 0, time.perf_counter()
        while (now := time.perf_counter()) < start + _ROUNDS_S:
            np.multiply(block, 1.0, out=block)
            moved += 2 * _BLOCK_BYTES
        return moved / (now - start)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(updates, range(threads))) / 1e9
