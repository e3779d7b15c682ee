"""Apply a plan's settings to an unchanged script: fields of TrainingArguments, options of `from_pretrained`,
environment variables. Reports the replaced values, and lines of the script that override the plan afterwards.

Nothing is imported before the script does it: classes of transformers are changed when they are imported. The process
belongs to the script: that of `memkit run`, or a prediction's child.
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
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Final

from hf_memkit.catalog.library_versions import is_on
from hf_memkit.common.errors import InputError, did_you_mean
from hf_memkit.common.user_files import parsed, user_path
from hf_memkit.common.when_imported import when_imported
from hf_memkit.setup.live_arguments import CreationRecord, creation_record, on_creation

_SECTIONS: Final = ("arguments", "model", "environment")
"""Sections of a plan file."""
PLAN_HEAD: Final = "# A plan by memkit"
"""Begins the first line of a plan that memkit wrote."""
PLAN_END: Final = "# End of the plan"
"""Its last line, without which the file was cut."""
_WITH_CODE: Final = ("adapter", "loss")
"""Settings that need other code in the script."""
_FOR_CONFIGS: Final = ("attn_implementation", "dtype", "experts_implementation")
"""Options that `from_config` takes too (transformers 5.23.0: modeling_utils.py, `_from_config`)."""


@dataclass(frozen=True)
class Overrides:
    """A plan's settings, which replace the script's.

    Attributes:
        arguments: fields under current names, for every TrainingArguments object (or subclass) that the script makes.
        model: options of `from_pretrained`, such as `dtype`, for every model made with it or with `from_config`.
        environment: variables, set before torch starts.
        adapter: fields of a `LoraConfig`, for predictions only: in a run the script must add adapters with other code.
        loss: `{"chunked": True}`: memkit's loss in chunks, for predictions only.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    adapter: Mapping[str, Any] = field(default_factory=dict)
    loss: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {name: dict(getattr(self, name)) for name in (*_SECTIONS, *_WITH_CODE) if getattr(self, name)}


def read_plan(path: str | Path) -> tuple[Overrides, dict[str, Any]]:
    """Read a plan file. Whether the script's class has a field is known only when it is used (`install`).

    Args:
        path: YAML or JSON with the keys `arguments`, `model` and `environment`, each an optional mapping.

    Returns:
        The overrides, and the mapping under `about`; other keys are ignored.

    Raises:
        InputError: one line for each problem.
    """
    from hf_memkit.catalog.argument_values import check_values, misspelt

    content = _read_content(path)
    problems = []
    for key in content:
        if key not in (*_SECTIONS, "about") and (near := did_you_mean(str(key), _SECTIONS)):
            problems.append(f"{path}: {key}: no key of a plan{near}")
    sections: dict[str, dict[str, Any]] = {}
    for name in _SECTIONS:
        section = content.get(name) or {}
        if not isinstance(section, dict) or not all(isinstance(key, str) for key in section):
            problems.append(f"{path}: {name}: expected names with values, got {type(section).__name__}")
            section = {}
        sections[name] = section

    fields, wrong = check_values(sections["arguments"])
    for name in fields:
        if close := misspelt(name):
            wrong.append(f"{name}: no field of TrainingArguments; did you mean {' or '.join(map(repr, close))}?")
    problems += [f"{path}: arguments: {line}" for line in wrong]

    model = sections["model"]
    if "torch_dtype" in model and "dtype" in model:
        problems.append(f"{path}: model: torch_dtype is the old name of dtype; give one of them")
    for name, value in sections["environment"].items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            problems.append(f"{path}: environment: {name}={value!r}: must be a text or a number; put it in quotes")
    about = content.get("about") or {}
    if not isinstance(about, dict):
        problems.append(f"{path}: about: expected names with values, got {type(about).__name__}")
    if problems:
        raise InputError("\n".join(problems))

    options = {"dtype" if name == "torch_dtype" else name: value for name, value in model.items()}
    environment = {name: str(value) for name, value in sections["environment"].items()}
    return Overrides(fields, options, environment), about


