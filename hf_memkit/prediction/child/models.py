"""The setup's model on fake tensors: the class that would be trained, from its config values, without any weights."""

from __future__ import annotations

from typing import Any

from hf_memkit.errors import InputError
from hf_memkit.models import quiet_transformers
from hf_memkit.setup import Setup
from hf_memkit.train import install_model_parts

__all__ = ["build_fake_model"]


def build_fake_model(setup: Setup, *, trust_remote_code: bool = False) -> Any:
    """The model with its dtype, attention, padded vocabulary, adapters and parts. No weight is initialised.

    Raises:
        InputError: transformers has no such class.
    """
    import torch
    from transformers.initialization import no_init_weights

    config = _config(setup, trust_remote_code)
    multiple = setup.get("model.pad_vocabulary_to_multiple_of")
    if multiple:
        text = config.get_text_config()
        text.vocab_size = -(-text.vocab_size // multiple) * multiple
    for key, value in setup.get("model.config", {}).items():
        setattr(config, key, value)
    options: dict[str, Any] = {}
    if setup.get("model.attn_implementation"):
        options["attn_implementation"] = setup["model.attn_implementation"]
    dtype = getattr(torch, setup.get("model.dtype") or str(getattr(config, "dtype", None) or "float32").split(".")[-1])
    with quiet_transformers(), no_init_weights():
        model = _class_of(setup, config)._from_config(config, dtype=dtype, **options)
        model.tie_weights()  # initialising would have done it
        if _has_own_output_layer(setup):
            _untie(model)
        if "model.quantization" in setup:
            from hf_memkit.prediction.child.linear_4bit import quantise_linears

            quantise_linears(model, setup["model.quantization"])
        if setup.section("adapter"):
            model = _with_adapters(model, setup.section("adapter"))
    install_model_parts(model, setup)
    return model


def _has_own_output_layer(setup: Setup) -> bool:
    """Whether the config says that the output layer is not the embedding.

    T5's config takes that value for another one, which it then has in its place: the decoder's outputs are not scaled
    (transformers 5.23.0: configuration_t5.py). A checkpoint of such a config has both layers, and both are loaded; a
    model that is made of the config alone has one.
    """
    config = setup.get("model.architecture", {})
    loaded = setup.get("model.origin") != "architecture"
    return config.get("tie_word_embeddings") is False or (loaded and config.get("scale_decoder_outputs") is False)


def _untie(model: Any) -> None:
    """An output layer of its own, where the config says so and transformers ties it none the less."""
    import torch

    inside, outside = model.get_input_embeddings(), model.get_output_embeddings()
    shared = getattr(inside, "weight", None)
    tied = shared is not None and getattr(outside, "weight", None) is shared
    if tied and shared is not None:
        outside.weight = torch.nn.Parameter(torch.empty_like(shared), requires_grad=shared.requires_grad)


def _config(setup: Setup, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    if trust_remote_code:
        return AutoConfig.from_pretrained(setup["model.name"], trust_remote_code=True)
    values = dict(setup["model.architecture"])
    values.pop("transformers_version", None)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _class_of(setup: Setup, config: Any) -> Any:
    """The class by name, or the causal language model of this architecture."""
    import transformers
    from transformers import AutoModelForCausalLM

    name = setup.get("model.class")
    if name is None:
        return AutoModelForCausalLM._model_mapping[type(config)]
    found = getattr(transformers, name, None)
    if found is None or not hasattr(found, "_from_config"):
        raise InputError(f"transformers has no model class {name!r}")
    return found


def _with_adapters(model: Any, options: dict[str, Any]) -> Any:
    import warnings

    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        return get_peft_model(model, LoraConfig(**options))
