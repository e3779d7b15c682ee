"""The callback never breaks a training and never changes its results."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_memkit import MemoryReportCallback, attach, oom_advice
from hf_memkit.measuring.memory.hooks import ModelHook
from hf_memkit.measuring.memory.readers.base import MemoryReader
from hf_memkit.measuring.memory.readers.host import HostReader
from hf_memkit.measuring.memory.recorder import RunRecorder
from hf_memkit.measuring.memory.records import read_records, steps
from tests.fewer import first

EVERYTHING = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}


def hook_count(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def methods_of(cls: type) -> list[str]:
    return sorted(name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("__"))


@pytest.fixture
def bare(make_trainer: Any, losses: Any) -> list[float]:
    """The losses without any callback of ours."""
    trainer = make_trainer(**EVERYTHING)
    trainer.train()
    return losses(trainer)


@pytest.mark.compat
@pytest.mark.parametrize("checkpointing", [False, True])
def test_same_losses(make_trainer: Any, losses: Any, bare: list[float], checkpointing: bool, allocator: Any) -> None:
    without = make_trainer(**EVERYTHING, activation_checkpointing=checkpointing)
    without.train()
    with_ours = make_trainer(**EVERYTHING, activation_checkpointing=checkpointing)
    attach(with_ours, readers=[allocator, HostReader()])
    with_ours.train()
    assert losses(with_ours) == losses(without)
    for name, weight in with_ours.model.state_dict().items():
        assert torch.equal(weight, without.model.state_dict()[name]), name


def trains_and_raises(trainer: Any) -> None:
    """So that what only follows an exception is called too."""
    forward = trainer.model.forward

    @functools.wraps(forward)
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    trainer.model.forward = fails
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory. Tried to allocate 2.00 GiB"),
        oom_advice(),
    ):
        trainer.train()


CALLBACK_METHODS = [name for name in methods_of(MemoryReportCallback) if name.startswith("on_")]
RECORDER_METHODS = methods_of(RunRecorder)
READER_METHODS = sorted(name for name in methods_of(MemoryReader) if not name.startswith("_"))


def test_the_lists_below_are_not_empty() -> None:
    assert {"on_train_begin", "on_step_end", "on_train_end"} <= set(CALLBACK_METHODS) and len(CALLBACK_METHODS) >= 11
    assert {"train_begin", "step_end", "_on_forward", "_on_boundary"} <= set(RECORDER_METHODS)
    assert READER_METHODS == ["capacity", "peak", "read", "reset_peak"]


def raises(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("injected")


@pytest.mark.parametrize("method", first(RECORDER_METHODS))
def test_an_error_in_any_part(
    method: str, make_trainer: Any, losses: Any, bare: list[float], monkeypatch: pytest.MonkeyPatch, allocator: Any
) -> None:
    called = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        called.append(method)
        raise RuntimeError("injected")

    monkeypatch.setattr(RunRecorder, method, fail)
    trainer = make_trainer(**EVERYTHING, save_strategy="steps", save_steps=2)
    callback = attach(trainer, readers=[allocator])
    trainer.train()
    assert losses(trainer) == bare and trainer.state.global_step == 3
    if method == "oom_fields":
        trains_and_raises(trainer)
    assert called and callback.callback_errors >= 1


class Broken:
    """Stands for anything an event works with."""

    def __getattribute__(self, name: str) -> Any:
        if name == "superseded":
            return False
        raise RuntimeError("injected")


@pytest.mark.parametrize("event", first(CALLBACK_METHODS))
def test_an_error_in_any_event(event: str, make_trainer: Any, losses: Any, bare: list[float]) -> None:
    callback = MemoryReportCallback()
    original = getattr(callback, event)
    called = []

    def with_broken_parts(*args: Any, **kwargs: Any) -> Any:
        called.append(event)
        training = callback._training
        if training is not None:
            training.recorder = Broken()  # type: ignore[assignment]
        result = original(Broken(), Broken(), Broken(), **dict.fromkeys((*kwargs, "logs", "metrics"), Broken()))
        assert callback.callback_errors >= 1
        return result

    setattr(callback, event, with_broken_parts)
    trainer = make_trainer([callback], **EVERYTHING, save_strategy="steps", save_steps=2)
    trainer.train()
    assert called and losses(trainer) == bare and trainer.state.global_step == 3


@pytest.mark.parametrize("method", READER_METHODS)
def test_an_error_in_any_reader_method(
    method: str, make_trainer: Any, losses: Any, bare: list[float], allocator: Any
) -> None:
    setattr(allocator, method, raises)
    trainer = make_trainer(**EVERYTHING)
    callback = attach(trainer, readers=[allocator, HostReader()])
    trainer.train()
    assert losses(trainer) == bare
    records = read_records(callback.path)
    assert len(steps(records)) == 3 and all("host_rss_gib" in step for step in steps(records))
    assert records[-1]["reader_errors"] == {f"FakeAllocator.{method}": "RuntimeError: injected"}
    assert records[-1]["callback_errors"] == 0
    if method == "read":
        assert "allocated_gib" not in steps(records)[0] and "peak_allocated_gib" in steps(records)[0]


def test_errors_are_reported_once_and_kept_short(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RunRecorder, "step_begin", raises)
    callback = MemoryReportCallback()
    make_trainer([callback], max_steps=8).train()
    end = read_records(callback.path)[-1]
    assert (
        end["callback_errors"] == 8 and end["callback_error_messages"] == ["on_step_begin: RuntimeError: injected"] * 5
    )
    assert len([r for r in caplog.records if r.name.startswith("hf_memkit")]) == 1


def test_the_output_folder_goes_away(make_trainer: Any, losses: Any, bare: list[float], tmp_path: Path) -> None:
    class Delete(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                shutil.rmtree(args.output_dir)
            if state.global_step == 2:
                shutil.rmtree(args.output_dir)
                Path(args.output_dir).write_text("a file where the folder was")

    callback = MemoryReportCallback()
    trainer = make_trainer([callback, Delete()], **EVERYTHING)
    trainer.train()
    assert losses(trainer) == bare and callback.callback_errors == 0
    assert callback._training is not None and callback._training.recorder.writer.lost > 0


class Boom(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError


@pytest.mark.compat
def test_hooks_are_gone_after_training(make_trainer: Any) -> None:
    trainer = make_trainer([MemoryReportCallback()])
    trainer.train()
    assert hook_count(trainer.model) == 0


@pytest.mark.parametrize("same_callback", [True, False])
def test_a_second_training_after_one_that_raised(make_trainer: Any, same_callback: bool, tmp_path: Path) -> None:
    first = MemoryReportCallback()
    trainer = make_trainer([first, Boom()])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert hook_count(trainer.model) > 0  # Trainer told nobody
    assert first.phase == "data"
    second = first if same_callback else MemoryReportCallback()
    again = make_trainer([second], model=trainer.model)
    again.train()
    assert hook_count(again.model) == 0
    assert [s["samples"] for s in steps(read_records(second.path))] == [2, 2, 2]


def test_close_removes_the_hooks_of_a_training_that_raised(make_trainer: Any) -> None:
    callback = MemoryReportCallback()
    trainer = make_trainer([callback, Boom()])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    callback.close()
    assert hook_count(trainer.model) == 0


@pytest.mark.slow
@pytest.mark.compat
def test_training_that_begins_again_without_an_end(make_trainer: Any) -> None:
    """As auto_find_batch_size does after an OOM."""

    class RunsOut(TrainerCallback):
        done = False

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and not self.done:
                self.done = True
                raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

    callback = MemoryReportCallback()
    trainer = make_trainer([callback, RunsOut()], per_device_train_batch_size=4, auto_find_batch_size=True)
    trainer.train()
    records = read_records(callback.path)
    assert [r["kind"] for r in records].count("run") == 2
    found = [s["samples"] for s in steps(records)]
    assert len(found) == 3 and len(set(found)) == 1 and found[0] < 4
    assert hook_count(trainer.model) == 0


def test_a_copied_or_pickled_model_reports_nothing(make_trainer: Any) -> None:
    copies: list[Any] = []

    class Copy(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            copies.extend((copy.deepcopy(model), pickle.loads(pickle.dumps(model))))
            for copied in copies:
                copied.train()(input_ids=torch.zeros(1, 4, dtype=torch.long))

    callback = MemoryReportCallback()
    make_trainer([callback, Copy()], max_steps=2).train()
    assert [s["samples"] for s in steps(read_records(callback.path))] == [2, 2] and len(copies) == 4
    assert not any(isinstance(hook, ModelHook) for hook in copies[0]._forward_pre_hooks.values())


def compile_root(model: Any, **how: Any) -> None:
    model.compile(backend="eager", **how)  # compiles `__call__`, and with it the hooks unless they are hidden


def compile_forward(model: Any, **how: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager", **how)


def compile_layers(model: Any, **how: Any) -> None:
    for layer in model.transformer.h:
        layer.forward = torch.compile(layer.forward, backend="eager", **how)


@pytest.mark.parametrize(
    ("compiled", "whole"),
    [
        (None, False),
        pytest.param(compile_root, False, marks=pytest.mark.slow),
        (compile_root, True),
        *(pytest.param(part, True, marks=pytest.mark.slow) for part in (compile_forward, compile_layers)),
    ],
)
def test_compiled_training_has_no_more_graphs(
    make_trainer: Any, losses: Any, new_model: Any, allocator: Any, compiled: Any, whole: bool
) -> None:
    from torch._dynamo.utils import counters

    found = []
    # The first run warms up: a process compiles some helpers only once.
    for callbacks in ([], [], [callback := MemoryReportCallback(readers=[allocator])]):
        torch._dynamo.reset()
        counters.clear()
        model = new_model()
        model.loss_type = "ForCausalLM"  # else the model logs that there is none, and that breaks a graph
        if compiled is not None:
            compiled(model, fullgraph=whole)
        backend = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled is None else {}
        trainer = make_trainer(callbacks, model=model, max_steps=2, **backend)
        trainer.train()
        breaks = sum(counters["graph_break"].values())
        found.append((losses(trainer), dict(counters["stats"]), dict(counters["frames"]), breaks))
    assert found[1] == found[2]
    step = steps(read_records(callback.path))[0]
    assert "recomputed_layers" not in step and callback.callback_errors == 0
    # A root that is one whole graph has no hooks, and then nobody sees its inputs, or when it runs.
    unseen = whole and compiled is compile_root
    assert step.get("samples") == (None if unseen else 2) and ("phases" in step) is not unseen
    assert step["peak_allocated_gib"] == 10.0
