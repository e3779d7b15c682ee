"""Differences between versions of transformers, torch and accelerate in names and arguments. Here only; what the child
process does otherwise with earlier versions is in `prediction/child/older_libraries.py`.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import importlib.util
import json
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from packaging.version import Version

OLDEST: Final = {"torch": "2.8", "transformers": "4.57", "accelerate": "1.3"}
"""Of each library that traces need the oldest version that works."""

FreeOrder = Literal["segment", "block", "address"]
"""What decides between free blocks of equal size: the age of their segment and then the address (torch 2.13 and later,
pytorch pull request 183591), the age of the block (torch 2.12, 178362), or the address alone (torch 2.11)."""

CALLBACKS_OF_LIBRARIES: Final = ("transformers.", "accelerate.", "trl.", "peft.", "hf_memkit.")
"""Modules whose callbacks are not the user's."""

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


_SOURCES: Final = ("training_args.py", "trainer_utils.py", "debug_utils.py")
"""The files of transformers that have TrainingArguments and the enumerations of its fields."""


def _folder_of(library: str) -> Path | None:
    """Where a library is installed; None if it is not. Nothing is imported."""
    spec = importlib.util.find_spec(library)
    return next((Path(place) for place in (spec and spec.submodule_search_locations) or ()), None)


@cache
def _classes(library: str, *patterns: str) -> Mapping[str, ast.ClassDef]:
    """Every class in the installed library's files, by name; empty if their source is missing."""
    folder = _folder_of(library)
    files = [file for pattern in patterns for file in sorted(folder.glob(pattern))] if folder else []
    try:
        parsed = [ast.parse(file.read_text(encoding="utf-8")).body for file in files]
    except (OSError, SyntaxError):
        return {}
    return {node.name: node for body in reversed(parsed) for node in body if isinstance(node, ast.ClassDef)}


def _declared(made: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    """The fields that a dataclass declares itself and takes as arguments."""
    for field in made.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            given = "init=False" not in ast.unparse(field.value or field)
            if given and "ClassVar" not in ast.unparse(field.annotation):
                yield field.target.id, field


@cache
def _written_types() -> Mapping[str, Any]:
    """Name → type of every field, as the source has them: importing the class takes seconds, because it imports torch.
    An enumeration is one of the same values; a type of another library is `Any`. Empty without the source."""
    classes = _classes("transformers", *_SOURCES)
    known = _Names({"Literal": Literal})
    for name, node in classes.items():
        members = [each for each in node.body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)]
        if any(isinstance(base, ast.Name) and base.id == "ExplicitEnum" for base in node.bases):
            known[name] = enum.Enum(
                name, {ast.unparse(each.targets[0]): ast.literal_eval(each.value) for each in members}
            )
    found = {}
    for name, field in _declared(classes["TrainingArguments"]) if classes else ():
        try:
            found[name] = eval(ast.unparse(field.annotation), {}, known)  # of the installed package's own source
        except (AttributeError, TypeError):
            found[name] = Any
    return found


