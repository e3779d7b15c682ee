"""Checks the values of a records file, which may contain anything: out come JSON values of the types in
`hf_memkit.measuring.record_types`, and text without control characters. HTML is escaped in `common/answer/html.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints, is_typeddict

from hf_memkit.common.answer.safe_text import printable
from hf_memkit.measuring.record_types import RECORDS, StepRecord

_LIMIT: Final = 1e15
"""Far above any size, count or time of a training, and floats are still exact for whole numbers."""

_FREE_DEPTH: Final = 6
"""Deeper levels of the user's values are left out: Python cannot handle JSON of a thousand levels."""


def few(values: Sequence[Any]) -> str:
    """The first eight values; `…` stands for the others."""
    return ", ".join(printable(value, 60) for value in values[:8]) + (", …" if len(values) > 8 else "")


def number(fields: Mapping[str, Any], name: str) -> float | None:
    """`fields[name]` if it is a finite number of a plausible size, else None; for fields that are not checked yet."""
    value = fields.get(name)
    return None if checked_number(value) is None else value


def clean_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without fields whose type is not that of its class. An unknown kind is checked like a step."""
    kind = record.get("kind")
    hint = RECORDS.get(kind, StepRecord) if isinstance(kind, str) else StepRecord
    cleaned: dict[str, Any] = _cleaner(hint)(record)
    return cleaned


def checked_number(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    # Compared before it becomes a float: a whole number may be too large to become one.
    return float(value) if -_LIMIT <= value <= _LIMIT and math.isfinite(value) else None


def _whole(value: Any) -> int | None:
    number = checked_number(value)
    return int(number) if number is not None and number.is_integer() else None


@functools.cache
def _cleaner(hint: Any) -> Callable[[Any], Any]:
    """A function that returns a value of this type, or None for a value of another type."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if hint is int:
        return _whole
    if hint is float:
        return checked_number
    if hint is str or origin is Literal:
        return lambda value: value if isinstance(value, str) else None
    if is_typeddict(hint):
        fields = {name: _cleaner(each) for name, each in get_type_hints(hint).items()}
        return lambda value: _fields(value, lambda name: fields.get(name) or _by_unit(name))
    if origin is dict and inner[1] is not Any:
        each = _cleaner(inner[1])
        return lambda value: _fields(value, lambda name: each)
    if origin is dict:
        return lambda value: _any_json(value) if isinstance(value, dict) else None
    if origin is list:
        each = _cleaner(inner[0])
        return lambda value: [one for one in map(each, value) if one is not None] if isinstance(value, list) else None
    if list[float] in inner:  # `[low, high]` if it was predicted
        several = _cleaner(list[float])
        return lambda value: several(value) if isinstance(value, list) else checked_number(value)
    return _any_json


def _fields(value: Any, cleaner: Callable[[str], Callable[[Any], Any]]) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    cleaned = ((name, cleaner(name)(each)) for name, each in value.items())
    return {name: each for name, each in cleaned if each is not None}


def _by_unit(name: str) -> Callable[[Any], Any]:
    """The cleaner of an unknown field."""
    return checked_number if name.endswith(("_gib", "_ms")) else _any_json


def _any_json(value: Any, levels: int = _FREE_DEPTH) -> Any:
    """A value of any type, without infinities and without deep levels."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if levels == _FREE_DEPTH else str(value)
    if not isinstance(value, dict | list):
        return value
    if levels == 0:
        return "…"
    if isinstance(value, list):
        return [_any_json(item, levels - 1) for item in value]
    return {name: _any_json(item, levels - 1) for name, item in value.items()}
