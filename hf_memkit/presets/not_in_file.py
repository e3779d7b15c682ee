"""Settings that a file of arguments cannot contain, each with its line of Python or of a shell. Some kinds of scripts
(`SCRIPTS`) have their own arguments for the model, so that fewer settings are left."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hf_memkit.setup.build.model import LOADING_ONLY, model_options
from hf_memkit.setup.build.trainer import optimizer_options
from hf_memkit.setup.own_arguments import LENGTH_NAMES
from hf_memkit.setup.setup import Setting, Setup

SCRIPTS: Final[dict[str, str]] = {
    "trainer": "any script that reads TrainingArguments with HfArgumentParser",
    "run_clm": "transformers' run_clm.py and run_fim.py, which have an argument for the dtype",
    "trl": "TRL (`trl sft --config`), which has arguments for dtype, attention, LoRA, 4-bit weights and environment",
}
"""Kinds of scripts, each with its arguments."""

# Names of trl.ModelConfig for fields of peft.LoraConfig and BitsAndBytesConfig.
# Source: trl 1.16.0, trainer/model_config.py; their use: trainer/utils.py, get_peft_config,
# get_quantization_config (which uses `dtype` as bnb_4bit_compute_dtype).
_SAME_IN_TRL: Final = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_quant_storage")
_TRL_4BIT: Final = {**{name: name for name in _SAME_IN_TRL}, "bnb_4bit_use_double_quant": "use_bnb_nested_quant"}
_TRL_LORA: Final = {
    **{name: f"lora_{name}" for name in ("r", "target_modules", "modules_to_save", "task_type")},
    **{name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")},
}

_LOADING: Final = (
    "model.dtype",
    "model.attn_implementation",
    "model.quantization",
    "model.config",
    *(f"model.{name}" for name in LOADING_ONLY),
)
_LENGTH_NAMES: Final = {"run_clm": "block_size", "trl": "max_length"}
"""Kind of script → its argument for the tokens of a sequence."""

_LENGTH: Final = "data.sequence_length"
_FACTS: Final = ("model.name", "model.origin", "model.architecture")
"""Settings that identify the model."""


@dataclass(frozen=True, slots=True)
class Outside:
    """One setting outside the file.

    Attributes:
        setting: its settings in readable form: `model.dtype = "bfloat16"`.
        reason: the preset's reason.
        line: its line of Python or of a shell.
        essential: whether a run without it is another method, such as full fine-tuning instead of LoRA.
    """

    setting: str
    reason: str
    line: str
    essential: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"what": self.setting, "reason": self.reason, "line": self.line, "essential": self.essential}


def script_arguments(setup: Setup, script: str) -> dict[str, Setting]:
    """`{name in the file: setting}` for settings that a kind of script has its own arguments for. The settings' keys
    are those of the setup, so that `outside_lines` omits them. Empty for `"trainer"`."""
    by_key = {setting.key: setting for setting in setup.settings}
    arguments: dict[str, Setting] = {}
    if script in ("run_clm", "trl") and "model.name" in by_key:
        arguments["model_name_or_path"] = by_key["model.name"]
    if script in ("run_clm", "trl") and "model.dtype" in by_key:
        arguments["dtype"] = by_key["model.dtype"]
    length = by_key.get(_LENGTH)
    if length is not None and not length.reason.startswith("assumed") and script in _LENGTH_NAMES:
        arguments[_LENGTH_NAMES[script]] = length
    if script != "trl":
        return arguments
    if "model.attn_implementation" in by_key:
        arguments["attn_implementation"] = by_key["model.attn_implementation"]
    arguments |= _trl_quantization(by_key)
    adapter = {key: setting for key, setting in by_key.items() if key.startswith("adapter.")}
    if adapter:
        arguments["use_peft"] = Setting("adapter.use", True, "TRL adds the adapters")
    for key, setting in adapter.items():
        name = _TRL_LORA.get(key.partition(".")[2])
        if name is not None:
            arguments[name] = setting
    environment = {key.partition(".")[2]: s for key, s in by_key.items() if key.startswith("environment.")}
    if environment:
        reason = "; ".join(dict.fromkeys(setting.reason for setting in environment.values()))
        arguments["env"] = Setting("environment.all", {name: str(s.value) for name, s in environment.items()}, reason)
    return arguments


def _trl_quantization(by_key: Mapping[str, Setting]) -> dict[str, Setting]:
    """4- or 8-bit weights under TRL's names; empty if it has no name for one of the fields."""
    setting = by_key.get("model.quantization")
    if setting is None:
        return {}
    fields = dict(setting.value)
    dtype = by_key.get("model.dtype")
    if dtype is not None and fields.get("bnb_4bit_compute_dtype") == dtype.value:
        del fields["bnb_4bit_compute_dtype"]  # TRL uses the dtype
    if fields.keys() - _TRL_4BIT.keys():
        return {}
    return {_TRL_4BIT[name]: Setting(setting.key, value, setting.reason) for name, value in fields.items()}


