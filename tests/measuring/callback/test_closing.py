"""The end of a training as its user sees it, and callbacks that are copied."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from hf_memkit import MemoryReportCallback, attach, oom_advice
from hf_memkit.measuring.callback.one_training import expect_end
from hf_memkit.measuring.callback.oom_watch import ExceptionWatch
from hf_memkit.measuring.memory.recorder import RunRecorder
from hf_memkit.measuring.memory.records import RecordWriter, read_records
from tests.measuring.recorded import QUIET, Recorded, hook_count


@pytest.mark.compat
def test_a_summary_and_a_page(recorded: Recorded) -> None:
    page = Path(recorded.trainer.args.output_dir) / "memory-report.html"
    summary = recorded.printed[recorded.printed.index("GPT2LMHeadModel") :]
    assert summary.count("\n") <= 24 and summary.count("memory-report.html") == 1 and "Finished after" in summary
    assert "GPT2LMHeadModel" in page.read_text() and "</html>" in page.read_text()


class AnotherRank(TrainerCallback):  # type: ignore[misc]
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.is_world_process_zero = False


@pytest.mark.parametrize(
    ("options", "others"),
    [({"summary": False}, []), ({"html": False}, []), ({}, [AnotherRank()])],
    ids=["no summary", "no page", "another rank"],
)
def test_either_can_be_left_out_and_only_one_rank_reports(
    options: dict[str, bool], others: list[Any], make_trainer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = MemoryReportCallback(**options)
    make_trainer([*others, callback]).train()
    assert ("GPT2LMHeadModel" in capsys.readouterr().out) is (not others and options.get("summary", True))
    assert (tmp_path / "run" / "memory-report.html").exists() is (not others and options.get("html", True))
    assert read_records(callback.path)[-1]["kind"] == "end"


def test_a_report_that_cannot_be_made(make_trainer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "memory-report.html").mkdir(parents=True)
    callback = MemoryReportCallback()
    trainer = make_trainer([callback])
    trainer.train()
    assert trainer.state.global_step == 3 and callback.callback_errors == 1
    assert "GPT2LMHeadModel" in capsys.readouterr().out  # the summary comes all the same


def test_the_allocator_snapshot_is_for_those_who_ask(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: what would be asked of it, and when."""
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module, name in (("one_training", "record_history"), ("one_training", "stop_history"),
                         ("exception", "write_snapshot")):  # fmt: skip
        reported = lambda *paths, name=name: calls.append((name, *(path.name for path in paths)))  # noqa: E731
        monkeypatch.setattr(f"hf_memkit.measuring.callback.{module}.{name}", reported)

    def train(**options: Any) -> dict[str, Any]:
        trainer = make_trainer()
        callback = attach(trainer, readers=[], **QUIET, **options)
        trainer.model.transformer.h[1].mlp.forward = lambda x: (_ for _ in ()).throw(torch.OutOfMemoryError("x"))
        with pytest.raises(torch.OutOfMemoryError), oom_advice():
            trainer.train()
        return read_records(callback.path)[-2]

    assert "snapshot" not in train() and calls == []
    assert train(oom_snapshot=True)["snapshot"] == "memory-snapshot-rank0.json"
    assert calls == [("record_history",), ("write_snapshot", "memory-snapshot-rank0.json"), ("stop_history",)]


@pytest.mark.parametrize("how", [copy.copy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_a_copied_callback_is_a_new_one(how: Any, make_trainer: Any, tmp_path: Path) -> None:
    class Copies(TrainerCallback):  # type: ignore[misc]
        copied: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            Copies.copied = how(callback)

    hook = sys.excepthook
    callback = MemoryReportCallback(tmp_path / "mine", log="none", **QUIET, run_facts={"a": 1})
    make_trainer([callback, Copies()]).train()
    copied = Copies.copied
    assert copied.path is None and copied.phase is None and copied.callback_errors == 0 and sys.excepthook is hook
    make_trainer([copied]).train()
    assert copied.path == callback.path
    runs = [record for record in read_records(callback.path) if record["kind"] == "run"]
    assert [run["facts"] for run in runs] == [{"a": 1}] * 2


def test_an_error_in_the_end_leaves_nothing_behind(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = sys.excepthook
    monkeypatch.setattr(RunRecorder, "end", lambda *args: 1 / 0)
    callback = MemoryReportCallback(**QUIET)
    trainer = make_trainer([callback])
    trainer.train()
    assert sys.excepthook is hook and callback.callback_errors == 1
    assert hook_count(trainer.model) == 0


def test_a_forked_process_does_not_end_the_training_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "memory-rank0.jsonl"
    path.touch()
    recorder = nn.Identity()  # anything that can be collected
    expect_end(recorder, RecordWriter(path), ExceptionWatch(recorder, recorder.eval))
    child = os.fork()
    if child == 0:
        del recorder  # as at the end of a data loader's worker
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and path.read_bytes() == b""
    del recorder
    assert [record["status"] for record in read_records(path)] == ["failed"]
