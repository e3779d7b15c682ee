"""The YAML of `accelerate launch`: the DeepSpeed config that Trainer makes from it, and the places of its keys.

```
YAML ──> launcher ──> environment variables ──> DeepSpeedPlugin() in TrainingArguments ──> DeepSpeed config
```

Sources: transformers 5.23.0: training_args.py 1713-1721; accelerate 1.15.0: commands/launch.py, utils/launch.py
(`prepare_deepspeed_cmd_env`), utils/dataclasses.py (`DeepSpeedPlugin.__post_init__`, `set_mixed_precision`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from hf_memkit.checks.rule import Problem
from hf_memkit.setup.techniques.registry import setting_of

SECTION: Final = "deepspeed_config"
_ZERO: Final = "zero_optimization"
_PRECISION: Final = "mixed_precision"

_KEYS: Final = {
    "gradient_accumulation_steps": f"{SECTION}.gradient_accumulation_steps",
    "gradient_clipping": f"{SECTION}.gradient_clipping",
    _ZERO: SECTION,
    f"{_ZERO}.stage": f"{SECTION}.zero_stage",
    f"{_ZERO}.offload_optimizer": f"{SECTION}.offload_optimizer_device",
    f"{_ZERO}.offload_optimizer.device": f"{SECTION}.offload_optimizer_device",
    f"{_ZERO}.offload_optimizer.nvme_path": f"{SECTION}.offload_optimizer_nvme_path",
    f"{_ZERO}.offload_param": f"{SECTION}.offload_param_device",
    f"{_ZERO}.offload_param.device": f"{SECTION}.offload_param_device",
    f"{_ZERO}.offload_param.nvme_path": f"{SECTION}.offload_param_nvme_path",
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": f"{SECTION}.zero3_save_16bit_model",
    "bf16": _PRECISION,
    "bf16.enabled": _PRECISION,
    "fp16": _PRECISION,
    "fp16.enabled": _PRECISION,
}
"""Key of the DeepSpeed config → key of the YAML."""


def own_engine(content: Mapping[str, Any]) -> str:
    """The engine in the YAML, such as DEEPSPEED or FSDP; empty without one."""
    kind = content.get("distributed_type", "NO")
    return "" if kind in ("NO", "MULTI_GPU", False) else str(kind)


def section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of the YAML; empty without one."""
    inner = content.get(name)
    return inner if isinstance(inner, Mapping) else {}


def processes(content: Mapping[str, Any]) -> tuple[int | None, int]:
    """GPUs on each machine (None: all), and machines."""
    total = content.get("num_processes")
    machines = content.get("num_machines")
    nodes = machines if isinstance(machines, int) and machines > 0 else 1
    return (max(1, total // nodes) if isinstance(total, int) and total > 0 else None), nodes


def deepspeed_config(content: Mapping[str, Any], arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config that Trainer fills in and DeepSpeed gets, if the YAML (`content`) names no JSON. The precision of
    Trainer's `arguments` overrides the YAML's."""
    own = section(content, SECTION)
    precision = str(content.get(_PRECISION) or "no").lower()
    if arguments is not None and (arguments.get("fp16") or arguments.get("bf16")):
        precision = "fp16" if arguments.get("fp16") else "bf16"
    stage = own.get("zero_stage", 2)
    zero: dict[str, Any] = {"stage": int(stage) if isinstance(stage, str) and stage.isdigit() else stage}
    for part in ("optimizer", "param"):
        device = own.get(f"offload_{part}_device") or "none"
        if device != "none":
            zero[f"offload_{part}"] = {"device": device}
            if device == "nvme":  # the launcher passes no path on
                zero[f"offload_{part}"]["nvme_path"] = "none"
    if zero["stage"] == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = bool(own.get("zero3_save_16bit_model", False))
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": own.get("gradient_accumulation_steps", "auto"),
        "gradient_clipping": own.get("gradient_clipping", "auto"),
        _ZERO: zero,
        "fp16": {"enabled": precision == "fp16"},
        "bf16": {"enabled": precision in ("bf16", "fp8")},
    }


def in_the_yaml(problem: Problem, content: Mapping[str, Any]) -> Problem | None:
    """The DeepSpeed config's problem at the YAML's key; None if advice has no key, or a YAML rule reports it."""
    if problem.rule == "nvme-path-missing":
        return None
    key = _KEYS.get(problem.key)
    if key is None:
        if problem.severity == "hint":
            return None
        fix = f"{problem.fix}; that takes a DeepSpeed JSON (deepspeed_config_file)"
        return replace(problem, key=f"{SECTION}: {problem.key}", fix=fix)
    part, _, name = key.rpartition(".")
    place = content.get(part, {}) if part else content
    own = place.get(name) if isinstance(place, Mapping) else None
    instead = "set mixed_precision: 'no'" if key == _PRECISION else "delete the key"
    fix = problem.fix.replace('write "auto"', instead)
    for text, replacement in _FIXES.items():
        fix = fix.replace(text, replacement)
    if re.search(r'"\w+":', fix):  # a key that only a JSON can have
        fix = f"{fix}; that takes a DeepSpeed JSON (deepspeed_config_file)"
    return replace(problem, key=key, value=own, fix=fix)


_FIXES: Final = {
    '"stage3_gather_16bit_weights_on_model_save": true': "zero3_save_16bit_model: true",
    '"stage": ': "zero_stage: ",
    'use fp16, with "bf16": {"enabled": "auto"}': "set mixed_precision: fp16, and "
    f"{setting_of('fp16-autocast')} in the arguments",
}
"""Text in a DeepSpeed rule's fix → the YAML's text."""