def _read_content(path: str | Path) -> dict[str, Any]:
    import yaml  # the environment of a script that is only traced may lack it

    try:
        text = user_path(path).read_text(encoding="utf-8")
        if text.startswith(PLAN_HEAD) and PLAN_END not in text:
            again = "Write it again: memkit plan … --write"
            raise InputError(f"{path}: incomplete: the last line, {PLAN_END!r}, is missing. {again} {path}")
        content = parsed(str(path), yaml.safe_load, text)
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
    return content


class OverrideReport:
    """Values of a script that overrides replaced, and overrides that failed; grows while the script runs.

    Attributes:
        overridden: a line for each value of the script that was replaced.
        differences: a line for each setting without effect: the plan's value, the script's, and the fix. Checked when
            a Trainer has been made, and when it begins to train.
        script: `arguments` of the first object that the script made, without the plan.
        arguments: that object.
        refused: the error that `install` has raised in the script.
    """

    def __init__(
        self, on_overridden: Callable[[str], None] | None, on_difference: Callable[[str], None] | None
    ) -> None:
        self.overridden: list[str] = []
        self.differences: list[str] = []
        self.script: Mapping[str, Any] = {}
        self.arguments: Any = None
        self.refused: InputError | None = None
        self._on_overridden = on_overridden or (lambda line: None)
        self._on_difference = on_difference or (lambda line: None)

    def add_overridden(self, line: str) -> None:
        if line not in self.overridden:
            self.overridden.append(line)
            self._on_overridden(line)

    def add_difference(self, line: str) -> None:
        if line not in self.differences:
            self.differences.append(line)
            self._on_difference(line)


def install(
    overrides: Overrides, *, on_overridden: Callable[[str], None] | None = None,
    on_difference: Callable[[str], None] | None = None,
) -> OverrideReport:  # fmt: skip
    """Set the variables now, and make the script's TrainingArguments and models use the overrides.

    - Fields are set before any `__post_init__` of the object runs, so that derived fields follow as from the script's
      own arguments: losses are equal to the bit.
    - Options replace those passed to `PreTrainedModel.from_pretrained` and `_from_config`; Auto classes, `from_config`
      and TRL's `model_init_kwargs` end there. A model made inside another one follows that one's config.

    Args:
        on_overridden: called with each line of `OverrideReport.overridden`.
        on_difference: called with each line of `OverrideReport.differences`.

    Raises (where the script makes its arguments):
        InputError: neither its class nor any class of transformers and TRL has such a field.
    """
    report = OverrideReport(on_overridden, on_difference)
    for name, value in overrides.environment.items():
        before = os.environ.get(name)
        if before != value:
            os.environ[name] = value
            if before is not None:
                report.add_overridden(f"{name}: {before} → {value}")
            if "torch" in sys.modules and name.startswith(("PYTORCH_", "TORCH_", "CUDA_", "OMP_")):
                late = "set too late, after torch was imported. Set it before Python starts"
                report.add_difference(f"{name}={value}: {late}")
    on_creation(
        begins=functools.partial(_set_fields, overrides, report),
        ends=functools.partial(_check_created, overrides, report),
    )
    models = _Models(overrides.model, report)
    if overrides.model:
        when_imported("transformers.modeling_utils", models.change)
    when_imported("transformers.trainer", functools.partial(_watch_trainers, overrides, report, models))
    return report


def _set_fields(overrides: Overrides, report: OverrideReport, arguments: Any, record: CreationRecord) -> None:
    from hf_memkit.catalog import library_versions

    if report.arguments is None:
        report.arguments = arguments
        report.script = record.script
    kind = type(arguments)
    fields = kind.__dataclass_fields__
    unknown_fields = []
    for name, value in library_versions.to_installed_arguments(overrides.arguments).items():
        if name in fields:
            names = library_versions.names_of(name)
            values = [record.script.get(alias) for alias in names]
            current = next((given for given in values if given is not None), None)
            if current is None and len(names) > 1 and isinstance(value, bool):
                current = False  # off by both names
            if not _is_same_value(current, value):
                report.add_overridden(f"{name}: {_shown(current)} → {_shown(value)}")
            setattr(arguments, name, copy.deepcopy(value))
        elif name in library_versions.fields():
            why = f"because {kind.__name__} has no such field"
            report.add_difference(f"{name}: the plan's {_shown(value)} has no effect, {why}")
        else:
            unknown_fields.append(f"arguments: {name}: {kind.__name__} has no such field{did_you_mean(name, fields)}")
    if unknown_fields:
        report.refused = InputError("\n".join(unknown_fields))
        raise report.refused


