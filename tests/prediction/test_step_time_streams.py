"""The time of a step whose work runs on several streams, as FSDP2's: against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from hf_memkit.catalog.gpu_rates import RATES
from hf_memkit.common.range import Range
from hf_memkit.common.terms import Phase
from hf_memkit.deepspeed.transfer_time import CollectiveSeconds
from hf_memkit.prediction import wire
from hf_memkit.prediction.time.step_time import StepTime, step_time
from hf_memkit.prediction.trace.work import HOST, Operation, Wait, Work

GATHERS, REDUCES = 2, 3
"""Streams."""
COMPUTE: Final = Operation("aten.mm.default", "matmul", "bfloat16", 2 * 8192**3, 0, (1, 8192, 8192, 8192))
GATHER: Final = Operation("all-gather", "collective", "bfloat16", 0, 10**8, stream=GATHERS, ranks=4, on_node=4)
REDUCE: Final = replace(GATHER, name="reduce-scatter", stream=REDUCES)
STEP: Final = Operation("aten._fused_adamw_.default", "memory", "float32", 0, 10**6)


class Step:
    """A step that is written down call by call."""

    def __init__(self) -> None:
        self.work = Work()

    def call(self, *operations: Operation) -> None:
        for operation in operations:
            if operation not in self.work.operations:
                self.work.operations.append(operation)
            self.work.calls.append(self.work.operations.index(operation))

    def wait(self, stream: int, on: int) -> None:
        calls = len(self.work.calls)
        self.work.waits.append(Wait(calls, stream, on, calls))

    def end(self, phase: Phase) -> None:
        self.work.marks.append((len(self.work.calls), phase))


def timed(
    step: Step, gather_s: float, *, stolen_s: float = 0.0, micro_batches: int = 1, loader_workers: int = 0
) -> StepTime:
    """The time with a host that takes no time, and collectives of these seconds."""
    collective = CollectiveSeconds(Range(gather_s, gather_s, gather_s), Range(stolen_s, stolen_s, stolen_s))
    return step_time(
        step.work, RATES["A100 80GB"], capability=8.0, host=0.0, span=(0, len(step.work.calls)),
        collective_s=lambda operation: collective, micro_batches=micro_batches, loader_workers=loader_workers,
    )  # fmt: skip


def compute_s() -> float:
    step = Step()
    step.call(COMPUTE)
    step.end("backward")
    step.call(STEP)
    step.end("optimizer")
    return timed(step, 0.0).by_phase["backward"]


ONE: Final = compute_s()


def two_layers() -> Step:
    """Forward of two layers, the second of which is gathered while the first computes; backward of one."""
    step = Step()
    step.call(GATHER)
    step.wait(0, GATHERS)
    step.call(GATHER, COMPUTE)
    gathered = Wait(3, 0, GATHERS, 2)  # before the second layer: both gathers
    step.work.waits.append(gathered)
    step.call(COMPUTE)
    step.end("forward")
    step.call(COMPUTE)
    step.wait(REDUCES, 0)
    step.call(REDUCE, COMPUTE)
    step.wait(0, REDUCES)
    step.end("backward")
    step.call(STEP)
    step.end("optimizer")
    return step


@pytest.mark.parametrize("share", [0.25, 1.0, 3.0])
def test_a_gather_is_hidden_by_the_computation_beside_it(share: float) -> None:
    """Defect: the sum of both, or nothing but the larger one. The first gather is never hidden."""
    gather_s = share * ONE
    found = timed(two_layers(), gather_s)
    assert found.by_phase["forward"] == pytest.approx(gather_s + max(ONE, gather_s) + ONE)
    assert found.by_phase["backward"] == pytest.approx(ONE + max(ONE, gather_s), rel=1e-3)
    late = max(0.0, gather_s - ONE)
    assert found.exposed_s == pytest.approx(gather_s + 2 * late, rel=1e-3)
    assert found.by_kind["collective"] == pytest.approx(3 * gather_s)
    assert any("no computation hides" in each for each in found.rests_on)


def test_a_hidden_gather_takes_some_of_the_memory_from_the_computation() -> None:
    """Defect: communication that is free once it is hidden. The last gather's share falls to the second layer."""
    found = timed(two_layers(), 0.25 * ONE, stolen_s=0.1 * ONE)
    assert found.by_phase["forward"] == pytest.approx(0.25 * ONE + 2.2 * ONE)


