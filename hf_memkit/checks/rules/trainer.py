"""DeepSpeed config against Trainer's arguments: where they disagree."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hf_memkit.checks.deepspeed_keys import key_at
from hf_memkit.checks.rule import Match, any_job, deepspeed
from hf_memkit.checks.subject import ABSENT, Subject
from hf_memkit.setup.techniques.registry import assignment

DEFAULTS = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "fp16": False,
    "bf16": False,
    "fp16_full_eval": False,
    "bf16_full_eval": False,
    "optim": "adamw_torch_fused",
    "lr_scheduler_type": "linear",
}
"""Defaults of TrainingArguments (transformers 5.23.0: training_args.py); trl 1.16.0 keeps those of batches."""

_SAME = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.params.eps": ("adam_epsilon",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "scheduler.params.warmup_max_lr": ("learning_rate",),
    "fp16.enabled": ("fp16", "fp16_full_eval"),
    "bf16.enabled": ("bf16", "bf16_full_eval"),
}
"""DeepSpeed's key → the arguments that it must agree with (transformers 5.23.0: integrations/deepspeed.py 136-181)."""

_DEEPSPEED_CLIPS = 1.0
"""deepspeed 0.19.8: runtime/constants.py 203, GRADIENT_CLIPPING_DEFAULT."""

_COMPARED = "transformers 5.23.0: integrations/deepspeed.py 107-132, 257"


def _value_in_arguments(subject: Subject, key: str, names: tuple[str, ...]) -> Any:
    """The value that the config's `key` must have according to the arguments `names`."""
    values = [subject.argument(name, DEFAULTS[name]) for name in names]
    if key.endswith(".enabled"):
        return any(value is True for value in values)
    return values if key.endswith("betas") else values[0]


def _with_places(subject: Subject, names: tuple[str, ...]) -> str:
    """`max_grad_norm=1.0 (in args.yaml)` or `(its default)`, for each name."""
    parts = []
    for name in names:
        given = subject.argument(name, ABSENT)
        place = f"in {subject.arguments_file or 'the arguments'}" if given is not ABSENT else "its default"
        parts.append(f"{name}={subject.argument(name, DEFAULTS[name])} ({place})")
    return " and ".join(parts)


@deepspeed.error(
    why="the DeepSpeed config and TrainingArguments disagree; Trainer fails, but only after loading the model",
    fix='write "auto": Trainer fills in its own value',
    source=_COMPARED,
)
def trainer_mismatch(subject: Subject) -> Iterator[Match]:
    if subject.arguments is None:
        return
    for key, names in _SAME.items():
        value = subject.at(key)
        if value in (ABSENT, None, "auto") or value == _value_in_arguments(subject, key, names):
            continue
        if key == "gradient_accumulation_steps" and subject.has("zero_optimization.zenflow"):
            continue  # zenflow has its own rule
        if key == "train_micro_batch_size_per_gpu" and subject.on("auto_find_batch_size"):
            continue  # not compared then
        known = key_at(subject, key)
        if known is not None and known.type_error(value):
            continue  # wrong-type reports it
        both = f"{key}={value} (in {subject.config_file or 'the DeepSpeed config'}) and {_with_places(subject, names)}"
        why = f"{both} disagree; Trainer fails, but only after loading the model"
        yield Match(key, value, why=why, fix=_fix(key, names, value))


def _fix(key: str, names: tuple[str, ...], value: Any) -> str:
    """Either side can change: "auto" uses the argument's value, which the config may not have been written for."""
    equal = (assignment(f"arguments.{name}", one) for name, one in _equal_arguments(key, names, value))
    return f'write "auto" to use Trainer\'s value, or set {", ".join(equal)} in the arguments'


def _equal_arguments(key: str, names: tuple[str, ...], value: Any) -> Iterator[tuple[str, Any]]:
    """The arguments among `names`, with their values, for which Trainer accepts `value` of the config's `key`."""
    names = names[:1] if key.endswith(".enabled") else names
    values = value if isinstance(value, list) and len(value) == len(names) else [value]
    return zip(names, values, strict=False)


_TOTAL: Final = "scheduler.params.total_num_steps"
_WARMUP: Final = "scheduler.params.warmup_num_steps"


