"""Signals during training: what the first, its echo, and the second one do."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainingArguments

from hf_memkit.cli import run_folder
from hf_memkit.components.stopping import StopOnSignal
from hf_memkit.run import launch
from hf_memkit.run.ranks import Ranks


def step_end(stop: StopOnSignal, step: int = 2) -> TrainerControl:
    control: TrainerControl = stop.on_step_end(
        TrainingArguments(output_dir="unused", use_cpu=True, save_strategy="steps"),
        SimpleNamespace(global_step=step, max_steps=4),
        TrainerControl(),
    )
    return control


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_after_the_step_with_a_checkpoint(number: signal.Signals) -> None:
    messages: list[str] = []
    stopped: list[bool] = []
    with StopOnSignal(messages.append, lambda: stopped.append(True)) as stop:
        assert not step_end(stop).should_training_stop
        os.kill(os.getpid(), number)
        assert not stop.requested, "training stops at the end of a step"
        control = step_end(stop)
        assert control.should_training_stop and control.should_save and stop.requested == number
    assert len(messages) == 1 and stopped == [True]


@pytest.mark.parametrize(("stopped_by", "code"), [(None, 0), ("SIGINT", 130), ("SIGTERM", 143)])
def test_the_exit_code_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_by: str | None, code: int
) -> None:
    """A caller can tell a stop from a failure. memkit's own ranks receive each signal as SIGINT, and the launching
    process knows which it was."""
    monkeypatch.setattr("hf_memkit.run.training.run", lambda *_, **__: {"stopped_by": stopped_by})
    job: Any = None
    assert run_folder.train(job, Ranks(), run_folder.FolderOptions(as_json=True)) == code
    monkeypatch.setenv("MEMKIT_LAUNCH_FOLDER", str(tmp_path))
    monkeypatch.setattr("hf_memkit.run.training.run", lambda *_, **__: {"stopped_by": stopped_by and "SIGINT"})
    in_a_rank = run_folder.train(job, Ranks(), run_folder.FolderOptions(as_json=True))
    assert in_a_rank == 0, "torchrun takes any other code for a failure"
    assert launch._code_of_ranks(tmp_path, [code - 128] if code else []) == code


def test_a_signal_in_the_last_step_changes_nothing() -> None:
    with StopOnSignal(lambda line: None, lambda: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        control = step_end(stop, step=4)
        assert not stop.requested and not control.should_training_stop and not control.should_save


def test_an_echo_is_the_same_press_and_a_second_one_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("hf_memkit.components.stopping.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with StopOnSignal(lambda line: None, lambda: None):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a launcher and the terminal both pass it on
        now_s[0] = 1.1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_in_a_rank_of_memkit_s_sigterm_keeps_its_meaning() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopOnSignal(lambda line: None, lambda: None, by_memkit=True):
        assert signal.getsignal(signal.SIGTERM) == before
        assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
