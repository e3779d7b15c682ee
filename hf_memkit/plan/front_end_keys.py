"""A setup's settings under the names that front ends have in their own configs.

In: fields of TrainingArguments, and options of `from_pretrained`. Out: what is written into the config of
LLaMA-Factory or axolotl, or given to ms-swift as options.

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
"""Whose names they all have."""


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """
    Attributes:
        name: as its documentation writes it.
        options: whether it is given options of a command line; False: the YAML that its command names.
        names: field → its own key; all others have the same name.
        values: field and value → its own keys and values, in place of both.
    """

    name: str
    options: bool
    names: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[tuple[str, Any], Mapping[str, Any]] = field(default_factory=dict)

    def keys(self, arguments: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        """The settings (fields of TrainingArguments, and options of `from_pretrained`) under its own names."""
        found: dict[str, Any] = {}
        for today, value in {**arguments, **model}.items():
            name = name_in_version(today, _TRANSFORMERS)
            if name == "quantization_config":
                value = _bits(value)
            own = self.values.get((name, value)) if not isinstance(value, list | dict) else None
            found |= own if own is not None else {self.names.get(name, name): value}
        return found

    def lines(self, arguments: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
        """What is written into its config, or added to its command, a setting a line."""
        keys = self.keys(arguments, model)
        if self.options:
            return [
                f"--{name} {str(value).lower() if isinstance(value, bool) else value}" for name, value in keys.items()
            ]
        return yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=1000).splitlines()


def _bits(config: Any) -> Any:
    """4 or 8, of a quantisation by bitsandbytes."""
    given = config if isinstance(config, Mapping) else {}
    return 4 if given.get("load_in_4bit") else 8 if given.get("load_in_8bit") else config


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
    """That of a command such as `"axolotl"`; None: it takes TrainingArguments' names, or is none."""
    return _BY_COMMAND.get(command)