def _schedule(subject: Subject) -> Iterator[tuple[str, str, int | None]]:
    """The scheduler's keys that Trainer compares as soon as it knows its steps, with the argument that decides it and
    the value: None if that also depends on the data.

    transformers 5.23.0: training_args.py, get_warmup_steps: below 1 a share of the steps.
    """
    asked = subject.argument("max_steps")
    steps = asked if isinstance(asked, int) and asked > 0 else None
    yield _TOTAL, "max_steps" if steps else "num_train_epochs", steps
    warmup = subject.argument("warmup_steps", 0)
    ratio = subject.argument("warmup_ratio")
    if not warmup and isinstance(ratio, int | float) and ratio:
        warmup = ratio
    if isinstance(warmup, int | float) and (warmup >= 1 or warmup == 0):
        yield _WARMUP, "warmup_steps", max(1, int(warmup))
    elif isinstance(warmup, int | float):
        yield _WARMUP, "warmup_steps", None if steps is None else max(1, math.ceil(steps * warmup))


@deepspeed.error(
    why="the scheduler's steps differ from Trainer's; Trainer fails, but only after loading the model",
    fix='write "auto": Trainer fills in its own value',
    source="transformers 5.23.0: integrations/deepspeed.py 243-261",
)
def schedule_mismatch(subject: Subject) -> Iterator[Match]:
    for key, name, expected in _schedule(subject) if subject.arguments is not None else ():
        value = subject.at(key)
        known = key_at(subject, key)
        if value in (ABSENT, None, "auto", expected) or (known is not None and known.type_error(value)):
            continue
        if expected is not None or (isinstance(value, int) and value < 1):
            why = f"{key}={value} and {name}={subject.argument(name, 0)} disagree; Trainer fails"
            yield Match(key, value, why=why)
        else:
            why = (
                f"Trainer computes the steps from {name} and the size of the data, and fails unless they are exactly "
                f"{value}, but only after loading the model"
            )
            yield Match(key, value, why=why, severity="warning")


@deepspeed.hint(
    why="Trainer fails unless its own argument equals this value; memkit cannot check that without the arguments",
    fix='write "auto", or check with the arguments (--args FILE)',
    source=_COMPARED,
)
def hard_coded(subject: Subject) -> Iterator[Match]:
    if subject.arguments is not None:
        return
    of_schedule = {_TOTAL: (), _WARMUP: ("warmup_steps",)}
    for key, names in {**_SAME, **of_schedule, "train_batch_size": ()}.items():
        value = subject.at(key)
        if value in (ABSENT, None, "auto", False) or key == "bf16.enabled":
            continue  # bf16_optimizer_states and its like are rejected without bf16, so it may be set for them
        if key == "gradient_accumulation_steps" and subject.has("zero_optimization.zenflow"):
            continue
        equal = ", ".join(f"{name}={one}" for name, one in _equal_arguments(key, names, value))
        number = "number of steps" if key == _TOTAL else "product of batch sizes"
        equal = f"it has {equal}" if equal else f"its {number} equals {value}"
        why = f"Trainer fails unless {equal}; memkit cannot check that without the arguments"
        yield Match(key, value, why=why)


@deepspeed.warning(
    why="without this key DeepSpeed clips at its own default, 1.0, and max_grad_norm has no effect: Trainer fills in "
    "only keys that exist",
    fix='add "gradient_clipping": "auto"',
    source="transformers 5.23.0: integrations/deepspeed.py 116-124; deepspeed 0.19.8: runtime/constants.py 203",
)
def clipping_missing(subject: Subject) -> Iterator[Match]:
    asked = subject.argument("max_grad_norm", _DEEPSPEED_CLIPS)
    if not subject.has("gradient_clipping") and (subject.arguments is None or asked != _DEEPSPEED_CLIPS):
        yield Match("gradient_clipping", severity="hint" if subject.arguments is None else None)


@deepspeed.error(
    why="Trainer fills in only keys that exist: this optimizer starts with DeepSpeed's own learning rate, 1e-3, and "
    "learning_rate has no effect",
    fix='add "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}',
    source="transformers 5.23.0: integrations/deepspeed.py 107-132, 158; deepspeed 0.19.8: ops/adam/fused_adam.py",
)
def learning_rate_missing(subject: Subject) -> Iterator[Match]:
    # These schedulers set the optimizer's rate themselves.
    own_rate = subject.has("scheduler.params.warmup_max_lr") or subject.at("scheduler.type") in _OWN_RATE
    if isinstance(subject.at("optimizer.type"), str) and not subject.has("optimizer.params.lr") and not own_rate:
        yield Match("optimizer.params.lr")


