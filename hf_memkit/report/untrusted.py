"""What records say is not trusted: a model, a path, a log or an argument may hold anything.

In: values from a records file. Out: plain JSON values of the types that the record contract names, and text that can
neither steer a terminal nor reorder a line. HTML is escaped where it is made (`html.py`).
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["clean_record", "number", "text", "whole"]

_LIMIT: Final = 1e15
"""No size, count or time of a training comes near it, and floats still hold whole numbers exactly there."""

_NESTED: Final = {"hardware": 1, "host": 1, "categories": 1, "phases": 2, "held": 2, "prediction": 3}
"""Mappings whose fields have the contract's names, and how many levels deep."""

_FREE: Final = frozenset(
    {"arguments", "facts", "inputs", "metrics", "optimizer_states", "places", "versions", "weights_dtypes"}
)
"""Mappings whose fields have names of the user's."""

_FREE_DEPTH: Final = 6
"""What is nested deeper in them is left out: nothing that anybody reads, and JSON of a thousand levels ends Python."""

_ROWS: Final = frozenset({"changes", "rows"})
_NUMBERS: Final = frozenset(
    {
        "alloc_retries", "allocator_cap_fraction", "allocator_ooms", "bytes", "device_count", "longest_sequence",
        "micro_batch", "micro_batches", "oom_kills", "parameters", "pid", "process_started", "rank",
        "recomputed_layers", "repeats", "samples", "schema", "start_step", "step", "steps", "time", "tokens",
        "trainable_parameters", "vocabulary", "world_size",
    }
)  # fmt: skip
_RANGES: Final = frozenset({"peak_reserved_gib"})
"""A number when it was measured, `[low, high]` when it was predicted."""

_STEERING: Final = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
"""Unicode categories of what a terminal or a browser obeys rather than shows: control characters (ANSI escapes begin
with one), formatting (bidirectional overrides, zero width), private use, surrogates, line and paragraph separators."""


def text(value: Any, limit: int = 200) -> str:
    """`value` on one line, `limit` characters at most; what steers is written out, as `\\x1b` or `\\u202e`."""
    raw = value if isinstance(value, str) else str(value)
    shown = []
    for character in raw[: limit + 1]:
        if character in "\t\n\r":
            shown.append(" ")
        elif unicodedata.category(character) in _STEERING:
            code = ord(character)
            shown.append(f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}")
        else:
            shown.append(character)
    if len(raw) > limit:
        return "".join(shown[: limit - 1]) + "…"
    return "".join(shown)


def number(fields: Mapping[str, Any] | None, name: str) -> float | None:
    """`fields[name]` if it is a finite number of a plausible size, else None."""
    value = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    # Compared before it becomes a float: a whole number may be too large to become one.
    return float(value) if -_LIMIT <= value <= _LIMIT and math.isfinite(value) else None


def whole(fields: Mapping[str, Any] | None, name: str) -> int | None:
    """`fields[name]` if it is a whole number of a plausible size, else None."""
    value = number(fields, name)
    return int(value) if value is not None and value.is_integer() else None


def clean_record(record: Mapping[str, Any], levels: int = 0) -> dict[str, Any]:
    """The record without what has another type than the contract says: the rest can be used without a look.

    `levels`: how many levels below this one hold the contract's fields too.
    """
    clean: dict[str, Any] = {}
    for name, value in record.items():
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            continue
        if name in _NUMBERS or name.endswith(("_gib", "_ms")):
            if number(record, name) is not None or (name in _RANGES and isinstance(value, list)):
                clean[name] = value
        elif name in _NESTED:
            if isinstance(value, Mapping):
                clean[name] = clean_record(value, _NESTED[name] - 1)
        elif name in _FREE:
            if isinstance(value, Mapping):
                clean[name] = _shallow(value, _FREE_DEPTH)
        elif name in _ROWS:
            if isinstance(value, list):
                clean[name] = [clean_record(row) for row in value if isinstance(row, Mapping)]
        elif isinstance(value, Mapping) and levels > 0:
            clean[name] = clean_record(value, levels - 1)
        else:
            clean[name] = _shallow(value, _FREE_DEPTH)
    return clean


def _shallow(value: Any, levels: int) -> Any:
    if not isinstance(value, dict | list):
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value
    if levels == 0:
        return "…"
    if isinstance(value, list):
        return [_shallow(item, levels - 1) for item in value]
    return {name: _shallow(item, levels - 1) for name, item in value.items()}
