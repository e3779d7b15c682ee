"""The user's own arguments override the preset's, together with what only went with the preset's value.

`torch_compile=False` of the user beside a preset's `torch_compile_mode` would compile all the same (transformers
5.23.0: training_args.py, a backend or mode switches compilation on), and `optim` beside an optimizer that Trainer is
given would be ignored. What only went with a replaced value is dropped, and every such setting is listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hf_memkit.common.errors import SettingError
from hf_memkit.setup.on_cpu import PAGE_LOCKED, unpin_optimizer, without_gpu
from hf_memkit.setup.setup import Replaced, Setting, Setup

_GOES_WITH: Final[dict[str, tuple[str, ...]]] = {
    "optim": ("arguments.optim_args", "arguments.optim_target_modules", "optimizer"),
    "torch_compile": ("arguments.torch_compile_backend", "arguments.torch_compile_mode"),
    "activation_checkpointing": ("arguments.activation_checkpointing_kwargs",),
    "use_liger_kernel": ("arguments.liger_kernel_config",),
}
"""What has no effect, or does harm, once the user's own value replaces the preset's."""

_CHECKS: Final = {"activation_checkpointing": ("trainer_parts.verify_checkpointing",)}
"""Parts that verify the preset's own value, and would stop a training that the user wants otherwise."""

_EXCLUDES: Final = {"bf16": ("arguments.fp16",), "fp16": ("arguments.bf16",)}
"""What cannot be true together with a field that is true (transformers 5.23.0: "At most one of fp16 and bf16")."""


def settle(setup: Setup, own: Mapping[str, Any]) -> tuple[Setup, tuple[Replaced, ...]]:
    """`setup` with the user's own fields of TrainingArguments (today's names), and what they replaced: a value that is
    also the preset's replaces nothing and keeps the preset's reason. A SettingError where they take away what the
    preset is."""
    settled, replaced = without_replaced(setup, own)
    before = {each.setting.key: each.setting for each in replaced}
    for name, value in own.items():
        key = f"arguments.{name}"
        if not _same(settled, key, value):
            mine = before.get(key)
            said = "" if mine is None else f"; the preset has {mine.value!r}: {mine.reason}"
            settled = settled.put(key, value, f"yours{said}")
    return settled, replaced


def without_replaced(setup: Setup, own: Mapping[str, Any]) -> tuple[Setup, tuple[Replaced, ...]]:
    """`setup` without what the user's own fields replace, and what that is. Values may be any objects. Refuses as
    `settle`."""
    if own.get("deepspeed") is not None and "deepspeed.config" in setup:
        raise SettingError(
            f"deepspeed={own['deepspeed']!r}: preset {setup.preset!r} has its own DeepSpeed config. Remove yours, "
            f"or choose a preset without DeepSpeed"
        )
    replaced: list[Replaced] = []
    for name, value in own.items():
        key = f"arguments.{name}"
        if _same(setup, key, value):
            continue
        gone = [*_GOES_WITH.get(name, ())]
        gone += _EXCLUDES.get(name, ()) if value is True else ()
        mine = next((s for s in setup.settings if s.key == key), None)
        if mine is not None:
            gone += _CHECKS.get(name, ())
            replaced.append(Replaced(mine, name, value))
            setup = setup.drop(key)
        for prefix in gone:
            setup = _drop(setup, prefix, name, value, f"it belongs to the preset's {name}", own, replaced)
    if own.get("use_cpu") is True:
        setup = _for_a_cpu(setup, own, replaced)
    return setup, tuple(replaced)


def _same(setup: Setup, key: str, value: Any) -> bool:
    return key in setup and setup[key] == value and type(setup[key]) is type(value)


def _for_a_cpu(setup: Setup, own: Mapping[str, Any], replaced: list[Replaced]) -> Setup:
    after, left_out = without_gpu(setup, keep=own)
    for each in left_out:
        was = next(s for s in setup.settings if each.key in (s.key, f"{s.key}.offload"))
        replaced.append(Replaced(Setting(each.key, each.value, was.reason), "use_cpu", True, each.reason))
    config = after.get("deepspeed.config")
    if config is not None and unpin_optimizer(config):
        was = next(s for s in setup.settings if s.key == "deepspeed.config")
        key = "deepspeed.config.zero_optimization.offload_optimizer.pin_memory"
        replaced.append(Replaced(Setting(key, True, was.reason), "use_cpu", True, PAGE_LOCKED))
        after = after.put("deepspeed.config", config, was.reason)
    return after


def _drop(
    setup: Setup, prefix: str, name: str, value: Any, why: str, own: Mapping[str, Any], replaced: list[Replaced]
) -> Setup:
    """Drops a key, or a section, except what the user gave too."""
    for setting in setup.settings:
        if setting.key != prefix and setting.key.partition(".")[0] != prefix:
            continue
        if setting.key.removeprefix("arguments.") in own:
            continue
        setup = setup.drop(setting.key)
        if not setting.key.startswith("optimizer.") or setting.key == "optimizer.class":  # one entry for the section
            replaced.append(Replaced(setting, name, value, why))
    return setup
