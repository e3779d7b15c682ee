"""The recipe file: its fields, and one line for every mistake in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError
from pydantic_core import ErrorDetails

from hf_memkit.common import resources
from hf_memkit.common.errors import InputError, RecipeError, SettingError, did_you_mean
from hf_memkit.common.units import parse_size
from hf_memkit.common.user_files import content_problem, is_there, parsed, text_of
from hf_memkit.presets import PRESETS, compose
from hf_memkit.recipes.task_names import DEFAULT_TASK, TASKS
from hf_memkit.setup.techniques.registry import TECHNIQUES, wrong_value

NO_CHECKPOINTING: Final = "none"
"""Value in `checkpointing` for keeping all activations."""


class _Strict(BaseModel):
    """Unknown keys are errors; values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _size(text: str) -> str:
    try:
        parse_size(text)
    except InputError as error:
        raise ValueError(str(error)) from None
    return text


def _has_model_type(architecture: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(architecture.get("model_type"), str):
        raise ValueError("must name its model_type, such as gpt2")
    return architecture


def _among(known: Collection[str], kind: str, hint: str = "") -> AfterValidator:
    """Validator for a name in `known`.

    Args:
        kind: kind of name, for the error.
        hint: where the error sends the user for all names; empty: it lists them.
    """

    def check(name: str) -> str:
        if name not in known:
            names = hint or f"allowed: {', '.join(known)}"
            raise ValueError(f"no {kind}{did_you_mean(name, known)}; {names}")
        return name

    return AfterValidator(check)


_TASK: Final = _among(TASKS, "task of this name")
_PRESET: Final = _among(PRESETS, "preset of this name")
_TECHNIQUE: Final = _among(TECHNIQUES, "technique of this name", "`memkit preset list --techniques` names all")
_CHECKPOINTING: Final = _among(
    (NO_CHECKPOINTING, *(technique.name for technique in TECHNIQUES.values() if technique.family == "checkpointing")),
    "checkpointing technique",
)


class Model(_Strict):
    """The model: `hub_id`, and config values to build it from if the hub is unreachable. `open_alternative`: a similar
    model that needs no login, if `hub_id` is gated."""

    hub_id: str = Field(min_length=1)
    open_alternative: str | None = None
    architecture: Annotated[dict[str, Any], AfterValidator(_has_model_type)]


class Data(_Strict):
    """The default data set.

    Attributes:
        held_out: share of the examples (blocks of text) kept for evaluation, above 0 and below 0.5.
        evaluated_blocks: maximum number of held-out examples.
        columns: names of columns of the default data set that differ from the task's.
        prefix: instruction before each source text, for models with several tasks.
        target_length: maximum tokens of a target text, if not that of a source.
        packing: whether short conversations share a sequence.
        language: language of speech, for multilingual models.
    """

    hub_id: str = Field(min_length=1)
    hub_config: str | None = None
    hub_split: str = "train"
    text_column: str = "text"
    columns: dict[str, str] = Field(default_factory=dict)
    prefix: str = ""
    target_length: PositiveInt | None = None
    packing: bool = False
    language: str | None = None
    held_out: float = Field(default=0.05, gt=0, lt=0.5)
    evaluated_blocks: PositiveInt = 128


class Variant(_Strict):
    """A preset with this recipe's values.

    Attributes:
        techniques: added to the preset's, replacing those with the same purpose.
        checkpointing: such techniques, or `none`, in order of preference: the first that fits is used, or the last.
        values: for the techniques.
        solve_for: `sequence` makes the sequence as long as GPU and model allow, from the recipe's `sequence_length`
            on; `--sequence-length` overrides it.
    """

    micro_batch_size: PositiveInt
    learning_rate: PositiveFloat
    techniques: list[Annotated[str, _TECHNIQUE]] = Field(default_factory=list)
    checkpointing: list[Annotated[str, _CHECKPOINTING]] = Field(default_factory=list)
    values: dict[str, Any] = Field(default_factory=dict)
    solve_for: Literal["sequence"] | None = None


class Rehearsal(_Strict):
    """Settings without a GPU. `model`: config values under transformers' common names."""

    model: dict[str, PositiveInt | PositiveFloat]
    sequence_length: PositiveInt
    sequences_per_step: PositiveInt
    micro_batch_size: PositiveInt
    steps: PositiveInt
    learning_rate: PositiveFloat


_MODELS: Final[dict[Any, type[_Strict]]] = {"model": Model, "data": Data, "variants": Variant, "rehearsal": Rehearsal}
"""Section of a recipe file → its fields."""


class Recipe(_Strict):
    """One recipe file. `name` and `path` come from the file, the rest from its text.

    Attributes:
        task: the kind of data (`hf_memkit.recipes.tasks`).
        sequence_length: tokens.
        sequences_per_step: sequences in an optimizer step.
        steps: optimizer steps.
        card: a marketing size such as `16GB`.
        gpus: GPUs on each machine.
    """

    name: str
    path: Path
    summary: str = Field(min_length=1, max_length=120)
    task: Annotated[str, _TASK] = DEFAULT_TASK
    model: Model
    data: Data
    card: Annotated[str, AfterValidator(_size)]
    gpus: PositiveInt = 1
    sequence_length: PositiveInt
    sequences_per_step: PositiveInt
    steps: PositiveInt
    variants: dict[Annotated[str, _PRESET], Variant] = Field(min_length=1)
    rehearsal: Rehearsal


def load_recipe(name: str) -> Recipe:
    """The recipe called `name`, or the one in the file `name` if that ends in .yaml or .yml.

    Raises:
        InputError: there is no such recipe or file.
        RecipeError: the file has mistakes; lists all of them.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not is_there(path) or not path.is_file():
            raise InputError(f"{name}: no such file. To list the recipes, type: memkit recipe")
        return read_recipe(path)
    if name not in resources.names("recipes") and is_there(name):
        raise InputError(f"{name}: not a recipe: a recipe is a .yaml file. To list them, type: memkit recipe")
    return read_recipe(resources.find("recipes", name))


def read_recipe(path: Path) -> Recipe:
    """The recipe in the file at `path`. Raises RecipeError with all mistakes."""
    try:
        content = parsed(str(path), yaml.safe_load, text_of(path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        mistake = getattr(error, "problem", None) or "cannot be parsed"
        raise RecipeError([f"{where}: not valid YAML: {mistake}"]) from None
    if problem := content_problem(content):
        raise RecipeError([f"{path}: {problem}"])
    derived = [key for key in ("name", "path") if key in content]
    problems = [f"{path}: {key}: remove it: the file's name and place decide it" for key in derived]
    problems += [f"{path}: {problem}" for problem in _wrong_numbers(content)]
    try:
        recipe = Recipe.model_validate({**content, "name": path.stem, "path": path})
    except ValidationError as error:
        raise RecipeError([*(_line(path, detail) for detail in error.errors()), *problems]) from None
    if problems:
        raise RecipeError(problems)
    return recipe


def _wrong_numbers(content: dict[str, Any]) -> Iterator[str]:
    """Micro-batches that do not divide the batch, and values that a variant's preset does not take. From the raw
    content, so that they are reported with all other mistakes."""
    variants = content.get("variants")
    for name, variant in variants.items() if isinstance(variants, dict) else ():
        if isinstance(variant, dict):
            yield from _uneven_batch(f"variants.{name}", variant, content.get("sequences_per_step"))
            if name in PRESETS:
                yield from _wrong_values(name, variant)
    rehearsal = content.get("rehearsal")
    if isinstance(rehearsal, dict):
        yield from _uneven_batch("rehearsal", rehearsal, rehearsal.get("sequences_per_step"))


def _uneven_batch(place: str, section: dict[str, Any], batch_size: Any) -> Iterator[str]:
    micro_batch = section.get("micro_batch_size")
    are_counts = all(isinstance(value, int) and value > 0 for value in (micro_batch, batch_size))
    if are_counts and batch_size % micro_batch:
        yield f"{place}.micro_batch_size: {micro_batch}: must divide sequences_per_step ({batch_size})"


def _wrong_values(preset: str, variant: dict[str, Any]) -> Iterator[str]:
    own = _names(variant, "techniques")
    try:
        techniques = list(compose(preset, own))
    except SettingError as error:
        yield f"variants.{preset}.techniques: {error}"
        return
    techniques += [TECHNIQUES[name] for name in (*own, *_names(variant, "checkpointing"))]
    allowed = list(dict.fromkeys(key for technique in techniques for key in technique.values))
    values = variant.get("values")
    for key, value in values.items() if isinstance(values, dict) else ():
        place = f"variants.{preset}.values.{key}"
        if key not in allowed:
            near = did_you_mean(str(key), allowed)
            yield f"{place}: unknown key{near}; allowed: {', '.join(allowed) or 'none'}"
        elif wrong := wrong_value(techniques, key, value):
            yield f"{place}: {value!r}: {wrong}"


def _names(variant: dict[str, Any], key: str) -> list[str]:
    """The valid techniques in a variant's list; others are reported elsewhere."""
    names = variant.get(key)
    if not isinstance(names, list):
        return []
    return [name for name in names if isinstance(name, str) and name in TECHNIQUES]


def _line(path: Path, detail: ErrorDetails) -> str:
    """One mistake: file, key, value, and allowed values."""
    key = ".".join(str(part) for part in detail["loc"] if part != "[key]")
    if detail["type"] == "extra_forbidden":
        *sections, name = detail["loc"]
        section = _MODELS[sections[0]] if sections else Recipe
        known = [field for field in section.model_fields if field not in {"name", "path"}]
        return f"{path}: {key}: unknown key{did_you_mean(str(name), known)}; allowed: {', '.join(known)}"
    if detail["type"] == "missing":
        return f"{path}: {key}: missing; add it"
    return f"{path}: {key}: {detail['input']!r}: {detail['msg'].removeprefix('Value error, ')}"
