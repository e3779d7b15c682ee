"""Descriptions of models from their configs, and setups with only the user's arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.common.errors import InputError, SettingError
from hf_memkit.prediction.defaults import TRAINER_DEFAULTS, default_setup, describe_model

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 100, "n_positions": 64}
BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "num_attention_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 48,
}  # fmt: skip
OWN_CODE = """
from transformers import PretrainedConfig

class OddConfig(PretrainedConfig):
    model_type = "memkit-odd"
"""


def folder(path: Path, config: dict[str, Any]) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_a_causal_language_model_has_shapes(tmp_path: Path) -> None:
    name = folder(tmp_path / "tiny", GPT2)
    model = describe_model(name)
    assert model.facts is not None and model.facts.layers == 2 and model.origin == "local"
    assert model.maximum_length == 64 and not model.own_code
    assert describe_model(name, shapes=False).facts is None


def test_a_model_of_another_kind_has_its_config(tmp_path: Path) -> None:
    model = describe_model(folder(tmp_path / "encoder", BERT))
    assert model.facts is None and model.maximum_length == 48
    assert model.config["model_type"] == "bert" and model.config["architectures"] == ["BertForMaskedLM"]
    assert default_setup(model, {})["model.class"] == "BertForMaskedLM"


def test_a_well_known_model_needs_no_hub() -> None:
    model = describe_model("gpt2", use_hub=False, shapes=False)
    assert model.origin == "architecture" and model.maximum_length == 1024 and model.config["model_type"] == "gpt2"


def test_code_of_its_own_runs_only_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = {"model_type": "memkit-odd", "auto_map": {"AutoConfig": "odd.OddConfig"}, "hidden_size": 8}
    name = folder(tmp_path / "odd", config)
    ran = tmp_path / "ran"
    (tmp_path / "odd" / "odd.py").write_text(f"open({str(ran)!r}, 'w').close()\n{OWN_CODE}")
    with pytest.raises(InputError, match="--trust-remote-code") as refused:
        describe_model(name)
    assert "\n" not in str(refused.value) and not ran.exists()
    assert capfd.readouterr().out == "", "no question on the terminal"
    model = describe_model(name, trust_remote_code=True)
    assert ran.exists() and model.own_code and model.facts is None and model.config["hidden_size"] == 8


def test_the_defaults_are_only_what_was_given(tmp_path: Path) -> None:
    model = describe_model(folder(tmp_path / "tiny", GPT2))
    setup = default_setup(model, {"optim": "adafactor", "bf16": True})
    assert setup.preset == TRAINER_DEFAULTS and setup.arguments == {"optim": "adafactor", "bf16": True}
    assert {each.reason for each in setup.settings if each.key.startswith("arguments.")} == {"yours"}
    assert setup["model.name"] == model.name and setup["model.origin"] == "local"
    assert setup["model.architecture"]["n_embd"] == 32
    assert {setting.key.partition(".")[0] for setting in setup.settings} == {"arguments", "model"}
    assert "model.class" not in setup, "Trainer's user says AutoModelForCausalLM"
    with pytest.raises(SettingError, match="at most one"):
        default_setup(model, {"bf16": True, "fp16": True})


def test_a_deepspeed_config_of_the_user_s_is_the_setup_s(tmp_path: Path) -> None:
    model = describe_model(folder(tmp_path / "tiny", GPT2), shapes=False)
    config = {"zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    for given in (config, str(tmp_path / "ds.json")):
        setup = default_setup(model, {"deepspeed": given})
        assert setup["deepspeed.config"] == config and "arguments.deepspeed" not in setup
    (tmp_path / "broken.json").write_text("{")
    for given, message in (("nowhere.json", "cannot be read"), (str(tmp_path / "broken.json"), "not JSON")):
        with pytest.raises(InputError, match=message):
            default_setup(model, {"deepspeed": given})
