"""Keys and values of DeepSpeed: rejected, ignored or read elsewhere; of a wrong type; "auto" that nothing fills."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hf_memkit.checks.deepspeed_keys import (
    CASE_MATTERS,
    OPTIMIZERS,
    REMOVED,
    RENAMED,
    SCHEDULERS,
    TORCH_SCHEDULERS,
    Key,
    key_at,
    places_of,
    section_at,
    section_name,
)
from hf_memkit.checks.rule import Match, Severity, any_job, deepspeed
from hf_memkit.checks.subject import Subject, walk
from hf_memkit.common.errors import did_you_mean

_DEPRECATED: Final[dict[str, tuple[Severity, str, str]]] = {
    "zero_optimization.cpu_offload": (
        "error",
        "accelerate does not read it and keeps Trainer's optimizer, which DeepSpeed then rejects with ZeRO-Offload",
        '"offload_optimizer": {"device": "cpu"}',
    ),
    "zero_optimization.cpu_offload_param": (
        "warning",
        "DeepSpeed maps it to offload_param, with a warning, but Trainer does not see that parameters are offloaded",
        '"offload_param": {"device": "cpu"}',
    ),
    "zero_optimization.cpu_offload_use_pin_memory": (
        "warning",
        "DeepSpeed accepts it and ignores it",
        '"pin_memory" inside offload_optimizer and offload_param',
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "hint",
        "deprecated: DeepSpeed maps it to the new name, with a warning",
        '"stage3_gather_16bit_weights_on_model_save"',
    ),
    "bfloat16": ("warning", 'DeepSpeed reads it, but Trainer fills in and compares only "bf16"', 'a section "bf16"'),
}


def _unknown(subject: Subject, *, strict: bool) -> Iterator[tuple[str, list[str]]]:
    """Keys that their section does not know, and the names that it does know."""
    for path, _ in walk(subject.config or {}):
        section = section_at(subject, section_name(path))
        if section is None or section.keys is None or section.strict is not strict:
            continue
        name = path.rpartition(".")[2]
        known = key_at(subject, path) is not None or (name.startswith("_") and not strict)  # "_comment" and its like
        if not (known or path in REMOVED or path in RENAMED or path in _DEPRECATED or _misplaced(subject, path)):
            yield path, list(section.keys)


def _misplaced(subject: Subject, path: str) -> str:
    """Where this key belongs, if it is known in another section and not in its own: a dotted path, or nothing."""
    if key_at(subject, path) is not None or path in REMOVED:
        return ""
    own = section_name(path)
    name = path.rpartition(".")[2]
    places = [place for place in places_of(name) if section_name(place) != own]
    nearest = [place for place in places if section_name(place).rpartition(".")[0] == own.rpartition(".")[0]]
    return next(iter(nearest or places), "")


@deepspeed.error(
    why="DeepSpeed removed this key and rejects the whole file",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/config.py 67-141",
)
def removed_key(subject: Subject) -> Iterator[Match]:
    for path, note in REMOVED.items():
        if subject.has(path):
            yield Match(path, fix=f"delete the key ({note})")


@deepspeed.error(
    why='DeepSpeed rejects this key: "Extra inputs are not permitted"',
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/config_utils.py 110",
)
def rejected_key(subject: Subject) -> Iterator[Match]:
    for path, known in _unknown(subject, strict=True):
        section, _, name = path.rpartition(".")
        why = "its class does not accept this parameter: TypeError when the engine starts"
        why = why if section.endswith(".params") else ""
        yield Match(path, why=why, fix=f"delete the key{did_you_mean(name, known)}")


@deepspeed.warning(
    why="unknown key; DeepSpeed silently ignores it",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/config.py 485-590, which reads the keys that it knows",
)
def unknown_key(subject: Subject) -> Iterator[Match]:
    for path, known in _unknown(subject, strict=False):
        yield Match(path, fix=f"delete the key{did_you_mean(path.rpartition('.')[2], known)}")


@deepspeed.warning(
    why="DeepSpeed reads this setting under another name and silently ignores this key",
    fix="rename it to the name that DeepSpeed reads",
    source="deepspeed 0.19.8: runtime/swap_tensor/aio_config.py 23-36, runtime/activation_checkpointing/config.py 76",
)
def renamed_key(subject: Subject) -> Iterator[Match]:
    for path, name in RENAMED.items():
        if subject.has(path):
            yield Match(path, fix=f"rename it to {name!r}")


@deepspeed.warning(
    why="the key belongs to another section",
    fix="move it there",
    source="deepspeed 0.19.8: runtime/config_utils.py 110; runtime/config.py 485-590",
)
def misplaced_key(subject: Subject) -> Iterator[Match]:
    for path, _ in walk(subject.config or {}):
        own = section_at(subject, section_name(path))
        place = _misplaced(subject, path) if own is not None and own.keys is not None else ""
        if not place or own is None or path in RENAMED or path in _DEPRECATED:
            continue
        effect = "DeepSpeed rejects it here" if own.strict else "DeepSpeed silently ignores it here"
        target = section_name(place) or "the top level"
        severity: Severity = "error" if own.strict else "warning"
        fix = f"move it to {place}"
        if section_name(path) in ("bf16", "bfloat16") and target == "fp16":
            fix = "delete it: bf16 needs no loss scaling"
        yield Match(path, why=f"{effect}: it belongs to {target}", fix=fix, severity=severity)


@deepspeed.warning(
    why="deprecated name that no longer has its full effect",
    fix="write the new name",
    source="deepspeed 0.19.8: runtime/zero/config.py 188-220, 287; accelerate 1.15.0: accelerator.py 2373",
)
def deprecated_key(subject: Subject) -> Iterator[Match]:
    for path, (severity, why, new) in _DEPRECATED.items():
        if subject.has(path):
            yield Match(path, why=why, fix=f"write {new} instead", severity=severity)


@any_job.warning(
    why="the key appears twice: under Trainer the last one silently takes precedence; without Trainer "
    "DeepSpeed rejects the file",
    fix="keep one of the two",
    source="accelerate 1.15.0: utils/deepspeed.py 143; deepspeed 0.19.8: runtime/config_utils.py 205; transformers "
    "5.23.0: hf_argparser.py 426 (yaml.safe_load)",
)
def duplicate_key(subject: Subject) -> Iterator[Match]:
    for path in subject.duplicates:
        yield Match(path)
    given = dict(walk(subject.arguments or {}))
    for path in subject.duplicate_arguments:
        why = "the key appears twice; the last one silently takes precedence"
        yield Match(path, given.get(path), why=why, argument=True)


FILLED = frozenset({
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping",
    "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps", "fp16.enabled", "bf16.enabled", "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
})  # fmt: skip
"""Keys whose "auto" Trainer fills in (transformers 5.23.0: integrations/deepspeed.py 136-262)."""

_ACCELERATE_FILLS = {
    "zero_optimization.stage": "2",
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_optimizer.nvme_path": "none",
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.offload_param.nvme_path": "none",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "false",
}
"""What accelerate uses for "auto" unless an environment variable sets it (accelerate 1.15.0:
utils/dataclasses.py 1237-1258, 1280-1292)."""

_OWN_AUTO: Final = {
    "zero_optimization.zenflow.select_strategy",
    "zero_optimization.zenflow.select_interval",
    "zero_optimization.zenflow.update_interval",
    "data_types.keep_in_fp32_modules",
}
"""Keys for which "auto" is one of DeepSpeed's own values."""

