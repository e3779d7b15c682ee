"""One rank's trace under DeepSpeed: activations and the loss as traced, everything that ZeRO splits from the ledger.

DeepSpeed's engine does not run on fake tensors. Its memory (partitions, buckets, gathered parameters) is computed to
the byte (`hf_memkit/deepspeed/`, tested against the real engine), and memory that it does not affect (activations,
logits) is traced without it, with weights in the engine's dtype. The trace shows when each gradient is computed; the
stage decides what happens to it. tests/prediction/test_split_states_live.py compares with live engines of one and two
processes.
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
"""Categories that come from the trace; the others come from the ledger."""

_TRACED_TERMS: Final = (
    Term.GRADIENTS, Term.GRADIENT_PARTITION, Term.GRADIENT_PARTITION_AGAIN, Term.LARGEST_GRADIENT,
    Term.FLATTENED_BUCKET, Term.FP64_GRADIENT,
)  # fmt: skip
"""Rows of gradients during the backward pass, which the trace has gradient by gradient."""

_FROM_THE_FIRST_STEP: Final = (Term.MOMENTS,)
"""Rows that the first optimizer step allocates, in memory freed by activations (deepspeed 0.19.8:
ops/adam/fused_adam.py 155; runtime/zero/stage_1_and_2.py 943, stage3.py 1310: the step creates the states)."""

_FP64_OF_16_BIT: Final = 4  # bytes in fp64 per byte of a 16-bit gradient

_COMPUTING: Final[tuple[Phase, ...]] = ("forward", "backward", "evaluate")
_GATHERED: Final = (Term.LIVE_PARAMETERS, Term.HELD_WEIGHTS, Term.ALL_GATHER_BUFFER)
"""Rows of stage 3 that exist only while modules compute: all parameters are partitioned again before the step
(deepspeed 0.19.8: runtime/zero/stage3.py 2878)."""

_GRADIENTS: Final = CATEGORIES.index("gradients")


def is_split(setup: Setup) -> bool:
    """Whether DeepSpeed is the setup's engine."""
    return "deepspeed.config" in setup


def without_engine(setup: Setup) -> Setup:
    """The setup to trace instead: weights in the engine's dtype, no autocast, no optimizer states."""
    config: dict[str, Any] = setup["deepspeed.config"]
    why = "as DeepSpeed's engine has it"
    for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        wanted = config.get(key, {}).get("enabled", False)
        if wanted is True or (wanted == "auto" and setup.get(f"arguments.{key}")):
            setup = setup.put("model.dtype", dtype, why)
    setup = setup.put("arguments.bf16", False, why).put("arguments.fp16", False, why)
    setup = setup.drop("deepspeed").drop("optimizer").drop("arguments.deepspeed")
    if setup.get("arguments.torch_compile"):
        setup = setup.put("deepspeed.left_out", config, "the engine's hooks decide where compiled graphs end")
    return setup.put("arguments.optim", "sgd", "the ledger has the optimizer's states")


def bucket_bytes(setup: Setup) -> int:
    """Bytes of gradients that are reduced together."""
    model = setup.job.model if setup.job is not None else None
    settings = ZeroSettings.from_config(setup["deepspeed.config"], model.width if model is not None else 0)
    return settings.element_bytes * settings.bucket_elements if settings.buckets else 0


def one_rank(trace: Trace, ledger: Ledger, bucket_bytes: int = 0) -> Trace:
    """Joins the trace of `without_engine` with the device rows of the ledger. `bucket_bytes`: of one gradient bucket
    (`bucket_bytes` of the setup); 0: each gradient is reduced separately."""
    rows = [row for row in ledger.rows if row.place == "device" and row.category not in _TRACED]
    terms = {row.term: row for row in rows if row.term in _TRACED_TERMS}
    added = []
    for row in rows:
        if row.term not in _TRACED_TERMS:
            phases: tuple[Phase, ...] = (row.phase,) if row.phase is not None else ()
            if row.term in _GATHERED:
                phases = _COMPUTING
            since: Phase | None = "optimizer" if row.term in _FROM_THE_FIRST_STEP else None
            added.append(ExtraAllocation(row.size_bytes, row.category, row.term, phases, since))
    workspaces = [
        ExtraAllocation(size, "buffers", trace.operations[operation])
        for size, category, operation in zip(trace.sizes_bytes, trace.category_of, trace.operation_of, strict=True)
        if trace.operations[operation] == "cuBLAS workspace" and category >= 0
    ]
    trace = _reduce_gradients(trace, {term: row.size_bytes for term, row in terms.items()}, bucket_bytes)
    return edited(trace, [*added, *workspaces], keep=(_TRACED | {"gradients"}).__contains__)


def split_notes(ledger: Ledger) -> tuple[str, ...]:
    """Notes on the terms that are joined with the trace, and how exact they are."""
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


def _reduce_gradients(trace: Trace, sizes: Mapping[str, int], bucket_bytes: int) -> Trace:
    """Replaces traced gradients by the engine's, and adds its temporary memory for reducing them. `sizes`: of the
    traced terms in the ledger.

    Stages 0 and 1 keep whole gradients, and reduce them after backward. With stages 2 and 3 a gradient stays whole
    until the next one is computed; by then it is copied into a bucket, which is reduced when the next gradient does
    not fit into it. Parts of several processes are flattened first; the process's own part goes into a buffer for its
    whole partition, allocated with the first part (that of the last process); gradients for the host are normed in
    fp64. With accumulation that buffer exists twice from the second micro-batch on (deepspeed 0.19.8:
    runtime/zero/stage_1_and_2.py 2367, 2187, 1886, 1042).
    """
    keeps = Term.GRADIENTS in sizes
    result = trace.without_events()
    whole = 0  # the gradient that is not copied yet
    bucket: list[int] = []  # bytes of the gradients that are not reduced yet
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

    def reduce_bucket() -> None:
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

    accumulates = False  # in a later micro-batch of a step
    for start, end, phase in trace.spans():
        for event in trace.events[start:end]:
            index = abs(event) - 1
            if trace.category_of[index] == _GRADIENTS and event > 0:
                size = trace.sizes_bytes[index]
                if not keeps and bucket and sum(bucket) + size > bucket_bytes:
                    reduce_bucket()
                bucket.append(size)
                if not keeps:
                    drop(whole)
                    result.sizes_bytes[index] = 0
                    whole = result.add(size, _GRADIENTS, trace.operation_of[index], trace.module_of[index])
                    result.events.append(whole)
            result.events.append(event)
        if phase == "backward":
            reduce_bucket()
            whole, again = drop(whole), drop(again)
            accumulates = bool(partition)
        elif phase == "optimizer":
            partition, accumulates = drop(partition), False
        result.marks.append((len(result.events), phase))
    return result