def outside_lines(setup: Setup, script: str = "trainer", own: Collection[str] = ()) -> tuple[Outside, ...]:
    """Settings outside TrainingArguments and the script's own arguments, in the order of their application. `own`:
    names that the user's file already has."""
    included = {setting.key for setting in script_arguments(setup, script).values()}
    variables = [s for s in setup.settings if s.key.startswith("environment.")] if script != "trl" else []
    lines = [Outside(f"{_name(s)}={s.value}", s.reason, f"export {_name(s)}={s.value}") for s in variables]
    lines += _loading_arguments(setup, included)
    for s in setup.settings:  # changes of the loaded model: padded vocabulary, config values
        if s.key == "model.pad_vocabulary_to_multiple_of":
            padded = f"model.resize_token_embeddings(pad_to_multiple_of={_literal(s.value)})"
            lines.append(Outside(_setting_texts([s]), s.reason, padded))
        elif s.key.startswith("model.") and s.key not in (*_LOADING, *_FACTS):
            line = f"model.config.{_name(s)} = {_literal(s.value)}"
            lines.append(Outside(_setting_texts([s]), s.reason, line))

    fields = [s for s in setup.settings if s.key.startswith("adapter.")]
    if adapter := [s for s in fields if script != "trl" or _name(s) not in _TRL_LORA]:
        config = f"LoraConfig({_keywords(setup.section('adapter'))})"
        call = f"from peft import LoraConfig, get_peft_model; model = get_peft_model(model, {config})"
        lines.append(Outside(_setting_texts(adapter), _reasons(adapter), call, essential=True))
    lines += _parts(setup, script)

    options = optimizer_options(setup)
    if options is not None:
        module, _, name = str(setup["optimizer.class"]).partition(":")
        reason = next(s.reason for s in setup.settings if s.key.startswith("optimizer."))
        inner = ", ".join(f"{json.dumps(key)}: {_literal(value)}" for key, value in options.items())
        line = f"from {module} import {name}; Trainer(…, optimizer_cls_and_kwargs=({name}, {{{inner}}}))"
        lines.append(Outside(f"optimizer.class = {name}", reason, line, essential=True))
    for s in setup.settings if not set(LENGTH_NAMES) & set(own) else ():
        # If requested or computed: every script has another name for it.
        if s.key == _LENGTH and s.key not in included and not s.reason.startswith("assumed"):
            line = f"cut the samples to {s.value} tokens (run_clm.py: block_size, TRL: max_length)"
            lines.append(Outside(_setting_texts([s]), s.reason, line))
    return tuple(lines)


def _loading_arguments(setup: Setup, included: set[str]) -> list[Outside]:
    """All arguments of `from_pretrained`, as one line."""
    loading_settings = [s for s in setup.settings if s.key in _LOADING and s.key not in included]
    if not loading_settings:
        return []
    name = _literal(setup["model.name"]) if "model.name" in setup else "MODEL"
    shown = [
        f"{key}=BitsAndBytesConfig({_keywords(value)})" if key == "quantization_config" else f"{key}={_literal(value)}"
        for key, value in model_options(setup).items()
    ]
    call = f"model = AutoModelForCausalLM.from_pretrained({', '.join([name, *shown])})"
    essential = any(s.key == "model.quantization" for s in loading_settings)
    return [Outside(_setting_texts(loading_settings), _reasons(loading_settings), call, essential)]


def _parts(setup: Setup, script: str) -> list[Outside]:
    lines = []
    for s in setup.settings:
        section, _, name = s.key.partition(".")
        further = f", {_keywords(s.value)}" if section in ("model_parts", "trainer_parts") and s.value else ""
        reason = s.reason
        if section == "model_parts":
            line = f"from hf_memkit.components.{name} import install; install(model{further})"
            if script == "trl" and name == "chunked_loss":  # SFTTrainer never makes the logits of a batch
                reason += "; TRL's SFTTrainer already does that (trl 1.16.0: trainer/sft_trainer.py 1142)"
        elif section == "trainer_parts":
            line = (
                f"from hf_memkit.components.{name} import trainer_options; Trainer(…, **trainer_options(model=model, "
                f"processing_class=tokenizer, arguments=training_args{further}))"
            )
        else:
            continue
        lines.append(Outside(_setting_texts([s]), reason, line))
    return lines


def _name(setting: Setting) -> str:
    return setting.key.partition(".")[2]


def _setting_texts(settings: list[Setting]) -> str:
    return ", ".join(f"{s.key} = {json.dumps(s.value)}" for s in settings)


def _reasons(settings: list[Setting]) -> str:
    return "; ".join(dict.fromkeys(s.reason for s in settings))


def _keywords(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_literal(value)}" for key, value in values.items())


def _literal(value: Any) -> str:
    """A value as Python code, text in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
