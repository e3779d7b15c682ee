"""Where the DeepSpeed config and TrainingArguments disagree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_memkit.checks.rule import Found, deepspeed
from hf_memkit.checks.subject import ABSENT, Subject

DEFAULTS = {
    "per_device_train_batch_size": 8,
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
"""Defaults of TrainingArguments that correspond to DeepSpeed's keys (transformers 5.23.0: training_args.py)."""

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

_MATCHED = "transformers 5.23.0: integrations/deepspeed.py 107-132, 257"


def _expected(subject: Subject, key: str, names: tuple[str, ...]) -> Any:
    values = [subject.argument(name, DEFAULTS[name]) for name in names]
    if key.endswith(".enabled"):
        return any(value is True for value in values)
    return values if key.endswith("betas") else values[0]


def _named(subject: Subject, names: tuple[str, ...]) -> str:
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
    source=_MATCHED,
)
def trainer_mismatch(subject: Subject) -> Iterator[Found]:
    if subject.arguments is None:
        return
    for key, names in _SAME.items():
        value = subject.at(key)
        if value in (ABSENT, None, "auto") or value == _expected(subject, key, names):
            continue
        if key == "gradient_accumulation_steps" and subject.has("zero_optimization.zenflow"):
            continue  # zenflow has its own rule
        if key == "train_micro_batch_size_per_gpu" and subject.on("auto_find_batch_size"):
            continue  # not compared then
        both = f"{key}={value} (in {subject.config_file or 'the DeepSpeed config'}) and {_named(subject, names)}"
        yield Found(key, value, why=f"{both} disagree; Trainer fails, but only after loading the model")


def _schedule(subject: Subject) -> Iterator[tuple[str, str, int]]:
    """The scheduler's keys that Trainer compares as soon as it knows its steps, with the argument and its value."""
    steps, warmup = subject.argument("max_steps"), subject.argument("warmup_steps", 0)
    if isinstance(steps, int) and steps > 0:
        yield "scheduler.params.total_num_steps", "max_steps", steps
    if isinstance(warmup, int):
        yield "scheduler.params.warmup_num_steps", "warmup_steps", max(1, warmup)


@deepspeed.error(
    why="the scheduler's steps differ from Trainer's; Trainer fails, but only after loading the model",
    fix='write "auto": Trainer fills in its own value',
    source="transformers 5.23.0: integrations/deepspeed.py 243-261",
)
def schedule_mismatch(subject: Subject) -> Iterator[Found]:
    for key, name, expected in _schedule(subject) if subject.arguments is not None else ():
        value = subject.at(key)
        if value not in (ABSENT, None, "auto", expected):
            why = f"{key}={value} and {name}={subject.argument(name, 0)} disagree; Trainer fails"
            yield Found(key, value, why=why)


@deepspeed.hint(
    why="Trainer fails unless its own argument equals this value; memkit cannot check that without the arguments",
    fix='write "auto", or check with the arguments (--args FILE)',
    source=_MATCHED,
)
def hard_coded(subject: Subject) -> Iterator[Found]:
    if subject.arguments is not None:
        return
    for key, names in {**_SAME, "train_batch_size": ()}.items():
        value = subject.at(key)
        if value in (ABSENT, None, "auto", False) or key == "bf16.enabled":
            continue  # bf16_optimizer_states and its like are rejected without bf16, so it may be set for them
        if key == "gradient_accumulation_steps" and subject.has("zero_optimization.zenflow"):
            continue
        own = names[:1] if key.endswith(".enabled") else names
        values = value if isinstance(value, list) and len(value) == len(own) else [value]
        equal = ", ".join(f"{name}={each}" for name, each in zip(own, values, strict=False))
        equal = f"it has {equal}" if equal else f"its product of batch sizes equals {value}"
        why = f"Trainer fails unless {equal}; memkit cannot check that without the arguments"
        yield Found(key, value, why=why)


@deepspeed.warning(
    why="without this key DeepSpeed clips at its own default, 1.0, and max_grad_norm has no effect: Trainer fills in "
    "only keys that exist",
    fix='add "gradient_clipping": "auto"',
    source="transformers 5.23.0: integrations/deepspeed.py 116-124; deepspeed 0.19.8: runtime/constants.py 203",
)
def clipping_missing(subject: Subject) -> Iterator[Found]:
    asked = subject.argument("max_grad_norm", _DEEPSPEED_CLIPS)
    if not subject.has("gradient_clipping") and (subject.arguments is None or asked != _DEEPSPEED_CLIPS):
        yield Found("gradient_clipping", severity="hint" if subject.arguments is None else None)


_SCHEDULES = {
    "WarmupLR": ("constant_with_warmup",),
    "WarmupDecayLR": ("linear",),
    "WarmupCosineLR": ("cosine",),
}


@deepspeed.warning(
    why="the scheduler of the DeepSpeed config runs; lr_scheduler_type has no effect",
    fix='delete the section "scheduler" to use Trainer\'s scheduler',
    source="transformers 5.23.0: integrations/deepspeed.py 591-593",
)
def scheduler_twice(subject: Subject) -> Iterator[Found]:
    kind, asked = subject.at("scheduler.type"), subject.argument("lr_scheduler_type")
    if isinstance(kind, str) and asked is not None and asked not in _SCHEDULES.get(kind, ()):
        yield Found("scheduler.type", kind, why=f"{kind} runs; lr_scheduler_type={asked} has no effect")


@deepspeed.error(
    why='accelerate rejects a DeepSpeed config without "zero_optimization"',
    fix='add "zero_optimization": {"stage": 0}, or the stage you want',
    source="accelerate 1.15.0: utils/dataclasses.py 1276",
)
def zero_section_missing(subject: Subject) -> Iterator[Found]:
    if not subject.has("zero_optimization"):
        yield Found("zero_optimization")
    elif isinstance(subject.at("zero_optimization"), bool):
        yield Found("zero_optimization", why="old form, which accelerate cannot read")
