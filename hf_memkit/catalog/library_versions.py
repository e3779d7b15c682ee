"""Names and arguments that differ between versions of transformers, torch and accelerate. Other differences that the
child process handles are in `prediction/child/older_libraries.py`."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import importlib.util
import json
import re
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from packaging.version import Version

OLDEST: Final = {"torch": "2.8", "transformers": "4.57", "accelerate": "1.3"}
"""Oldest version of each library that traces work with."""

FreeOrder = Literal["segment", "block", "address"]
"""How the allocator orders free blocks of equal size: by their segment's age, then address (torch 2.13 and later,
pytorch pull request 183591), by the block's age (torch 2.12, 178362), or by address only (torch 2.11)."""

CALLBACKS_OF_LIBRARIES: Final = ("transformers.", "accelerate.", "trl.", "peft.", "hf_memkit.")
"""Modules of callbacks that come with libraries."""

GENERATION_FIELDS: Final = frozenset(
    {
        "generation_config", "generation_max_length", "generation_num_beams", "predict_with_generate",
        "sortish_sampler",
    }
)  # fmt: skip
"""Fields that Seq2SeqTrainingArguments add to TrainingArguments (transformers 5.23.0: training_args_seq2seq.py)."""

# transformers 5.23 renamed these fields; the old names are deprecated there, and the new ones unknown before.
# Source: transformers/training_args.py, 5.22.0 and 5.23.0. memkit uses the new names everywhere.
_RENAMED = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
_CURRENT = {old: new for new, old in _RENAMED.items()}


def current_name(name: str) -> str:
    """Current name of a TrainingArguments field; a field that was never renamed keeps its name."""
    return _CURRENT.get(name, name)


def names_of(name: str) -> tuple[str, ...]:
    """All names of a TrainingArguments field: the current one first, then its former one.

    >>> names_of("gradient_checkpointing"), names_of("optim")
    (('activation_checkpointing', 'gradient_checkpointing'), ('optim',))
    """
    current = current_name(name)
    return (current, _RENAMED[current]) if current in _RENAMED else (current,)


def name_in_version(name: str, transformers: tuple[int, ...]) -> str:
    """Name of a field in a version of transformers such as `(5, 22)`; `()`, an unknown version: the current name."""
    return _RENAMED.get(name, name) if () < transformers < (5, 23) else name


_SOURCES: Final = ("training_args.py", "trainer_utils.py", "debug_utils.py")
"""Files of transformers that define TrainingArguments and the enumerations of its fields."""


def _folder_of(library: str) -> Path | None:
    """Folder of an installed library, found without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(library)
    return next((Path(place) for place in (spec and spec.submodule_search_locations) or ()), None)


@cache
def _classes(library: str, *patterns: str) -> Mapping[str, ast.ClassDef]:
    """Name → class definition in the installed library's source files; empty without its source."""
    folder = _folder_of(library)
    files = [file for pattern in patterns for file in sorted(folder.glob(pattern))] if folder else []
    try:
        parsed = [ast.parse(file.read_text(encoding="utf-8")).body for file in files]
    except (OSError, SyntaxError):
        return {}
    return {node.name: node for body in reversed(parsed) for node in body if isinstance(node, ast.ClassDef)}


