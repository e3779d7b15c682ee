"""Converts dataclasses to JSON and back, between memkit and its child process.

Fields are numbers, texts, lists, tuples, mappings, arbitrary JSON (`Any`) and dataclasses; a union has at most one
dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from hf_memkit.common import as_json

T = TypeVar("T")


def dumps(value: Any, *, sort_keys: bool = False) -> str:
    """The JSON of a value. Raises TypeError if a part of it is neither a dataclass nor JSON."""

    def by_field(part: Any) -> dict[str, Any]:
        return {field.name: getattr(part, field.name) for field in fields(part)}

    return as_json.dumps(value, default=by_field, sort_keys=sort_keys)


def loads(kind: type[T], text: str) -> T:
    """The value of this type in a JSON text. ValueError if it is not JSON, or not of this type (another version)."""
    try:
        value: T = _build(kind, as_json.loads(text))
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"no {kind.__name__}: {error}") from error
    return value


_hints: Final = cache(get_type_hints)


def _build(hint: Any, value: Any) -> Any:
    if value is None or hint is Any:
        return value
    if isinstance(hint, type) and is_dataclass(hint):
        hints = _hints(hint)
        return hint(**{name: _build(hints[name], item) for name, item in value.items()})
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        typed = [part for part in parts if is_dataclass(part) or get_origin(part) is not None]
        return _build(typed[0], value) if typed else value
    if kind is tuple:
        if parts[1:] == (...,):
            return tuple(value) if parts[0] in (int, str) else tuple(_build(parts[0], item) for item in value)
        return tuple(_build(part, item) for part, item in zip(parts, value, strict=True))
    if kind is list and parts[0] not in (int, str):
        return [_build(parts[0], item) for item in value]
    if kind in (dict, Mapping):
        return {name: _build(parts[1], item) for name, item in value.items()}
    return value
