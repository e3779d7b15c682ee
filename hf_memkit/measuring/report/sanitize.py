"""What records say is not trusted: a model, a path, a log or an argument may hold anything.

In: values from a records file. Out: plain JSON values of the types that `hf_memkit.measuring.record_types` names, and
text that can neither steer a terminal nor reorder a line. HTML is escaped where it is made (`common/answer/html.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints, is_typeddict

from hf_memkit.common.answer.safe_text import text as text
from hf_memkit.measuring.record_types import RECORDS, StepRecord

_LIMIT: Final = 1e15
"""No size, count or time of a training comes near it, and floats still hold whole numbers exactly there."""

_FREE_DEPTH: Final = 6
"""What is nested deeper in values of the user's is left out: nothing that anybody reads, and JSON of a thousand levels
ends Python."""


def few(values: Sequence[Any]) -> str:
    """The first eight, and a sign that there are more."""
    return ", ".join(text(value, 60) for value in values[:8]) + (", …" if len(values) > 8 else "")


def number(fields: Mapping[str, Any], name: str) -> float | None:
    """`fields[name]` if it is a finite number of a plausible size, else None: for what nobody has cleaned."""
    value = fields.get(name)
    return None if _number(value) is None else value


def clean_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without what has another type than its class says: the rest can be used without a look. One of a kind
    that this memkit does not know is looked at as a step is."""
    kind = record.get("kind")
    hint = RECORDS.get(kind, StepRecord) if isinstance(kind, str) else StepRecord
    cleaned: dict[str, Any] = _cleaner(hint)(record)
    return cleaned


def _number(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    # Compared before it becomes a float: a whole number may be too large to become one.
    return float(value) if -_LIMIT <= value <= _LIMIT and math.isfinite(value) else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number.is_integer() else None


@functools.cache
def _cleaner(hint: Any) -> Callable[[Any], Any]:
    """A function that gives a value of this type as it is to be used, or None for a value of another type."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is int:
        return _whole
    if hint is float:
        return _number
    if hint is str or origin is Literal:
        return lambda value: value if isinstance(value, str) else None
    if is_typeddict(hint):
        fields = {name: _cleaner(each) for name, each in get_type_hints(hint).items()}
        return lambda value: _fields(value, lambda name: fields.get(name) or _by_unit(name))
    if origin is dict and inner[1] is not Any:
        each = _cleaner(inner[1])
        return lambda value: _fields(value, lambda name: each)
    if origin is dict:
        return lambda value: _of_the_user(value) if isinstance(value, dict) else None
    if origin is list:
        each = _cleaner(inner[0])
        return lambda value: [one for one in map(each, value) if one is not None] if isinstance(value, list) else None
    if list[float] in inner:  # `[low, high]` where it was predicted
        several = _cleaner(list[float])
        return lambda value: several(value) if isinstance(value, list) else _number(value)
    return _of_the_user


def _fields(value: Any, cleaner: Callable[[str], Callable[[Any], Any]]) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    cleaned = ((name, cleaner(name)(each)) for name, each in value.items())
    return {name: each for name, each in cleaned if each is not None}


def _by_unit(name: str) -> Callable[[Any], Any]:
    """For a field that this memkit does not know."""
    return _number if name.endswith(("_gib", "_ms")) else _of_the_user


def _of_the_user(value: Any, levels: int = _FREE_DEPTH) -> Any:
    """What may be anything, without what JSON cannot say and what nobody reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if levels == _FREE_DEPTH else str(value)
    if not isinstance(value, dict | list):
        return value
    if levels == 0:
        return "…"
    if isinstance(value, list):
        return [_of_the_user(item, levels - 1) for item in value]
    return {name: _of_the_user(item, levels - 1) for name, item in value.items()}
