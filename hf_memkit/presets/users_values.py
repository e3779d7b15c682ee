"""The user's own arguments override the preset's, together with settings that depend on the preset's value.

The user's `torch_compile=False` with a preset's `torch_compile_mode` would still compile (transformers 5.23.0:
training_args.py, a backend or mode enables compilation), and `optim` with an optimizer passed to Trainer would be
ignored. Such settings are dropped with the replaced value, and listed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit.common.errors import SettingError
from hf_memkit.setup.on_cpu import PAGE_LOCKED, unpin_optimizer, without_gpu
from hf_memkit.setup.setup import Replaced, Setting, Setup

_REMOVED_WITH: Final[dict[str, tuple[str, ...]]] = {
    "optim": ("arguments.optim_args", "arguments.optim_target_modules", "optimizer"),
    "torch_compile": ("arguments.torch_compile_backend", "arguments.torch_compile_mode"),
    "activation_checkpointing": ("arguments.activation_checkpointing_kwargs", "trainer_parts.verify_checkpointing"),
    "use_liger_kernel": ("arguments.liger_kernel_config",),
    "fsdp": ("arguments.fsdp_config", "arguments.ddp_backend", "environment.ACCELERATE_USE_FSDP"),
}
"""Field → settings without effect, or harmful, once the user's value replaces the preset's."""

_FSDP_WORDS: Final[Mapping[str, Mapping[str, bool]]] = {
    "full_shard": {"reshard_after_forward": True},
    "shard_grad_op": {"reshard_after_forward": False},
    "offload": {"cpu_offload": True},
}
"""Words in `fsdp` → what Trainer writes into `fsdp_config` for them (transformers 5.23.0: training_args.py,
`_apply_legacy_fsdp_to_config`)."""

_EXCLUDES: Final = {"bf16": ("arguments.fp16",), "fp16": ("arguments.bf16",)}
"""Field → settings that cannot be true with it (transformers 5.23.0: "At most one of fp16 and bf16")."""


def apply_own_arguments(setup: Setup, own: Mapping[str, Any]) -> tuple[Setup, tuple[Replaced, ...]]:
    """`setup` with the user's fields of TrainingArguments (current names), and the replaced settings; a value equal to
    the preset's replaces nothing. Raises SettingError if the fields exclude the preset."""
    own = _with_plain_fsdp_config(setup, own)
    changed, replaced = remove_replaced(setup, own)
    replaced_settings = {entry.setting.key: entry.setting for entry in replaced}
    for name, value in own.items():
        key = f"arguments.{name}"
        if not _is_set_to(changed, key, value):
            old = replaced_settings.get(key)
            instead = "" if old is None else f"; the preset has {old.value!r}: {old.reason}"
            changed = changed.put(key, value, f"yours{instead}")
    return changed, replaced


def remove_replaced(setup: Setup, own: Mapping[str, Any]) -> tuple[Setup, tuple[Replaced, ...]]:
    """`setup` without the settings that the user's fields (any objects) replace, and these settings. Raises
    SettingError if the fields exclude the preset."""
    own = _with_plain_fsdp_config(setup, own)
    if own.get("deepspeed") is not None and "deepspeed.config" in setup:
        raise SettingError(
            f"deepspeed={own['deepspeed']!r}: preset {setup.preset!r} has its own DeepSpeed config. Remove yours, "
            f"or choose a preset without DeepSpeed"
        )
    replaced: list[Replaced] = []
    if isinstance(own.get("fsdp"), str | list) and own["fsdp"] and "fsdp_config" not in own:
        setup = _with_fsdp_words(setup, own["fsdp"], replaced)
    for name, value in own.items():
        key = f"arguments.{name}"
        if _is_set_to(setup, key, value):
            continue
        dependent = [*_REMOVED_WITH.get(name, ())]
        dependent += _EXCLUDES.get(name, ()) if value is True else ()
        preset_setting = next((s for s in setup.settings if s.key == key), None)
        if preset_setting is not None:
            replaced.append(Replaced(preset_setting, name, value))
            setup = setup.drop(key)
        for prefix in dependent:
            for setting in setup.settings:
                key = setting.key
                if prefix not in (key, key.partition(".")[0]) or key.removeprefix("arguments.") in own:
                    continue
                setup = setup.drop(key)
                if not key.startswith("optimizer.") or key == "optimizer.class":  # one entry for the section
                    replaced.append(Replaced(setting, name, value, f"it belongs to the preset's {name}"))
    if own.get("use_cpu") is True:
        setup = _for_a_cpu(setup, own, replaced)
    return setup, tuple(replaced)


def _with_plain_fsdp_config(setup: Setup, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The user's fields, with the content of `fsdp_config` as Trainer reads it: from a file if it is a path, and under
    names without `fsdp_` (transformers 5.23.0: training_args.py 2780-2786). Its checkpointing turns the preset's off,
    because Trainer refuses both. Raises SettingError if the file cannot be read."""
    config = own.get("fsdp_config")
    if isinstance(config, str | Path) and config:
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingError(f"fsdp_config={config}: not read: {error}. Give a JSON file") from None
    if not isinstance(config, Mapping):
        return own
    plain = {str(name).removeprefix("fsdp_"): value for name, value in config.items()}
    own = {**own, "fsdp_config": plain}
    if plain.get("activation_checkpointing") and setup.get("arguments.activation_checkpointing"):
        own.setdefault("activation_checkpointing", False)
    return own


def _with_fsdp_words(setup: Setup, value: str | list[Any], replaced: list[Replaced]) -> Setup:
    """`setup` with the user's words in `fsdp`, and with their settings in the preset's `fsdp_config`."""
    of_preset = {each.key: each for each in setup.settings if each.key in ("arguments.fsdp", "arguments.fsdp_config")}
    if len(of_preset) < 2:
        return setup
    fsdp, config = of_preset.values()
    words = value.split() if isinstance(value, str) else value
    changed = dict(config.value)
    for word in words:
        for name, wanted in _FSDP_WORDS.get(getattr(word, "value", word), {}).items():
            if changed.get(name, False) != wanted:
                setting = Setting(f"{config.key}.{name}", changed.get(name, False), config.reason)
                replaced.append(Replaced(setting, "fsdp", value))
            changed[name] = wanted
    return setup.put(config.key, changed, config.reason).put(fsdp.key, value, fsdp.reason)


def _is_set_to(setup: Setup, key: str, value: Any) -> bool:
    return key in setup and setup[key] == value and type(setup[key]) is type(value)


def _for_a_cpu(setup: Setup, own: Mapping[str, Any], replaced: list[Replaced]) -> Setup:
    after, left_out = without_gpu(setup, keep=own)
    for omitted in left_out:
        original = next(s for s in setup.settings if omitted.key in (s.key, f"{s.key}.offload"))
        setting = Setting(omitted.key, omitted.value, original.reason)
        replaced.append(Replaced(setting, "use_cpu", True, omitted.reason))
    config = after.get("deepspeed.config")
    if config is not None and unpin_optimizer(config):
        original = next(s for s in setup.settings if s.key == "deepspeed.config")
        key = "deepspeed.config.zero_optimization.offload_optimizer.pin_memory"
        replaced.append(Replaced(Setting(key, True, original.reason), "use_cpu", True, PAGE_LOCKED))
        after = after.put("deepspeed.config", config, original.reason)
    return after
