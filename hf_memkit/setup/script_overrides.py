"""A plan's settings in a script that stays as it is: fields of TrainingArguments, options of `from_pretrained`,
variables. In: a plan file. Out: what the script had in their place, and what it sets by hand afterwards.

No library is imported before the script does it: transformers' classes are changed the moment they have been imported.
The process is the script's alone: that of `memkit run`, or a prediction's child.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hf_memkit.catalog.library_versions import is_on
from hf_memkit.common.errors import InputError, did_you_mean
from hf_memkit.common.user_files import parsed, user_path
from hf_memkit.common.when_imported import when_imported
from hf_memkit.setup.live_arguments import Made, made_of, when_made

_SECTIONS: Final = ("arguments", "model", "environment")
"""Of a plan file."""
_WITH_CODE: Final = ("adapter", "loss")
"""What a run has only by other code in the script."""
_FOR_CONFIGS: Final = ("attn_implementation", "dtype", "experts_implementation")
"""Options of `from_pretrained` that `from_config` takes too (transformers 5.23.0: modeling_utils.py,
`_from_config`)."""


@dataclass(frozen=True)
class Overrides:
    """What a plan sets, in place of what the script has.

    Attributes:
        arguments: fields of TrainingArguments, also of a subclass such as TRL's SFTConfig, under today's names. They
            are set in every object that the script makes.
        model: options of `from_pretrained`, such as `attn_implementation` and `dtype`, for every model that the script
            makes by it or, as far as it takes them, by `from_config`.
        environment: variables, set before torch starts.
        adapter: fields of a `LoraConfig`. Only a prediction's child adds adapters
            (`prediction/child/libraries/adapters.py`): in a run the script does, with other code, and no plan file has
            any.
        loss: `{"chunked": True}`: memkit's loss in chunks; as with adapters.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    adapter: Mapping[str, Any] = field(default_factory=dict)
    loss: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {name: dict(getattr(self, name)) for name in (*_SECTIONS, *_WITH_CODE) if getattr(self, name)}