_OWN_RATE: Final = ("LRRangeTest", "OneCycle")
_OPTIMIZER_DEFAULTS: Final = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
"""deepspeed 0.19.8: ops/adam/fused_adam.py, ops/adam/cpu_adam.py, `__init__`."""


@deepspeed.warning(
    why="Trainer fills in only keys that exist: the argument has no effect, and DeepSpeed's own default is used",
    fix='add the key with "auto"',
    source="transformers 5.23.0: integrations/deepspeed.py 107-132, 159-165; deepspeed 0.19.8: ops/adam/fused_adam.py",
)
def optimizer_params_missing(subject: Subject) -> Iterator[Match]:
    kind = subject.at("optimizer.type")
    if subject.arguments is None or not isinstance(kind, str) or kind.lower() not in ("adam", "adamw"):
        return
    for name, default in _OPTIMIZER_DEFAULTS.items():
        key = f"optimizer.params.{name}"
        names = _SAME[key]
        asked = _value_in_arguments(subject, key, names)
        if not subject.has(key) and any(argument in subject.arguments for argument in names) and asked != default:
            given = _with_places(subject, names)
            why = f"{given} has no effect: Trainer fills in only keys that exist, and DeepSpeed's default is {default}"
            yield Match(key, why=why, fix=f'add "{name}": "auto" to the optimizer\'s params')


_NEEDED: Final = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
"""Parameters of DeepSpeed's schedulers that have no default (deepspeed 0.19.8: runtime/lr_schedules.py)."""


@deepspeed.error(
    why="the scheduler needs this parameter; training fails with a TypeError, but only after loading the model",
    fix="add it to the scheduler's params",
    source="deepspeed 0.19.8: runtime/lr_schedules.py",
)
def scheduler_params_missing(subject: Subject) -> Iterator[Match]:
    kind = subject.at("scheduler.type")
    for name in _NEEDED.get(kind, ()) if isinstance(kind, str) else ():
        if not subject.has(f"scheduler.params.{name}"):
            fix = f'add "{name}": "auto" to the scheduler\'s params' if name == "total_num_steps" else ""
            yield Match(f"scheduler.params.{name}", fix=fix)


_SCHEDULES = {"WarmupLR": ("constant_with_warmup",), "WarmupDecayLR": ("linear",), "WarmupCosineLR": ("cosine",)}


@deepspeed.warning(
    why="the scheduler of the DeepSpeed config runs; lr_scheduler_type has no effect",
    fix='delete the section "scheduler" to use Trainer\'s scheduler',
    source="transformers 5.23.0: integrations/deepspeed.py 591-593",
)
def scheduler_twice(subject: Subject) -> Iterator[Match]:
    kind = subject.at("scheduler.type")
    asked = subject.argument("lr_scheduler_type")
    if isinstance(kind, str) and asked is not None and asked not in _SCHEDULES.get(kind, ()):
        yield Match("scheduler.type", kind, why=f"{kind} runs; lr_scheduler_type={asked} has no effect")


@any_job.error(
    why="Trainer reads a DeepSpeed config as JSON only; TrainingArguments fail with a JSONDecodeError",
    fix="write it as JSON, or start with `accelerate launch --config_file` if it is accelerate's",
    source="accelerate 1.15.0: utils/deepspeed.py 141-158",
)
def deepspeed_config_in_yaml(subject: Subject) -> Iterator[Match]:
    value = subject.argument("deepspeed")
    if not isinstance(value, str) or Path(value).suffix.lower() not in (".yaml", ".yml"):
        return
    for path in (Path(value), Path(subject.arguments_file).parent / value):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except OSError:
            continue
        except ValueError:
            yield Match("deepspeed", value, argument=True)
        return


@deepspeed.error(
    why='accelerate rejects a DeepSpeed config without "zero_optimization"',
    fix='add "zero_optimization": {"stage": 0}, or the stage you want',
    source="accelerate 1.15.0: utils/dataclasses.py 1276",
)
def zero_section_missing(subject: Subject) -> Iterator[Match]:
    if not subject.has("zero_optimization"):
        yield Match("zero_optimization")
    elif isinstance(subject.at("zero_optimization"), bool):
        yield Match("zero_optimization", why="old form, which accelerate cannot read")
