"""Bytes of optimizer states, computed from the shapes of what is trained.

Tests compare every figure with the tensors that the real optimizers hold after a step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hf_memkit.models import ModelFacts
from hf_memkit.techniques.adapter_sizes import adapted
from hf_memkit.training_setup import TrainingSetup

__all__ = [
    "LAYERWISE",
    "Shapes",
    "States",
    "gradient_bytes",
    "optimizer_of",
    "padded_vocabulary",
    "state_bytes",
    "state_source",
    "states_of",
    "step_temporary_bytes",
    "trained_shapes",
]

SMALLEST_QUANTISED: Final = 4096
"""Elements below which no state is quantised (bitsandbytes 0.50.2: optim/optimizer.py 508; torchao 0.18.0:
optim/adam.py 78)."""

_BNB_ADAMW: Final = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")
_BNB_LION: Final = ("lion_8bit", "paged_lion_8bit")

_BNB_BLOCK: Final = 256
"""bitsandbytes 0.50.2: optim/optimizer.py 528."""

_TORCHAO: Final = {8: (256, 256), 4: (128, 16)}
"""Bits → (elements a block, entries of the table): torchao 0.18.0: optim/adam.py, optim/quant_utils.py."""

_TORCHAO_CLASSES: Final = ("hf_memkit.components.low_bit_adamw:", "torchao.")
_TRAINERS_TORCHAO: Final = ("adamw_torch_8bit", "adamw_torch_4bit")
_TRAINERS_TORCHAO_BLOCK: Final = 256
"""What Trainer gives both (transformers 5.23.0: trainer_optimizer.py 470), and cannot be told otherwise."""

_WORD: Final = 4  # bytes of fp32

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

LAYERWISE: Final = ("lomo", "adalomo", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise",
                    "galore_adafactor_layerwise", "apollo_adamw_layerwise")  # fmt: skip
"""Values of `optim` that update a parameter as soon as its gradient is there, and drop the gradient."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What is trained, each parameter once.

    Attributes:
        matrices: (rows, columns) of the weights of linear layers, as they are stored.
        embeddings: (rows, columns) of embeddings, with an output layer that is tied to one.
        vectors: elements of all the rest.
        projected: how many of the first `matrices` GaLore and APOLLO project; None: all of them.
    """

    matrices: tuple[tuple[int, int], ...]
    embeddings: tuple[tuple[int, int], ...] = ()
    vectors: tuple[int, ...] = ()
    projected: int | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of every parameter."""
        return (*(rows * columns for rows, columns in (*self.matrices, *self.embeddings)), *self.vectors)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of an optimizer's states: `quantised` with their scales and tables, and what is `plain` numbers."""

    quantised: int
    plain: int

    @property
    def total(self) -> int:
        return self.quantised + self.plain