_OVERWRITTEN: Final = "steps_per_print"
"""accelerate overwrites it with infinity, so that any value is right (1.15.0: utils/dataclasses.py 1326)."""


def _known(subject: Subject) -> Iterator[tuple[str, Any, Key]]:
    """Every known key with its value and its allowed values; "auto" has its own rule.

    Without values that are unused under Trainer. DeepSpeed reads `activation_checkpointing` without a check, and
    nothing uses it (0.19.8: runtime/activation_checkpointing/config.py 72-98).
    """
    for path, value in walk(subject.config or {}):
        unused = path == _OVERWRITTEN or path.startswith("activation_checkpointing.")
        if value != "auto" and not unused and (key := key_at(subject, path)) is not None:
            yield path, value, key


@deepspeed.error(
    why='Trainer fills in "auto" only for some keys; accelerate rejects it elsewhere before the engine starts',
    fix="write a value",
    source="transformers 5.23.0: integrations/deepspeed.py 136-262; accelerate 1.15.0: utils/dataclasses.py 1363-1372",
)
def auto_not_filled(subject: Subject) -> Iterator[Match]:
    for path, value in walk(subject.config or {}):
        if value != "auto" or path in FILLED or path in _OWN_AUTO or path == _OVERWRITTEN:
            continue
        if path.endswith(".stage3_gather_16bit_weights_on_model_save") and subject.zero.stage == 3:
            continue  # no-weights-saved says what follows from it
        taken = _ACCELERATE_FILLS.get(path)
        why = f"Trainer does not fill in this key; accelerate uses {taken} for every job" if taken else ""
        yield Match(path, value, why=why, severity="warning" if taken else None)


