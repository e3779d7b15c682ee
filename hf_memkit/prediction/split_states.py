"""One rank's trace under DeepSpeed: activations and the loss as traced, everything that ZeRO splits from the ledger.

DeepSpeed's engine is not run on fake tensors. What it holds (partitions, buckets, gathered parameters) is known to the
byte (`hf_memkit/deepspeed/`, tested against the real engine), and what it does not touch (activations, logits) is as
without it, with weights in the engine's dtype. When each gradient comes is traced, and what becomes of it follows from
the stage. Compared with live engines of one and two processes in tests/prediction/test_split_states_live.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hf_memkit.common.terms import CATEGORIES, Category, Phase
from hf_memkit.deepspeed.engine_terms import Term
from hf_memkit.deepspeed.settings import ZeroSettings
from hf_memkit.prediction.trace.edit import ExtraAllocation, edited
from hf_memkit.prediction.trace.trace import Trace
from hf_memkit.setup.ledger import Ledger
from hf_memkit.setup.setup import Setup

_TRACED: Final[frozenset[Category]] = frozenset({"activations", "loss", "other"})
"""What is taken from the trace; the ledger has the rest."""

_TRACED_TERMS: Final = (
    Term.GRADIENTS, Term.GRADIENT_PARTITION, Term.GRADIENT_PARTITION_AGAIN, Term.LARGEST_GRADIENT,
    Term.FLATTENED_BUCKET, Term.FP64_GRADIENT,
)  # fmt: skip
"""Rows of gradients that come and go with the backward pass, which the trace knows gradient by gradient."""

_FROM_THE_FIRST_STEP: Final = (Term.MOMENTS,)
"""Rows that the first optimizer step makes, out of what activations have left free (deepspeed 0.19.8:
ops/adam/fused_adam.py 155; runtime/zero/stage_1_and_2.py 943, stage3.py 1310: the states are made by the step)."""

_FP64_OF_16_BIT: Final = 4
"""Times the bytes of a 16-bit gradient."""

_COMPUTING: Final[tuple[Phase, ...]] = ("forward", "backward", "evaluate")
_GATHERED: Final = (Term.LIVE_PARAMETERS, Term.HELD_WEIGHTS, Term.ALL_GATHER_BUFFER)
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


def bucket_bytes(setup: Setup) -> int:
    """Bytes of gradients that are reduced at once."""
    model = setup.job.model if setup.job is not None else None
    settings = ZeroSettings.from_config(setup["deepspeed.config"], model.width if model is not None else 0)
    return settings.element_bytes * settings.bucket_elements if settings.buckets else 0


def one_rank(trace: Trace, ledger: Ledger, bucket_bytes: int = 0) -> Trace:
    """The trace of `without_engine` joined with the device rows of the ledger. `bucket_bytes`: of one bucket of
    gradients (`bucket_bytes` of the setup); 0: each gradient is reduced by itself."""
    rows = [row for row in ledger.rows if row.place == "device" and row.category not in _TRACED]
    terms = {row.term: row for row in rows if row.term in _TRACED_TERMS}
    added = []
    for row in rows:
        if row.term not in _TRACED_TERMS:
            phases = _COMPUTING if row.term in _GATHERED else () if row.phase is None else (row.phase,)
            since: Phase | None = "optimizer" if row.term in _FROM_THE_FIRST_STEP else None
            added.append(ExtraAllocation(row.size_bytes, row.category, row.term, phases, since))
    workspaces = [
        ExtraAllocation(size, "buffers", trace.operations[operation])
        for size, category, operation in zip(trace.sizes_bytes, trace.category_of, trace.operation_of, strict=True)
        if trace.operations[operation] == "cuBLAS workspace" and category >= 0
    ]
    trace = _reduced(trace, {term: row.size_bytes for term, row in terms.items()}, bucket_bytes)
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
            "on top: an upper bound"
        )
    return tuple(notes)


def _reduced(trace: Trace, sizes: Mapping[str, int], bucket_bytes: int) -> Trace:
    """Gradients as the engine leaves them, and what it makes and drops to reduce them. `sizes`: of the traced terms
    that the ledger has.

    Stages 0 and 1 keep them whole, and reduce them when backward has ended. With stages 2 and 3 each is whole until
    the next one comes, by then copied into a bucket, which is reduced when the next gradient has no room in it. What
    spans processes is flattened first; what the process owns goes into a buffer for all that it owns, made at the
    first of it, which is the last process's; and what goes to the host is normed in fp64. With accumulation that
    buffer is there twice from the second micro-batch on (deepspeed 0.19.8: runtime/zero/stage_1_and_2.py 2367, 2187,
    1886, 1042).
    """
    keeps = Term.GRADIENTS in sizes
    result = trace.without_events()
    whole = 0  # the gradient that has not been copied yet
    bucket: list[int] = []  # bytes of the gradients that have not been reduced yet
    partition = again = 0

    def make(term: Term, size: int) -> int:
        if not size:
            return 0
        if term.value not in result.operations:
            result.operations.append(term.value)
        number = result.add(size, CATEGORIES.index(term.category), result.operations.index(term.value))
        result.events.append(number)
        return number

    def drop(number: int) -> int:
        if number:
            result.events.append(-number)
        return 0

    def reduce_it() -> None:
        nonlocal partition, again
        if not bucket:
            return
        drop(make(Term.FLATTENED_BUCKET, min(sizes.get(Term.FLATTENED_BUCKET, 0), sum(bucket))))
        if not partition:
            partition = make(Term.GRADIENT_PARTITION, sizes.get(Term.GRADIENT_PARTITION, 0))
        elif not again and accumulates:
            again = make(Term.GRADIENT_PARTITION_AGAIN, sizes.get(Term.GRADIENT_PARTITION_AGAIN, 0))
        drop(make(Term.FP64_GRADIENT, min(sizes.get(Term.FP64_GRADIENT, 0), _FP64_OF_16_BIT * max(bucket))))
        bucket.clear()

    accumulates = False  # whether this is a later micro-batch of a step
    for start, end, phase in trace.spans():
        for event in trace.events[start:end]:
            which = abs(event) - 1
            if trace.category_of[which] == _GRADIENTS and event > 0:
                size = trace.sizes_bytes[which]
                if not keeps and bucket and sum(bucket) + size > bucket_bytes:
                    reduce_it()
                bucket.append(size)
                if not keeps:
                    drop(whole)
                    result.sizes_bytes[which] = 0
                    whole = result.add(size, _GRADIENTS, trace.operation_of[which], trace.module_of[which])
                    result.events.append(whole)
            result.events.append(event)
        if phase == "backward":
            reduce_it()
            whole, again = drop(whole), drop(again)
            accumulates = bool(partition)
        elif phase == "optimizer":
            partition, accumulates = drop(partition), False
        result.marks.append((len(result.events), phase))
    return result
