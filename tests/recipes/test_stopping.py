"""Signals during training: what the first, its echo, and the second one do."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainingArguments

from hf_memkit.components.stopping import StopOnSignal


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
        assert control.should_training_stop and control.should_save and stop.requested
    assert len(messages) == 1 and stopped == [True]


def test_a_signal_in_the_last_step_changes_nothing() -> None:
    with StopOnSignal(lambda line: None, lambda: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        control = step_end(stop, step=4)
        assert not stop.requested and not control.should_training_stop and not control.should_save


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_of_the_data_loader_waits_for_the_trainer_and_can_be_ended(number: signal.Signals) -> None:
    with StopOnSignal(lambda line: os._exit(3), lambda: None):
        worker = os.fork()
        if worker == 0:
            os.kill(os.getpid(), number)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    assert code == (0 if number == signal.SIGINT else -signal.SIGTERM)


def test_an_echo_is_the_same_press_and_a_second_one_stops_at_once() -> None:
    with StopOnSignal(lambda line: None, lambda: None):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a launcher and the terminal both pass it on
        time.sleep(1.1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_in_a_rank_of_memkit_s_sigterm_keeps_its_meaning() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopOnSignal(lambda line: None, lambda: None, by_memkit=True):
        assert signal.getsignal(signal.SIGTERM) == before
        assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
