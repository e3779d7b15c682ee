"""Translates settings into the config keys of front ends.

In: fields of TrainingArguments and options of `from_pretrained`. Out: lines for the config of LLaMA-Factory or
axolotl, or options of ms-swift.

Sources: llamafactory 0.9.5: hparams/model_args.py, hparams/parser.py; axolotl 0.19.0: utils/schemas/training.py,
core/builders/base.py, integrations/liger; ms-swift 4.6.0: arguments of `swift sft`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from hf_memkit.catalog.library_versions import name_in_version

_TRANSFORMERS: Final = (5, 6)
"""All these front ends use the argument names of this version."""


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """A program that trains from a config, such as axolotl.

    Attributes:
        name: as its documentation writes it.
        options: whether settings are command-line options; False if they are keys of a YAML file.
        names: field → key of the front end, if it has another name.
        values: (field, value) → keys and values of the front end that replace both.
    """

    name: str
    options: bool
    names: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[tuple[str, Any], Mapping[str, Any]] = field(default_factory=dict)

    def lines(self, arguments: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
        """One line per setting, for the front end's config or command line. `model`: options of `from_pretrained`."""
        keys: dict[str, Any] = {}
        for field_name, value in {**arguments, **model}.items():
            name = name_in_version(field_name, _TRANSFORMERS)
            if name == "quantization_config":
                value = _bits(value)
            own = self.values.get((name, value)) if not isinstance(value, list | dict) else None
            keys |= own if own is not None else {self.names.get(name, name): value}
        if not self.options:
            return yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=1000).splitlines()
        words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in keys.items()}
        return [f"--{name} {word}" for name, word in words.items()]


def _bits(config: Any) -> Any:
    """4 or 8 for a quantisation by bitsandbytes; any other config unchanged."""
    given = config if isinstance(config, Mapping) else {}
    if given.get("load_in_4bit"):
        return 4
    return 8 if given.get("load_in_8bit") else config


_LLAMA_FACTORY: Final = FrontEnd(
    "LLaMA-Factory", options=False,
    names={"use_liger_kernel": "enable_liger_kernel", "quantization_config": "quantization_bit"},
    values={
        ("attn_implementation", "flash_attention_2"): {"flash_attn": "fa2"},
        ("attn_implementation", "sdpa"): {"flash_attn": "sdpa"},
    },
)  # fmt: skip
_AXOLOTL: Final = FrontEnd(
    "axolotl", options=False,
    names={
        "per_device_train_batch_size": "micro_batch_size", "per_device_eval_batch_size": "eval_batch_size",
        "optim": "optimizer",
    },
    values={
        ("use_liger_kernel", True): {
            "plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True,
            "liger_rms_norm": True, "liger_glu_activation": True, "liger_rope": True,
        },
        ("quantization_config", 4): {"load_in_4bit": True, "adapter": "qlora"},
        ("quantization_config", 8): {"load_in_8bit": True},
    },
)  # fmt: skip
_SWIFT: Final = FrontEnd(
    "ms-swift", options=True,
    values={
        ("attn_implementation", "flash_attention_2"): {"attn_impl": "flash_attn"},
        ("attn_implementation", "sdpa"): {"attn_impl": "sdpa"},
        ("quantization_config", 4): {"quant_method": "bnb", "quant_bits": 4},
        ("quantization_config", 8): {"quant_method": "bnb", "quant_bits": 8},
    },
)  # fmt: skip
_BY_COMMAND: Final = {
    "llamafactory-cli": _LLAMA_FACTORY, "lmf": _LLAMA_FACTORY, "axolotl": _AXOLOTL, "swift": _SWIFT
}  # fmt: skip


def front_end(command: str) -> FrontEnd | None:
    """The front end of a command such as `"axolotl"`; None if it has none or uses TrainingArguments' names."""
    return _BY_COMMAND.get(command)
