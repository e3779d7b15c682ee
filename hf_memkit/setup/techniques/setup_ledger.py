"""Computes the memory of a setup's weights, adapters, gradients and optimizer states, a row a term.

The sums are computed from shapes, without torch, and every row names its source; tests compare them with real tensors
of PEFT, bitsandbytes and torchao. Activations need a trace, so that the sums can refuse a setup, but never prove that
it fits. `hf_memkit.deepspeed.engine_ledger` has DeepSpeed's terms.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from hf_memkit.catalog.adapter_layers import adapted_layers, adapter_tensors, matches_any
from hf_memkit.catalog.models import Linear, ModelFacts
from hf_memkit.catalog.optimizers import Options, Shapes, States, find_optimizer
from hf_memkit.common.terms import Place
from hf_memkit.setup.job import Job, process_row
from hf_memkit.setup.ledger import Row
from hf_memkit.setup.setup import Setup

_SWITCH: Final = "arguments.activation_checkpointing"
_PARTS: Final = {"checkpoint_selective", "checkpoint_offload"}

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def rows(setup: Setup) -> tuple[Row, ...]:
    """The terms of the setup's ledger, without those that its techniques added; none if the model is unknown."""
    job = setup.resolved_for
    model = job.model
    if model is None:
        return ()
    if "deepspeed.config" in setup:
        return _offloaded_inputs(setup, model)
    weights = _adapters(setup, model) if setup.section("adapter") else _full(setup, model)
    states = (*weights, *_trained(setup, model))
    readers = job.gpus
    if setup.get("arguments.fsdp"):
        states = _sharded(setup, model, states)
        readers = 1 if _fsdp(setup).get("cpu_ram_efficient_loading") else job.gpus
    loading: tuple[Row, ...] = ()
    if "model.device_map" not in setup:  # which reads each tensor straight to the GPU
        size = _weight_bytes(setup) * model.parameters * readers
        loading = (Row("host", "weights", "weights while loading", size, "read on the CPU first"),)
    replicas = () if setup.get("arguments.fsdp") else _replicas(states, job)
    return (*states, *replicas, *loading, *_offloaded_inputs(setup, model), process_row(job.gpus))


def _weight_bytes(setup: Setup) -> int:
    return _BYTES[setup.get("model.dtype", "float32")]


def _fsdp(setup: Setup) -> dict[str, Any]:
    return dict(setup.get("arguments.fsdp_config") or {})


_WHOLE: Final = ("their scales and tables", "one layer's weights, dequantised")
"""Terms that FSDP2 does not split: state of 4-bit layers beside their weights."""


