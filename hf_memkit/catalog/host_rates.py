"""Rates of a host's RAM and disk: measured in a second or two, given, or assumed. A GB is 10**9 bytes."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Barrier
from typing import Final

from hf_memkit.catalog.rates import Figure, GpuRates

_BLOCK_BYTES: Final = 128 << 20
"""Bytes of each thread's block: larger than its share of any cache."""

_ROUNDS_S: Final = 0.3
"""Seconds of measuring for each number of threads."""

_DEVICES: Final = "chsasank/device-benchmarks@7ccc883 README.md"
_UPDATES: Final = 1.5
"""Bytes moved by updates in place per byte that a copy benchmark counts: copies count two bytes and move three, as a
line is fetched before it is written (McCalpin, STREAM). Measured: 1.73 on one core of an AMD EPYC."""
_DESKTOP_RAM: Final = Figure(
    _UPDATES * 29, f"assumed: 1.5 × copies of a tensor, {_DEVICES}: 29 by a Ryzen 9 5900X; 14 to 49 elsewhere"
)
_SERVER_RAM: Final = Figure(
    _UPDATES * 96,
    f"assumed: 1.5 × copies of a tensor, {_DEVICES}: 96 by a Xeon Platinum 8358; 80 to 137 on servers since 2019",
)
_SERVER_CORES: Final = 33
"""Minimum number of logical CPUs of a host with a server's memory channels: desktops end at 32, and a slice of a
server with fewer cannot use its channels fully."""
_ASSUMED_CORE: Final = Figure(15.0, "assumed: one core")
_ASSUMED_READ: Final = Figure(
    3.69, "assumed: as DeepSpeed's handle reads from a PNY CS3040 (deepspeed: docs/_tutorials/deepnvme.md)"
)
_ASSUMED_WRITE: Final = Figure(
    3.18, "assumed: as DeepSpeed's handle writes to a PNY CS3040 (deepspeed: docs/_tutorials/deepnvme.md)"
)


@dataclass(frozen=True, slots=True)
class HostRates:
    """Rates of a host.

    Attributes:
        cores: number of cores that this process may use.
        ram_gb_per_s: bytes read plus bytes written by all cores, 10^9 a second.
        core_gb_per_s: the same for one core.
        nvme_read_gb_per_s, nvme_write_gb_per_s: of the disk that DeepSpeed swaps to.
        cores_source: source of `cores`.
        network_gb_per_s: of all network cards between machines, in one direction; None: as its GPUs' servers have.
    """

    cores: int
    ram_gb_per_s: Figure
    core_gb_per_s: Figure
    nvme_read_gb_per_s: Figure
    nvme_write_gb_per_s: Figure
    cores_source: str = "assumed"
    network_gb_per_s: Figure | None = None

    @property
    def knows_disk(self) -> bool:
        """Whether both rates of the disk are measured or given."""
        return self.nvme_read_gb_per_s != _ASSUMED_READ and self.nvme_write_gb_per_s != _ASSUMED_WRITE

    def with_disk(self, read_gb_per_s: float, write_gb_per_s: float, source: str) -> HostRates:
        """With measured rates of the disk instead of assumed ones; given rates stay."""
        read, write = (Figure(rate, source, measured=True) for rate in (read_gb_per_s, write_gb_per_s))
        return replace(
            self,
            nvme_read_gb_per_s=read if self.nvme_read_gb_per_s == _ASSUMED_READ else self.nvme_read_gb_per_s,
            nvme_write_gb_per_s=write if self.nvme_write_gb_per_s == _ASSUMED_WRITE else self.nvme_write_gb_per_s,
        )

    def describe_cpu(self) -> str:
        """Sentence with the figures that the time of a CPU optimizer is computed from."""
        ram = self.ram_gb_per_s
        return f"CPU optimizer: {self.cores} cores ({self.cores_source}), RAM {ram.value:.3g} GB/s ({ram.source})"

    def describe_disk(self, read_bytes: float, written_bytes: float) -> str:
        """Sentence with the bytes that a step reads and writes, and the disk's rates."""
        read = self.nvme_read_gb_per_s
        write = self.nvme_write_gb_per_s
        text = f"disk: {read_bytes / 1e9:.3g} GB a step are read at {read.value:.3g} GB/s"
        if read.source != write.source:
            text += f" ({read.source})"
        return f"{text}, {written_bytes / 1e9:.3g} GB written at {write.value:.3g} GB/s ({write.source})"


