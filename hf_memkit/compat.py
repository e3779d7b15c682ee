"""Every difference between supported versions of transformers, torch, accelerate and deepspeed. Here only.

Supported: transformers 5.17 to 5.x, torch 2.11 and later, deepspeed 0.19 and later.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import importlib.util
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from packaging.version import Version

__all__ = [
    "GENERATION_FIELDS",
    "FreeOrder",
    "argument_types",
    "current_name",
    "fields",
    "free_order",
    "name_in_version",
    "names_of",
    "to_installed_arguments",
]

FreeOrder = Literal["segment", "block", "address"]
"""What decides between free blocks of equal size: the age of their segment and then the address (torch 2.13 and later,
pytorch pull request 183591), the age of the block (torch 2.12, 178362), or the address alone (torch 2.11)."""

GENERATION_FIELDS: Final = frozenset(
    {
        "generation_config", "generation_max_length", "generation_num_beams", "predict_with_generate",
        "sortish_sampler",
    }
)  # fmt: skip
"""What Seq2SeqTrainingArguments have beside TrainingArguments (transformers 5.23.0: training_args_seq2seq.py)."""

# transformers 5.23 renamed these fields; the old names are deprecated there, and the new ones unknown before.
# Source: transformers/training_args.py, 5.22.0 and 5.23.0. memkit speaks the new names everywhere.
_RENAMED = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
_CURRENT = {old: new for new, old in _RENAMED.items()}


def current_name(name: str) -> str:
    """Today's name of a TrainingArguments field that was renamed; any other name as it is."""
    return _CURRENT.get(name, name)


def names_of(name: str) -> tuple[str, ...]:
    """All names of a TrainingArguments field, of which one is given: today's, and that of before if it was renamed.

    >>> names_of("gradient_checkpointing"), names_of("optim")
    (('activation_checkpointing', 'gradient_checkpointing'), ('optim',))
    """
    today = current_name(name)
    return (today, _RENAMED[today]) if today in _RENAMED else (today,)


def name_in_version(name: str, transformers: tuple[int, ...]) -> str:
    """A field's name (today's) in that version of transformers, such as `(5, 22)`; empty: not known, today's name."""
    return _RENAMED.get(name, name) if () < transformers < (5, 23) else name


_SOURCES: Final = ("training_args.py", "trainer_utils.py")
"""The files of transformers that have TrainingArguments and the enumerations of its fields."""


class _FieldTypes(Mapping[str, Any]):
    """Types of fields, as transformers' source has them: importing the class takes seconds, because it imports torch.
    It is asked for what no reading of the source tells."""

    def __getitem__(self, name: str) -> Any:
        written = _written_types()[name]
        return _all_types()[name] if written is None else written

    def __iter__(self) -> Iterator[str]:
        return iter(_written_types())

    def __len__(self) -> int:
        return len(_written_types())


@cache
def _written_types() -> Mapping[str, Any]:
    """Name (today's) → type of every field, None where an import would be needed. An enumeration is one of the same
    values."""
    spec = importlib.util.find_spec("transformers")
    try:
        folder = Path(((spec and spec.submodule_search_locations) or [""])[0])
        parsed = [ast.parse((folder / name).read_text(encoding="utf-8")).body for name in _SOURCES]
    except (OSError, SyntaxError):  # installed without its source
        return dict.fromkeys(_all_types())
    classes = {node.name: node for body in reversed(parsed) for node in body if isinstance(node, ast.ClassDef)}
    known: dict[str, Any] = {"__builtins__": builtins, "Any": Any, "Literal": Literal}
    for name, node in classes.items():
        members = [each for each in node.body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)]
        if any(isinstance(base, ast.Name) and base.id == "ExplicitEnum" for base in node.bases):
            known[name] = enum.Enum(
                name, {ast.unparse(each.targets[0]): ast.literal_eval(each.value) for each in members}
            )
    found = {}
    for field in classes["TrainingArguments"].body:
        if isinstance(field, ast.AnnAssign) and "init=False" not in ast.unparse(field.value or field):
            try:
                kind = eval(ast.unparse(field.annotation), known)  # of the installed package's own source
            except (NameError, TypeError):
                kind = None
            found[current_name(ast.unparse(field.target))] = kind
    return found


def argument_types() -> Mapping[str, Any]:
    """Name (today's) and type of every field of the installed `transformers.TrainingArguments`."""
    return _FieldTypes()


@cache
def _all_types() -> Mapping[str, Any]:
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    return {
        current_name(field.name): hints[field.name] for field in dataclasses.fields(TrainingArguments) if field.init
    }


@cache
def fields() -> frozenset[str]:
    """Every name, also those of before, of a field of TrainingArguments, of Seq2SeqTrainingArguments, and of the
    configs of TRL, where it is installed."""
    return frozenset({*_written_types(), *_CURRENT, *GENERATION_FIELDS, *_trl_fields()})


def _trl_fields() -> frozenset[str]:
    """What TRL's configs and scripts declare, read from the source: importing them takes seconds."""
    spec = importlib.util.find_spec("trl")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    patterns = ("trainer/*_config.py", "experimental/*/*_config.py", "scripts/utils.py")
    return frozenset(
        field.target.id
        for folder in folders
        for pattern in patterns
        for file in folder.glob(pattern)
        for made in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(made, ast.ClassDef) and made.name != "DatasetConfig"  # an entry of the list `datasets`
        for field in made.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


@cache
def _installed_names() -> frozenset[str]:
    from transformers import TrainingArguments

    return frozenset(field.name for field in dataclasses.fields(TrainingArguments))


def to_installed_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments`, written with today's names, under the names that the installed transformers knows.

    >>> to_installed_arguments({"activation_checkpointing": True})  # on transformers 5.22
    {'gradient_checkpointing': True}
    """
    known = _installed_names()
    return {
        _RENAMED[name] if name in _RENAMED and name not in known else name: value for name, value in arguments.items()
    }


def free_order(torch_version: str) -> FreeOrder:
    """How that version of torch, such as `"2.13.0+cu130"`, puts free blocks of equal size in order."""
    release = Version(torch_version).release
    return "segment" if release >= (2, 13) else "block" if release >= (2, 12) else "address"
