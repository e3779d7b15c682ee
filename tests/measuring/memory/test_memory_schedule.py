"""How many records and looks a long training gets."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_memkit.measuring.memory.error_barrier import ErrorBarrier
from hf_memkit.measuring.memory.peak_sampler import WatchSchedule
from hf_memkit.measuring.memory.readers.host import HostReader
from hf_memkit.measuring.memory.recorder import RunRecorder
from hf_memkit.measuring.memory.records import read_records, steps
from hf_memkit.measuring.memory.windows import SINGLE_STEPS, StepWindow, window_size


def test_windows_double() -> None:
    assert [window_size(n) for n in (0, 4_999, 5_000, 9_999, 10_000, 19_999, 20_000)] == [1, 1, 2, 2, 4, 4, 8]


def test_maxima_means_and_the_last() -> None:
    window = StepWindow()
    first = {
        "step": 1, "step_time_ms": 10.0, "tokens": 100, "longest_sequence": 50, "peak_allocated_gib": 3.0,
        "allocated_gib": 1.0, "alloc_retries": 0, "phases": {"forward": {"peak_allocated_gib": 3.0}},
    }  # fmt: skip
    second = {
        "step": 2, "step_time_ms": 20.0, "tokens": 200, "longest_sequence": 40, "peak_allocated_gib": 2.0,
        "allocated_gib": 1.5, "alloc_retries": 4, "phases": {"backward": {"peak_allocated_gib": 2.0}},
    }  # fmt: skip
    assert window.add(SINGLE_STEPS, first) == []
    (record,) = window.add(SINGLE_STEPS + 1, second)
    assert record == {
        "step": 2, "steps": 2, "step_time_ms": 15.0, "tokens": 150, "longest_sequence": 50, "peak_allocated_gib": 3.0,
        "allocated_gib": 1.5, "alloc_retries": 4,
        "phases": {"forward": {"peak_allocated_gib": 3.0}, "backward": {"peak_allocated_gib": 2.0}},
    }  # fmt: skip
    assert window.flush() == []


def test_a_watched_step_stands_alone() -> None:
    window = StepWindow()
    assert window.add(SINGLE_STEPS, {"step": 1, "step_time_ms": 4.0}) == []
    before, watched = window.add(SINGLE_STEPS + 1, {"step": 2, "step_time_ms": 6.0, "held": {}})
    assert (before["step"], before["steps"], watched["step"], watched["steps"]) == (1, 1, 2, 1)


def test_watching_costs_a_thousandth_at_most() -> None:
    schedule = WatchSchedule()
    assert [n for n in range(25) if schedule.is_due(n, 0.0)] == [0, 1, 2, 10, 20]
    schedule.watched(cost_s=0.002, now_s=100.0)
    assert not schedule.is_due(30, 101.9) and schedule.is_due(30, 102.1)
    assert schedule.is_due(SINGLE_STEPS + 40, 200.0) and not schedule.is_due(4 * SINGLE_STEPS + 20, 200.0)


MODEL, STATE = nn.Linear(4, 4), SimpleNamespace(global_step=0)


def recorder_in(folder: Path, optimizer: Any, *readers: Any) -> RunRecorder:
    """As Trainer drives it, without Trainer."""
    STATE.global_step = 0
    args = SimpleNamespace(process_index=0, world_size=1, device=torch.device("cpu"), output_dir=str(folder))
    recorder = RunRecorder(folder, args, ErrorBarrier(), readers=[HostReader(), *readers])
    recorder.train_begin(STATE, MODEL, optimizer, {})
    return recorder


@pytest.mark.slow
def test_forty_thousand_steps(tmp_path: Path, allocator: Any) -> None:
    """The file grows with the logarithm, memory not at all."""
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    recorder = recorder_in(tmp_path, optimizer, allocator)
    total, held = 40_000, []
    for step in range(1, total + 1):
        recorder.tracker.step_begin()
        recorder.tracker.move_to("forward")
        recorder.tracker.move_to("backward")
        recorder.tracker.pre_optimizer_step()
        recorder.optimizer_step(optimizer)
        STATE.global_step = step
        allocator.use(2.0 if step == 33_333 else 1.0)
        recorder.step_end(STATE)
        if step in (1_000, 20_000):
            # Only two stretches, because it makes everything several times slower.
            tracemalloc.start()
        if step in (1_500, 20_500):
            held.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
    recorder.end("finished")
    recorder.close()
    assert max(held) < 100_000
    records = steps(read_records(recorder.writer.path))
    assert sum(record["steps"] for record in records) == total
    assert len(records) < 20_000 and recorder.writer.path.stat().st_size < 16 * 2**20
    assert [r["steps"] for r in records[:SINGLE_STEPS]] == [1] * SINGLE_STEPS
    (highest,) = [r for r in records if r["peak_allocated_gib"] == 12.0]
    assert highest["step"] - highest["steps"] < 33_333 <= highest["step"]


@pytest.mark.parametrize(
    "event",
    [lambda recorder: recorder.evaluate(STATE, {}), lambda recorder: recorder.save(STATE),
     lambda recorder: recorder.end("failed"), RunRecorder.close, RunRecorder.oom_fields],
)  # fmt: skip
def test_pending_steps_are_written_at_each_other_event(tmp_path: Path, event: Any) -> None:
    recorder = recorder_in(tmp_path, None)
    recorder._steps = 4 * SINGLE_STEPS + 1
    STATE.global_step = 1
    recorder.tracker.step_begin()
    recorder.step_end(STATE)
    assert steps(read_records(recorder.writer.path)) == []
    event(recorder)
    assert [r["step"] for r in steps(read_records(recorder.writer.path))] == [1]
