"""What records say is not trusted: a model, a path, a log or an argument may hold anything.

In: values from a records file. Out: plain JSON values of the types that `hf_memkit.record_types` names, and text that
can neither steer a terminal nor reorder a line. HTML is escaped where it is made (`html.py`).
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args, get_origin, get_type_hints, is_typeddict

from hf_memkit.record_types import RECORDS

__all__ = ["clean_record", "number", "text", "whole"]

_LIMIT: Final = 1e15
"""No size, count or time of a training comes near it, and floats still hold whole numbers exactly there."""

_FREE_DEPTH: Final = 6
"""What is nested deeper in values of the user's is left out: nothing that anybody reads, and JSON of a thousand levels
ends Python."""

_STEERING: Final = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
"""Unicode categories of what a terminal or a browser obeys rather than shows: control characters (ANSI escapes begin
with one), formatting (bidirectional overrides, zero width), private use, surrogates, line and paragraph separators."""


@dataclass(frozen=True, slots=True)
class _Contract:
    """The fields of all records by what they may hold; a name means the same wherever it stands.

    Attributes:
        nested: mappings whose fields have the contract's names, and how many levels deep.
        free: mappings whose fields have names of the user's.
        rows: lists of mappings with the contract's names.
        numbers: numbers.
        ranges: a number where it was measured, `[low, high]` where it was predicted.
    """

    nested: dict[str, int] = field(default_factory=dict)
    free: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)
    numbers: set[str] = field(default_factory=set)
    ranges: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, records: Iterable[type]) -> _Contract:
        contract = cls()
        for record in records:
            contract._take(record)
        return contract

    def _take(self, record: type) -> int:
        """Takes the names in `record` and what it is made of; returns how many levels of them it has inside."""
        deepest = 0
        for name, hint in get_type_hints(record).items():
            origin, inner, levels = get_origin(hint), get_args(hint), 0
            if is_typeddict(hint):
                levels = 1 + self._take(hint)
            elif origin is dict and is_typeddict(inner[1]):
                levels = 2 + self._take(inner[1])
            elif origin is dict:
                self.free.add(name)
            elif origin is list and is_typeddict(inner[0]):
                self._take(inner[0])
                self.rows.add(name)
            elif list[float] in inner:
                self.ranges.add(name)
            elif hint is int or hint is float:
                self.numbers.add(name)
            if levels:
                self.nested[name] = max(levels, self.nested.get(name, 0))
            deepest = max(deepest, levels)
        return deepest


_CONTRACT: Final = _Contract.of(RECORDS.values())


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
        if name in _CONTRACT.numbers or name.endswith(("_gib", "_ms")):
            if number(record, name) is not None or (name in _CONTRACT.ranges and isinstance(value, list)):
                clean[name] = value
        elif name in _CONTRACT.nested:
            if isinstance(value, Mapping):
                clean[name] = clean_record(value, _CONTRACT.nested[name] - 1)
        elif name in _CONTRACT.free:
            if isinstance(value, Mapping):
                clean[name] = _shallow(value, _FREE_DEPTH)
        elif name in _CONTRACT.rows:
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
