"""Trainings on a disk that fills up: how they ended is known all the same, and why their records end early."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_memkit import MemoryReportCallback
from hf_memkit.measuring.callback.one_training import expect_end
from hf_memkit.measuring.callback.oom_watch import ExceptionWatch
from hf_memkit.measuring.memory.records import RecordWriter, read_records, steps
from hf_memkit.measuring.report.load import load_run
from hf_memkit.measuring.report.rank_reader import RankReader
from tests.measuring.report.synthetic_records import hosted_here

STEPS = 24
FULL, FREE = 3, 20
NO_PROCESS = 2**22 + 1
"""Linux gives no process so high a number."""


@dataclass
class SmallDisk:
    """A folder on a disk that can be filled, and freed again."""

    folder: Path
    fill: Callable[[], None]
    free: Callable[[], None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A limit on the size of files stands for a full disk: a file that grows beyond it fails as there, and one may be
    written where it has bytes already."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        size = max((path.stat().st_size for path in tmp_path.rglob("*.jsonl")), default=0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, unlimited[1]))

    def free() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    yield SmallDisk(tmp_path, fill, free)
    free()


class Fills(TrainerCallback):  # type: ignore[misc]
    """Fills the disk after step `FULL`, and frees it after step `FREE` if that is asked for."""

    def __init__(self, disk: SmallDisk, *, frees: bool = False, then: Callable[[], None] = lambda: None) -> None:
        self.disk, self.frees, self.then = disk, frees, then

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == FULL:
            self.disk.fill()
        if state.global_step == FREE and self.frees:
            self.disk.free()
        if state.global_step == STEPS:
            self.then()


def test_finished_failed_and_finished_again(
    disk: SmallDisk, make_trainer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    while_it_ran = []

    def look() -> None:
        while_it_ran.append(load_run(disk.folder).ending)

    callback = MemoryReportCallback(disk.folder)
    reader = RankReader(disk.folder / "memory-rank0.jsonl")
    make_trainer([callback, Fills(disk, then=lambda: (look(), reader.read()))], max_steps=STEPS).train()  # type: ignore[func-returns-value]
    recorded = max(step["step"] for step in steps(read_records(callback.path)))
    assert FULL <= recorded < STEPS
    (running,) = while_it_ran
    assert (running.kind, running.step) == ("running", recorded) and "cannot be written: " in running.why
    ended = load_run(disk.folder)
    assert (ended.ending.kind, ended.ending.step) == ("finished", STEPS)
    end = ended.first.end
    assert end is not None and end["lost_records"] >= STEPS - recorded
    assert f"end early, after step {recorded}: {end['write_error']}" in ended.ending.why
    assert any(
        f"during training: {end['lost_records']} " in note and end["write_error"] in note for note in ended.notes
    )
    assert f"Finished after step {STEPS}" in " ".join(capsys.readouterr().out.split())
    assert reader.attempts[-1].end is None and reader.read() and reader.attempts[-1].end == end, "for --follow"
    assert not reader.read()

    disk.free()
    make_trainer([MemoryReportCallback(disk.folder, summary=False, html=False)]).train()
    again = load_run(disk.folder)
    (earlier,) = again.first.earlier
    assert again.ending.kind == earlier[1].kind == "finished" and earlier[1].why == ended.ending.why
    assert "could not be written" not in " ".join(again.notes)


def test_a_disk_that_has_room_again(disk: SmallDisk, make_trainer: Any) -> None:
    callback = MemoryReportCallback(disk.folder, summary=False, html=False)
    make_trainer([callback, Fills(disk, frees=True)], max_steps=STEPS).train()
    run = load_run(disk.folder)
    assert run.ending.why == f"finished after step {STEPS}"
    assert run.first.end is not None and run.first.end["lost_records"] > 0
    assert any("could not be written" in note for note in run.notes)
    assert read_records(callback.path)[-1]["kind"] == "end", "in its normal place"


def writer_on(disk: SmallDisk) -> RecordWriter:
    """Of a training whose process is gone, on a disk that is full after its second step."""
    writer = RecordWriter(disk.folder / "memory-rank0.jsonl")
    writer.write("run", {"start_step": 0, "host": hosted_here(pid=NO_PROCESS, process_started=1.0)})
    for step in (1, 2):
        assert writer.write("step", {"step": step})
    disk.fill()
    for step in (3, 4):
        assert not writer.write("step", {"step": step, "pad": "x" * 100})
    return writer


def test_killed_while_the_disk_was_full(disk: SmallDisk) -> None:
    writer = writer_on(disk)
    killed = load_run(disk.folder).ending
    assert (
        killed.kind == "killed" and f"after step 2 or later: its records end there ({writer.last_error})" in killed.why
    )
    disk.free()
    assert writer.write("step", {"step": 5})
    killed = load_run(disk.folder).ending
    assert killed.kind == "killed" and "after step 5;" in killed.why, "what was lost before is not where it ended"


def test_an_error_too_long_for_the_blanks(disk: SmallDisk) -> None:
    end = {"status": "failed", "error_type": "OSError", "error": "OSError: " + "ø" * 500, "step": 4, "x": "y" * 3000}
    assert writer_on(disk).write("end", end)
    disk.free()  # before pytest writes anything
    failed = load_run(disk.folder).ending
    assert (failed.kind, failed.step) == ("failed", 4) and "with OSError: ø" in failed.why


def test_an_end_that_nothing_could_hold_is_written_later(disk: SmallDisk) -> None:
    class Recorder:
        def raised(self, error: BaseException) -> None:
            """Nothing raises here."""

    recorder, writer = Recorder(), RecordWriter(disk.folder / "memory-rank0.jsonl")
    disk.fill()
    assert not writer.write("run", {"start_step": 0, "pad": "x" * 5000})  # nor are there blanks
    expect_end(recorder, writer, ExceptionWatch(recorder, recorder.raised))
    assert not writer.write("end", {"status": "finished", "step": 9, "pad": "x" * 5000}) and writer.owed
    disk.free()
    del recorder
    gc.collect()
    (end,) = read_records(writer.path)
    assert (end["status"], end["step"]) == ("finished", 9)
