"""One rank's trace under DeepSpeed: activations and the loss as traced, everything that ZeRO splits from the ledger.

DeepSpeed's engine is not run on fake tensors. What it holds (partitions, buckets, gathered parameters) is known to the
byte (`hf_memkit/zero/`, tested against the real engine), and what it does not touch (activations, logits) is the same
as without it, with the weights in the dtype that the engine gives them.
"""

from __future__ import annotations

from typing import Any, Final

from hf_memkit.ledger import Ledger
from hf_memkit.predict.edit import Added, edited
from hf_memkit.predict.trace import Trace
from hf_memkit.terms import Category
from hf_memkit.training_setup import TrainingSetup

__all__ = ["is_split", "one_rank", "without_engine"]

_TRACED: Final[frozenset[Category]] = frozenset({"activations", "loss", "other"})
"""What is taken from the trace; the ledger has the rest."""


def is_split(setup: TrainingSetup) -> bool:
    """Whether DeepSpeed is the setup's engine."""
    return "deepspeed.config" in setup


def without_engine(setup: TrainingSetup) -> TrainingSetup:
    """The setup to trace in its place: weights in the engine's dtype, no autocast, no optimizer states."""
    config: dict[str, Any] = setup["deepspeed.config"]
    why = "as DeepSpeed's engine has it"
    for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        wanted = config.get(key, {}).get("enabled", False)
        if wanted is True or (wanted == "auto" and setup.get(f"arguments.{key}")):
            setup = setup.put("model.dtype", dtype, why)
    setup = setup.put("arguments.bf16", False, why).put("arguments.fp16", False, why)
    setup = setup.drop("deepspeed").drop("optimizer").drop("arguments.deepspeed")
    return setup.put("arguments.optim", "sgd", "the ledger has the optimizer's states")


def one_rank(trace: Trace, ledger: Ledger) -> Trace:
    """The trace of `without_engine` joined with the device rows of the ledger."""
    rows = [row for row in ledger.rows if row.place == "device" and row.category not in _TRACED]
    added = [Added(row.size_bytes, row.category, row.term, row.phase) for row in rows]
    workspaces = [
        Added(size, "buffers", trace.operations[operation])
        for size, category, operation in zip(trace.sizes_bytes, trace.category_of, trace.operation_of, strict=True)
        if trace.operations[operation] == "cuBLAS workspace" and category >= 0
    ]
    return edited(trace, [*added, *workspaces], keep=_TRACED.__contains__)