def _check_created(overrides: Overrides, report: OverrideReport, arguments: Any, record: CreationRecord) -> None:
    for name, value in _fields_of(overrides, arguments):
        current = record.after_init.get(name)
        if not _is_same_value(current, value):
            change = f"changes the plan's {_shown(value)} to {_shown(current)}"
            report.add_difference(f"{name}: {type(arguments).__name__} {change}")


def _fields_of(overrides: Overrides, arguments: Any) -> Iterator[tuple[str, Any]]:
    from hf_memkit.catalog import library_versions

    for name, value in library_versions.to_installed_arguments(overrides.arguments).items():
        if name in type(arguments).__dataclass_fields__:
            yield name, value


def _shown(value: Any) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    return "''" if value == "" else str(value)


def _is_same_value(value: Any, wanted: Any) -> bool:
    """Whether a field has the wanted value, perhaps as converted by its class: an enumeration, a list of one item
    (DPO's `loss_type`), a dict with added defaults, an object made of a dict (`accelerator_config`)."""
    if is_dataclass(value) and isinstance(wanted, dict):
        return all(_is_same_value(getattr(value, name, None), item) for name, item in wanted.items())
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, list) and not isinstance(wanted, list):
        value = value[0] if len(value) == 1 else value
    if isinstance(value, dict) and isinstance(wanted, dict):
        is_nested = any(isinstance(item, dict) for item in wanted.values())
        return value == wanted if is_nested else all(value.get(key) == item for key, item in wanted.items())
    return bool(value == wanted)


