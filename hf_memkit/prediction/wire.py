"""Dataclasses as JSON, between memkit and the process that traces: of numbers, texts, lists, tuples, mappings, JSON of
others (`Any`) and further dataclasses; a union has one dataclass at most."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def written(value: Any, *, sort_keys: bool = False) -> str:
    """
    Raises:
        TypeError: something in it is neither a dataclass nor JSON.
    """
    return json.dumps(value, default=_by_field, sort_keys=sort_keys)


def read(kind: type[T], text: str) -> T:
    """
    Raises:
        ValueError: it is no JSON, or not of this kind: of another version, say.
    """
    try:
        found: T = _made(kind, json.loads(text))
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"no {kind.__name__}: {error}") from error
    return found


def _by_field(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value)}


_hints: Final = cache(get_type_hints)


def _made(hint: Any, value: Any) -> Any:
    if value is None or hint is Any:
        return value
    if isinstance(hint, type) and is_dataclass(hint):
        hints = _hints(hint)
        return hint(**{name: _made(hints[name], each) for name, each in value.items()})
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        several = [each for each in parts if is_dataclass(each) or get_origin(each) is not None]
        return _made(several[0], value) if several else value
    if kind is tuple:
        if parts[1:] == (...,):
            return tuple(value) if parts[0] in (int, str) else tuple(_made(parts[0], each) for each in value)
        return tuple(_made(part, each) for part, each in zip(parts, value, strict=True))
    if kind is list and parts[0] not in (int, str):
        return [_made(parts[0], each) for each in value]
    if kind in (dict, Mapping):
        return {name: _made(parts[1], each) for name, each in value.items()}
    return value
