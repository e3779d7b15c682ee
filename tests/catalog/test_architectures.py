"""The built-in architectures build the models that they are named after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_memkit.catalog.architectures import ARCHITECTURES, built_in
from hf_memkit.catalog.models import describe
from hf_memkit.common.errors import InputError


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_has_the_published_number_of_parameters(name: str) -> None:
    architecture = ARCHITECTURES[name]
    assert describe(name, architecture.config, use_hub=False).parameters == architecture.parameters


def test_names_are_found_without_organisation_case_or_tuning() -> None:
    assert built_in("gpt2-xl") == built_in("openai-community/gpt2-xl") != None  # noqa: E711
    result = built_in("meta-llama/llama-3.1-8b-INSTRUCT")
    assert result is not None and result[0] == "meta-llama/Llama-3.1-8B"
    assert built_in("my-org/my-model") is None


def test_they_stand_in_only_where_they_are_allowed_to() -> None:
    facts = describe("gpt2", use_hub=False, use_built_in=True)
    assert facts.parameters == 124_439_808 and facts.origin == "architecture"
    with pytest.raises(InputError, match=r"neither a folder here nor in the cache.*; give a folder"):
        describe("gpt2", use_hub=False)


def test_groups_are_those_of_trainer_s_optimizer() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer

    for name in ("openai-community/gpt2", "Qwen/Qwen3-0.6B", "EleutherAI/pythia-160m", "facebook/opt-125m"):
        values = dict(ARCHITECTURES[name].config)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        decayed = set(Trainer.get_decay_parameter_names(None, model))
        named = list(model.named_parameters())
        expected = [[p.numel() for n, p in named if (n in decayed) is wanted] for wanted in (True, False)]
        facts = describe(name, ARCHITECTURES[name].config, use_hub=False)
        assert [list(group) for group in facts.groups] == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "vit"}, "no causal language model for a ViTConfig. Give a model"),
        ({"model_type": "llama", "hidden_act": "nope", "num_hidden_layers": 1}, "unknown value 'nope'"),
    ],
)
def test_a_config_that_makes_no_model_is_reported_whole(tmp_path: Path, values: dict[str, object], words: str) -> None:
    """Would notice: a list of all of transformers' configs, cut in the middle of a name."""
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError) as caught:
        describe(str(tmp_path), use_hub=False)
    assert words in str(caught.value) and len(str(caught.value).replace(str(tmp_path), "")) < 600