def test_collectives_share_the_links() -> None:
    """Defect: a gather and a reduction on streams of their own, both at the whole rate of the links."""
    step = Step()
    step.call(GATHER, REDUCE, COMPUTE)
    step.wait(0, GATHERS)
    step.wait(0, REDUCES)
    step.call(COMPUTE)
    step.end("backward")
    step.call(STEP)
    step.end("optimizer")
    assert timed(step, 5 * ONE).by_phase["backward"] == pytest.approx(11 * ONE)


def test_the_host_waits_where_it_synchronizes() -> None:
    """Defect: gradients on their way to RAM, on whose copies a step on the CPU waits."""
    step = Step()
    step.call(GATHER)
    step.wait(HOST, GATHERS)
    step.call(COMPUTE)
    step.end("backward")
    step.call(STEP)
    step.end("optimizer")
    assert timed(step, 5 * ONE).by_phase["backward"] == pytest.approx(6 * ONE)


def test_only_the_last_micro_batch_reduces_gradients() -> None:
    """Defect: a reduce-scatter in each micro-batch of an accumulation, or the first one priced once."""
    step = Step()
    for reductions in (0, 1):
        step.end("data")
        step.call(GATHER)
        step.wait(0, GATHERS)
        step.call(COMPUTE)
        step.end("forward")
        step.call(COMPUTE)
        step.wait(REDUCES, 0)
        step.call(*[REDUCE] * reductions)
        step.end("backward")
    step.call(STEP)
    step.end("optimizer")
    two, five = (timed(step, ONE, micro_batches=count) for count in (2, 5))
    assert two.by_kind["collective"] == pytest.approx(3 * ONE)
    assert five.by_kind["collective"] == pytest.approx(6 * ONE)
    assert five.seconds.middle - two.seconds.middle == pytest.approx(9 * ONE)


def test_micro_batches_that_all_reduce_are_alike_from_the_second() -> None:
    """Defect: the first one repeated with `sync_each_batch`, or with tensor parallelism, which exchanges in each: it
    has no gradients to add to."""
    step = Step()
    for products in (1, 2):
        step.call(REDUCE)
        step.wait(0, REDUCES)
        step.end("forward")
        step.call(*[COMPUTE] * products)
        step.end("backward")
    step.call(STEP)
    step.end("optimizer")
    two, five = (timed(step, ONE, micro_batches=count) for count in (2, 5))
    assert five.seconds.middle - two.seconds.middle == pytest.approx(3 * (1 + 2) * ONE)


def test_shards_from_ram_are_no_batch() -> None:
    """Defect: the time to collate a batch for each copy of an offloaded shard."""
    shard = Operation("aten._to_copy.default", "transfer", "float32", 0, 10**9, stream=1)
    step = Step()
    step.call(shard, COMPUTE)
    step.end("backward")
    step.call(STEP)
    step.end("optimizer")
    assert timed(step, ONE).seconds.middle < 1.1 * timed(step, ONE, loader_workers=1).seconds.middle


def test_a_step_on_the_cpu_ends_the_last_micro_batch() -> None:
    """Defect: with the optimizer in RAM, the GPU has no call in its step, and what follows was taken for the only
    micro-batch."""
    step = Step()
    step.call(GATHER)
    step.wait(0, GATHERS)
    step.call(COMPUTE)
    step.end("forward")
    step.call(COMPUTE)
    step.end("backward")
    step.end("optimizer")
    step.call(STEP)
    step.end("data")
    time = timed(step, ONE)
    assert time.by_phase["forward"] == pytest.approx(2 * ONE)
    assert time.by_phase["backward"] == pytest.approx(ONE)


def test_work_without_streams_is_still_read() -> None:
    """Defect: a trace that an earlier version kept, whose operations have no stream and whose work has no waits."""
    old = '{"operations": [{"name": "a", "kind": "memory", "dtype": "", "flops": 0, "moved_bytes": 4}], "calls": [0]}'
    work = wire.loads(Work, old)
    assert work == Work([Operation("a", "memory", "", 0, 4)], [0])
    assert wire.loads(Work, wire.dumps(two_layers().work)) == two_layers().work
