"""Values: of the wrong type, out of range, or "auto" where nothing fills it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hf_memkit.checks.deepspeed_keys import CASE_MATTERS, OPTIMIZERS, SCHEDULERS, TORCH_SCHEDULERS, Key, key_at
from hf_memkit.checks.rule import Found, deepspeed
from hf_memkit.checks.subject import Subject, walk
from hf_memkit.common.errors import did_you_mean

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

_OWN_AUTO = frozenset(
    {
        "zero_optimization.zenflow.select_strategy",
        "zero_optimization.zenflow.select_interval",
        "zero_optimization.zenflow.update_interval",
        "data_types.keep_in_fp32_modules",
    }
)
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
def auto_not_filled(subject: Subject) -> Iterator[Found]:
    for path, value in walk(subject.config or {}):
        if value != "auto" or path in FILLED or path in _OWN_AUTO or path == _OVERWRITTEN:
            continue
        if path.endswith(".stage3_gather_16bit_weights_on_model_save") and subject.zero.stage == 3:
            continue  # no-weights-saved says what follows from it
        taken = _ACCELERATE_FILLS.get(path)
        why = f"Trainer does not fill in this key; accelerate uses {taken} for every job" if taken else ""
        yield Found(path, value, why=why, severity="warning" if taken else None)


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
def wrong_type(subject: Subject) -> Iterator[Found]:
    for path, value, key in _known(subject):
        if wanted := key.type_error(value):
            plain = isinstance(value, str) and key.kind not in ("section", "list")
            fix = f"write {wanted}{' without quotes' if plain else ''}"
            yield Found(path, value, why=f"expected {wanted}, got {_named(value)}", fix=fix)


@deepspeed.error(
    why="DeepSpeed rejects the value or cannot use it",
    fix="write a value in range",
    source="deepspeed 0.19.8: runtime/zero/config.py 83-380, zero/offload_config.py, runtime/config.py 590-606",
)
def out_of_range(subject: Subject) -> Iterator[Found]:
    for path, value, key in _known(subject):
        if key.type_error(value) is None and (bound := key.range_error(value)):
            yield Found(path, value, why=f"the value must be {bound}", fix=f"write a value that is {bound}")


@deepspeed.error(
    why="DeepSpeed has no optimizer of this name",
    fix="write the name of an optimizer of DeepSpeed or of torch.optim",
    source="deepspeed 0.19.8: runtime/engine.py 1985, 2017",
)
def unknown_optimizer(subject: Subject) -> Iterator[Found]:
    kind = subject.at("optimizer.type")
    if isinstance(kind, str) and kind not in CASE_MATTERS and kind.lower() not in OPTIMIZERS:
        fix = f"write the name of an optimizer of DeepSpeed or of torch.optim{did_you_mean(kind, OPTIMIZERS)}"
        yield Found("optimizer.type", kind, fix=fix)


@deepspeed.error(
    why="DeepSpeed has no scheduler of this name",
    fix="write the name of a scheduler of DeepSpeed or of torch",
    source="deepspeed 0.19.8: runtime/engine.py 1926, runtime/lr_schedules.py 24",
)
def unknown_scheduler(subject: Subject) -> Iterator[Found]:
    kind = subject.at("scheduler.type")
    if isinstance(kind, str) and kind not in SCHEDULERS and kind not in TORCH_SCHEDULERS:
        known = ", ".join(SCHEDULERS)
        yield Found("scheduler.type", kind, fix=f"write one of {known}{did_you_mean(kind, SCHEDULERS)}")
