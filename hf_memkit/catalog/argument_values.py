"""Validate values for fields of TrainingArguments, and find misspelt names of fields. TrainingArguments hardly
validates: the text `"false"` counts as true, and `1e-4`, which YAML 1.1 reads as text, fails at the first comparison
(transformers 5.23.0: hf_argparser.py, `parse_dict`)."""

from __future__ import annotations

import contextlib
import difflib
import enum
import types
import typing
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final

import yaml

from hf_memkit.catalog import library_versions
from hf_memkit.catalog.former_arguments import EXAMPLES, SHARED, ever_fields
from hf_memkit.common.errors import did_you_mean

_NEAR: Final = 0.85
"""Minimum similarity (difflib) of a misspelling: `grad_accumulation_steps` has 0.92, `train_batch_size` 0.74."""


def misspelt(name: str) -> tuple[str, ...]:
    """The fields of TrainingArguments or of TRL's configs that `name` may be a misspelling of; empty if none.

    There are several if `name` lacks the word that distinguishes them. A name may be the script's own argument: it is
    no misspelling if it has an extra word, lacks the first word, replaces a word, or lacks any word of a TRL field.
    TRL fields of one word (`dtype`), of experimental configs, or shared with other scripts are not compared.

    >>> misspelt("per_device_train_batchsize"), misspelt("ref_model_name_or_path"), misspelt("block_size")
    (('per_device_train_batch_size',), (), ())
    >>> misspelt("per_device_batch_size")
    ('per_device_train_batch_size', 'per_device_eval_batch_size')
    """
    if not is_unknown(name) or name in ever_fields("trl"):
        return ()
    of_transformers = library_versions.argument_types()
    of_trl = library_versions.fields(stable=True) - SHARED - of_transformers.keys()
    fields = [*of_transformers, *sorted(field for field in of_trl if "_" in field)]
    close = difflib.get_close_matches(name, fields, cutoff=_NEAR)
    nearest = next((field for field in close if not _other_words(name, field)), None)
    if nearest is None:
        return ()
    if not _lacks_words(name, nearest):
        return (nearest,)
    if nearest not in ever_fields("transformers"):
        return ()
    length = len(nearest.split("_"))
    return tuple(field for field in fields if _lacks_words(name, field) and len(field.split("_")) == length)


def is_unknown(name: str) -> bool:
    """Whether `name` is no field of TrainingArguments in any version or of TRL, and no argument of example scripts."""
    return name not in library_versions.fields() and name not in EXAMPLES and name not in ever_fields("transformers")


def _lacks_words(name: str, field: str) -> bool:
    """Whether `name` is `field` without some of its words."""
    words = iter(field.split("_"))
    return all(word in words for word in name.split("_"))


def _other_words(name: str, field: str) -> bool:
    words = name.split("_")
    field_words = field.split("_")
    if len(words) > len(field_words):
        return all(word in words for word in field_words)
    if len(words) < len(field_words):
        return words == field_words[-len(words) :]
    return any(difflib.SequenceMatcher(None, *pair).ratio() < 0.6 for pair in zip(words, field_words, strict=True))


def check_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert values to the types of their fields.

    Names that are no field of TrainingArguments are kept: they may belong to a script.

    Returns:
        The values under current names, and a line for each wrong one.

    >>> check_values({"gradient_checkpointing": True, "learning_rate": "1e-4", "max_steps": "five"})
    ({'activation_checkpointing': True, 'learning_rate': 0.0001}, ['max_steps=five: expected int, got str'])
    """
    hints = library_versions.argument_types()
    valid: dict[str, Any] = {}
    problems = []
    for given, value in values.items():
        name = library_versions.current_name(given)
        if name in valid and valid[name] != value:
            other = next(key for key in values if key != given and library_versions.current_name(key) == name)
            problems.append(f"{given}={value!r}: the same field as {other}; give one of them")
        elif name not in hints:
            valid[name] = value
        else:
            try:
                valid[name] = _typed(value, hints[name])
            except ValueError as error:
                problems.append(f"{given}={value}: {error}")
    return valid, problems


def _typed(value: Any, hint: Any) -> Any:
    """`value` from a file or a caller as a value of type `hint`, as in `convert`."""
    arms = _arms(hint)
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, enum.Enum):
        value = str(value.value)
    if isinstance(value, str):
        return value if str in arms and not _enums(arms) else convert(value, hint)
    if value is None and type(None) not in arms and Any not in arms:
        raise ValueError(f"expected {_describe(arms)}. Omit it for the default")
    if isinstance(value, bool) and bool not in arms and not _enums(arms):
        raise ValueError(f"expected {_describe(arms)}, got bool")
    return _fitted(value, hint)


def convert(text: str, hint: Any) -> Any:
    """`text`, parsed as YAML, as a value of type `hint`. Raises ValueError, with the allowed types, for another."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    except RecursionError:
        raise ValueError("nested too deeply. Write fewer brackets") from None
    if isinstance(value, str) and float in _arms(hint):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 reads 1e-4 as text, because it has no dot
    return _fitted(value, hint)


def _fitted(value: Any, hint: Any) -> Any:
    arms = _arms(hint)
    if type(value) is int and float in arms and int not in arms:
        return value  # a step count stays a whole number: 5, not 5.0
    if _enums(arms) and isinstance(value, str | bool):
        # A field typed `Enum | str` would take any text; only the enumeration's values mean something. YAML reads a
        # bare `no` as False, which is a value of several of them.
        word = "no" if value is False else str(value)
        allowed = [str(member.value) for arm in _enums(arms) for member in arm]
        if word not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}{did_you_mean(word, allowed)}")
        return word
    from pydantic import TypeAdapter, ValidationError  # environments that memkit only traces in may lack pydantic

    try:
        return TypeAdapter(hint).validate_python(value, strict=False)
    except ValidationError:
        raise ValueError(f"expected {_describe(arms)}, got {type(value).__name__}") from None


def _enums(arms: tuple[Any, ...]) -> list[type[enum.Enum]]:
    return [arm for arm in arms if isinstance(arm, type) and issubclass(arm, enum.Enum)]


def _arms(hint: Any) -> tuple[Any, ...]:
    """The types of a union, flat."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(flat for arm in typing.get_args(hint) for flat in _arms(arm))
    return (hint,)


def _describe(arms: tuple[Any, ...]) -> str:
    names = ["null" if arm is type(None) else getattr(arm, "__name__", str(arm)) for arm in arms]
    return " or ".join(dict.fromkeys(names))
