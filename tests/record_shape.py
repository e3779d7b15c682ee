"""Checks records against the types in `hf_memkit.measuring.record_types`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from hf_memkit.measuring.memory.records import read_records
from hf_memkit.measuring.record_types import RECORDS, ProposedChange


def misfits_in(folder: Path) -> list[str]:
    """The `misfits` of all records below a folder."""
    records = [record for path in sorted(folder.rglob("memory-rank*.jsonl")) for record in read_records(path)]
    return [misfit for record in records for misfit in misfits(record)]


def misfits(record: Mapping[str, Any]) -> list[str]:
    """A message for each field that the record's type does not have, and for each value of another type."""
    kind = record["kind"]
    return _of(RECORDS[kind], record, kind) if kind in RECORDS else [f"{kind}: no such record"]


def _of(hint: Any, value: Any, place: str) -> list[str]:
    origin, inner = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
        if not isinstance(value, Mapping):
            return [f"{place}: {value!r} is no mapping"]
        hints, wrong = get_type_hints(hint), []
        for name, each in value.items():
            if name not in hints:
                wrong += [] if place == "run.prediction" else [f"{place}.{name}: in no class"]
            elif not (each is None and hint is ProposedChange):
                wrong += _of(hints[name], each, f"{place}.{name}")
        return wrong
    if origin is dict:
        return [misfit for name, each in value.items() for misfit in _of(inner[1], each, f"{place}.{name}")]
    if origin is list:
        return [misfit for each in value for misfit in _of(inner[0], each, f"{place}[]")]
    if origin is Literal:
        return [] if value in inner else [f"{place}: {value!r} is none of {inner}"]
    if origin in (Union, UnionType):
        return [] if any(not _of(each, value, place) for each in inner) else [f"{place}: {value!r} is no {hint}"]
    types = (int, float) if hint is float else object if hint is Any else hint
    fits = isinstance(value, types) and (hint is not int or not isinstance(value, bool))
    return [] if fits else [f"{place}: {value!r} is no {hint}"]
