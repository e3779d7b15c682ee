"""Writes the tables of record fields in docs/measuring.md from measuring/record_types.py."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

from evidence_tables import ROOT, table

TYPES = ROOT / "hf_memkit" / "measuring" / "record_types.py"


@dataclass
class Field:
    """One field: its type in words, what it is, where it comes from, when it is absent, the classes in its type."""

    name: str
    kind: str
    what: str
    source: str
    absent: str
    made_of: frozenset[str]


@dataclass
class Record:
    """One class: its words, its own fields, and the classes that it has fields from."""

    words: str
    fields: list[Field] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)


def read_types() -> tuple[dict[str, Record], dict[str, str]]:
    """The classes of record_types.py by name, and the class of each kind of record."""
    body = ast.parse(TYPES.read_text()).body
    classes: dict[str, Record] = {}
    kinds: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        match node:
            case ast.ClassDef():
                bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
                own = zip(node.body, node.body[1:], strict=False)
                fields = [_field(a.target.id, a.annotation, _text(b)) for a, b in own if isinstance(a, ast.AnnAssign)]
                classes[node.name] = Record(_plain(ast.get_docstring(node) or ""), fields, bases)
            case ast.Assign(value=ast.Call(func=ast.Name(id="TypedDict"), args=[ast.Constant(name), ast.Dict() as d])):
                words, *lines = re.split(r"\n+(?=\w+: )", _text(after).strip())
                said = dict(line.split(": ", 1) for line in lines)
                types = zip(d.keys, d.values, strict=True)
                classes[name] = Record(_plain(words), [_field(k.value, hint, said[k.value]) for k, hint in types])
            case ast.AnnAssign(target=ast.Name(id="RECORDS"), value=ast.Dict() as d):
                kinds = {k.value: v.id for k, v in zip(d.keys, d.values, strict=True)}
    return classes, kinds


def counters_table(classes: dict[str, Record]) -> str:
    """What readers say, and where each number comes from."""
    fields = (*classes["Counters"].fields, *classes["Peaks"].fields)
    rows = ([f"`{each.name}`", each.what, each.source, each.absent] for each in fields)
    return table("field | what it is | source | absent", rows)


def record_tables(classes: dict[str, Record], kinds: dict[str, str]) -> str:
    """A table a kind of record, then one a kind of part. Fields that several have are named with a link to theirs."""
    shared = {"Measured": "[counters and peaks](#counters)", "InputSizes": "[sizes of inputs](#sizes-of-inputs)"}
    parts = ["### Every record", "", _table(classes["_Record"])]
    for kind, name in kinds.items():
        record = classes[name]
        beside = " and ".join(shared[base] for base in record.bases if base in shared)
        beside = f" Also: {beside}." if beside else ""
        parts += ["", f"### `{kind}`", "", record.words + beside, "", _table(record)]
    parts += ["", "### Sizes of inputs", "", classes["InputSizes"].words, "", _table(classes["InputSizes"])]
    for name, record in classes.items():
        fields = (each for other in classes.values() for each in other.fields)
        where = ", ".join(dict.fromkeys(f"`{each.name}`" for each in fields if name in each.made_of))
        if where:
            parts += ["", f"### In {where}", "", record.words, "", _table(record)]
    return "\n".join(parts)


def tables() -> dict[Path, dict[str, str]]:
    """Each page's tables."""
    classes, kinds = read_types()
    return {
        ROOT / "docs" / "measuring.md": {
            "counters": counters_table(classes),
            "records": record_tables(classes, kinds),
        },
    }


def _field(name: str, hint: ast.expr, words: str) -> Field:
    parts = re.split(r" ?\b(Source|Absent): ", _plain(words))
    said = {part: text.strip().rstrip(".") for part, text in zip(parts[1::2], parts[2::2], strict=True)}
    made_of = frozenset(node.id for node in ast.walk(hint) if isinstance(node, ast.Name))
    return Field(name, _type(hint), parts[0].rstrip("."), said.get("Source", ""), said.get("Absent", ""), made_of)


def _type(hint: ast.expr) -> str:
    """In words that need no Python: `number`, `{phase: {…}}`."""
    match hint:
        case ast.Name(id="int"):
            return "whole number"
        case ast.Name(id="float"):
            return "number"
        case ast.Name(id="str" | "Phase" | "Status"):
            return "text"
        case ast.Name(id="bool"):
            return "true or false"
        case ast.Name(id="Any"):
            return "any"
        case ast.Subscript(value=ast.Name(id="list"), slice=inner):
            return f"list: {_type(inner)}"
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[ast.Name(id=key), inner])):
            return f"by {'name' if key == 'str' else key.lower()}: {_type(inner)}"
        case ast.BinOp(left=left, right=right):
            return f"{_type(left)}, or {_type(right)}"
    return "fields"


def _table(record: Record) -> str:
    rows = ([f"`{each.name}`", each.kind, each.what, each.absent] for each in record.fields)
    return table("field | type | what it is | absent", rows)


def _text(node: ast.stmt | None) -> str:
    assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant), "a field without words"
    return str(node.value.value)


def _plain(words: str) -> str:
    return " ".join(words.split())
