"""What a traced training computes: each operation that reaches the GPU, with its FLOPs, its bytes and its type, in
order. From this and a GPU's rates `step_time.py` has a step's time. It is plain data, beside the storages in a
`Trace`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from hf_memkit.common.terms import Phase

Kind = Literal["matmul", "attention", "memory", "transfer", "unknown"]
"""How the time of an operation is computed: products of matrices (and convolutions), fused attention, all that reads
and writes and computes little, copies between host and GPU, and what is done beside torch's dispatcher and has no row
of its own cost yet."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


def spans(marks: Iterable[tuple[int, Phase]]) -> Iterator[tuple[int, int, Phase]]:
    """`(first, one past the last, phase)` of every stretch that ends with a mark, in order."""
    start = 0
    for end, phase in marks:
        yield start, max(start, end), phase
        start = max(start, end)


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of call: the same operation on the same shapes and types.

    Attributes:
        name: as the dispatcher has it, such as `"aten.mm.default"`, or `"triton.NAME"`, `"bitsandbytes.NAME"`.
        kind: how its time is computed.
        dtype: in which type it computes, such as `"bfloat16"`; of products the type of the factors.
        flops: floating-point operations; a multiplication and an addition are two.
        moved_bytes: what it reads and writes of the GPU's memory, each tensor once.
        shape: of products `(batch, m, n, k)`; empty for others.
        launches: kernels on the GPU that it starts.
        waits: whether the host goes on only when the GPU has done all before it, and this.
        from_autograd: whether autograd's engine, in C++, calls it; else Python does.
        alignment: of products, elements: the largest of 8, 4, 2 and 1 that divides the length of every row in memory.
    """

    name: str
    kind: Kind
    dtype: str
    flops: int
    moved_bytes: int
    shape: tuple[int, ...] = ()
    launches: int = 1
    waits: bool = False
    from_autograd: bool = False
    alignment: int = 8


@dataclass(slots=True)
class Work:
    """Calls in order.

    Attributes:
        operations: the kinds of calls.
        calls: of each call the index of its operation.
        marks: `(call index, phase)`: the calls before that index and after the mark before it fell into `phase`.
    """

    operations: list[Operation] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    marks: list[tuple[int, Phase]] = field(default_factory=list)

    def spans(self) -> Iterator[tuple[int, int, Phase]]:
        """`(first call, one past the last, phase)` of every stretch, in order."""
        return spans(self.marks)

    def steps(self) -> list[tuple[int, int]]:
        """`(first call, one past the last)` of each optimizer step, from the end of the one before (or of loading) to
        the end of phase optimizer."""
        found, start, trains = [], 0, False
        for _, end, phase in self.spans():
            if phase in ("load", "evaluate", "save", "resume"):
                start, trains = end, False
            elif phase == "backward":
                trains = True
            elif phase == "optimizer" and trains:
                found.append((start, end))
                start, trains = end, False
        return found
