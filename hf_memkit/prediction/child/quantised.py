"""Quantised models of scripts: weights without memory, quantised by the code of the library that would do it.

```
from_pretrained(…, quantization_config=…) ──> transformers' quantizer ──> modules of its library, on the meta device
a fake weight ──> quantizer.get_quantize_ops().convert ──> codes and scales, each as large as it will be
```

| method | what a step allocates |
|---|---|
| bitsandbytes, 4 and 8 bits | what its own autograd functions do; what its CUDA kernels take: `gpu_events.py` |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from hf_memkit.errors import Unmodelled
from hf_memkit.prediction.child.fake_gpu import library_parameters
from hf_memkit.prediction.child.real_and_fake import RealAndFake

__all__ = ["OUTLIER_COLUMNS", "quantised", "quantizers"]

_MODELLED: Final = {"bitsandbytes"}

OUTLIER_COLUMNS: Final = 7
"""Columns of each input with values above the threshold: no more in models of up to 13 B parameters (Dettmers et al.
2022, LLM.int8(), arXiv 2208.07339, section 2.2)."""


def quantizers(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `get_hf_quantizer`: every checkpoint is quantised when it is loaded, also one that was before."""

    def get_hf_quantizer(config: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        options = _options(config, given)
        method = str(getattr(options.get("quant_method"), "value", options.get("quant_method")) or "bitsandbytes")
        if options and method not in _MODELLED:
            raise Unmodelled(f"{method}: quantised models of this kind are not modelled")
        found = original(config, given, *args, **kwargs)
        if found[0] is not None:
            found[0].pre_quantized = False
            if method == "bitsandbytes":
                import bitsandbytes

                library_parameters(bitsandbytes.nn.Params4bit, bitsandbytes.nn.Int8Params)
                _outliers_are_few()
        return found

    return get_hf_quantizer


def _options(config: Any, given: Any) -> dict[str, Any]:
    asked = given if given is not None else getattr(config, "quantization_config", None)
    return dict(asked.to_dict() if hasattr(asked, "to_dict") else asked or {})


def _outliers_are_few() -> None:
    """How many columns of an input exceed the threshold of 8 bits depends on values: `OUTLIER_COLUMNS` are assumed
    (bitsandbytes 0.50.2: _ops.py; backends/default/ops.py, `int8_vectorwise_quant`, `int8_mixed_scaled_mm`)."""

    def vectorwise(inputs: torch.Tensor, threshold: float = 0.0) -> Any:
        rows = inputs.new_empty(inputs.numel() // inputs.shape[-1], dtype=torch.float32)
        few = min(OUTLIER_COLUMNS, inputs.shape[-1])
        outliers = inputs.new_empty(few, dtype=torch.int64) if threshold > 0 else None
        return torch.empty_like(inputs, dtype=torch.int8), rows, outliers

    def mixed(
        inputs: torch.Tensor, codes: torch.Tensor, weight: torch.Tensor, rows: Any, columns: Any,
        outliers: torch.Tensor | None = None, bias: Any = None,
    ) -> Any:  # fmt: skip
        kept = (inputs.shape[0], outliers.shape[0]) if outliers is not None and outliers.numel() else (0,)
        return inputs.new_empty((*codes.shape[:-1], weight.shape[0])), inputs.new_empty(kept)

    for name, shapes in {"int8_vectorwise_quant": vectorwise, "int8_mixed_scaled_mm": mixed}.items():
        torch.library.register_fake(f"bitsandbytes::{name}", shapes, allow_override=True)


def quantised(
    quantizer: Any, model: Any, path: str, shaped: torch.Tensor, place: Any, boundary: RealAndFake
) -> nn.Parameter:
    """The parameter that loading makes of a weight.

    Args:
        quantizer: transformers'.
        model: whose parameter it is.
        path: the parameter's name.
        shaped: shape and dtype of what is quantised, on the meta device.
        place: where it is quantised, and stays.
        boundary: makes fake tensors.
    """
    from transformers.pytorch_utils import Conv1D

    module = model.get_submodule(path.rpartition(".")[0])
    if issubclass(getattr(module, "source_cls", nn.Linear), Conv1D):
        shaped = torch.empty_like(shaped.T, memory_format=torch.contiguous_format)  # as it is in the checkpoint
    weight = boundary.empty_like(shaped, place)
    with torch.no_grad():
        made = quantizer.get_quantize_ops().convert(
            {path: [weight]}, model=model, full_layer_name=path, missing_keys=set()
        )
    return made.get(path) if path in made else model.get_parameter(path)
