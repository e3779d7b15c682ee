"""Reads the user's own arguments: `--set key=value`, `--args FILE`, a dict, or a TrainingArguments.

The result is plain data, under current names and of the fields' types. An error lists everything that is wrong. Names
that are no field of TrainingArguments are refused, except in a file: its script may have further arguments.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import ChainMap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from hf_memkit.catalog import library_versions
from hf_memkit.catalog.argument_values import check_values, convert, misspelt
from hf_memkit.catalog.former_arguments import former_arguments
from hf_memkit.common.as_json import as_json
from hf_memkit.common.errors import InputError, SettingError, did_you_mean
from hf_memkit.setup.request import below_one

LENGTH_NAMES: Final = ("block_size", "max_length", "max_seq_length")
"""Arguments of scripts for the sequence length in tokens (transformers' run_clm, TRL)."""

_COUNTS: Final = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")

_NO_MEMORY: Final = frozenset(
    {
        "output_dir", "run_name", "report_to", "logging_dir", "project", "trackio_space_id", "hub_model_id",
        "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push", "hub_revision", "push_to_hub", "use_cpu",
        "local_rank", "log_level", "log_level_replica", "resume_from_checkpoint", "do_train", "do_eval", "do_predict",
        "disable_tqdm", "seed", "data_seed",
    }
)  # fmt: skip
"""Fields without effect on memory. `use_cpu` allows bf16 on a machine without a GPU; tokens are secret."""


class ReadFile(Protocol):
    """Content of a file (`hf_memkit.checks.reading`)."""

    @property
    def path(self) -> Path: ...
    @property
    def kind(self) -> str: ...
    @property
    def content(self) -> Mapping[str, Any]: ...
    @property
    def duplicates(self) -> tuple[str, ...]: ...
    @property
    def refusal(self) -> str: ...


def is_field(name: str) -> bool:
    """Whether TrainingArguments has a field of this name."""
    return name in library_versions.argument_types()


def wrong_counts(values: Mapping[str, Any], *further: str) -> list[str]:
    """A line for each count among `values` that is no whole number above 0. `further`: more names that are counts."""
    return below_one({name: values[name] for name in sorted((*_COUNTS, *further)) if name in values})


def read_pairs(
    pairs: Iterable[str], other_options: Mapping[str, str] | None = None, further: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Parse `key=value` strings; values are YAML scalars: `1e-4`, `true`, `null`, `text`.

    Args:
        pairs: the strings.
        other_options: field that cannot be set here → what to do instead.
        further: name → type of fields that a recipe's Trainer adds to TrainingArguments.

    Returns:
        Field → value.

    Raises:
        SettingError: lists every wrong pair.
    """
    pairs = list(pairs)
    if not pairs:
        return {}  # without importing transformers, which takes seconds
    hints = ChainMap(dict(further or {}), library_versions.argument_types())  # type: ignore[arg-type] # only read
    values: dict[str, Any] = {}
    problems = []
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = library_versions.current_name(name.strip())
        if not equals or not name:
            problems.append(f"--set {pair}: write key=value, such as --set learning_rate=1e-4")
        elif other_options and name in other_options:
            problems.append(f"--set {name}: cannot be set here: {other_options[name]}")
        elif name not in hints:
            problems.append(f"--set {name}: no field of TrainingArguments{_instead(name, text.strip(), hints)}")
        else:
            try:
                values[name] = convert(text.strip(), hints[name])
            except ValueError as error:
                problems.append(f"--set {name}={text.strip()}: {error}")
    if problems:
        raise SettingError("\n".join(problems))
    return values


def read_values_and_pairs(pairs: Iterable[str], kinds: Mapping[str, type]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of techniques, and fields of TrainingArguments, from `--set key=value`.

    Args:
        pairs: the strings.
        kinds: name of a technique's value → its type.

    Raises:
        SettingError: lists every wrong pair.
    """
    try:
        fields = read_pairs(pairs, further=kinds)
    except SettingError as error:
        known = f"; values of this preset: {', '.join(kinds)}" if kinds else ""
        lines = str(error).splitlines()
        lines = [line + known if "no field of TrainingArguments" in line else line for line in lines]
        raise SettingError("\n".join(lines)) from None
    values = {name: fields.pop(name) for name in kinds if name in fields}
    return values, fields


def read_file(file: ReadFile) -> tuple[dict[str, Any], list[str]]:
    """Arguments in the user's file, including those of its script, and notes on values that were converted.

    Raises:
        InputError: no file of arguments, or a key appears twice.
        SettingError: lists values of the wrong type and misspelt fields.
    """
    if file.refusal:
        raise InputError(f"--args {file.path}: {file.refusal}")
    wanted = "give a YAML or JSON file of TrainingArguments"
    if file.kind == "recipe":
        raise InputError(f"--args {file.path}: a recipe; {wanted}")
    if file.kind != "arguments":
        such_as = f"such as one with deepspeed: {file.path}"
        raise InputError(f"--args {file.path}: a DeepSpeed config; {wanted}, {such_as}")
    if file.duplicates:
        raise InputError(f"{file.path}: {', '.join(file.duplicates)}: appears twice. Keep one")
    arguments, problems = check_values(file.content)
    for name in arguments:
        if close := misspelt(str(name)):
            problems.append(f"{name}: no field of this name; did you mean {' or '.join(map(repr, close))}?")
    if problems:
        raise SettingError("\n".join(f"{file.path}: {problem}" for problem in problems))
    notes = []
    for given, value in file.content.items():
        name = library_versions.current_name(given)
        if type(value) is not type(arguments[name]) and isinstance(value, str | bool):
            notes.append(f"{given}: your file's {value!r} becomes {arguments[name]!r}, by the field's type")
    return arguments, notes


def _instead(name: str, value: Any, known: Iterable[str]) -> str:
    """Replacement for a name that is no field: the successor of a former field, or a similar field."""
    former = former_arguments({name: value}).get(name)
    return did_you_mean(name, known) if former is None else f"; {former.fix} ({former.why})"


def former_lines(path: str | Path | None, own: Mapping[str, Any]) -> list[str]:
    """A line for each argument of the user's file that the installed libraries have removed."""
    removed = {} if path is None else former_arguments(own)
    return [f"{path}: {name} has no effect: {former.fix} ({former.why})" for name, former in removed.items()]


def length_of(own: Mapping[str, Any], notes: list[str]) -> int | None:
    """Tokens in a sequence according to the user's own arguments; adds a note about it."""
    key = next((key for key in LENGTH_NAMES if type(own.get(key)) is int), None)
    if key is None:
        return None
    notes.append(f"sequences of {own[key]} tokens: your {key}")
    return int(own[key])


def read_mapping(given: Mapping[str, Any], place: str, also: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of a dict.

    Args:
        given: name → value.
        place: the dict's name in messages.
        also: names that are fields here too.

    Raises:
        SettingError: lists everything wrong.
    """
    if not given:
        return {}  # without importing transformers, which takes seconds
    known = library_versions.argument_types()
    arguments, problems = check_values(given)
    for name, value in arguments.items():
        if name not in known and name not in also:
            problems.append(f"{name}: no field of TrainingArguments{_instead(str(name), value, known)}")
    problems += wrong_counts(arguments)
    if problems:
        raise SettingError("\n".join(f"{place}: {problem}" for problem in problems))
    return arguments


def read_trainer(args: Any) -> tuple[dict[str, Any], list[str]]:
    """Fields that differ from their defaults and affect memory, and notes on omitted ones.

    Args:
        args: `TrainingArguments` or a subclass's object, a dict of fields, or None.

    Raises:
        InputError: `args` is something else, or has a value that is no plain data.
    """
    notes: list[str] = []
    if args is None:
        return {}, notes
    if isinstance(args, Mapping):
        fields = read_mapping(args, "args", also=library_versions.GENERATION_FIELDS)
    elif dataclasses.is_dataclass(args) and not isinstance(args, type) and hasattr(args, "train_batch_size"):
        fields, notes = _changed_fields(args)
    else:
        raise InputError(
            f"args: expected TrainingArguments or a dict of its fields, got {type(args).__name__}. A dict also "
            f"accepts bf16=True on a machine without a GPU"
        )
    return {name: value for name, value in fields.items() if name not in _NO_MEMORY}, notes


def _changed_fields(args: Any) -> tuple[dict[str, Any], list[str]]:
    """Fields that differ from those of a default object, and a note on fields that Trainer does not have."""
    from transformers import Seq2SeqTrainingArguments, TrainingArguments

    kind = Seq2SeqTrainingArguments if isinstance(args, Seq2SeqTrainingArguments) else TrainingArguments
    plain = kind(output_dir=args.output_dir, use_cpu=True)
    fields = {}
    for field in dataclasses.fields(kind):
        value = getattr(args, field.name, None)
        if not field.init or field.name in _NO_MEMORY or _plain(value) == _plain(getattr(plain, field.name)):
            continue
        try:
            fields[library_versions.current_name(field.name)] = as_json(_plain(value))
        except (TypeError, ValueError):
            raise InputError(
                f"args.{field.name}={value!r}: not a plain value. Use numbers, text, booleans, lists or dicts"
            ) from None

    known = {field.name for field in dataclasses.fields(kind)}
    omitted = []
    for field in dataclasses.fields(args):
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name not in known and getattr(args, field.name, None) != default:
            omitted.append(field.name)
    note = f"omitted fields of {type(args).__name__}, which Trainer does not have: {', '.join(omitted)}"
    return fields, [note] if omitted else []


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.to_dict() if hasattr(value, "to_dict") else value
