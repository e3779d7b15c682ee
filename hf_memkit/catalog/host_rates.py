"""How fast a host moves bytes: its RAM and its disk. Measured here in a second or two, given, or assumed.

A GB is 10**9 bytes. The rates of GPUs are in `gpu_rates.py`.
"""

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
        cores_source: where `cores` comes from.
    """

    cores: int
    ram_gb_per_s: Figure
    core_gb_per_s: Figure
    nvme_read_gb_per_s: Figure
    nvme_write_gb_per_s: Figure
    cores_source: str = "assumed"

    @property
    def knows_disk(self) -> bool:
        """Whether both rates of the disk are measured or given."""
        return self.nvme_read_gb_per_s != _ASSUMED_READ and self.nvme_write_gb_per_s != _ASSUMED_WRITE

    def with_disk(self, read_gb_per_s: float, write_gb_per_s: float, source: str) -> HostRates:
        """With what was measured of the disk, in the place of what is assumed."""
        read, write = (Figure(each, source, measured=True) for each in (read_gb_per_s, write_gb_per_s))
        return replace(
            self,
            nvme_read_gb_per_s=read if self.nvme_read_gb_per_s == _ASSUMED_READ else self.nvme_read_gb_per_s,
            nvme_write_gb_per_s=write if self.nvme_write_gb_per_s == _ASSUMED_WRITE else self.nvme_write_gb_per_s,
        )

    def said_of_cpu(self) -> str:
        """What an optimizer on the CPU is priced by."""
        ram = self.ram_gb_per_s
        return f"CPU optimizer: {self.cores} cores ({self.cores_source}), RAM {ram.value:.3g} GB/s ({ram.source})"

    def said_of_disk(self, read_bytes: float, written_bytes: float) -> str:
        """What a step reads and writes, at which rates."""
        read, write = self.nvme_read_gb_per_s, self.nvme_write_gb_per_s
        said = f"disk: {read_bytes / 1e9:.3g} GB a step are read at {read.value:.3g} GB/s"
        if read.source != write.source:
            said += f" ({read.source})"
        return f"{said}, {written_bytes / 1e9:.3g} GB written at {write.value:.3g} GB/s ({write.source})"


@dataclass(frozen=True, slots=True)
class GivenHost:
    """What the user says of the machine in question; None: nothing, and it is measured or assumed.

    Attributes:
        cores: for each machine.
        ram_gb_per_s, nvme_read_gb_per_s, nvme_write_gb_per_s: as of `HostRates`.
        pcie_gb_per_s: as of `GpuRates`.
        nvme_path: folder that DeepSpeed may swap to; None: it may not.
    """

    cores: int | None = None
    ram_gb_per_s: float | None = None
    nvme_read_gb_per_s: float | None = None
    nvme_write_gb_per_s: float | None = None
    pcie_gb_per_s: float | None = None
    nvme_path: str | None = None

    def over(self, host: HostRates) -> HostRates:
        """What is given, and the rest of `host`."""

        def figure(value: float | None, other: Figure) -> Figure:
            return other if value is None else Figure(value, _GIVEN)

        return replace(
            host,
            cores=host.cores if self.cores is None else self.cores,
            cores_source=host.cores_source if self.cores is None else _GIVEN,
            ram_gb_per_s=figure(self.ram_gb_per_s, host.ram_gb_per_s),
            nvme_read_gb_per_s=figure(self.nvme_read_gb_per_s, host.nvme_read_gb_per_s),
            nvme_write_gb_per_s=figure(self.nvme_write_gb_per_s, host.nvme_write_gb_per_s),
        )

    def over_pcie(self, rates: GpuRates) -> GpuRates:
        """A GPU in this machine."""
        given = self.pcie_gb_per_s
        return rates if given is None else replace(rates, pcie_gb_per_s=Figure(given, _GIVEN))

    def said(self) -> str:
        """`"times use the machine of --host: 32 cores, RAM 200 GB/s"`; empty: nothing is given."""
        rates = {
            "RAM": self.ram_gb_per_s, "NVMe reads": self.nvme_read_gb_per_s, "NVMe writes": self.nvme_write_gb_per_s,
            "PCIe": self.pcie_gb_per_s,
        }  # fmt: skip
        said = [f"{self.cores} cores"] if self.cores is not None else []
        said += [f"{name} {value:.4g} GB/s" for name, value in rates.items() if value is not None]
        return f"times use the machine of --host: {', '.join(said)}" if said else ""


_GIVEN: Final = "given by --host"


def assumed_host(cores: int) -> HostRates:
    """A host of which only the cores are known, with one disk."""
    return HostRates(cores, _assumed_ram(cores), _ASSUMED_CORE, _ASSUMED_READ, _ASSUMED_WRITE)


def _assumed_ram(cores: int) -> Figure:
    return _SERVER_RAM if cores >= _SERVER_CORES else _DESKTOP_RAM


def measured_host() -> HostRates:
    """This host, in a second: updates in place by one thread, and by one on each core. The disk is assumed:
    `deepspeed/aio.py` measures one, in the folder that is swapped to, and takes longer."""
    cores = len(os.sched_getaffinity(0))
    one, every = _update_gb_per_s(1), _update_gb_per_s(cores)
    how = f"measured on this host, {_BLOCK_BYTES >> 20} MiB updated in place"
    return HostRates(
        cores,
        Figure(max(one, every), f"{how}, {cores} threads", measured=True),
        Figure(one, f"{how}, 1 thread", measured=True),
        _ASSUMED_READ,
        _ASSUMED_WRITE,
        "this host's",
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
