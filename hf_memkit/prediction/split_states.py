"""One rank's trace under DeepSpeed: activations and the loss as traced, everything that ZeRO splits from the ledger.

DeepSpeed's engine is not run on fake tensors. What it holds (partitions, buckets, gathered parameters) is known to the
byte (`hf_memkit/zero/`, tested against the real engine), and what it does not touch (activations, logits) is the same
as without it, with the weights in the dtype that the engine gives them. Gradients are both: when each one comes is
traced, and what becomes of it then follows from the stage.

Compared with live engines of one and two processes in tests/predict/test_split_states_live.py. With more, the terms
are the ledger's, whose sizes are DeepSpeed's own arithmetic of partitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from hf_memkit.ledger import Ledger, Row
from hf_memkit.prediction.trace import Trace
from hf_memkit.prediction.trace_edit import ExtraAllocation, edited
from hf_memkit.setup import Setup
from hf_memkit.terms import CATEGORIES, Category, Phase
from hf_memkit.zero.terms import Term

__all__ = ["is_split", "one_rank", "split_notes", "without_engine"]

_TRACED: Final[frozenset[Category]] = frozenset({"activations", "loss", "other"})
"""What is taken from the trace; the ledger has the rest."""

_TRACED_TERMS: Final = (Term.GRADIENTS, Term.GRADIENT_PARTITION, Term.LARGEST_GRADIENT)
"""Rows of gradients that come and go with the backward pass, which the trace knows gradient by gradient."""

_COMPUTING: Final[tuple[Phase, ...]] = ("forward", "backward", "evaluate")
_GATHERED: Final = (Term.LIVE_PARAMETERS, Term.ALL_GATHER_BUFFER)
"""Rows of stage 3 that are there only while modules compute: all parameters are split again before the step (deepspeed
0.19.8: runtime/zero/stage3.py 2878)."""

_GRADIENTS: Final = CATEGORIES.index("gradients")


def is_split(setup: Setup) -> bool:
    """Whether DeepSpeed is the setup's engine."""
    return "deepspeed.config" in setup


def without_engine(setup: Setup) -> Setup:
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
    terms = {row.term: row for row in rows if row.term in _TRACED_TERMS}
    added = [
        ExtraAllocation(row.size_bytes, row.category, row.term, _phases(row))
        for row in rows
        if row.term not in _TRACED_TERMS
    ]
    workspaces = [
        ExtraAllocation(size, "buffers", trace.operations[operation])
        for size, category, operation in zip(trace.sizes_bytes, trace.category_of, trace.operation_of, strict=True)
        if trace.operations[operation] == "cuBLAS workspace" and category >= 0
    ]
    if Term.GRADIENTS not in terms:
        share = terms[Term.GRADIENT_PARTITION].size_bytes if Term.GRADIENT_PARTITION in terms else 0
        trace = _reduced(trace, share)
    return edited(trace, [*added, *workspaces], keep=(_TRACED | {"gradients"}).__contains__)


def split_notes(ledger: Ledger) -> tuple[str, ...]:
    """Which terms are joined with the trace, and how exact each is."""
    device = {row.term for row in ledger.rows if row.place == "device"}
    notes = [
        "activations, the loss and when each gradient comes are traced; partitions, master weights, moments and "
        "buckets are DeepSpeed's own arithmetic"
    ]
    if device & set(_GATHERED):
        notes.append(
            "parameters that stage 3 gathers are counted at their limit, stage3_max_live_parameters with one prefetch "
            "on top: a bound from above"
        )
    return tuple(notes)


def _phases(row: Row) -> tuple[Phase, ...]:
    if row.term in _GATHERED:
        return _COMPUTING
    return () if row.phase is None else (row.phase,)


def _reduced(trace: Trace, share_bytes: int) -> Trace:
    """Gradients as stages 2 and 3 leave them: whole until the next one comes, by then reduced into a bucket; a share
    of each stays as long as the traced gradient, all of one step together `share_bytes`."""
    steps = sum(1 for _, phase in trace.marks if phase == "optimizer")
    total = sum(_gradient_sizes(trace)) // max(1, steps)
    scale = min(1.0, share_bytes / total) if total else 0.0
    result = trace.without_events()
    whole = 0  # the gradient that has not been reduced yet

    def reduce_it() -> None:
        nonlocal whole
        if whole:
            result.events.append(-whole)
            whole = 0

    for start, end, phase in trace.spans():
        for event in trace.events[start:end]:
            which = abs(event) - 1
            if trace.category_of[which] != _GRADIENTS:
                result.events.append(event)
            elif event > 0:
                reduce_it()
                result.sizes_bytes[which] = round(scale * trace.sizes_bytes[which])
                whole = result.add(
                    trace.sizes_bytes[which], _GRADIENTS, trace.operation_of[which], trace.module_of[which]
                )
                result.events.extend((whole, event))
            else:
                result.events.append(event)
        if phase == "backward":
            reduce_it()
        result.marks.append((len(result.events), phase))
    return result


def _gradient_sizes(trace: Trace) -> Iterator[int]:
    return (
        size
        for size, category in zip(trace.sizes_bytes, trace.category_of, strict=True)
        if category == _GRADIENTS
    )  # fmt: skip
