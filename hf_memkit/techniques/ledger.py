"""What a finished setup needs, a row a term: computed from its settings, whatever techniques put them there.

The formulas are the thin ones that the choice of a variant and of a micro-batch needs; each family has its own in a
module without torch. They are computed, not measured, and every row names its source. What DeepSpeed holds comes from
`hf_memkit.zero.ledger` instead, by the techniques that bring it.
"""

from __future__ import annotations

from typing import Final

from hf_memkit.job import Job, process_row
from hf_memkit.ledger import Row
from hf_memkit.models import ModelFacts
from hf_memkit.setup import Setup
from hf_memkit.techniques import activation_bytes
from hf_memkit.techniques.activation_bytes import checkpoint_mode
from hf_memkit.techniques.adapter_sizes import (
    adapter_parameters,
    copied_parameters,
    dequantised_bytes,
    offloaded_parameters,
    quantised_bytes,
)
from hf_memkit.techniques.optimizer_states import (
    gradient_bytes,
    state_source,
    states_of,
    step_temporary_bytes,
    trained_shapes,
)

__all__ = ["rows"]

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def rows(setup: Setup, job: Job) -> tuple[Row, ...]:
    """The terms of `setup`'s ledger that its techniques did not bring themselves; none where no model is known."""
    model = job.model
    if model is None:
        return ()
    if "deepspeed.config" in setup:
        return _activations(setup, job, model)
    weights = _adapters(setup, model) if setup.section("adapter") else _full(setup, model)
    states = (*weights, *_trained(setup, job, model))
    loading: tuple[Row, ...] = ()
    if "model.device_map" not in setup:  # which reads each tensor straight to the card
        size = _weight_bytes(setup) * model.parameters * job.gpus
        loading = (Row("host", "weights", "weights while loading", size, "read on the CPU first"),)
    return (*states, *_replicas(states, job), *loading, *_activations(setup, job, model), process_row(job.gpus))


def _weight_bytes(setup: Setup) -> int:
    return _BYTES[setup.get("model.dtype", "float32")]


def _full(setup: Setup, model: ModelFacts) -> tuple[Row, ...]:
    size = _weight_bytes(setup)
    found = [Row("device", "weights", f"{8 * size}-bit weights", size * model.parameters, f"{size} bytes a parameter")]
    if size == 4 and (setup.get("arguments.bf16") is True or setup.get("arguments.fp16") is True):
        # Autocast's copies live as long as its context, which ends with the forward pass, and as long as backward
        # needs them: a checkpointed layer makes its own again.
        copies = checkpoint_mode(setup)[0] == "none"
        found.append(
            Row(
                "device", "weights", "16-bit copies that autocast keeps", 2 * model.parameters,
                "2 bytes a parameter (torch: aten/src/ATen/autocast_mode.cpp, cached_cast)",
                "backward" if copies else "forward",
            )
        )  # fmt: skip
    return tuple(found)


def _adapters(setup: Setup, model: ModelFacts) -> tuple[Row, ...]:
    """The frozen weights and the adapters beside them."""
    size, adapter, quantization = _weight_bytes(setup), setup.section("adapter"), setup.get("model.quantization")
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
    found = [Row("device", "weights", "adapters, fp32", 4 * count, "4 bytes an adapter parameter (PEFT casts up)")]
    if copied := copied_parameters(model, adapter):
        source = "weights and gradients, two moments, each in the weights' dtype (peft: ModulesToSaveWrapper)"
        found += [
            Row("device", "weights", "trained copies of modules_to_save", size * copied, source),
            Row("device", "gradients", "of the copies", size * copied, source),
            Row("device", "optimizer", "moments of the copies", 2 * size * copied, source),
        ]
    return (*frozen, *found)


def _trained(setup: Setup, job: Job, model: ModelFacts) -> tuple[Row, ...]:
    """Gradients and optimizer states of what is trained."""
    of = " of the adapters" if setup.section("adapter") else ""
    size, source = gradient_bytes(setup, model)
    gradients = Row("device", "gradients", f"gradients{of}", size, source)
    if "trainer_parts.cpu_offload_optimizer" in setup:
        return _offloaded(setup, job, model, gradients)
    states = states_of(setup, model)
    found = [gradients]
    if states.quantised:
        found.append(
            Row("device", "optimizer", f"quantised states{of}", states.quantised, state_source(setup))
        )  # fmt: skip
    if states.plain:
        what = "states that are not quantised" if states.quantised else "optimizer states"
        found.append(Row("device", "optimizer", f"{what}{of}", states.plain, state_source(setup)))
    if temporary := step_temporary_bytes(setup, model):
        found.append(
            Row(
                "device", "optimizer", "temporaries of the foreach form", temporary,
                "one more copy of what is trained (torch: optim/adam.py, _multi_tensor_adam)", "optimizer",
            )
        )  # fmt: skip
    return tuple(found)


def _offloaded(setup: Setup, job: Job, model: ModelFacts, gradients: Row) -> tuple[Row, ...]:
    """torchao's CPUOffloadOptimizer: weights' and gradients' copies page-locked, states in RAM."""
    size = 4 if setup.section("adapter") else _weight_bytes(setup)
    moved, stays = offloaded_parameters(trained_shapes(setup, model).sizes)
    source = "torchao: optim/cpu_offload.py"
    options = setup["trainer_parts.cpu_offload_optimizer"]
    # By itself the part frees gradients where they are not accumulated.
    freed = options.get("offload_gradients", job.accumulation == 1)
    kept = None if freed else gradients
    return tuple(
        row
        for row in (
            kept,
            Row("device", "optimizer", "states of small parameters", 2 * size * stays, source),
            Row("pinned", "weights", "copies of the weights", size * moved, source),
            Row("pinned", "gradients", "copies of the gradients", size * moved, source),
            Row("host", "optimizer", "AdamW moments", 2 * size * moved, source),
        )
        if row is not None
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


def _activations(setup: Setup, job: Job, model: ModelFacts) -> tuple[Row, ...]:
    """What grows with the batch. For other models than causal language models there is no formula; a setup says so
    (`hf_memkit/recipe/resolve.py`), and a trace tells."""
    return () if model.model_class is not None else activation_bytes.rows(setup, job, model)
