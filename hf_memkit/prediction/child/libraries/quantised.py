"""Quantised models of scripts: fake weights, quantised by the library that would do it.

transformers' quantizer creates its library's modules on the meta device, and codes and scales of the correct size from
a fake weight (`quantizer.get_quantize_ops().convert`).

| method | its step |
|---|---|
| bitsandbytes, 4 and 8 bits | its autograd functions; `gpu_events.py` adds the memory of its CUDA kernels |
| torchao, 8-bit weights only | its tensor subclasses, decomposed by torch's products |
| FP8 and MXFP4, dequantised on loading | as without quantisation |
| others | `Unmodelled` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.gpu.real_and_fake import RealAndFake
from hf_memkit.prediction.child.libraries.library_rules import assume_few_outliers
from hf_memkit.prediction.child.older_libraries import quantized_parameter
from hf_memkit.prediction.gpu_memory import OUTLIERS_ASSUMED

_SUPPORTED: Final = {"bitsandbytes", "torchao", "fp8", "mxfp4"}
"""Methods whose quantizer is created; those of others may need libraries that are not installed."""
_EIGHT_BIT_WEIGHTS: Final = {"Int8WeightOnlyConfig", "Float8WeightOnlyConfig"}


def quantizers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces transformers' `get_hf_quantizer` (5.23.0: quantizers/auto.py), so that models with a quantised
    checkpoint are quantised on loading, too."""

    def get_hf_quantizer(config: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        configs = (config, config.get_text_config(decoder=True))
        values = (getattr(config, "quantization_config", None) for config in configs)
        quantization = given or next(filter(None, values), None)
        if quantization and (method := _method(quantization)) not in _SUPPORTED:
            raise _unmodelled(method)
        quantizer, config, *rest = original(config, given, *args, **kwargs)
        if quantizer is None:
            return quantizer, config, *rest
        if getattr(quantizer.quantization_config, "dequantize", False):
            del config.quantization_config
            return None, config, *rest
        _check(quantizer.quantization_config)
        if _method(quantizer.quantization_config) == "bitsandbytes":
            assume_few_outliers()
        quantizer.pre_quantized = False
        return quantizer, config, *rest

    return get_hf_quantizer


def _method(quantization: Any) -> str:
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    return str(getattr(method, "value", method) or "bitsandbytes")  # older checkpoints have only load_in_4bit


def _unmodelled(what: str) -> Unmodelled:
    return Unmodelled(
        f"{what}: this quantisation is not supported; use the model it was made from, with "
        "BitsAndBytesConfig(load_in_4bit=True) or (load_in_8bit=True), or measure: memkit run"
    )


def _check(quantization: Any) -> None:
    """Raises Unmodelled if it cannot be traced or trained."""
    method = _method(quantization)
    if method == "torchao":
        kind = type(quantization.quant_type).__name__
        if kind not in _EIGHT_BIT_WEIGHTS:
            raise _unmodelled(f"torchao's {kind}")
    elif method != "bitsandbytes":
        raise _unmodelled(method)
    elif quantization.load_in_8bit and quantization.llm_int8_has_fp16_weight:
        raise _unmodelled("llm_int8_has_fp16_weight")


def quantised(
    quantizer: Any, model: Any, path: str, shaped: torch.Tensor, device: Any, boundary: RealAndFake
) -> nn.Parameter:
    """The quantised parameter of the weight `path` of the model. `shaped`: meta tensor with its shape and dtype."""
    from transformers.pytorch_utils import Conv1D

    module = model.get_submodule(path.rpartition(".")[0])
    if issubclass(getattr(module, "source_cls", nn.Linear), Conv1D):
        shaped = shaped.new_empty(shaped.shape[::-1])  # as it is in the checkpoint
    weight = boundary.empty_like(shaped, device)
    return quantized_parameter(quantizer, model, path, weight)


def notes_on_8_bits(model: Any) -> Iterator[str]:
    """Notes on a trained model in bitsandbytes' 8 bits: the assumed outliers, and inputs kept despite checkpointing.
    Its autograd function keeps inputs as attributes (bitsandbytes 0.50.2: autograd/_functions.py, `MatMul8bitLt`),
    which non-reentrant checkpointing does not see."""
    if not getattr(model, "is_loaded_in_8bit", False):
        return
    if model.config.quantization_config.llm_int8_threshold > 0:
        yield OUTLIERS_ASSUMED
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    options = [getattr(module._gradient_checkpointing_func, "keywords", {}) for module in checkpointed]
    if any(option.get("use_reentrant") is False for option in options):
        yield (
            "8 bits: bitsandbytes keeps the input of each layer despite gradient checkpointing. To free it, set "
            'gradient_checkpointing_kwargs={"use_reentrant": True}'
        )
