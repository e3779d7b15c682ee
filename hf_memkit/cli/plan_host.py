"""`memkit plan --host` and `--nvme-path`: speeds of the machine with the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hf_memkit.catalog.host_rates import GivenHost
from hf_memkit.common.errors import InputError, did_you_mean
from hf_memkit.common.units import GB, parse_rate
from hf_memkit.common.user_files import user_path

_RATES: Final = {
    "ram-bandwidth": "ram_gb_per_s",
    "nvme-read": "nvme_read_gb_per_s",
    "nvme-write": "nvme_write_gb_per_s",
    "pcie": "pcie_gb_per_s",
}
_CORES: Final = "cores"


def read_host(given: Sequence[str], nvme_path: str | None = None) -> GivenHost:
    """Reads values such as `"cores=32,nvme-read=6GB/s"`; the InputError has a line for each mistake."""
    cores: int | None = None
    rates: dict[str, float] = {}
    seen: set[str] = set()
    wrong = []
    for each in (part.strip() for text in given for part in text.split(",") if part.strip()):
        name, equals, value = (part.strip() for part in each.partition("="))
        if name not in (names := (_CORES, *_RATES)):
            near = did_you_mean(name, names) or f"; write one of {', '.join(names)}"
            wrong.append(f"--host {each}: unknown name{near}")
        elif name in seen:
            wrong.append(f"--host {each}: {name} given twice; omit one")
        elif name == _CORES and not (value.isascii() and value.isdigit() and int(value)):
            wrong.append(f"--host {each}: write a whole number of cores: cores=32")
        elif name == _CORES:
            cores = int(value)
        elif not equals or not value:
            wrong.append(f"--host {each}: write NAME=RATE, such as {name}=6GB/s")
        else:
            try:
                rates[_RATES[name]] = parse_rate(value) / GB
            except InputError as error:
                wrong.append(f"--host {name}: {error}")
        seen.add(name)
    if nvme_path is not None and not nvme_path.strip():
        wrong.append("--nvme-path: empty; give a folder on a fast disk")
    elif nvme_path is not None and user_path(nvme_path).exists() and not user_path(nvme_path).is_dir():
        wrong.append(f"--nvme-path {nvme_path}: a file; give a folder")
    if wrong:
        raise InputError("\n".join(wrong))
    return GivenHost(cores, nvme_path=nvme_path, **rates)