@dataclass(frozen=True, slots=True)
class GivenHost:
    """The user's description of a host; figures that are None are measured or assumed.

    Attributes:
        cores: of each machine.
        ram_gb_per_s, nvme_read_gb_per_s, nvme_write_gb_per_s: as in `HostRates`.
        pcie_gb_per_s: achieved rate in one direction.
        network_gb_per_s: as in `HostRates`.
        nvme_path: folder that DeepSpeed may swap to; None: no swapping.
    """

    cores: int | None = None
    ram_gb_per_s: float | None = None
    nvme_read_gb_per_s: float | None = None
    nvme_write_gb_per_s: float | None = None
    pcie_gb_per_s: float | None = None
    nvme_path: str | None = None
    network_gb_per_s: float | None = None

    def overridden_on(self, host: HostRates) -> HostRates:
        """The given figures, and those of `host` for the rest."""

        def figure(value: float | None, other: Figure) -> Figure:
            return other if value is None else Figure(value, "given by --host")

        network = host.network_gb_per_s
        if self.network_gb_per_s is not None:
            network = Figure(self.network_gb_per_s, "given by --host")
        return replace(
            host,
            cores=host.cores if self.cores is None else self.cores,
            cores_source=host.cores_source if self.cores is None else "given by --host",
            ram_gb_per_s=figure(self.ram_gb_per_s, host.ram_gb_per_s),
            nvme_read_gb_per_s=figure(self.nvme_read_gb_per_s, host.nvme_read_gb_per_s),
            nvme_write_gb_per_s=figure(self.nvme_write_gb_per_s, host.nvme_write_gb_per_s),
            network_gb_per_s=network,
        )

    def over_pcie(self, rates: GpuRates) -> GpuRates:
        """`rates` of a GPU in this machine, with the given PCIe rate."""
        given = self.pcie_gb_per_s
        return rates if given is None else replace(rates, pcie_gb_per_s=Figure(given, "given by --host"))

    def describe(self) -> str:
        """`"times use the machine of --host: 32 cores, RAM 200 GB/s"`; empty if nothing is given."""
        rates = {
            "RAM": self.ram_gb_per_s, "NVMe reads": self.nvme_read_gb_per_s, "NVMe writes": self.nvme_write_gb_per_s,
            "PCIe": self.pcie_gb_per_s, "network": self.network_gb_per_s,
        }  # fmt: skip
        figures = [f"{self.cores} cores"] if self.cores is not None else []
        figures += [f"{name} {value:.4g} GB/s" for name, value in rates.items() if value is not None]
        return f"times use the machine of --host: {', '.join(figures)}" if figures else ""


def assumed_host(cores: int) -> HostRates:
    """Assumed rates of a host with this number of cores and one disk."""
    ram = _SERVER_RAM if cores >= _SERVER_CORES else _DESKTOP_RAM
    return HostRates(cores, ram, _ASSUMED_CORE, _ASSUMED_READ, _ASSUMED_WRITE)


def measured_host() -> HostRates:
    """Measure this host's RAM in a second, by updates in place with one thread and with one on each core. The disk's
    rates are assumed: `deepspeed/aio.py` measures them in the swap folder, which takes longer."""
    cores = len(os.sched_getaffinity(0))
    one_thread = _update_gb_per_s(1)
    all_threads = _update_gb_per_s(cores)
    how = f"measured on this host, {_BLOCK_BYTES >> 20} MiB updated in place"
    ram = Figure(max(one_thread, all_threads), f"{how}, {cores} threads", measured=True)
    core = Figure(one_thread, f"{how}, 1 thread", measured=True)
    return HostRates(cores, ram, core, _ASSUMED_READ, _ASSUMED_WRITE, "this host's")


def _update_gb_per_s(threads: int) -> float:
    """10^9 bytes read and written a second by updates in place, like Adam's, in threads; numpy frees the GIL."""
    import numpy as np

    barrier = Barrier(threads)

    def updates(_: int) -> float:
        block = np.ones(_BLOCK_BYTES // 4, np.float32)  # touches every page
        barrier.wait()
        moved = 0
        start = time.perf_counter()
        while (now := time.perf_counter()) < start + _ROUNDS_S:
            np.multiply(block, 1.0, out=block)
            moved += 2 * _BLOCK_BYTES
        return moved / (now - start)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(updates, range(threads))) / 1e9
