"""Reads JSON and YAML with one clear line for what is broken, and says what kind of file it is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from hf_memkit.errors import InputError

__all__ = ["File", "Kind", "read"]

Kind = Literal["deepspeed", "arguments", "recipe"]

_DEEPSPEED = frozenset(
    {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "activation_checkpointing"}
)
_RECIPE = frozenset({"variants", "sequences_per_step"})
_ACCELERATE = frozenset({"compute_environment", "distributed_type", "deepspeed_config"})


@dataclass(frozen=True)
class File:
    """A file as it was read: its path, what it is, what it holds, and keys that it holds twice."""

    path: Path
    kind: Kind
    content: Mapping[str, Any]
    duplicates: tuple[str, ...] = ()


def read(path: str | Path) -> File:
    """Reads a file that is named `.json`, `.yaml` or `.yml`.

    Raises:
        InputError: it cannot be read, is no JSON or YAML (line and column are named), or is nothing that is checked.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}; give a JSON or YAML file") from None
    duplicates: list[str] = []
    content = _yaml(path, text) if path.suffix.lower() in (".yaml", ".yml") else _json(path, text, duplicates)
    if not isinstance(content, Mapping):
        raise InputError(f"{path}: line 1, column 1: keys and values belong here, not a {type(content).__name__}")
    return File(path, _kind(path, content), content, tuple(duplicates))


def _json(path: Path, text: str, duplicates: list[str]) -> Any:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        duplicates.extend(key for key, count in Counter(key for key, _ in found).items() if count > 1)
        return dict(found)

    try:
        content = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: line {error.lineno}, column {error.colno}: {error.msg}") from None
    if duplicates and isinstance(content, Mapping):
        duplicates[:] = [_path_of(name, content) for name in duplicates]
    return content


def _path_of(name: str, content: Mapping[str, Any], prefix: str = "") -> str:
    """The dotted path of the first key of this name."""
    for key, value in content.items():
        if key == name:
            return prefix + key
        if isinstance(value, Mapping) and (found := _path_of(name, value, f"{prefix}{key}.")):
            return found
    return "" if prefix else name


def _yaml(path: Path, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InputError(f"{path}: {place}{error.problem}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: {str(error).splitlines()[0]}") from None


def _kind(path: Path, content: Mapping[str, Any]) -> Kind:
    keys = content.keys()
    if keys & _ACCELERATE:
        raise InputError(
            f"{path}: this is a config of `accelerate launch`; check the DeepSpeed JSON that it names "
            f"(deepspeed_config_file)"
        )
    if keys & _RECIPE:
        return "recipe"
    if keys & _DEEPSPEED or any(
        isinstance(content.get(name), Mapping) for name in ("bf16", "fp16", "optimizer", "aio")
    ):
        return "deepspeed"
    return "arguments"
