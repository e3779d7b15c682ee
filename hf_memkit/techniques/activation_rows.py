"""Rows of the ledger for the layers' activations, read from a finished setup."""

from __future__ import annotations

from hf_memkit.job import Job
from hf_memkit.ledger import Row
from hf_memkit.models import ModelFacts
from hf_memkit.techniques.activation_bytes import Mode, Numbers, held, layer_of, numbers_in
from hf_memkit.training_setup import TrainingSetup

__all__ = ["activation_rows", "checkpoint_mode", "numbers_of"]

_FORMULA = "formulas of hf_memkit/techniques/activation_bytes.py (Korthikanti et al. 2022, arXiv 2205.05198)"
_CHEN = "Chen et al. 2016, arXiv 1604.06174"


def checkpoint_mode(setup: TrainingSetup) -> tuple[Mode, int]:
    """How the setup checkpoints, and every how many layers: as `held` takes them."""
    parts = setup.section("model_parts")
    if "checkpoint_segments" in parts:
        length = int(parts["checkpoint_segments"]["segment_layers"])
        return ("segments", length) if length > 1 else ("every-layer", 1)
    if "checkpoint_selective" in parts:
        return "selective", 1
    if "checkpoint_offload" in parts:
        return "offloaded", 1
    if setup.get("arguments.activation_checkpointing") is not True:
        return "none", 1
    options = setup.get("arguments.activation_checkpointing_kwargs") or {}
    if options.get("offload"):
        return "offloaded", 1
    every = int(options.get("every_n_layers", 1))
    return ("every-nth-layer", every) if every > 1 else ("every-layer", 1)


def numbers_of(setup: TrainingSetup) -> Numbers:
    """Which numbers the activations are kept in."""
    mixed = setup.get("arguments.bf16") is True or setup.get("arguments.fp16") is True
    return numbers_in(str(setup.get("model.dtype", "float32")), mixed=mixed)


def activation_rows(setup: TrainingSetup, job: Job, model: ModelFacts) -> tuple[Row, ...]:
    """What the layers hold at the highest point of the backward pass; the loss is not in it."""
    mode, every = checkpoint_mode(setup)
    fused = "model_parts.fused_gelu" in setup
    bytes_of = held(mode, layer_of(model, job.tokens, numbers_of(setup), fused_gelu=fused), model.layers, every)
    inputs = {
        "segments": f"inputs of the segments of {every} layers",
        "offloaded": "the one input that is on the card",
    }.get(mode, "inputs of the checkpointed layers")
    kept = {
        "none": "all layers",
        "selective": "matrix products and attention of all layers",
    }.get(mode, "layers that are not checkpointed")
    again = {
        "segments": f"{every} layers recomputed together",
        "selective": "the rest of one layer, recomputed",
    }.get(mode, "one layer recomputed")
    terms = (
        (inputs, bytes_of.inputs, f"tokens × width × bytes of a number, each ({_CHEN})"),
        (kept, bytes_of.kept, _FORMULA),
        (again, bytes_of.recomputed, _FORMULA),
        ("gradients inside a layer", bytes_of.gradients, _FORMULA),
    )
    rows = tuple(Row("device", "activations", term, size, source, "backward") for term, size, source in terms if size)
    if bytes_of.pinned:
        source = f"{_CHEN}; rounded up to powers of two (torch:aten/src/ATen/core/CachingHostAllocator.h)"
        host = Row(
            "pinned",
            "activations",
            "inputs of the checkpointed layers",
            bytes_of.pinned * job.gpus,
            source,
            "backward",
        )
        rows = (*rows, host)
    return rows