_FORMS: Final = ((str, "text"), (Mapping, "a section"), (object, "a list"))


def _named(value: Any) -> str:
    """The kind of `value`, for "expected a number, got text"."""
    if isinstance(value, bool | None) or (isinstance(value, float) and not math.isfinite(value)):
        return json.dumps(value)
    if isinstance(value, int | float):
        return "a number"
    return "an empty text" if value == "" else next(words for kind, words in _FORMS if isinstance(value, kind))


@deepspeed.error(
    why="the value has the wrong type",
    fix="write a value of the right type",
    source="deepspeed 0.19.8: runtime/zero/config.py 83-380; transformers 5.23.0: integrations/deepspeed.py 131 (==)",
)
def wrong_type(subject: Subject) -> Iterator[Match]:
    for path, value, key in _known(subject):
        if wanted := key.type_error(value):
            plain = isinstance(value, str) and key.kind not in ("section", "list")
            fix = f"write {wanted}{' without quotes' if plain else ''}"
            yield Match(path, value, why=f"expected {wanted}, got {_named(value)}", fix=fix)


@deepspeed.error(
    why="DeepSpeed rejects the value or cannot use it",
    fix="write a value in range",
    source="deepspeed 0.19.8: runtime/zero/config.py 83-380, zero/offload_config.py, runtime/config.py 590-606",
)
def out_of_range(subject: Subject) -> Iterator[Match]:
    for path, value, key in _known(subject):
        if key.type_error(value) is None and (bound := key.range_error(value)):
            yield Match(path, value, why=f"the value must be {bound}", fix=f"write a value that is {bound}")


@deepspeed.error(
    why="DeepSpeed has no optimizer of this name",
    fix="write the name of an optimizer of DeepSpeed or of torch.optim",
    source="deepspeed 0.19.8: runtime/engine.py 1985, 2017",
)
def unknown_optimizer(subject: Subject) -> Iterator[Match]:
    kind = subject.at("optimizer.type")
    if isinstance(kind, str) and kind not in CASE_MATTERS and kind.lower() not in OPTIMIZERS:
        fix = f"write the name of an optimizer of DeepSpeed or of torch.optim{did_you_mean(kind, OPTIMIZERS)}"
        yield Match("optimizer.type", kind, fix=fix)


@deepspeed.error(
    why="DeepSpeed has no scheduler of this name",
    fix="write the name of a scheduler of DeepSpeed or of torch",
    source="deepspeed 0.19.8: runtime/engine.py 1926, runtime/lr_schedules.py 24",
)
def unknown_scheduler(subject: Subject) -> Iterator[Match]:
    kind = subject.at("scheduler.type")
    if isinstance(kind, str) and kind not in SCHEDULERS and kind not in TORCH_SCHEDULERS:
        known = ", ".join(SCHEDULERS)
        yield Match("scheduler.type", kind, fix=f"write one of {known}{did_you_mean(kind, SCHEDULERS)}")
