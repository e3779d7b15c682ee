"""How small the GPU may be, and the interval of reserved bytes."""

from __future__ import annotations

import pytest

from hf_memkit.common.terms import CATEGORIES
from hf_memkit.common.units import MIB
from hf_memkit.prediction.allocator import capacity
from hf_memkit.prediction.allocator.capacity import CAP_STEP, perturbed, reserved_interval, smallest_cap
from hf_memkit.prediction.allocator.replay import replay
from hf_memkit.prediction.allocator.settings import AllocatorSettings, parse_settings
from hf_memkit.prediction.trace.edit import ExtraAllocation, edited
from hf_memkit.prediction.trace.trace import Trace
from tests.prediction.traces import random_trace, trace_of

OPTIONS = ("", "expandable_segments:True", "max_split_size_mb:32")


def test_the_smallest_cap_counts_what_can_go_back() -> None:
    # 30 are freed before 40 come: where there is room, 70 are held, and 12 are cut from the free 30. Where there is
    # not, the 30 go back, and 40 + 12 are enough.
    trace = trace_of([1, -1, 2, 3], [30 * MIB, 40 * MIB, 12 * MIB])
    assert replay(trace).peak_reserved_bytes == 70 * MIB
    assert smallest_cap(trace) == 52 * MIB
    assert smallest_cap(trace_of([], [])) == 0


@pytest.mark.parametrize("text", OPTIONS)
@pytest.mark.parametrize("seed", [0, 6])
def test_the_smallest_cap_and_all_above_it(text: str, seed: int) -> None:
    """Every cap is tried here: from the answer on, all complete."""
    settings, _ = parse_settings(text)
    trace = random_trace(seed, 600)
    free = replay(trace, settings)
    cap = smallest_cap(trace, settings)
    assert cap % CAP_STEP == 0
    assert free.peak_requested_bytes <= cap <= free.peak_reserved_bytes
    assert not replay(trace, settings, cap - CAP_STEP).completed
    for larger in range(cap, free.peak_reserved_bytes + CAP_STEP, CAP_STEP):
        assert replay(trace, settings, larger).completed


def test_where_more_memory_does_not_help_the_search_goes_on_above() -> None:
    """83 steps complete, with 82 failing. But 87 fails too, and 88 is the answer."""
    trace = random_trace(6, 300)
    done = {steps: replay(trace, cap_bytes=steps * CAP_STEP).completed for steps in range(82, 140)}
    assert [steps for steps, completed in done.items() if not completed] == [82, 87]
    assert smallest_cap(trace) == 88 * CAP_STEP


def test_after_a_long_walk_the_search_is_by_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = [random_trace(seed, 300) for seed in range(6)]
    walked = [smallest_cap(trace) for trace in traces]
    monkeypatch.setattr(capacity, "_MAX_REPLAYS", 1)
    assert [smallest_cap(trace) for trace in traces] == walked


def test_where_torch_sets_the_limit_collection_belongs_to_it() -> None:
    settings = AllocatorSettings(garbage_collection_threshold=0.6, memory_fraction=0.5)
    trace = random_trace(2, 600)
    cap = smallest_cap(trace, settings)
    limited = replay(trace, settings, allowed_bytes=cap)
    assert limited.completed and limited.peak_reserved_bytes <= cap
    assert limited != replay(trace, AllocatorSettings(), cap)  # something was collected


@pytest.mark.parametrize("text", OPTIONS)
def test_the_interval_holds_what_replays_hold(text: str) -> None:
    settings, _ = parse_settings(text)
    trace = random_trace(4, 1000)
    low, high = reserved_interval(trace, settings)
    assert (low, high) == reserved_interval(trace, settings, smallest_cap_bytes=smallest_cap(trace, settings))
    assert low <= smallest_cap(trace, settings) <= replay(trace, settings).peak_reserved_bytes <= high
    assert reserved_interval(trace, settings, replays=0)[1] == replay(trace, settings).peak_reserved_bytes
    for seed in range(6):
        assert replay(perturbed(trace, seed), settings).peak_requested_bytes > 0


def test_a_perturbed_trace_is_of_the_same_job() -> None:
    trace = _with_workspaces(random_trace(7, 900))
    for seed in range(4):
        other = perturbed(trace, seed)
        assert other.events != trace.events and other.events == perturbed(trace, seed).events
        count = len(trace.sizes_bytes)
        assert other.sizes_bytes[:count] == trace.sizes_bytes
        assert {event for event in other.events if abs(event) <= count} == set(trace.events)
        assert [event for event in other.events if -count <= event < 0] == [
            event for event in trace.events if event < 0
        ]
        assert 0 < len(other.sizes_bytes) - count < 60
        assert max(other.sizes_bytes[count:]) <= 2 * MIB
        assert [phase for _, phase in other.marks] == [phase for _, phase in trace.marks]
        for (end, _), (mark, _) in zip(trace.marks, other.marks, strict=True):
            before = {event for event in other.events[:mark] if abs(event) <= count}
            early = {count - 1, count} if seed % 2 else set()
            assert before == set(trace.events[:end]) | early
        made: set[int] = set()
        for event in other.events:
            assert event > 0 or -event in made  # nothing is freed before it is made
            made.add(event)
    assert perturbed(trace, 1).events[:2] == [trace.events[-2], trace.events[-1]]


def _with_workspaces(trace: Trace) -> Trace:
    """The trace with two storages of the category `buffers` at its end, which are never freed."""
    for _ in range(2):
        trace.sizes_bytes.append(8 * MIB)
        trace.category_of.append(CATEGORIES.index("buffers"))
        trace.operation_of.append(0)
        trace.module_of.append(0)
        trace.events.append(len(trace.sizes_bytes))
    return trace


def test_operations_make_their_results_in_another_order() -> None:
    trace = trace_of([1, 2, 3, -1, 4], [MIB] * 4)
    trace.operations = ["one", "two"]
    trace.operation_of = [0, 0, 1, 0]
    orders = {tuple(perturbed(trace, seed).events[:3]) for seed in range(0, 12, 2)}
    assert {(1, 2, 3), (2, 1, 3)} <= orders  # 1 and 2 are of one operation, 3 is of another
    assert all(order[2] == 3 for order in orders if set(order) == {1, 2, 3})


def test_a_trace_keeps_its_streams() -> None:
    """Two requests of 4 and 8 MiB share a segment of 20 MiB on one stream, and not on two. Would notice: a smallest
    cap, a part or a copy of a trace that forgets them."""
    trace = trace_of([1, 2], [4 * MIB, 8 * MIB], [(2, "forward")])
    assert smallest_cap(trace) == replay(trace).peak_reserved_bytes == 20 * MIB
    trace.stream_of = [0, 1]
    for each in (trace, trace.only((0, 2)), edited(trace, [])):
        assert each.stream_of == [0, 1]
        assert smallest_cap(each) == replay(each).peak_reserved_bytes == 40 * MIB
    assert edited(trace, [ExtraAllocation(512, "buffers", "a buffer")]).stream_of == [0, 0, 1]
