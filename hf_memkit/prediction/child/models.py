"""The setup's model on fake tensors: the class that would be trained, from its config values, without any weights.

In 4 bits the layers that transformers' quantizer would replace are found by its own functions. Each becomes a
bitsandbytes `Linear4bit` whose codes and statistics have the right sizes, so that PEFT takes it for one, and whose
product is bitsandbytes' own (`matmul_4bit`: the input of a frozen weight is not kept; backward dequantises the weight
again).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_memkit.errors import InputError, Unmodelled
from hf_memkit.models import quiet_transformers
from hf_memkit.setup import Setup
from hf_memkit.train import install_model_parts

__all__ = ["build_fake_model", "quantise_linears"]


def build_fake_model(setup: Setup, *, trust_remote_code: bool = False) -> Any:
    """The model with its dtype, attention, padded vocabulary, adapters and parts. No weight is initialised.

    Raises:
        InputError: transformers has no such class.
    """
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
    outside = model.get_output_embeddings()
    shared = getattr(model.get_input_embeddings(), "weight", None)
    if getattr(outside, "weight", None) is shared and shared is not None:
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


def quantise_linears(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Replaces the linear layers of a transformers model, as loading in 4 bits does. `options`: fields of
    `transformers.BitsAndBytesConfig`.

    Raises:
        Unmodelled: another kind of quantisation, or bitsandbytes is not installed.
    """
    if not options.get("load_in_4bit"):
        raise Unmodelled(f"model.quantization = {dict(options)}: only load_in_4bit is modelled")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise Unmodelled("load_in_4bit: its rules need bitsandbytes installed: pip install bitsandbytes") from None
    from transformers import BitsAndBytesConfig
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    config: Any = BitsAndBytesConfig(**options)
    kept = HfQuantizer.get_modules_to_not_convert(
        model, config.llm_int8_skip_modules, getattr(model, "_keep_in_fp32_modules", None)
    )
    for name, module in list(model.named_modules()):
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept):
            model.set_submodule(name, _linear(module, config))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


def _linear(module: Any, config: Any) -> nn.Module:
    transposed = not isinstance(module, nn.Linear)  # Conv1D stores (inputs, outputs)
    inputs, outputs = module.weight.shape if transposed else reversed(module.weight.shape)
    return _class()(inputs, outputs, module, config)  # type: ignore[no-any-return]


def _class() -> Any:
    """Made when it is needed: bitsandbytes need not be installed."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState

    class FakeLinear4bit(bnb.nn.Linear4bit):  # type: ignore[misc]
        def __init__(self, inputs: int, outputs: int, original: Any, config: Any) -> None:
            nn.Module.__init__(self)
            self.in_features, self.out_features = inputs, outputs
            self.compute_dtype = config.bnb_4bit_compute_dtype
            self.compute_type_is_set = True
            self.quant_state = None
            self.quant_storage = config.bnb_4bit_quant_storage
            self.support_avx512bf16_for_cpu = False
            self.dtype = original.weight.dtype
            elements = inputs * outputs
            packed = -(-elements // 2) // torch.empty((), dtype=self.quant_storage, device="meta").element_size()
            weight: Any = nn.Parameter(torch.empty((packed, 1), dtype=self.quant_storage), requires_grad=False)
            weight.compress_statistics = config.bnb_4bit_use_double_quant
            weight.quant_type = config.bnb_4bit_quant_type
            self.weight = weight
            self.bias = original.bias
            # bitsandbytes 0.50.2: functional.py, `quantize_4bit`: blocks of 64, of whose scales 256 share one.
            scales = -(-elements // 64)
            self.nested = bool(config.bnb_4bit_use_double_quant)
            self.register_buffer("code", torch.empty(16))
            self.register_buffer("absmax", torch.empty(scales, dtype=torch.uint8 if self.nested else torch.float32))
            if self.nested:
                self.register_buffer("nested_absmax", torch.empty(-(-scales // 256)))
                self.register_buffer("nested_code", torch.empty(256))
                self.register_buffer("offset", torch.empty(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """As bitsandbytes 0.50.2: nn/modules.py, `Linear4bit.forward`."""
            kind = self.weight.quant_type
            nested: Any = None
            if self.nested:
                nested = QuantState(self.nested_absmax, code=self.nested_code, blocksize=256, dtype=torch.float32)
            state = QuantState(
                self.absmax, shape=torch.Size((self.out_features, self.in_features)), code=self.code, blocksize=64,
                quant_type=kind, dtype=self.dtype, offset=self.offset if self.nested else None, state2=nested,
            )  # fmt: skip
            wanted = x.dtype
            x = x.to(self.compute_dtype)
            bias = None if self.bias is None else self.bias.to(self.compute_dtype)
            product: torch.Tensor = bnb.matmul_4bit(x, self.weight, bias=bias, quant_state=state)
            return product.to(wanted)

    return FakeLinear4bit
