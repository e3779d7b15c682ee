"""Parse sizes and rates, and format them. GiB is always 2**30 bytes, GB always 10**9 bytes. The figure on a GPU's box
("16 GB") is a name, not a size: `hf_memkit.catalog.hardware` has the real capacity of such a GPU."""

from __future__ import annotations

import re

from hf_memkit.common.errors import InputError

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 10**9

_FACTOR = {
    "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": MIB,
    "g": GB, "gb": GB, "gib": GIB,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip


def parse_size(text: str, subject: str = "") -> int:
    """Bytes in a size such as `"16GB"` (16 × 10**9) or `"15.1 GiB"` (15.1 × 2**30). Raises InputError if `text` is not
    a size, has no unit, or is not above zero. `subject`: start of the message, such as `"--ram"`."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    place = f"{subject}: " if subject else ""
    if match and not match[2] and float(match[1]) > 0:
        raise InputError(f"{place}{text!r} has no unit; did you mean {match[1]}GB?")
    factor = _FACTOR.get(match[2].lower()) if match else None
    if match and factor is not None and float(match[1]) <= 0:
        raise InputError(f"{place}{text!r} must be above 0; give a size such as 16GB")
    if match is None or factor is None:
        raise InputError(f"{place}{text!r} is not a size; write a number and a unit, such as 16GB or 15.1GiB")
    return int(float(match[1]) * factor)


def parse_rate(text: str) -> float:
    """Bytes a second: `"6GB/s"` is 6 × 10**9. Raises InputError if `text` is not a rate of bytes above zero."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*(/\s*s)?\s*", text)
    unit = match[2] if match else ""
    if match is None or float(match[1]) <= 0:
        raise InputError(f"{text!r} is not a rate; write a number above 0 and a unit, such as 6GB/s")
    if re.fullmatch("[kKMGT]b", unit):
        raise InputError(f"{text!r} is in bits; write bytes: {float(match[1]) / 8:g}{unit[0]}B/s")
    factor = _FACTOR.get(unit.lower())
    if factor is not None and match[3] is None:
        raise InputError(f"{text!r} is a size; write a rate: {match[1]}{unit}/s")
    if factor is None:
        hint = "; 1 Gbit/s is 0.125GB/s" if "b" in unit else ""
        raise InputError(f"{text!r} has no unit of bytes a second, such as GB/s or MB/s{hint}. Write 6GB/s or 500MB/s")
    return float(match[1]) * factor


def format_gib(size_bytes: float) -> str:
    """`"2.90 GiB"`: two decimals below 100 GiB, one above."""
    gib = size_bytes / GIB
    return f"{gib:.2f} GiB" if gib < 100 else f"{gib:.1f} GiB"


def format_size(size_bytes: float) -> str:
    """A size such as `"2.90 GiB"`, `"1.6 MiB"`, `"0.5 KiB"`: units from 0.1 on, so that only 0 bytes are 0.00."""
    if size_bytes == 0 or abs(size_bytes) >= GIB / 10:
        return format_gib(size_bytes)
    size, unit = (MIB, "MiB") if abs(size_bytes) >= MIB / 10 else (KIB, "KiB")
    return f"{size_bytes / size:.1f} {unit}"