def _declared(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    """The fields that a dataclass declares itself and takes as arguments."""
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            is_argument = "init=False" not in ast.unparse(field.value or field)
            if is_argument and "ClassVar" not in ast.unparse(field.annotation):
                yield field.target.id, field


@cache
def _written_types() -> Mapping[str, Any]:
    """Name → type of every field, read from the source, because importing the class imports torch and takes seconds.
    Enumerations are rebuilt with the same values; types of other libraries are `Any`. Empty without the source."""
    classes = _classes("transformers", *_SOURCES)
    known = _Names({"Literal": Literal})
    for name, node in classes.items():
        if any(isinstance(base, ast.Name) and base.id == "ExplicitEnum" for base in node.bases):
            members = {}
            for member in node.body:
                if isinstance(member, ast.Assign) and isinstance(member.value, ast.Constant):
                    members[ast.unparse(member.targets[0])] = member.value.value
            known[name] = enum.Enum(name, members)
    types = {}
    for name, field in _declared(classes["TrainingArguments"]) if classes else ():
        try:
            types[name] = eval(ast.unparse(field.annotation), {}, known)  # of the installed package's own source
        except (AttributeError, TypeError):
            types[name] = Any
    return types


class _Names(dict[str, Any]):
    """Names in an annotation; unknown ones are built-in types or `Any`."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


@cache
def argument_types() -> Mapping[str, Any]:
    """Current name → type of every field of the installed `transformers.TrainingArguments`."""
    types = {current_name(name): kind for name, kind in (_written_types() or _imported_types()).items()}
    # Annotated for the command line only (transformers 5.23.0: training_args.py 1444).
    return {**types, "fsdp": bool | str | list[str] | None}


@cache
def _imported_types() -> Mapping[str, Any]:
    """The fields of the imported class; without transformers only their names, from `argument_fields.json`."""
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
    """Current and former names of all fields of TrainingArguments, Seq2SeqTrainingArguments, and TRL's configs if it
    is installed; `stable`: of the latter only those in `stable_trl_classes`."""
    of_trl = [names for owner, names in trl_classes().items() if not stable or owner in stable_trl_classes()]
    return frozenset({*argument_types(), *_CURRENT, *GENERATION_FIELDS}.union(*of_trl))


_STABLE: Final = "trainer/*_config.py"


def stable_trl_classes() -> frozenset[str]:
    """Classes of `trl_classes` that are not experimental, and configure a trainer or the model."""
    return frozenset(_classes("trl", _STABLE))


@cache
def trl_classes() -> Mapping[str, frozenset[str]]:
    """Class → its fields, for TRL's configs and the dataclasses of its scripts; empty without TRL. Read from the
    source, because importing them takes seconds. Fields inherited from transformers are left out."""
    classes = _classes("trl", _STABLE, "experimental/*/*_config.py", "scripts/*.py")

    def names(node: ast.ClassDef) -> set[str]:
        bases = (ast.unparse(base) for base in node.bases)
        inherited = (names(classes[base]) for base in bases if base in classes and base != node.name)
        return {name for name, _ in _declared(node)}.union(*inherited)

    # DatasetConfig is an entry of the list `datasets`.
    return {name: frozenset(names(node)) for name, node in classes.items() if name != "DatasetConfig"}


@cache
def accelerate_keys() -> frozenset[str]:
    """Keys in the YAML of `accelerate launch` (accelerate 1.15.0: commands/config/config_args.py)."""
    classes = _classes("accelerate", "commands/config/config_args.py")
    return frozenset(name for node in classes.values() for name, _ in _declared(node))


@cache
def accelerate_values(kind: str) -> tuple[str, ...]:
    """Values of an enumeration in accelerate's utils/dataclasses.py, such as `"DistributedType"`; or empty."""
    node = _classes("accelerate", "utils/dataclasses.py").get(kind)
    members = (member.value for member in (node.body if node is not None else ()) if isinstance(member, ast.Assign))
    return tuple(str(value.value) for value in members if isinstance(value, ast.Constant))


@cache
def accelerate_options(function: Literal["prepare_deepspeed_cmd_env", "prepare_multi_gpu_env"]) -> frozenset[str]:
    """Options that `accelerate launch` passes on to DeepSpeed, or to other engines on GPUs, read from the source of
    the function that does (accelerate 1.15.0: utils/launch.py); empty without accelerate."""
    try:
        text = ((_folder_of("accelerate") or Path()) / "utils" / "launch.py").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    nodes = [node for f in functions if f.name == function for node in ast.walk(f)]
    read = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    calls = (ast.unparse(node) for node in nodes if isinstance(node, ast.Call))
    by_getattr = (re.match(r"getattr\(args, '(\w+)'", call) for call in calls)
    names = {node.attr for node in read if ast.unparse(node.value) == "args"}
    return frozenset(names | {match[1] for match in by_getattr if match})


@cache
def model_classes() -> frozenset[str]:
    """Names of all classes in the model files of the installed transformers; empty without its source."""
    folder = _folder_of("transformers")
    files = (folder / "models").glob("*/modeling_*.py") if folder else ()
    texts = (file.read_text(encoding="utf-8") for file in files)
    return frozenset(name for text in texts for name in re.findall(r"^class (\w+)", text, re.MULTILINE))


def to_installed_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` under the names that the installed transformers knows.

    >>> to_installed_arguments({"activation_checkpointing": True})  # on transformers 5.22
    {'gradient_checkpointing': True}
    """
    renamed = {name: old for name, old in _RENAMED.items() if name in arguments}
    known = (_written_types() or _imported_types()) if renamed else ()
    former = {name: old for name, old in renamed.items() if name not in known}
    return {former.get(name, name): value for name, value in arguments.items()}


def torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA; torch is not imported (torch 2.13.0: version.py)."""
    folder = _folder_of("torch")
    try:
        body = ast.parse(((folder or Path()) / "version.py").read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return False
    for statement in body:
        if isinstance(statement, ast.AnnAssign | ast.Assign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            is_set = isinstance(statement.value, ast.Constant) and statement.value.value is not None
            if is_set and any(ast.unparse(target) == "cuda" for target in targets):
                return True
    return False


def is_on(value: str | None) -> bool:
    """Whether a text is true for accelerate's variables (accelerate 1.15.0: utils/environment.py, `str_to_bool`) and
    for transformers' options of optimizers (transformers 5.23.0: utils/generic.py, `strtobool`)."""
    return (value or "").lower() in ("1", "true", "t", "yes", "y", "on")


def free_order(torch_version: str) -> FreeOrder:
    """How a version of torch, such as `"2.13.0+cu130"`, orders free blocks of equal size."""
    release = Version(torch_version).release
    if release >= (2, 13):
        return "segment"
    return "block" if release >= (2, 12) else "address"
