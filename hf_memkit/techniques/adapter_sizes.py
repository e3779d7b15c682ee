"""Bytes of adapters and of quantised weights, computed from the shapes of the model's linear layers.

Tests compare every figure with the real tensors of PEFT and bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hf_memkit.adapter_layers import ALL_LINEAR, adapted, named
from hf_memkit.models import Linear, ModelFacts

__all__ = [
    "ALL_LINEAR",
    "EMBEDDINGS",
    "OFFLOAD_MINIMUM",
    "Quantised",
    "adapted",
    "adapter_parameters",
    "copied_parameters",
    "dequantised_bytes",
    "offloaded_parameters",
    "quantised_bytes",
    "quantised_layers",
]

EMBEDDINGS: Final = frozenset({"wte", "embed_tokens", "embed_in", "word_embeddings", "tok_embeddings"})
"""What architectures call their word embedding."""

BLOCK: Final = 64
"""Weights that share one scale (bitsandbytes 0.50.2: nn/modules.py, `Params4bit.__new__`)."""

NESTED_BLOCK: Final = 256
"""Scales that share one scale under double quantisation (bitsandbytes 0.50.2: functional.py, `quantize_4bit`)."""

OFFLOAD_MINIMUM: Final = 4096
"""Elements from which torchao moves a parameter's optimizer to the host (torchao 0.18.0: optim/cpu_offload.py,
`minimal_size`)."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """Bytes of a quantised model.

    Attributes:
        codes: the weights themselves, packed.
        statistics: scales and tables that make numbers of the codes.
        kept: what is not quantised (embeddings, output layer, norms, biases, experts in one tensor), in the dtype
            that the model is loaded in.
    """

    codes: int
    statistics: int
    kept: int

    @property
    def total(self) -> int:
        return self.codes + self.statistics + self.kept


def adapter_parameters(model: ModelFacts, adapter: Mapping[str, Any]) -> int:
    """Parameters of the adapters: rank × (inputs + outputs) a layer (Hu et al. 2021, arXiv 2106.09685, section 4).

    Exact for `bias="none"`, one rank, and layers that are `nn.Linear` or `Conv1D`. Adapters of experts that are kept
    in one tensor are not counted (`ModelFacts.stacked`).
    """
    rank = int(adapter.get("r", 8))
    return sum(rank * (layer.inputs + layer.outputs) for layer in adapted(model, adapter))


def copied_parameters(model: ModelFacts, adapter: Mapping[str, Any]) -> int:
    """Parameters that `modules_to_save` trains in a copy, beside the frozen originals (peft 0.21.2: utils/other.py,
    `ModulesToSaveWrapper`)."""
    names = adapter.get("modules_to_save") or ()
    copied = sum(
        layer.elements + layer.outputs * layer.bias for layer in model.linears if named(layer.name, names)
    )  # fmt: skip
    return copied + model.vocabulary * model.width * len(EMBEDDINGS & set(names))


def quantised_layers(model: ModelFacts, quantization: Mapping[str, Any]) -> tuple[Linear, ...]:
    """The linear layers that bitsandbytes replaces.

    All but the output layer and what `llm_int8_skip_modules` names; if that is given, it replaces the default, and the
    output layer is quantised with the rest (transformers 5.23.0: quantizers/base.py, `get_modules_to_not_convert`).
    """
    skipped = quantization.get("llm_int8_skip_modules")
    if skipped is None:
        return tuple(layer for layer in model.linears if not layer.head)
    return tuple(layer for layer in model.linears if not any(layer.name.endswith(str(name)) for name in skipped))


def quantised_bytes(model: ModelFacts, quantization: Mapping[str, Any], element_bytes: int = 2) -> Quantised:
    """Bytes of the model's weights after loading with these fields of `BitsAndBytesConfig`.

    4-bit: half a byte a weight, and a scale for each block of 64: 4 bytes, or with double quantisation 1 byte and 4
    for each 256 scales, and tables of 16 and 256 numbers a layer (Dettmers et al. 2023, arXiv 2305.14314, section 3;
    bitsandbytes 0.50.2: functional.py, `quantize_4bit`). 8-bit: a byte a weight, and 4 bytes an output (Dettmers et
    al. 2022, arXiv 2208.07339).

    Args:
        model: its linear layers must be known.
        quantization: `load_in_4bit` or `load_in_8bit`, `bnb_4bit_use_double_quant`, `llm_int8_skip_modules`.
        element_bytes: bytes of a weight that is not quantised.
    """
    layers = quantised_layers(model, quantization)
    kept = (model.parameters - sum(layer.elements for layer in layers)) * element_bytes
    if quantization.get("load_in_8bit"):
        return Quantised(sum(layer.elements for layer in layers), 4 * sum(layer.outputs for layer in layers), kept)
    nested = bool(quantization.get("bnb_4bit_use_double_quant"))
    codes = sum(_blocks(layer.elements, 2) for layer in layers)
    return Quantised(codes, sum(_statistics(layer.elements, nested) for layer in layers), kept)


def dequantised_bytes(model: ModelFacts, quantization: Mapping[str, Any], element_bytes: int = 2) -> int:
    """Bytes of the largest weight, as whole numbers: a layer is dequantised each time it is used
    (bitsandbytes 0.50.2: autograd/_functions.py, `MatMul4Bit`)."""
    return element_bytes * max((layer.elements for layer in quantised_layers(model, quantization)), default=0)


def offloaded_parameters(sizes: Iterable[int]) -> tuple[int, int]:
    """(elements whose optimizer torchao's CPUOffloadOptimizer moves to the host, elements that stay on the card)."""
    all_sizes = tuple(sizes)
    moved = sum(size for size in all_sizes if size >= OFFLOAD_MINIMUM)
    return moved, sum(all_sizes) - moved


def _statistics(elements: int, nested: bool) -> int:
    scales, table = _blocks(elements, BLOCK), 4 * 16
    if not nested:
        return 4 * scales + table
    # One byte a scale; of these an fp32 scale a block, the table of 256 numbers, and their offset.
    return scales + 4 * _blocks(scales, NESTED_BLOCK) + 4 * 256 + 4 + table


def _blocks(elements: int, size: int) -> int:
    return -(-elements // size)