def read_plan(path: str | Path) -> tuple[Overrides, dict[str, Any]]:
    """The overrides of a plan file (YAML or JSON with the keys `arguments`, `model` and `environment`, each a mapping
    or left out), and what its key `about` says of the plan; other keys are left alone. An InputError has a line for
    each problem; whether the script's own class has a field is only known when it makes one (`install`)."""
    import yaml  # late: the environment of a script that is only traced may have none

    from hf_memkit.catalog.argument_values import check_values, misspelt

    try:
        content = parsed(str(path), yaml.safe_load, user_path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = str(getattr(error, "strerror", None) or "not UTF-8 text")
        raise InputError(f"{path}: cannot be read ({why}). Write the path of a plan file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise InputError(f"{path}{place}: not valid YAML ({getattr(error, 'problem', error)})") from None
    if not isinstance(content, dict) or not content.keys() & set(_SECTIONS):
        raise InputError(
            f"{path}: not a plan file; expected at least one of the keys {', '.join(_SECTIONS)}. "
            f"To make one: memkit plan SCRIPT --write FILE"
        )
    problems = [
        f"{path}: {key}: no key of a plan{near}"
        for key in content
        if key not in (*_SECTIONS, "about") and (near := did_you_mean(str(key), _SECTIONS))
    ]
    sections: dict[str, dict[str, Any]] = {}
    for name in _SECTIONS:
        section = content.get(name) or {}
        if isinstance(section, dict) and all(isinstance(key, str) for key in section):
            sections[name] = section
        else:
            problems.append(f"{path}: {name}: expected names with values, got {type(section).__name__}")
    fields, wrong = check_values(sections.get("arguments", {}))
    wrong += [
        f"{name}: no field of TrainingArguments; did you mean {' or '.join(map(repr, close))}?"
        for name in fields
        if (close := misspelt(name))
    ]
    problems += [f"{path}: arguments: {line}" for line in wrong]
    model = sections.get("model", {})
    if "torch_dtype" in model and "dtype" in model:
        problems.append(f"{path}: model: torch_dtype is the old name of dtype; give one of them")
    environment = sections.get("environment", {})
    problems += [
        f"{path}: environment: {name}={value!r}: must be a text or a number; put it in quotes"
        for name, value in environment.items()
        if isinstance(value, bool) or not isinstance(value, str | int | float)
    ]
    about = content.get("about") or {}
    if not isinstance(about, dict):
        problems.append(f"{path}: about: expected names with values, got {type(about).__name__}")
    if problems:
        raise InputError("\n".join(problems))
    options = {"dtype" if name == "torch_dtype" else name: value for name, value in model.items()}
    return Overrides(fields, options, {name: str(value) for name, value in environment.items()}), about


def _ignore(line: str) -> None:
    pass


class FoundInScript:
    """What overrides met in a script; grows while it runs.

    Attributes:
        overridden: a line for each value that the script had and that another took the place of.
        differences: a line for each setting that is not in force all the same: what the plan says, what the script
            has, and what to change. Looked for when a Trainer has been made, and when it begins to train.
        script: `arguments` of the first object that the script made, as they would be without the plan.
        arguments: that object.
        refused: the error that `install` has raised in the script.
    """

    def __init__(self, overridden: Callable[[str], None] = _ignore, differs: Callable[[str], None] = _ignore) -> None:
        self.overridden: list[str] = []
        self.differences: list[str] = []
        self.script: Mapping[str, Any] = {}
        self.arguments: Any = None
        self.refused: InputError | None = None
        self._say_overridden, self._say_differs = overridden, differs

    def note(self, line: str) -> None:
        """Another line of `overridden`."""
        if line not in self.overridden:
            self.overridden.append(line)
            self._say_overridden(line)

    def differs(self, line: str) -> None:
        """Another line of `differences`."""
        if line not in self.differences:
            self.differences.append(line)
            self._say_differs(line)


def install(
    overrides: Overrides,
    *,
    overridden: Callable[[str], None] = _ignore,
    differs: Callable[[str], None] = _ignore,
) -> FoundInScript:
    """Sets the variables now, and has the script's TrainingArguments and models made with the overrides.

    - Fields are set before any `__post_init__` of the object runs, so that a class derives from them what it derives
      from arguments that are given by hand: the losses are the same to the bit.
    - Options take the place of those that `PreTrainedModel.from_pretrained` and `_from_config` were called with; Auto
      classes, `from_config` and TRL's `model_init_kwargs` end in them. A model that is made within another's making
      follows that one's config.

    Args:
        overridden: called with each line of `FoundInScript.overridden` as it is found.
        differs: called with each line of `FoundInScript.differences` as it is found.

    Raises (where the script makes its arguments):
        InputError: its class has no such field, nor has any of transformers' and TRL's.
    """
    found = FoundInScript(overridden, differs)
    _set_environment(overrides, found)
    if overrides.arguments:
        when_made(
            begins=functools.partial(_set_fields, overrides, found),
            ends=functools.partial(_check_made, overrides, found),
        )
    else:
        when_made(begins=lambda arguments, made: _remember(found, arguments, made))
    models = _Models(overrides.model, found)
    if overrides.model:
        when_imported("transformers.modeling_utils", models.change)
    when_imported("transformers.trainer", functools.partial(_watch_trainers, overrides, found, models))
    return found


def _set_environment(overrides: Overrides, found: FoundInScript) -> None:
    for name, value in overrides.environment.items():
        before = os.environ.get(name)
        if before != value:
            os.environ[name] = value
            if before is not None:
                found.note(f"{name}: {before} → {value}")
            if "torch" in sys.modules and name.startswith(("PYTORCH_", "TORCH_", "CUDA_", "OMP_")):
                found.differs(f"{name}={value}: set too late, after torch was imported. Set it before Python starts")


def _remember(found: FoundInScript, arguments: Any, made: Made) -> None:
    if found.arguments is None:
        found.arguments, found.script = arguments, made.script


def _set_fields(overrides: Overrides, found: FoundInScript, arguments: Any, made: Made) -> None:
    from hf_memkit.catalog import library_versions

    _remember(found, arguments, made)
    kind = type(arguments)
    fields = kind.__dataclass_fields__
    unknown = []
    for name, value in library_versions.to_installed_arguments(overrides.arguments).items():
        if name in fields:
            names = library_versions.names_of(name)
            has = next((made.script[each] for each in names if made.script.get(each) is not None), None)
            if has is None and len(names) > 1 and isinstance(value, bool):
                has = False  # by neither name: it is off
            if not _means(has, value):
                found.note(f"{name}: {_shown(has)} → {_shown(value)}")
            setattr(arguments, name, copy.deepcopy(value))
        elif name in library_versions.fields():
            found.differs(
                f"{name}: the plan's {_shown(value)} has no effect, because {kind.__name__} has no such field"
            )
        else:
            unknown.append(f"arguments: {name}: {kind.__name__} has no such field{did_you_mean(name, fields)}")
    if unknown:
        found.refused = InputError("\n".join(unknown))
        raise found.refused


def _check_made(overrides: Overrides, found: FoundInScript, arguments: Any, made: Made) -> None:
    for name, value in _fields_of(overrides, arguments):
        has = made.settled.get(name)
        if not _means(has, value):
            found.differs(f"{name}: {type(arguments).__name__} changes the plan's {_shown(value)} to {_shown(has)}")


def _fields_of(overrides: Overrides, arguments: Any) -> Iterator[tuple[str, Any]]:
    from hf_memkit.catalog import library_versions

    for name, value in library_versions.to_installed_arguments(overrides.arguments).items():
        if name in type(arguments).__dataclass_fields__:
            yield name, value


def _shown(value: Any) -> str:
    return str(value.value) if isinstance(value, enum.Enum) else repr(value) if value == "" else str(value)


def _means(has: Any, wanted: Any) -> bool:
    """Whether a field holds what was asked for, perhaps in the form that its class gives it: an enumeration, a list of
    one (DPO's `loss_type`), a dict with defaults beside what was asked for."""
    if isinstance(has, enum.Enum):
        has = has.value
    if isinstance(has, list) and not isinstance(wanted, list):
        has = has[0] if len(has) == 1 else has
    if isinstance(has, dict) and isinstance(wanted, dict):
        return has.items() >= wanted.items() if _plain(wanted) else has == wanted
    return bool(has == wanted)


def _plain(value: Mapping[str, Any]) -> bool:
    return not any(isinstance(each, dict | list) for each in value.values())


class _Models:
    """The options for models, and which models were made with them."""

    def __init__(self, options: Mapping[str, Any], found: FoundInScript) -> None:
        self.options, self._found = options, found
        self.made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._inside = False

    def change(self, modeling_utils: types.ModuleType) -> None:
        base = modeling_utils.PreTrainedModel
        for name in ("from_pretrained", "_from_config"):
            setattr(base, name, classmethod(self._with_options(name, vars(base)[name].__func__)))

    def _with_options(self, method: str, plain: Any) -> Any:
        @functools.wraps(plain)
        def made(kind: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return plain(kind, *args, **kwargs)
            given = self.options
            if method == "_from_config":
                given = {name: given[name] for name in _FOR_CONFIGS if name in given and given[name] != "auto"}
            if "dtype" in given and "torch_dtype" in kwargs:
                kwargs["dtype"] = kwargs.pop("torch_dtype")
            for name, value in given.items():
                has = kwargs.get(name)
                if has is None and name == "attn_implementation":  # Auto classes put it into the config
                    has = getattr(kwargs.get("config", args[0] if args else None), "_attn_implementation", None)
                if has is not None and (said := str(has).removeprefix("torch.")) != str(value):
                    self._found.note(f"{name}: {said} → {value}")
            self._inside = True
            try:
                model = plain(kind, *args, **{**kwargs, **copy.deepcopy(dict(given))})
            finally:
                self._inside = False
            with contextlib.suppress(TypeError):  # `output_loading_info`: a tuple
                self.made.add(model[0] if isinstance(model, tuple) else model)
            return model

        return made


def _watch_trainers(overrides: Overrides, found: FoundInScript, models: _Models, trainer: types.ModuleType) -> None:
    init, train = trainer.Trainer.__init__, trainer.Trainer.train

    @functools.wraps(init)
    def with_check(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _check_trainer(overrides, found, models, self)
        _check_optimizer(overrides, found, self)

    @functools.wraps(train)
    def train_with_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_trainer(overrides, found, models, self)
        return train(self, *args, **kwargs)

    trainer.Trainer.__init__, trainer.Trainer.train = with_check, train_with_check


def overrides_optimizer(trainer: Any) -> bool:
    """Whether a method that is no library's makes the optimizer."""
    libraries = ("transformers.", "trl.", "sentence_transformers.")
    return not type(trainer).create_optimizer.__module__.startswith(libraries)


def _check_optimizer(overrides: Overrides, found: FoundInScript, trainer: Any) -> None:
    """Of a Trainer that has just been made: later it has one of its own."""
    asked = overrides.arguments.get("optim")
    given = trainer.optimizer
    if asked is not None and (given is not None or getattr(trainer, "optimizer_cls_and_kwargs", None)):
        name = type(given).__name__ if given is not None else trainer.optimizer_cls_and_kwargs[0].__name__
        found.differs(
            f"optim: the optimizer that the script gives Trainer ({name}) overrides the plan's {asked}. Remove it"
        )
    elif asked is not None and overrides_optimizer(trainer):
        found.differs(
            f"optim: {type(trainer).__name__}.create_optimizer may override the plan's {asked}. Make it use "
            "arguments.optim"
        )


def _check_trainer(overrides: Overrides, found: FoundInScript, models: _Models, trainer: Any) -> None:
    try:
        for line in (*_changed_fields(overrides, trainer.args), *_of_model(overrides, models, trainer)):
            found.differs(line)
        for name, value in overrides.environment.items():
            if os.environ.get(name) != value:
                has = os.environ.get(name)
                found.differs(f"{name}: the script sets {has}, which overrides the plan's {value}. Remove that line")
    except Exception as error:  # a check never ends a training
        found.differs(f"cannot compare the plan with this Trainer: {type(error).__name__}: {error}")


def _changed_fields(overrides: Overrides, arguments: Any) -> Iterator[str]:
    made = made_of(arguments)
    for name, value in _fields_of(overrides, arguments):
        has = getattr(arguments, name, None)
        wanted = made.settled.get(name) if made is not None else value
        if has != wanted and not _means(has, value):
            yield (
                f"{name}: the script sets {_shown(has)} after it makes its {type(arguments).__name__}, which "
                f"overrides the plan's {_shown(value)}. Remove that line"
            )
    if "per_device_train_batch_size" in overrides.arguments and getattr(arguments, "auto_find_batch_size", False):
        yield (
            "auto_find_batch_size=True: after an out-of-memory error Trainer would take a smaller batch than the "
            "plan's. Set it to False"
        )
    on = overrides.arguments.get("deepspeed", True)
    if not on and is_on(os.environ.get("ACCELERATE_USE_DEEPSPEED")):
        yield "deepspeed: accelerate's config enables it, and the plan has none. Launch without that config"


def _of_model(overrides: Overrides, models: _Models, trainer: Any) -> Iterator[str]:
    model = trainer.model
    if model is None:  # `model_init`: made in `train`
        return
    unseen = not any(each in models.made for each in model.modules())
    how = ". Make it with from_pretrained or from_config" if unseen else ""
    for name, has in _in_force(model).items():
        wanted = overrides.model.get(name)
        if wanted not in (None, "auto", has):
            yield f"{name}: the model has {has}, not the plan's {wanted}{how}"
    others = sorted(overrides.model.keys() - {"attn_implementation", "dtype"})
    if others and unseen:
        yield f"{', '.join(others)}: no effect, because from_pretrained did not make the model{how}"
    on = overrides.arguments.get("activation_checkpointing", overrides.arguments.get("gradient_checkpointing"))
    if on is False and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        yield (
            "activation_checkpointing: the script calls model.gradient_checkpointing_enable(), which overrides the "
            "plan's False. Remove that line"
        )


def _in_force(model: Any) -> dict[str, str]:
    """Options that a model shows."""
    found = {}
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(attention, str):
        found["attn_implementation"] = _package_of(attention)
    if getattr(model, "hf_quantizer", None) is None:
        sizes: dict[str, int] = {}
        for parameter in model.parameters():
            if parameter.is_floating_point():
                dtype = str(parameter.dtype).removeprefix("torch.")
                sizes[dtype] = sizes.get(dtype, 0) + getattr(parameter, "ds_numel", parameter.numel())
        if sizes:
            found["dtype"] = max(sizes, key=lambda dtype: sizes[dtype])
    return found


def _package_of(attention: str) -> str:
    """The name of the package for kernels of the hub that stand in for it where it is not installed."""
    utils = sys.modules.get("transformers.modeling_flash_attention_utils")
    kernels = getattr(utils, "FLASH_ATTN_KERNEL_FALLBACK", {})
    return next((name for name, kernel in kernels.items() if kernel == attention), attention)
