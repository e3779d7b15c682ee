"""Read JSON and YAML files, report mistakes in one line, and recognise the kind of file."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from hf_memkit.catalog.argument_values import is_unknown, misspelt
from hf_memkit.catalog.library_versions import current_name, fields
from hf_memkit.checks.deepspeed_keys import SECTIONS
from hf_memkit.checks.other_files import Other, is_accelerate, is_fsdp, other_script, other_tool
from hf_memkit.common.errors import InputError
from hf_memkit.common.user_files import content_problem, parsed, text_of, user_path

Kind = Literal["accelerate", "deepspeed", "fsdp", "arguments", "recipe", "other"]

_KNOWN: Final = SECTIONS[""].keys or {}
"""Keys at the top of a DeepSpeed config."""
_DEEPSPEED: Final = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu"})
"""Keys that only DeepSpeed has."""
_RECIPE = frozenset({"variants", "sequences_per_step"})

_COMMENT = re.compile(r"^\s*(?://|/\*|#)|[{\[,:]\s*(?://|/\*|#)|[\"\w\]}]\s*,?\s+(?://|#)", re.M)
"""Possible comment in a JSON text: at the beginning of a line, or after a value."""


@dataclass(frozen=True)
class File:
    """A file: its path, its kind, its content, and the keys that appear twice. `other`: description of a file of kind
    "other", which memkit recognises and does not check."""

    path: Path
    kind: Kind
    content: Mapping[str, Any]
    duplicates: tuple[str, ...] = ()
    other: Other | None = None

    @property
    def refusal(self) -> str:
        """Description of a file of another kind, with the file to give instead; else empty."""
        return "" if self.other is None else str(self.other)


def read(path: str | Path) -> File:
    """Read a `.json`, `.yaml` or `.yml` file; many others are recognised. Raises InputError with line and column."""
    path = user_path(path)
    text = text_of(path)
    if other := other_script(path, text):
        return File(path, "other", {}, other=other)
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    if not text.strip():
        raise InputError(f"{path}: {content_problem(None)}")
    content, duplicates = _parse_yaml(path, text) if is_yaml else parse_json(str(path), text)
    if problem := content_problem(content):
        raise InputError(f"{path}: {problem}")
    other = None if content.keys() & _RECIPE else other_tool(path, content)
    return File(path, "other" if other else _kind_of_keys(content), content, duplicates, other)


class _Object(dict[str, Any]):
    """A JSON object that records which of its keys appeared twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice = _repeated(key for key, _ in pairs)


def parse_json(place: str, text: str) -> tuple[Any, tuple[str, ...]]:
    """The content of a JSON text, and the dotted paths of keys that appear twice. Raises InputError if it is invalid,
    or nested too deeply; names `place`, line and column."""
    try:
        content = parsed(place, partial(json.loads, object_pairs_hook=_Object), text)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: line {error.lineno}, column {error.colno}: {_simpler_message(error)}") from None
    return content, tuple(_json_duplicates(content))


def _simpler_message(error: json.JSONDecodeError) -> str:
    """json's message without its place, which memkit prints first; a simpler one for the most frequent mistake, a
    comma before a closing bracket (from Python 3.13 on the place is the comma's)."""
    if _COMMENT.search(re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', error.doc)):  # without strings: addresses contain //
        return "JSON has no comments, and Trainer cannot read a file with one. Remove them"
    before = error.doc[: error.pos].rstrip()
    after = error.doc[error.pos :]
    closing = after.removeprefix(",").lstrip()[:1]
    if closing in ("}", "]") and (before.endswith(",") or after.startswith(",")):
        return f"a comma before {closing}. Remove it"
    if error.msg == "Expecting value":
        return "no valid value. Write a number, true, false, null, or a text in double quotes"
    return error.msg.removesuffix(" at").removesuffix(" starting").removesuffix(": ")


def _json_duplicates(value: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(value, _Object):
        for key, inner in value.items():
            if key in value.twice:
                yield prefix + key
            yield from _json_duplicates(inner, f"{prefix}{key}.")


def _parse_yaml(path: Path, text: str) -> tuple[Any, tuple[str, ...]]:
    """The content of a YAML text, and the dotted paths of keys that appear twice: PyYAML silently uses the last.
    Raises InputError if it is invalid; names the file, line and column."""
    try:
        content = parsed(str(path), yaml.safe_load, text)
        return content, tuple(dict.fromkeys(_yaml_duplicates(yaml.compose(text, yaml.SafeLoader))))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InputError(f"{path}: {place}{error.problem}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: {str(error).splitlines()[0]}") from None


def key_lines(path: str | Path) -> dict[str, int]:
    """Dotted path of each key of a file, also under names in problems → its line, from 1."""
    text = user_path(path).read_text(encoding="utf-8")
    try:
        node = yaml.compose(text.expandtabs(), yaml.SafeLoader)  # JSON is YAML, except for tabs as indentation
    except yaml.YAMLError:
        return {}
    lines = dict(_key_lines(node))
    for key, line in list(lines.items()):
        lines.setdefault(current_name(key.removeprefix("deepspeed.")), line)
    return lines


def _key_lines(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield f"{prefix}{key.value}", key.start_mark.line + 1
            yield from _key_lines(value, f"{prefix}{key.value}.")


def _yaml_duplicates(node: yaml.Node | None, prefix: str = "") -> Iterator[str]:
    if isinstance(node, yaml.MappingNode):
        names = [str(key.value) for key, _ in node.value]
        yield from (prefix + name for name in _repeated(names))
        for name, (_, value) in zip(names, node.value, strict=True):
            yield from _yaml_duplicates(value, f"{prefix}{name}.")


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _kind_of_keys(content: Mapping[str, Any]) -> Kind:
    """The kind of most keys. A name that both DeepSpeed and TrainingArguments have counts only if its value decides:
    `bf16: {enabled: true}` is DeepSpeed's, `bf16: true` an argument if no key is certainly DeepSpeed's."""
    if content.keys() & _RECIPE:
        return "recipe"
    if is_accelerate(content):
        return "accelerate"
    if is_fsdp(content):
        return "fsdp"

    keys = {}  # those at the top of a DeepSpeed config, or similar to one if they are no arguments
    for name in content:
        key = str(name)
        if key in _KNOWN:
            keys[name] = key
        elif is_unknown(key) and not misspelt(key) and (near := get_close_matches(key, _KNOWN, n=1, cutoff=0.85)):
            keys[name] = near[0]

    of_deepspeed = {name for name, key in keys.items() if _of_deepspeed(key, content[name])}
    unique = any(keys[name] in _DEEPSPEED for name in of_deepspeed)
    certain = unique or any(name in fields() for name in of_deepspeed)
    shared = {name for name in keys if name in fields() and (certain or _KNOWN[name].kind != "section")}
    others = content.keys() - of_deepspeed - shared
    if unique:  # unknown names are typing errors in a DeepSpeed config
        others = {name for name in others if not is_unknown(str(name)) or misspelt(str(name))}
    return "deepspeed" if len(of_deepspeed) + certain > len(others) else "arguments"


def _of_deepspeed(key: str, value: Any) -> bool:
    """Whether the value is DeepSpeed's, with parameters in `params`: a script's `optimizer` has them directly."""
    if key in _DEEPSPEED:
        return True
    if key in fields():
        return isinstance(value, Mapping)
    if isinstance(value, Mapping):
        inner = SECTIONS[key].keys if key in SECTIONS else None
        return _KNOWN[key].kind == "section" and value.keys() <= (inner or {}).keys()
    return value == "auto" or _KNOWN[key].type_error(value) is None
