"""Sizes as libraries print them. In: text. Out: bytes, and back.

torch prints KiB, MiB and GiB; the kernel's kB are 1024 bytes; MPS prints "GB" and means 2**30 bytes
(torch: aten/src/ATen/mps/MPSAllocator.mm, `format_size`), so that each form says which it is.
"""

from __future__ import annotations

import re
from typing import Final

from hf_memkit.units import GIB, MIB

__all__ = ["SIZE", "show", "to_bytes"]

SIZE: Final = r"(\d{1,20}(?:[,_']\d{3}){0,6}(?:\.\d{1,9})?) ?(bytes|byte|[KMGTPkmgtp]i?B|B)\b"
"""A number and a unit: two groups."""

_POWER: Final = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}

# NVML answers -1 for a process's memory where it cannot tell (Windows, WSL2), and torch prints that as a size:
# 17179869184.00 GiB. No machine has 2**60 bytes.
_ABSURD: Final = 2**60


def to_bytes(number: str, unit: str, *, binary: bool = False) -> int | None:
    """Bytes of a size; None where the number stands for "not known". `binary`: GB means 2**30 here."""
    value = float(re.sub(r"[,_']", "", number))
    letter = unit[0].lower()
    factor = 1 if letter == "b" else (1024 if binary or "i" in unit else 1000) ** _POWER[letter]
    size = round(value * factor)
    return size if size < _ABSURD else None


def show(size_bytes: float) -> str:
    """`"3.87 GiB"`, `"435.5 MiB"`, `"40 bytes"`: the unit in which the number is easy to read."""
    if size_bytes >= GIB:
        return f"{size_bytes / GIB:.2f} GiB"
    if size_bytes >= MIB:
        return f"{size_bytes / MIB:.1f} MiB"
    return f"{size_bytes / 1024:.1f} KiB" if size_bytes >= 1024 else f"{size_bytes:.0f} bytes"