class _Names(dict[str, Any]):
    """Names in an annotation: what is neither here nor a built-in type is `Any`."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


@cache
def argument_types() -> Mapping[str, Any]:
    """Name (today's) and type of every field of the installed `transformers.TrainingArguments`."""
    return {current_name(name): kind for name, kind in (_written_types() or _imported_types()).items()}


@cache
def _imported_types() -> Mapping[str, Any]:
    """Without transformers the names alone, of its newest version that was read (`scripts/argument_fields.py`)."""
    try:
        from transformers import TrainingArguments
    except ModuleNotFoundError:
        text = Path(__file__).with_name("argument_fields.json").read_text(encoding="utf-8")
        by_versions = json.loads(text)["transformers"]["classes"]["TrainingArguments"]
        return {name: Any for versions, names in by_versions.items() if versions.endswith("-") for name in names}
    hints = typing.get_type_hints(TrainingArguments)
    return {field.name: hints[field.name] for field in dataclasses.fields(TrainingArguments) if field.init}


@cache
def fields(*, stable: bool = False) -> frozenset[str]:
    """Every name, also those of before, of a field of TrainingArguments, of Seq2SeqTrainingArguments, and of the
    configs of TRL, where it is installed; `stable`: only of those in `stable_trl_classes`."""
    of_trl = [names for owner, names in trl_classes().items() if not stable or owner in stable_trl_classes()]
    return frozenset({*argument_types(), *_CURRENT, *GENERATION_FIELDS}.union(*of_trl))


_STABLE: Final = "trainer/*_config.py"


def stable_trl_classes() -> frozenset[str]:
    """Those of `trl_classes` that are not experimental, and belong to a trainer or to the model."""
    return frozenset(_classes("trl", _STABLE))


@cache
def trl_classes() -> Mapping[str, frozenset[str]]:
    """Class → its fields, of TRL's configs and of what its scripts declare, read from the source: importing them takes
    seconds. What a config inherits from transformers is left out; empty without TRL."""
    classes = _classes("trl", _STABLE, "experimental/*/*_config.py", "scripts/*.py")

    def names(made: ast.ClassDef) -> set[str]:
        bases = (ast.unparse(base) for base in made.bases)
        inherited = (names(classes[base]) for base in bases if base in classes and base != made.name)
        return {name for name, _ in _declared(made)}.union(*inherited)

    # DatasetConfig is an entry of the list `datasets`.
    return {name: frozenset(names(made)) for name, made in classes.items() if name != "DatasetConfig"}


@cache
def accelerate_keys() -> frozenset[str]:
    """Keys of the YAML of `accelerate launch` (accelerate 1.15.0: commands/config/config_args.py)."""
    classes = _classes("accelerate", "commands/config/config_args.py")
    return frozenset(name for made in classes.values() for name, _ in _declared(made))


@cache
def accelerate_values(kind: str) -> tuple[str, ...]:
    """What an enumeration of accelerate allows, such as `"DistributedType"`; empty without accelerate (accelerate
    1.15.0: utils/dataclasses.py)."""
    made = _classes("accelerate", "utils/dataclasses.py").get(kind)
    members = (each.value for each in (made.body if made is not None else ()) if isinstance(each, ast.Assign))
    return tuple(str(value.value) for value in members if isinstance(value, ast.Constant))


@cache
def accelerate_options_for_deepspeed() -> frozenset[str]:
    """Options that `accelerate launch` passes on to DeepSpeed, read from the source (accelerate 1.15.0:
    utils/launch.py, `prepare_deepspeed_cmd_env`); empty without accelerate."""
    try:
        text = ((_folder_of("accelerate") or Path()) / "utils" / "launch.py").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    made = [each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)]
    names = {
        inner.attr
        for each in made
        if each.name == "prepare_deepspeed_cmd_env"
        for inner in ast.walk(each)
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "args"
    }
    return frozenset(names)


@cache
def _installed_names() -> frozenset[str]:
    return frozenset(_written_types() or _imported_types())


def to_installed_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments`, written with today's names, under the names that the installed transformers knows.

    >>> to_installed_arguments({"activation_checkpointing": True})  # on transformers 5.22
    {'gradient_checkpointing': True}
    """
    known = _installed_names()
    return {
        _RENAMED[name] if name in _RENAMED and name not in known else name: value for name, value in arguments.items()
    }


def torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, without importing it (torch 2.13.0: version.py)."""
    folder = _folder_of("torch")
    try:
        body = ast.parse(((folder or Path()) / "version.py").read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return False
    cuda = [each.value for each in body if isinstance(each, ast.AnnAssign | ast.Assign) and _names_cuda(each)]
    return any(isinstance(value, ast.Constant) and value.value is not None for value in cuda)


def _names_cuda(statement: ast.AnnAssign | ast.Assign) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return any(ast.unparse(target) == "cuda" for target in targets)


def is_on(value: str | None) -> bool:
    """Whether accelerate takes the value of an environment variable for true, and transformers that of an optimizer's
    option (accelerate 1.15.0: utils/environment.py, `str_to_bool`; transformers 5.23.0: utils/generic.py,
    `strtobool`)."""
    return (value or "").lower() in ("1", "true", "t", "yes", "y", "on")


def free_order(torch_version: str) -> FreeOrder:
    """How that version of torch, such as `"2.13.0+cu130"`, puts free blocks of equal size in order."""
    release = Version(torch_version).release
    return "segment" if release >= (2, 13) else "block" if release >= (2, 12) else "address"
