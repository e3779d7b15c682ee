"""Quantised models of scripts: weights without memory, quantised by the code of the library that would do it.
transformers' quantizer makes modules of its library, on the meta device, and of a fake weight codes and scales, each
as large as it will be (`quantizer.get_quantize_ops().convert`).

| method | its step |
|---|---|
| bitsandbytes, 4 and 8 bits | its own autograd functions; what its CUDA kernels take besides is in `gpu_events.py` |
| torchao, 8-bit weights alone | its tensor subclasses, which torch's own products take apart |
| FP8 and MXFP4, dequantised when they are loaded | as without them |
| others | `Unmodelled` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.gpu.real_and_fake import RealAndFake
from hf_memkit.prediction.child.libraries.library_rules import outliers_are_few
from hf_memkit.prediction.child.older_libraries import quantized_parameter
from hf_memkit.prediction.gpu_memory import OUTLIERS_ASSUMED

_ASKED: Final = {"bitsandbytes", "torchao", "fp8", "mxfp4"}
"""Methods whose quantizer is asked; those of others may want libraries that are not installed."""
_EIGHT_BIT_WEIGHTS: Final = {"Int8WeightOnlyConfig", "Float8WeightOnlyConfig"}


def quantizers(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of transformers' `get_hf_quantizer` (5.23.0: quantizers/auto.py): what is quantised in its checkpoint
    is quantised when it is loaded, too."""

    def get_hf_quantizer(config: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        configs = (config, config.get_text_config(decoder=True))
        asked = given or next(filter(None, (getattr(each, "quantization_config", None) for each in configs)), None)
        if asked and (method := _method(asked)) not in _ASKED:
            raise _unmodelled(method)
        quantizer, config, *rest = original(config, given, *args, **kwargs)
        if quantizer is None:
            return quantizer, config, *rest
        if getattr(quantizer.quantization_config, "dequantize", False):
            del config.quantization_config
            return None, config, *rest
        _check(quantizer.quantization_config)
        if _method(quantizer.quantization_config) == "bitsandbytes":
            outliers_are_few()
        quantizer.pre_quantized = False
        return quantizer, config, *rest

    return get_hf_quantizer


def _method(asked: Any) -> str:
    found = asked.get("quant_method") if isinstance(asked, dict) else asked.quant_method
    return str(getattr(found, "value", found) or "bitsandbytes")  # older checkpoints say load_in_4bit alone


def _unmodelled(what: str) -> Unmodelled:
    return Unmodelled(
        f"{what}: this quantisation is not supported; use the model it was made from, with "
        "BitsAndBytesConfig(load_in_4bit=True) or (load_in_8bit=True), or measure: memkit run"
    )


def _check(asked: Any) -> None:
    """Raises Unmodelled if it cannot be traced, or not be trained."""
    method = _method(asked)
    if method == "torchao":
        kind = type(asked.quant_type).__name__
        if kind not in _EIGHT_BIT_WEIGHTS:
            raise _unmodelled(f"torchao's {kind}")
    elif method != "bitsandbytes":
        raise _unmodelled(method)
    elif asked.load_in_8bit and asked.llm_int8_has_fp16_weight:
        raise _unmodelled("llm_int8_has_fp16_weight")


def quantised(
    quantizer: Any, model: Any, path: str, shaped: torch.Tensor, place: Any, boundary: RealAndFake
) -> nn.Parameter:
    """The parameter that loading makes of a weight of the model: `path` is its name, `shaped` has shape and dtype of
    what is quantised, on the meta device, and `place` is where it is quantised, and stays."""
    from transformers.pytorch_utils import Conv1D

    module = model.get_submodule(path.rpartition(".")[0])
    if issubclass(getattr(module, "source_cls", nn.Linear), Conv1D):
        shaped = shaped.new_empty(shaped.shape[::-1])  # as it is in the checkpoint
    weight = boundary.empty_like(shaped, place)
    return quantized_parameter(quantizer, model, path, weight)


def notes_on_8_bits(model: Any) -> Iterator[str]:
    """What is assumed of a trained model in bitsandbytes' 8 bits, and what it keeps for a reason that one would not
    guess: its autograd function keeps inputs as attributes (bitsandbytes 0.50.2: autograd/_functions.py,
    `MatMul8bitLt`), where checkpointing that is not reentrant does not find them."""
    if not getattr(model, "is_loaded_in_8bit", False):
        return
    if model.config.quantization_config.llm_int8_threshold > 0:
        yield OUTLIERS_ASSUMED
    checkpointed = [each for each in model.modules() if getattr(each, "gradient_checkpointing", False)]
    options = [getattr(each._gradient_checkpointing_func, "keywords", {}) for each in checkpointed]
    if any(each.get("use_reentrant") is False for each in options):
        yield (
            "8 bits: bitsandbytes keeps the input of each layer despite gradient checkpointing. To free it, set "
            'gradient_checkpointing_kwargs={"use_reentrant": True}'
        )
