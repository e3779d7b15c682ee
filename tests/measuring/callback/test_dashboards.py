"""Numbers in the dashboards that people use: the real ones, read back from what they wrote."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_memkit import MemoryReportCallback, attach
from hf_memkit.common.errors import SettingError
from hf_memkit.measuring.callback.numbers_of_ranks import RankSample
from hf_memkit.measuring.memory.readers.host import HostReader
from tests.measuring.recorded import QUIET, Recorded, with_peaks

FEW = {"peak_allocated_gib", "peak_reserved_gib", "fragmentation_gib", "peak_reserved_percent", "headroom_gib"}


@pytest.fixture
def readers(allocator: Any) -> list[Any]:
    read = allocator.read
    allocator.read = lambda: {**read(), "fragmentation_gib": 1.0}
    return [allocator, HostReader()]


def ours(log: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in log.items() if key.startswith("memory/")}


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


@pytest.mark.compat
def test_log_history_and_trainer_state(measured: Recorded) -> None:
    few = {f"memory/{name}" for name in FEW - {"fragmentation_gib"}}
    state = Path(measured.trainer.args.output_dir) / "checkpoint-3" / "trainer_state.json"
    for history in (measured.trainer.state.log_history, json.loads(state.read_text())["log_history"]):
        assert sum("loss" in entry for entry in history) == 3
        for entry in history:
            assert ours(entry).keys() == (few if "loss" in entry else set())
            assert all(type(value) is float for value in ours(entry).values())
            assert "loss" not in entry or entry["memory/headroom_gib"] == 0.0


@pytest.fixture
def dashboards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """wandb, and what reads trackio's logs: both imported, with their folders in the test's."""
    for name in ("TENSORBOARD_LOGGING_DIR", "WANDB_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(name, str(tmp_path))  # trackio reads it when it is imported
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    return importlib.import_module("wandb"), importlib.import_module("trackio.sqlite_storage").SQLiteStorage


def test_every_dashboard(make_trainer: Any, readers: list[Any], tmp_path: Path, dashboards: tuple[Any, Any]) -> None:
    wandb, trackio = dashboards
    trainer = make_trainer(report_to=["tensorboard", "wandb", "trackio"], run_name="one")
    attach(trainer, readers=readers, **QUIET)
    trainer.train()
    summary = dict(wandb.run.summary)
    wandb.finish()
    wandb.teardown()  # its threads end too
    few = {f"train/memory/{name}" for name in FEW}
    scalars = tensorboard_scalars(tmp_path)
    assert {tag for tag in scalars if "memory" in tag} == {key for key in summary if "memory/" in key} == few
    assert scalars["train/memory/peak_allocated_gib"] == [(1, 10.0), (2, 10.0), (3, 10.0)]
    assert scalars["train/memory/peak_reserved_percent"][0][1] == pytest.approx(68.75)  # 11 of 16 GiB
    assert summary["train/memory/headroom_gib"] == pytest.approx(5.0)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    logged = [row for row in trackio.get_logs("huggingface", "one") if "train/loss" in row]
    assert [row["train/memory/peak_allocated_gib"] for row in logged] == [10.0, 10.0, 10.0]


def test_a_plain_callback_says_what_it_cannot_reach(
    make_trainer: Any, readers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    callback = MemoryReportCallback(readers=readers, **QUIET)
    trainer = make_trainer([callback], report_to="tensorboard", max_steps=1)
    with caplog.at_level(logging.WARNING, "hf_memkit"):
        trainer.train()
        trainer.train()
    assert not any("memory" in tag for tag in tensorboard_scalars(tmp_path / "tb"))
    assert all(ours(entry) for entry in trainer.state.log_history if "loss" in entry)
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("hf_memkit")]
    assert "tensorboard" in message and "attach(trainer)" in message
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hf_memkit"):
        attach(trainer).close()
        trainer.train()  # attached now
    assert not [record for record in caplog.records if record.name.startswith("hf_memkit")]
    assert {tag for tag in tensorboard_scalars(tmp_path / "tb") if "memory" in tag} == {
        f"train/memory/{name}" for name in FEW
    }


def test_attach_takes_the_options_of_the_callback() -> None:
    options = list(inspect.signature(attach).parameters.values())[1:]
    assert options == list(inspect.signature(MemoryReportCallback).parameters.values())


def test_a_plain_callback_is_silent_where_it_misses_nothing(
    make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Without a dashboard, and where it logs nothing."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    with caplog.at_level(logging.WARNING, "hf_memkit"):
        make_trainer([MemoryReportCallback(**QUIET)], max_steps=1).train()
        make_trainer([MemoryReportCallback(log="none", **QUIET)], report_to="tensorboard", max_steps=1).train()
    assert not [record for record in caplog.records if record.name.startswith("hf_memkit")]


def test_how_many_keys(make_trainer: Any, readers: list[Any]) -> None:
    result = {}
    for log in ("all", "none"):
        trainer = with_peaks(make_trainer(max_steps=1), readers[0])
        attach(trainer, log=log, readers=readers, **QUIET)
        trainer.train()
        result[log] = ours(next(entry for entry in trainer.state.log_history if "loss" in entry))
    assert result["none"] == {} and {f"memory/{name}" for name in FEW} < result["all"].keys()
    assert {"memory/host_rss_gib", "memory/weights_gib", "memory/other_gib"} <= result["all"].keys()
    assert result["all"]["memory/forward_peak_allocated_gib"] == 12 and result["all"]["memory/allocated_gib"] == 10
    assert all(type(value) in (int, float) for value in result["all"].values())
    with pytest.raises(SettingError, match=r"log='al'.*did you mean 'all'"):
        MemoryReportCallback(log="al")  # type: ignore[arg-type]


def test_the_highest_since_the_last_logging_step(make_trainer: Any, allocator: Any) -> None:
    class Uses(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            allocator.use({0: 1.0, 1: 3.0, 2: 2.0, 3: 0.5}[state.global_step])

    trainer = make_trainer([Uses()], max_steps=4, logging_steps=2, gradient_accumulation_steps=2)
    attach(trainer, readers=[allocator], **QUIET)
    trainer.train()
    logged = [entry["memory/peak_allocated_gib"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [13.0, 12.0]


def test_a_rank_that_fell_silent_is_left_out(
    make_trainer: Any, allocator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is heard of until the logging step after its last numbers; and the exchange ends with the training."""
    closed: list[bool] = []
    last = {1: RankSample(1, {"peak_allocated_gib": 9.0}, -60.0)}
    others = SimpleNamespace(publish=lambda *given: None, latest=lambda: last, close=lambda: closed.append(True))
    monkeypatch.setattr("hf_memkit.measuring.callback.one_training.join_ranks", lambda: others)
    trainer = make_trainer()
    attach(trainer, readers=[allocator], **QUIET)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry.get("memory/ranks_heard") for entry in logged] == [1, 1, None] and closed