class _Models:
    """The options for models, and the models made with them."""

    def __init__(self, options: Mapping[str, Any], report: OverrideReport) -> None:
        self.options = options
        self._report = report
        self.created: weakref.WeakSet[Any] = weakref.WeakSet()
        self._inside = False

    def change(self, modeling_utils: types.ModuleType) -> None:
        base = modeling_utils.PreTrainedModel
        for name in ("from_pretrained", "_from_config"):
            setattr(base, name, classmethod(self._with_options(name, vars(base)[name].__func__)))

    def _with_options(self, method: str, plain: Any) -> Any:
        @functools.wraps(plain)
        def with_options(kind: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return plain(kind, *args, **kwargs)
            wanted = self.options
            if method == "_from_config":
                wanted = {name: wanted[name] for name in _FOR_CONFIGS if wanted.get(name, "auto") != "auto"}
            if "dtype" in wanted and "torch_dtype" in kwargs:
                kwargs["dtype"] = kwargs.pop("torch_dtype")

            for name, value in wanted.items():
                given = kwargs.get(name)
                if given is None and name == "attn_implementation":  # Auto classes put it into the config
                    given = getattr(kwargs.get("config", args[0] if args else None), "_attn_implementation", None)
                if given is not None and (current := str(given).removeprefix("torch.")) != str(value):
                    self._report.add_overridden(f"{name}: {current} → {value}")

            self._inside = True
            try:
                model = plain(kind, *args, **{**kwargs, **copy.deepcopy(dict(wanted))})
            finally:
                self._inside = False
            with contextlib.suppress(TypeError):  # `output_loading_info`: a tuple
                self.created.add(model[0] if isinstance(model, tuple) else model)
            return model

        return with_options


def _watch_trainers(overrides: Overrides, report: OverrideReport, models: _Models, trainer: types.ModuleType) -> None:
    init = trainer.Trainer.__init__
    train = trainer.Trainer.train

    @functools.wraps(init)
    def with_check(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _check_trainer(overrides, report, models, self)
        _check_optimizer(overrides, report, self)

    @functools.wraps(train)
    def train_with_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_trainer(overrides, report, models, self)
        return train(self, *args, **kwargs)

    trainer.Trainer.__init__ = with_check
    trainer.Trainer.train = train_with_check


def overrides_optimizer(trainer: Any) -> bool:
    """Whether a method outside the libraries makes the optimizer."""
    libraries = ("transformers.", "trl.", "sentence_transformers.")
    return not type(trainer).create_optimizer.__module__.startswith(libraries)


def _check_optimizer(overrides: Overrides, report: OverrideReport, trainer: Any) -> None:
    """Check a new Trainer's optimizer: training sets `trainer.optimizer` later."""
    wanted = overrides.arguments.get("optim")
    if wanted is None:
        return
    kind, _ = getattr(trainer, "optimizer_cls_and_kwargs", None) or (None, None)
    if trainer.optimizer is not None:
        kind = type(trainer.optimizer)
    if kind is not None:
        script = f"the optimizer that the script gives Trainer ({kind.__name__})"
        report.add_difference(f"optim: {script} overrides the plan's {wanted}. Remove it")
    elif overrides_optimizer(trainer):
        method = f"{type(trainer).__name__}.create_optimizer"
        report.add_difference(f"optim: {method} may override the plan's {wanted}. Make it use arguments.optim")


def _check_trainer(overrides: Overrides, report: OverrideReport, models: _Models, trainer: Any) -> None:
    try:
        for line in (*_changed_fields(overrides, trainer.args), *_of_model(overrides, models, trainer)):
            report.add_difference(line)
        if getattr(trainer.args, "fsdp", None) and not getattr(trainer, "is_fsdp_enabled", True):
            report.add_difference("fsdp: no effect: accelerate shards on GPUs only. Each process has the whole model")
        for name, value in overrides.environment.items():
            if os.environ.get(name) != value:
                sets = f"the script sets {os.environ.get(name)}, which overrides the plan's {value}"
                report.add_difference(f"{name}: {sets}. Remove that line")
    except Exception as error:  # a check never ends a training
        report.add_difference(f"cannot compare the plan with this Trainer: {type(error).__name__}: {error}")


def _changed_fields(overrides: Overrides, arguments: Any) -> Iterator[str]:
    record = creation_record(arguments)
    for name, value in _fields_of(overrides, arguments):
        current = getattr(arguments, name, None)
        wanted = record.after_init.get(name) if record is not None else value
        if current != wanted and not _is_same_value(current, value):
            yield (
                f"{name}: the script sets {_shown(current)} after it makes its {type(arguments).__name__}, which "
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
    unseen = not any(module in models.created for module in model.modules())
    how = ". Make it with from_pretrained or from_config" if unseen else ""
    for name, current in _options_of(model).items():
        wanted = overrides.model.get(name)
        if wanted not in (None, "auto", current):
            yield f"{name}: the model has {current}, not the plan's {wanted}{how}"
    others = sorted(overrides.model.keys() - {"attn_implementation", "dtype"})
    if others and unseen:
        yield f"{', '.join(others)}: no effect, because from_pretrained did not make the model{how}"
    on = overrides.arguments.get("activation_checkpointing", overrides.arguments.get("gradient_checkpointing"))
    if on is False and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        yield (
            "activation_checkpointing: the script calls model.gradient_checkpointing_enable(), which overrides the "
            "plan's False. Remove that line"
        )


def _options_of(model: Any) -> dict[str, str]:
    """The attention implementation and the dtype of most weights that a model has."""
    options = {}
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(attention, str):
        # If a package is not installed, transformers uses a kernel of the hub: report the package.
        utils = sys.modules.get("transformers.modeling_flash_attention_utils")
        kernels = getattr(utils, "FLASH_ATTN_KERNEL_FALLBACK", {})
        package = next((name for name, kernel in kernels.items() if kernel == attention), attention)
        options["attn_implementation"] = package
    if getattr(model, "hf_quantizer", None) is None:
        sizes: dict[str, int] = {}
        for parameter in model.parameters():
            if parameter.is_floating_point():
                dtype = str(parameter.dtype).removeprefix("torch.")
                sizes[dtype] = sizes.get(dtype, 0) + getattr(parameter, "ds_numel", parameter.numel())
        if sizes:
            options["dtype"] = max(sizes, key=lambda dtype: sizes[dtype])
    return options
