"""Operations that a traced training computes on the GPU, in order, with FLOPs, bytes and dtype.

`step_time.py` computes the time of a step from them and a GPU's rates. It is plain data, part of a `Trace`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from hf_memkit.common.terms import Phase

Kind = Literal["matmul", "attention", "memory", "transfer", "collective", "unknown"]
"""How the time of an operation is computed: matrix products and convolutions; fused attention; operations bound by
memory; copies between host and GPU; communication of several ranks; and operations outside torch's dispatcher without
a formula."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

Caller = Literal["python", "autograd", "compiled"]
"""What starts an operation: Python code; autograd's engine, in C++; or the code that torch.compile generates, which
calls kernels and products directly."""


def spans(marks: Iterable[tuple[int, Phase]]) -> Iterator[tuple[int, int, Phase]]:
    """`(first, one past the last, phase)` of the span before each mark, in order."""
    start = 0
    for end, phase in marks:
        yield start, max(start, end), phase
        start = max(start, end)


@dataclass(frozen=True, slots=True)
class Operation:
    """The same operation on the same shapes and dtypes."""

    name: str  # in the dispatcher, such as `"aten.mm.default"`, or `"triton.NAME"`, `"bitsandbytes.NAME"`
    kind: Kind  # how its time is computed
    dtype: str  # dtype of the computation, such as `"bfloat16"`; for products, of the factors
    flops: int  # floating-point operations; a multiplication and an addition count as two
    moved_bytes: int  # bytes that it reads and writes in GPU memory, each tensor once; of collectives: that it sends
    shape: tuple[int, ...] = ()  # of products `(batch, m, n, k)`; else empty
    launches: int = 1  # kernels that it starts on the GPU
    waits: bool = False  # whether the host waits until the GPU has finished this operation
    called_by: Caller = "python"
    alignment: int = 8  # for products, in elements: the largest of 8, 4, 2 and 1 that divides the length of every row
    stream: int = 0  # the CUDA stream that runs it, if streams are recorded; 0: the default one
    ranks: int = 1  # of collectives: ranks of the group
    on_node: int = 1  # of collectives: ranks of the group on one machine


HOST: Final = -1
"""Number of the host among streams that wait."""

EXCHANGES: Final = -2
"""Number of the stream on which collectives of context and tensor parallelism run, beside the computation."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A stream waits for another one: an event, `wait_stream`, or the host that synchronizes."""

    call: int  # index of the first call after it
    stream: int  # that waits, or `HOST`
    on: int  # the stream that it waits for
    until: int  # for all its calls before this index


@dataclass(slots=True)
class Work:
    """Calls in order. `marks`: `(call index, phase)`: calls from the previous mark up to this index are in `phase`."""

    operations: list[Operation] = field(default_factory=list)  # distinct ones
    calls: list[int] = field(default_factory=list)  # index of each call's operation
    marks: list[tuple[int, Phase]] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)  # in order; empty if streams are not recorded

    def spans(self) -> Iterator[tuple[int, int, Phase]]:
        """`(first call, one past the last, phase)` of every span, in order."""
        return spans(self.marks)

    def steps(self) -> list[tuple[int, int]]:
        """`(first call, one past the last)` of each optimizer step, from the end of the previous one or of loading."""
        steps, start, trains = [], 0, False
        for _, end, phase in self.spans():
            if phase in ("load", "evaluate", "save", "resume"):
                start, trains = end, False
            elif phase == "backward":
                trains = True
            elif phase == "optimizer" and trains:
                steps.append((start, end))
                start, trains = end, False
        return steps
