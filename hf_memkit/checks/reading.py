"""Reads JSON and YAML files, reports what is broken in one line, and recognises the kind of file."""

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
from hf_memkit.checks.other_files import Other, is_accelerate, other_script, other_tool
from hf_memkit.common.errors import InputError
from hf_memkit.common.user_files import parsed, user_path

Kind = Literal["accelerate", "deepspeed", "arguments", "recipe", "other"]

_KNOWN: Final = SECTIONS[""].keys or {}
"""Keys at the top of a DeepSpeed config."""
_DEEPSPEED: Final = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu"})
"""Those that nothing else has."""
_RECIPE = frozenset({"variants", "sequences_per_step"})

_COMMENT = re.compile(r"^\s*(?://|/\*|#)|[{\[,:]\s*(?://|/\*|#)|[\"\w\]}]\s*,?\s+(?://|#)", re.M)
"""Where a JSON text may have a comment: a line's beginning, or behind a value."""


@dataclass(frozen=True)
class File:
    """A file: its path, its kind, its content, and the keys that appear twice.

    `other` says what a file of kind "other" is: one that memkit recognises, and does not check.
    """

    path: Path
    kind: Kind
    content: Mapping[str, Any]
    duplicates: tuple[str, ...] = ()
    other: Other | None = None

    @property
    def refusal(self) -> str:
        """What it is and what to give instead, if it is of another kind; else empty."""
        return "" if self.other is None else str(self.other)


def read(path: str | Path) -> File:
    """Reads a `.json`, `.yaml` or `.yml` file, and recognises many others; an InputError with line and column where it
    cannot."""
    path = user_path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}. Give a JSON or YAML file") from None
    if other := other_script(path, text):
        return File(path, "other", {}, other=other)
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    content, duplicates = _parse_yaml(path, text) if is_yaml else parse_json(str(path), text)
    if not isinstance(content, Mapping):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise InputError(f"{path}: line 1, column 1: expected keys and values, got {found}")
    other = None if content.keys() & _RECIPE else other_tool(path, content)
    return File(path, "other" if other else _kind(content), content, duplicates, other)


class _Object(dict[str, Any]):
    """A JSON object that records which of its keys appeared twice."""

    twice: frozenset[str] = frozenset()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    found = _Object(pairs)
    found.twice = frozenset(_repeated(key for key, _ in pairs))
    return found


def parse_json(place: str, text: str) -> tuple[Any, tuple[str, ...]]:
    """The content of a JSON text, and the dotted paths of keys that appear twice; an InputError with `place`, line and
    column where it is none, or is nested too deeply."""
    try:
        content = parsed(place, partial(json.loads, object_pairs_hook=_object), text)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: line {error.lineno}, column {error.colno}: {_plain(error)}") from None
    return content, tuple(_json_duplicates(content))


def _plain(error: json.JSONDecodeError) -> str:
    """json's message without its ending for the place, which memkit prints first; a plainer one of the commonest
    mistake, a comma before a closing bracket (from Python 3.13 on the place is the comma's)."""
    if _COMMENT.search(_without_texts(error.doc)):
        return "JSON has no comments, and Trainer cannot read a file with one. Remove them"
    before, after = error.doc[: error.pos].rstrip(), error.doc[error.pos :]
    closing = after.removeprefix(",").lstrip()[:1]
    if closing in ("}", "]") and (before.endswith(",") or after.startswith(",")):
        return f"a comma before {closing}. Remove it"
    return error.msg.removesuffix(" at").removesuffix(" starting").removesuffix(": ")


def _without_texts(text: str) -> str:
    """A JSON text with its quoted texts emptied: an address has // in it."""
    return re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', text)


def _json_duplicates(value: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(value, _Object):
        for key, inner in value.items():
            if key in value.twice:
                yield prefix + key
            yield from _json_duplicates(inner, f"{prefix}{key}.")


def _parse_yaml(path: Path, text: str) -> tuple[Any, tuple[str, ...]]:
    """As `parse_json`; PyYAML too silently uses the last of two equal keys."""
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
    """Dotted path of each key of a file that `read` takes, and names that problems use for it → its line, from 1."""
    text = user_path(path).read_text(encoding="utf-8")
    try:
        node = yaml.compose(text.expandtabs(), yaml.SafeLoader)  # JSON is YAML, but for the tabs that may indent it
    except yaml.YAMLError:
        return {}
    found = dict(_key_lines(node))
    for key, line in list(found.items()):
        found.setdefault(current_name(key.removeprefix("deepspeed.")), line)
    return found


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


def _kind(content: Mapping[str, Any]) -> Kind:
    """The kind of most keys. A name that DeepSpeed and TrainingArguments both have counts only if its value decides:
    `bf16: {enabled: true}` is DeepSpeed's, `bf16: true` an argument where no key is surely DeepSpeed's."""
    if content.keys() & _RECIPE:
        return "recipe"
    if is_accelerate(content):
        return "accelerate"
    keys = {name: key for name in content if (key := _deepspeed_key(str(name)))}
    theirs = {name for name, key in keys.items() if _of_deepspeed(key, content[name])}
    coined = any(keys[name] in _DEEPSPEED for name in theirs)
    surely = coined or any(name in fields() for name in theirs)
    either = {name for name in keys if name in fields() and (surely or _KNOWN[name].kind != "section")}
    others = content.keys() - theirs - either
    if coined:  # what is no argument is a slip in a DeepSpeed config
        others = {name for name in others if not is_unknown(str(name)) or misspelt(str(name))}
    return "deepspeed" if len(theirs) + surely > len(others) else "arguments"


def _deepspeed_key(name: str) -> str:
    """The key at the top of a DeepSpeed config that `name` is, or nearly is while it is no argument; else empty."""
    if name in _KNOWN or not is_unknown(name) or misspelt(name):
        return name if name in _KNOWN else ""
    return next(iter(get_close_matches(name, _KNOWN, n=1, cutoff=0.85)), "")


def _of_deepspeed(key: str, value: Any) -> bool:
    """Whether the value is what DeepSpeed has there. Scripts have a section `optimizer` with the optimizer's
    parameters in it; DeepSpeed has them in `params`."""
    if key in _DEEPSPEED:
        return True
    if key in fields():
        return isinstance(value, Mapping)
    if isinstance(value, Mapping):
        inner = SECTIONS[key].keys if key in SECTIONS else None
        return _KNOWN[key].kind == "section" and value.keys() <= (inner or {}).keys()
    return value == "auto" or _KNOWN[key].type_error(value) is None
