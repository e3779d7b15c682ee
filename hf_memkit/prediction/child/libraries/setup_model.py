"""Builds a setup's model on fake tensors, from its config and class, without weights.

In 4 and 8 bits the layers that transformers' quantizer would replace become bitsandbytes' layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_memkit.catalog.models import quiet_transformers
from hf_memkit.common.errors import InputError, Unmodelled
from hf_memkit.prediction.child.libraries.library_rules import assume_few_outliers
from hf_memkit.prediction.child.older_libraries import no_init_weights
from hf_memkit.setup.build import add_adapters, install_model_parts
from hf_memkit.setup.setup import Setup


def build_fake_model(setup: Setup, *, trust_remote_code: bool = False) -> Any:
    """The model with its dtype, attention, padded vocabulary, adapters and components; no weight is initialised.
    Raises InputError if transformers has no such class."""
    from transformers import AutoConfig

    if trust_remote_code:
        config = AutoConfig.from_pretrained(setup["model.name"], trust_remote_code=True)
    else:
        values = dict(setup["model.architecture"])
        values.pop("transformers_version", None)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
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
        model.tie_weights()  # initialising would do it
        # T5's config uses the second value for scaling of the decoder's outputs (transformers 5.23.0:
        # configuration_t5.py). A checkpoint of such a config has both layers; a model made from the config has one.
        own = setup.get("model.architecture", {})
        loaded = setup.get("model.origin") != "architecture"
        if own.get("tie_word_embeddings") is False or (loaded and own.get("scale_decoder_outputs") is False):
            output = model.get_output_embeddings()
            shared = getattr(model.get_input_embeddings(), "weight", None)
            if getattr(output, "weight", None) is shared and shared is not None:  # tied, although the config differs
                output.weight = nn.Parameter(torch.empty_like(shared), requires_grad=shared.requires_grad)
        if "model.quantization" in setup:
            quantise_linears(model, setup["model.quantization"])
        if setup.section("adapter"):
            model = add_adapters(model, setup.section("adapter"))
    install_model_parts(model, setup)
    return model


def _class_of(setup: Setup, config: Any) -> Any:
    """The class with the setup's name, else the causal language model of this architecture."""
    import transformers
    from transformers import AutoModelForCausalLM

    name = setup.get("model.class")
    if name is None:
        return AutoModelForCausalLM._model_mapping[type(config)]
    kind = getattr(transformers, name, None)
    if kind is None or not hasattr(kind, "_from_config"):
        raise InputError(
            f"transformers {transformers.__version__} has no model class {name!r}; check architectures in the model's "
            f"config.json"
        )
    return kind


def quantise_linears(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Replaces linear layers of a transformers model as loading with these fields of `BitsAndBytesConfig` does.
    Raises Unmodelled for another kind of quantisation, or if bitsandbytes is not installed."""
    if not (options.get("load_in_4bit") or options.get("load_in_8bit")) or options.get("llm_int8_has_fp16_weight"):
        raise Unmodelled(f"model.quantization = {dict(options)}: only load_in_4bit and load_in_8bit are supported")
    try:
        import bitsandbytes as bnb
    except ImportError:
        raise Unmodelled("model.quantization: the trace needs bitsandbytes; run: pip install bitsandbytes") from None
    from transformers import BitsAndBytesConfig
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    config: Any = BitsAndBytesConfig(**options)
    if config.load_in_8bit:
        assume_few_outliers()
    kept = HfQuantizer.get_modules_to_not_convert(
        model, config.llm_int8_skip_modules, getattr(model, "_keep_in_fp32_modules", None)
    )
    for name, module in list(model.named_modules()):
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept):
            # As transformers 5.23.0: integrations/bitsandbytes.py, `replace_with_bnb_linear`, `Bnb4bitQuantize`.
            weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
            outputs, inputs = weight.shape
            linear: Any
            if config.load_in_8bit:
                threshold = config.llm_int8_threshold
                linear = bnb.nn.Linear8bitLt(
                    inputs, outputs, has_fp16_weights=False, threshold=threshold, device="meta"
                )
                linear.weight = bnb.nn.Int8Params(weight.detach(), requires_grad=False).to(weight.device)
            else:
                linear = bnb.nn.Linear4bit(
                    inputs, outputs, compute_dtype=config.bnb_4bit_compute_dtype,
                    compress_statistics=config.bnb_4bit_use_double_quant, quant_type=config.bnb_4bit_quant_type,
                    quant_storage=config.bnb_4bit_quant_storage, device="meta",
                )  # fmt: skip
                linear.weight = bnb.nn.Params4bit(weight.detach(), **vars(linear.weight)).to(weight.device)
            # A check of the model before training would pack weights for a CPU with AVX512-BF16 (bitsandbytes 0.50.2:
            # nn/modules.py, `Linear4bit.forward`), which no training on a GPU does.
            linear.support_avx512bf16_for_cpu = False
            linear.bias = module.bias
            model.set_submodule(name, linear)
    model_config: Any = model.config
    model_config.quantization_config = config
    setattr(model, "is_loaded_in_8bit" if config.load_in_8bit else "is_loaded_in_4bit", True)