def padded_vocabulary(vocabulary: int, multiple: int = 64) -> int:
    """Rows of the word embedding, padded to a multiple."""
    return -(-vocabulary // multiple) * multiple


def optimizer_of(setup: TrainingSetup) -> str:
    """The optimizer that steps: an import path (`module:name`), or a value of `optim`."""
    value = setup.get("optimizer.class") or setup.get("arguments.optim") or "adamw_torch_fused"
    return str(value)


def trained_shapes(setup: TrainingSetup, model: ModelFacts) -> Shapes:
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


def state_bytes(
    optimizer: str, shapes: Shapes, *, weight_bytes: int = 4, rank: int = 128, momentum: bool = True
) -> States:
    """Bytes that `optimizer` holds between two steps.

    Args:
        optimizer: a value of Trainer's `optim`, or `module:name` of a class.
        shapes: what is trained.
        weight_bytes: of one number of a parameter; torch's own optimizers keep their states in that dtype.
        rank: of GaLore's and APOLLO's projections.
        momentum: whether SGD has one.

    Raises:
        KeyError: no formula is known for it.
    """
    name = optimizer.rpartition(":")[2].lower()
    sizes, count = shapes.sizes, sum(shapes.sizes)
    if optimizer.startswith(("galore_adamw", "apollo_adamw")) and "8bit" not in optimizer:
        return States(0, _low_rank(shapes, weight_bytes, rank))
    if name in ("adamw_torch", "adamw_torch_fused", "adamw", "adam"):
        return States(0, 2 * weight_bytes * count)
    if optimizer.startswith(_TORCHAO_CLASSES) or optimizer in _TRAINERS_TORCHAO:
        rest = _WORD if optimizer.startswith("hf_memkit") else weight_bytes
        return _torchao(sizes, 8 if "8bit" in name else 4, rest, _torchao_block(optimizer))
    if name == "sgd":
        return States(0, weight_bytes * count if momentum else 0)
    if name in ("adafactor", "adalomo"):
        factored = sum(rows + columns for rows, columns in (*shapes.matrices, *shapes.embeddings))
        return States(0, _WORD * (factored + sum(shapes.vectors)))
    if name == "lomo":
        return States(0, 0)
    if name in ("lars", "lamb"):
        return States(0, (1 if name == "lars" else 2) * _WORD * count)
    if name in _BNB_ADAMW:
        return _bitsandbytes(shapes, 2)
    if name in _BNB_LION:
        return _bitsandbytes(shapes, 1)
    raise KeyError(optimizer)


def _bitsandbytes(shapes: Shapes, moments: int) -> States:
    """Embeddings keep 32 bits: Trainer overrides them (transformers 5.23.0: trainer.py 1331-1344)."""
    candidates = (*(rows * columns for rows, columns in shapes.matrices), *shapes.vectors)
    eight = [size for size in candidates if size >= SMALLEST_QUANTISED]
    rest = sum(shapes.sizes) - sum(eight)
    return States(moments * sum(size + _WORD * -(-size // _BNB_BLOCK) for size in eight), moments * _WORD * rest)


def _torchao_block(optimizer: str) -> int:
    """Elements that share a scale."""
    bits = 8 if "8bit" in optimizer.lower() else 4
    return _TRAINERS_TORCHAO_BLOCK if optimizer in _TRAINERS_TORCHAO else _TORCHAO[bits][0]


def _torchao(sizes: Iterable[int], bits: int, rest_bytes: int, block: int) -> States:
    """Both moments; each has a table of its own (torchao 0.18.0: optim/subclass_8bit.py, `zeros`)."""
    entries = _TORCHAO[bits][1]
    all_sizes = tuple(sizes)
    low = [size for size in all_sizes if size >= SMALLEST_QUANTISED and size % block == 0]
    each = sum(size * bits // 8 + _WORD * (size // block) + _WORD * entries for size in low)
    return States(2 * each, 2 * rest_bytes * (sum(all_sizes) - sum(low)))


def _low_rank(shapes: Shapes, weight_bytes: int, rank: int) -> int:
    """Projected: two moments of (longer side) × rank, and a projector of rank × (shorter side); the rest as AdamW."""
    chosen = shapes.matrices if shapes.projected is None else shapes.matrices[: shapes.projected]
    projected = 0
    for rows, columns in chosen:
        short, long = sorted((rows, columns))
        projected += 2 * long * min(rank, short) + short * min(rank, short)
    rest = sum(shapes.sizes) - sum(rows * columns for rows, columns in chosen)
    return weight_bytes * (projected + 2 * rest)


def _trained_bytes(setup: TrainingSetup) -> int:
    # PEFT casts adapters of 16-bit models to fp32 (peft: tuners/tuners_utils.py, autocast_adapter_dtype).
    return 4 if setup.section("adapter") else _BYTES[setup.get("model.dtype", "float32")]


def _option(setup: TrainingSetup, name: str) -> str | None:
    text = str(setup.get("arguments.optim_args") or "").replace(" ", "")
    pairs: Mapping[str, Any] = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    return pairs.get(name)


def states_of(setup: TrainingSetup, model: ModelFacts, *, weight_bytes: int | None = None) -> States:
    """Bytes of the states that the setup's optimizer will hold; AdamW's where no formula is known for it."""
    shapes = trained_shapes(setup, model)
    size = _trained_bytes(setup) if weight_bytes is None else weight_bytes
    rank = int(_option(setup, "rank") or 128)
    try:
        momentum = _option(setup, "momentum") is not None
        return state_bytes(optimizer_of(setup), shapes, weight_bytes=size, rank=rank, momentum=momentum)
    except KeyError:
        return States(0, 2 * size * sum(shapes.sizes))


def state_source(setup: TrainingSetup) -> str:
    """The formula behind `states_of`, in words."""
    optimizer = optimizer_of(setup)
    name = optimizer.rpartition(":")[2].lower()
    size = _trained_bytes(setup)
    if name in _BNB_ADAMW:
        return "2 × (1 + 4/256) bytes a parameter, 8 for embeddings and below 4096 elements (bitsandbytes)"
    if name in _BNB_LION:
        return "1 + 4/256 bytes a parameter, 4 for embeddings and below 4096 elements (bitsandbytes)"
    if optimizer.startswith(_TORCHAO_CLASSES) or optimizer in _TRAINERS_TORCHAO:
        block, number = _torchao_block(optimizer), "1" if "8bit" in name else "1/2"
        more = f"more below 4096 elements or not divisible by {block}"
        return f"2 × ({number} + 4/{block}) bytes a parameter (torchao); {more}"
    if "galore" in name or "apollo" in name:
        return f"{size} bytes × (2 × longer side + shorter side) × rank a projected matrix; two moments of the rest"
    if name in ("adafactor", "adalomo"):
        return "4 bytes × (rows + columns) a matrix (Shazeer & Stern 2018, arXiv 1804.04235)"
    if name == "lomo":
        return "none"
    if name in ("sgd", "lars"):
        return f"one moment: {4 if name == 'lars' else size} bytes a parameter"
    return f"two moments: {4 if name == 'lamb' else size} bytes each a parameter"


def gradient_bytes(setup: TrainingSetup, model: ModelFacts, *, weight_bytes: int | None = None) -> tuple[int, str]:
    """(bytes of gradients held at once, by which formula).

    LOMO holds two, at most the two largest: it uses a gradient when the next one arrives (lomo-optim 0.1.1: lomo.py
    96-137). The layer-wise forms hold one.
    """
    sizes = trained_shapes(setup, model).sizes
    size = _trained_bytes(setup) if weight_bytes is None else weight_bytes
    optimizer = optimizer_of(setup)
    if optimizer not in LAYERWISE:
        return size * sum(sizes), f"{size} bytes a trained parameter"
    two = optimizer in ("lomo", "adalomo")
    held = sum(sorted(sizes)[-2:]) if two else max(sizes, default=0)
    return size * held, f"{size} bytes × the {'two largest parameters, at most' if two else 'largest parameter'}"


def step_temporary_bytes(setup: TrainingSetup, model: ModelFacts, *, weight_bytes: int | None = None) -> int:
    """Bytes of the foreach form's temporaries at the peak of a step: one more copy of what is trained, on CUDA."""
    size = _trained_bytes(setup) if weight_bytes is None else weight_bytes
    foreach = optimizer_of(setup) == "adamw_torch"
    return size * sum(trained_shapes(setup, model).sizes) if foreach else 0
