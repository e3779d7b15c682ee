"""Bytes of a setup's optimizer states and gradients, from the formulas of `hf_memkit.optimizers`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from hf_memkit.models import ModelFacts
from hf_memkit.optimizers import Options, Shapes, States, find_optimizer
from hf_memkit.setup import Setup
from hf_memkit.techniques.adapter_sizes import adapted

__all__ = [
    "gradient_bytes",
    "optimizer_of",
    "padded_vocabulary",
    "state_source",
    "states_of",
    "step_temporary_bytes",
    "trained_shapes",
]

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def padded_vocabulary(vocabulary: int, multiple: int = 64) -> int:
    """Rows of the word embedding, padded to a multiple."""
    return -(-vocabulary // multiple) * multiple


def optimizer_of(setup: Setup) -> str:
    """The optimizer that steps: an import path (`module:name`), or a value of `optim`."""
    value = setup.get("optimizer.class") or setup.get("arguments.optim") or "adamw_torch_fused"
    return str(value)


def trained_shapes(setup: Setup, model: ModelFacts) -> Shapes:
    """The shapes of what the setup trains: adapters if it has some, otherwise everything."""
    adapter = setup.section("adapter")
    if adapter:
        rank = int(adapter.get("r", 8))
        layers = adapted(model, adapter)
        pairs = (((rank, layer.inputs), (layer.outputs, rank)) for layer in layers)
        return Shapes(tuple(shape for pair in pairs for shape in pair))
    tied = model.tied > 0
    transposed = "gpt2" in model.model_type  # Conv1D stores (inputs, outputs); the sizes are the same
    linears = [layer for layer in model.linears if not (layer.head and tied)]
    targets = setup.get("arguments.optim_target_modules")
    linears.sort(key=lambda layer: not _targeted(layer.name, targets))  # the projected ones first
    # Conv1D is no nn.Linear, which is all that Trainer projects.
    projected = 0 if transposed else sum(_targeted(layer.name, targets) for layer in linears)
    matrices = tuple((one.inputs, one.outputs) if transposed else (one.outputs, one.inputs) for one in linears)
    rest = Counter(model.sizes)
    rest.subtract(one.elements for one in linears)
    wide = [size for size in rest.elements() if _is_table(size, model)]
    rest.subtract(wide)
    tables = tuple((size // model.width, model.width) for size in wide)
    multiple = setup.get("model.pad_vocabulary_to_multiple_of")
    if multiple:
        padded = padded_vocabulary(model.vocabulary, int(multiple))
        tables = tuple((padded if rows == model.vocabulary else rows, width) for rows, width in tables)
        matrices = tuple((padded if rows == model.vocabulary else rows, columns) for rows, columns in matrices)
    return Shapes(matrices, tables, tuple(rest.elements()), projected)


def _targeted(name: str, targets: Any) -> bool:
    """As Trainer reads it (transformers 5.23.0: trainer_utils.py 1018-1054); all if nothing is said."""
    if targets is None or (isinstance(targets, str) and targets.replace("_", "-") == "all-linear"):
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(target in name or re.fullmatch(target, name) for target in targets)


def _is_table(size: int, model: ModelFacts) -> bool:
    """A word or position embedding, not a long bias: those are of no more than a few times the width."""
    rows, left = divmod(size, model.width)
    return left == 0 and (rows == model.vocabulary or rows >= (model.maximum_length or model.vocabulary))


def _trained_bytes(setup: Setup) -> int:
    # PEFT casts adapters of 16-bit models to fp32 (peft: tuners/tuners_utils.py, autocast_adapter_dtype).
    return 4 if setup.section("adapter") else _BYTES[setup.get("model.dtype", "float32")]


def _option(setup: Setup, name: str) -> str | None:
    text = str(setup.get("arguments.optim_args") or "").replace(" ", "")
    pairs: Mapping[str, Any] = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    return pairs.get(name)


def states_of(setup: Setup, model: ModelFacts, *, weight_bytes: int | None = None) -> States:
    """Bytes of the states that the setup's optimizer will hold; AdamW's where no formula is known for it."""
    shapes = trained_shapes(setup, model)
    size = _trained_bytes(setup) if weight_bytes is None else weight_bytes
    rank = int(_option(setup, "rank") or 128)
    momentum = _option(setup, "momentum") is not None
    return find_optimizer(optimizer_of(setup)).states.bytes_of(shapes, Options(size, rank, momentum))


def state_source(setup: Setup) -> str:
    """The formula behind `states_of`, in words."""
    return find_optimizer(optimizer_of(setup)).states.source.format(weight_bytes=_trained_bytes(setup))


def gradient_bytes(setup: Setup, model: ModelFacts, *, weight_bytes: int | None = None) -> tuple[int, str]:
    """(bytes of gradients held at once, by which formula).

    What is updated within the backward pass holds a few, at most the largest (`Optimizer.gradients_at_once`).
    """
    sizes = trained_shapes(setup, model).sizes
    size = _trained_bytes(setup) if weight_bytes is None else weight_bytes
    at_once = find_optimizer(optimizer_of(setup)).gradients_at_once
    if at_once is None:
        return size * sum(sizes), f"{size} bytes a trained parameter"
    held = sum(sorted(sizes)[-at_once:])
    largest = "largest parameter" if at_once == 1 else "two largest parameters, at most"
    return size * held, f"{size} bytes × the {largest}"


def step_temporary_bytes(setup: Setup, model: ModelFacts, *, weight_bytes: int | None = None) -> int:
    """Bytes of the foreach form's temporaries at the peak of a step: one more copy of what is trained, on CUDA."""
    size = _trained_bytes(setup) if weight_bytes is None else weight_bytes
    foreach = find_optimizer(optimizer_of(setup)).foreach
    return size * sum(trained_shapes(setup, model).sizes) if foreach else 0