def _sharded(setup: Setup, model: ModelFacts, states: tuple[Row, ...]) -> tuple[Row, ...]:
    """What FSDP2 keeps of these terms: a share on the GPU or, offloaded, those of a machine in RAM. The largest
    weight is a lower bound of what it gathers; a trace shows the rest."""
    job = setup.resolved_for
    offloaded = _fsdp(setup).get("cpu_offload")
    size = 2 if setup.get("arguments.bf16") or setup.get("arguments.fp16") else 4
    source = f"{size} bytes a number (torch: distributed/fsdp/_fully_shard, `unshard`)"
    gathered = Row("device", "buffers", "largest weight, gathered", size * model.largest_parameter, source, "forward")
    rows = [gathered]
    for row in states:
        if row.term not in _WHOLE:
            row = replace(row, size_bytes=-(-row.size_bytes // job.processes), source=f"{row.source}; split by FSDP2")
            if offloaded:
                place: Place = "pinned" if row.category == "weights" else "host"
                row = replace(row, place=place, size_bytes=row.size_bytes * job.gpus)
        rows.append(row)
    return tuple(rows)


def _full(setup: Setup, model: ModelFacts) -> tuple[Row, ...]:
    size = _weight_bytes(setup)
    terms = [Row("device", "weights", f"{8 * size}-bit weights", size * model.parameters, f"{size} bytes a parameter")]
    autocast = setup.get("arguments.bf16") is True or setup.get("arguments.fp16") is True
    if size == 4 and autocast and not setup.get("arguments.fsdp"):  # FSDP gathers weights in 16 bits
        # Autocast keeps copies until backward has used them, or until forward ends if layers are checkpointed.
        checkpointed = _PARTS & set(setup.section("model_parts")) or setup.get(_SWITCH) is True
        terms.append(
            Row(
                "device", "weights", "16-bit copies that autocast keeps", 2 * model.parameters,
                "2 bytes a parameter (torch: aten/src/ATen/autocast_mode.cpp, cached_cast)",
                "forward" if checkpointed else "backward",
            )
        )  # fmt: skip
    return tuple(terms)


def _adapters(setup: Setup, model: ModelFacts) -> tuple[Row, ...]:
    """The frozen weights and the adapters."""
    size = _weight_bytes(setup)
    adapter = setup.section("adapter")
    quantization = setup.get("model.quantization")
    bits = f"{8 * size}-bit"
    if quantization is None:
        each = f"{size} bytes a parameter"
        frozen = [Row("device", "weights", f"frozen {bits} weights", size * model.parameters, each)]
    else:
        parts = quantised_bytes(model, quantization, size)
        source = "bitsandbytes: functional.py, quantize_4bit; transformers: quantizers/base.py"
        frozen = [
            Row("device", "weights", "quantised weights", parts.codes, source),
            Row("device", "weights", "their scales and tables", parts.statistics, source),
            Row("device", "weights", f"{bits}: embeddings, norms, output layer", parts.kept, source),
            Row(
                "device", "buffers", "one layer's weights, dequantised", dequantised_bytes(model, quantization, size),
                "bitsandbytes: autograd/_functions.py, MatMul4Bit", "backward",
            ),
        ]  # fmt: skip
    count = adapter_parameters(model, adapter)
    terms = [Row("device", "weights", "adapters, fp32", 4 * count, "4 bytes an adapter parameter (PEFT casts up)")]
    if copied := copied_parameters(model, adapter):
        source = "weights and gradients, two moments, each in the weights' dtype (peft: ModulesToSaveWrapper)"
        terms += [
            Row("device", "weights", "trained copies of modules_to_save", size * copied, source),
            Row("device", "gradients", "of the copies", size * copied, source),
            Row("device", "optimizer", "moments of the copies", 2 * size * copied, source),
        ]
    return (*frozen, *terms)


def _trained(setup: Setup, model: ModelFacts) -> tuple[Row, ...]:
    """Gradients and optimizer states."""
    of = " of the adapters" if setup.section("adapter") else ""
    size, source = gradient_bytes(setup, model)
    gradients = Row("device", "gradients", f"gradients{of}", size, source)
    if "trainer_parts.cpu_offload_optimizer" in setup:
        return _offloaded(setup, model, gradients)
    states = states_of(setup, model)
    source = state_source(setup)
    plain = "states that are not quantised" if states.quantised else "optimizer states"
    terms = (
        Row("device", "optimizer", f"quantised states{of}", states.quantised, source),
        Row("device", "optimizer", f"{plain}{of}", states.plain, source),
        Row(
            "device", "optimizer", "temporaries of the foreach form", step_temporary_bytes(setup, model),
            "one more copy of what is trained (torch: optim/adam.py, _multi_tensor_adam)", "optimizer",
        ),
    )  # fmt: skip
    return (gradients, *(row for row in terms if row.size_bytes))


def _offloaded(setup: Setup, model: ModelFacts, gradients: Row) -> tuple[Row, ...]:
    """torchao's CPUOffloadOptimizer: page-locked copies of weights and gradients, states in RAM."""
    size = _trained_bytes(setup)
    moved, stays = offloaded_parameters(_trained_shapes(setup, model).sizes)
    source = "torchao: optim/cpu_offload.py"
    # The optimizer frees gradients only without accumulation.
    freed = setup["trainer_parts.cpu_offload_optimizer"].get("offload_gradients", setup.resolved_for.accumulation == 1)
    return (
        *(() if freed else (gradients,)),
        Row("device", "optimizer", "states of small parameters", 2 * size * stays, source),
        Row("pinned", "weights", "copies of the weights", size * moved, source),
        Row("pinned", "gradients", "copies of the gradients", size * moved, source),
        Row("host", "optimizer", "AdamW moments", 2 * size * moved, source),
    )


def _replicas(states: tuple[Row, ...], job: Job) -> tuple[Row, ...]:
    if job.processes == 1:
        return ()
    gradients = sum(row.size_bytes for row in states if row.place == "device" and row.category == "gradients")
    return (
        Row(
            "device", "buffers", "gradient buckets of DistributedDataParallel", gradients,
            "as large as the gradients, kept beside them (torch:nn/parallel/distributed.py, gradient_as_bucket_view)",
        ),
    )  # fmt: skip


def _offloaded_inputs(setup: Setup, model: ModelFacts) -> tuple[Row, ...]:
    """The layers' inputs in page-locked RAM. PyTorch's pinned allocator rounds each block up to a power of two."""
    by_trainer = setup.get(_SWITCH) is True and (setup.get(f"{_SWITCH}_kwargs") or {}).get("offload")
    if model.model_class is not None or not (by_trainer or "checkpoint_offload" in setup.section("model_parts")):
        return ()
    job = setup.resolved_for
    each = 1 << (_weight_bytes(setup) * job.tokens * model.width - 1).bit_length()
    return (
        Row(
            "pinned", "activations", "inputs of the checkpointed layers", job.gpus * model.layers * each,
            "tokens × width × bytes of a number, each rounded up to a power of two (torch: "
            "aten/src/ATen/core/CachingHostAllocator.h)", "backward",
        ),
    )  # fmt: skip


EMBEDDINGS: Final = frozenset({"wte", "embed_tokens", "embed_in", "word_embeddings", "tok_embeddings"})
"""Names of the word embedding in architectures."""

BLOCK: Final = 64
"""Weights that share one scale (bitsandbytes 0.50.2: nn/modules.py, `Params4bit.__new__`)."""

NESTED_BLOCK: Final = 256
"""Scales that share one scale under double quantisation (bitsandbytes 0.50.2: functional.py, `quantize_4bit`)."""

OFFLOAD_MINIMUM: Final = 4096
"""Minimum elements of a parameter that torchao offloads (torchao 0.18.0: optim/cpu_offload.py, `minimal_size`)."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """Bytes of a quantised model.

    Attributes:
        codes: the packed weights.
        statistics: scales and tables.
        kept: weights that are not quantised (embeddings, output layer, norms, biases, experts in one tensor).
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
    return sum(adapter_tensors(model, adapter))


def copied_parameters(model: ModelFacts, adapter: Mapping[str, Any]) -> int:
    """Parameters of the trained copies of `modules_to_save` (peft 0.21.2: utils/other.py, `ModulesToSaveWrapper`)."""
    names = adapter.get("modules_to_save") or ()
    copied = sum(
        layer.elements + layer.outputs * layer.bias for layer in model.linears if matches_any(layer.name, names)
    )  # fmt: skip
    return copied + model.vocabulary * model.width * len(EMBEDDINGS & set(names))


def quantised_layers(model: ModelFacts, quantization: Mapping[str, Any]) -> tuple[Linear, ...]:
    """The linear layers that bitsandbytes quantises: all but `llm_int8_skip_modules`, by default the output layer
    (transformers 5.23.0: quantizers/base.py, `get_modules_to_not_convert`)."""
    skipped = quantization.get("llm_int8_skip_modules")
    if skipped is None:
        return tuple(layer for layer in model.linears if not layer.head)
    return tuple(layer for layer in model.linears if not any(layer.name.endswith(str(name)) for name in skipped))


def quantised_bytes(model: ModelFacts, quantization: Mapping[str, Any], element_bytes: int = 2) -> Quantised:
    """Bytes of the model's weights after loading with these fields of `BitsAndBytesConfig`.

    4-bit: half a byte a weight; a scale for each block of 64 (4 bytes, or with double quantisation 1 byte and 4 for
    each 256 scales); tables of 16 and 256 numbers a layer (Dettmers et al. 2023, arXiv 2305.14314, section 3;
    bitsandbytes: `quantize_4bit`). 8-bit: a byte a weight, 4 an output (Dettmers et al. 2022, arXiv 2208.07339).

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
    """Bytes of the largest weight when it is dequantised, which happens each time it is used (bitsandbytes 0.50.2:
    autograd/_functions.py, `MatMul4Bit`)."""
    return element_bytes * max((layer.elements for layer in quantised_layers(model, quantization)), default=0)


def offloaded_parameters(sizes: Iterable[int]) -> tuple[int, int]:
    """(elements whose states CPUOffloadOptimizer moves to RAM, elements whose states stay on the GPU)."""
    all_sizes = tuple(sizes)
    moved = sum(size for size in all_sizes if size >= OFFLOAD_MINIMUM)
    return moved, sum(all_sizes) - moved


def _statistics(elements: int, nested: bool) -> int:
    scales = _blocks(elements, BLOCK)
    table = 4 * 16
    if not nested:
        return 4 * scales + table
    # One byte a scale; of these an fp32 scale a block, the table of 256 numbers, and their offset.
    return scales + 4 * _blocks(scales, NESTED_BLOCK) + 4 * 256 + 4 + table


def _blocks(elements: int, size: int) -> int:
    return -(-elements // size)


def padded_vocabulary(vocabulary: int, multiple: int = 64) -> int:
    """Rows of the word embedding, padded to a multiple."""
    return -(-vocabulary // multiple) * multiple


def optimizer_of(setup: Setup) -> str:
    """The setup's optimizer: an import path (`module:name`), or a value of `optim`."""
    value = setup.get("optimizer.class") or setup.get("arguments.optim") or "adamw_torch_fused"
    return str(value)


def _trained_shapes(setup: Setup, model: ModelFacts) -> Shapes:
    """The shapes of the trained parameters: the adapters, or the whole model."""
    adapter = setup.section("adapter")
    if adapter:
        rank = int(adapter.get("r", 8))
        layers = adapted_layers(model, adapter)
        pairs = (((rank, layer.inputs), (layer.outputs, rank)) for layer in layers)
        return Shapes(tuple(shape for pair in pairs for shape in pair))
    tied = model.tied > 0
    transposed = "gpt2" in model.model_type  # Conv1D stores (inputs, outputs); the sizes are the same

    linears = [layer for layer in model.linears if not (layer.head and tied)]
    targets = setup.get("arguments.optim_target_modules")
    linears.sort(key=lambda layer: not _targeted(layer.name, targets))  # the projected ones first
    # Trainer projects nn.Linear only, not Conv1D.
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
    """Whether Trainer projects the module (transformers 5.23.0: trainer_utils.py 1018-1054); all by default."""
    if targets is None or (isinstance(targets, str) and targets.replace("_", "-") == "all-linear"):
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(target in name or re.fullmatch(target, name) for target in targets)


def _is_table(size: int, model: ModelFacts) -> bool:
    """Whether a parameter of this size is a word or position embedding; a bias has a few times the width at most."""
    rows, left = divmod(size, model.width)
    return left == 0 and (rows == model.vocabulary or rows >= (model.maximum_length or model.vocabulary))


def _trained_bytes(setup: Setup) -> int:
    # PEFT casts adapters of 16-bit models to fp32 (peft: tuners/tuners_utils.py, autocast_adapter_dtype).
    return 4 if setup.section("adapter") else _weight_bytes(setup)


def states_of(setup: Setup, model: ModelFacts) -> States:
    """Bytes of the optimizer's states; AdamW's if no formula is known."""
    text = str(setup.get("arguments.optim_args") or "").replace(" ", "")
    given = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    options = Options(_trained_bytes(setup), int(given.get("rank") or 128), "momentum" in given)
    return find_optimizer(optimizer_of(setup)).states.bytes_of(_trained_shapes(setup, model), options)


def state_source(setup: Setup) -> str:
    """The formula behind `states_of`, in words."""
    return find_optimizer(optimizer_of(setup)).states.source.format(weight_bytes=_trained_bytes(setup))


def gradient_bytes(setup: Setup, model: ModelFacts) -> tuple[int, str]:
    """Maximum bytes of gradients at once, and the formula; an optimizer that steps in backward holds only a few."""
    sizes = _trained_shapes(setup, model).sizes
    size = _trained_bytes(setup)
    at_once = find_optimizer(optimizer_of(setup)).gradients_at_once
    if at_once is None:
        return size * sum(sizes), f"{size} bytes a trained parameter"
    held = sum(sorted(sizes)[-at_once:])
    largest = "largest parameter" if at_once == 1 else "two largest parameters, at most"
    return size * held, f"{size} bytes × the {largest}"


def step_temporary_bytes(setup: Setup, model: ModelFacts) -> int:
    """Bytes of the foreach form's temporaries: one copy of the trained parameters."""
    foreach = find_optimizer(optimizer_of(setup)).foreach
    return _trained_bytes(setup) * sum(_trained_shapes(setup, model).sizes) if foreach else 0
