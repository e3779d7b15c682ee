"""The callback never breaks a training and never changes its results."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_memkit import MemoryReportCallback, attach
from hf_memkit.measuring.memory.hooks import ModelHook
from hf_memkit.measuring.memory.phases import PhaseTracker
from hf_memkit.measuring.memory.readers.host import HostReader
from hf_memkit.measuring.memory.recorder import RunRecorder
from hf_memkit.measuring.memory.records import read_records, steps
from tests.fewer import first
from tests.measuring.recorded import EVERYTHING, Recorded, hook_count
from tests.tiny_trainer import losses_of, tiny_gpt2


@pytest.mark.compat
def test_same_losses(bare: Trainer, recorded: Recorded, measured: Recorded) -> None:
    weights = bare.model.state_dict()
    for run in (recorded, measured):
        assert losses_of(run.trainer) == losses_of(bare)
        assert all(torch.equal(weight, weights[name]) for name, weight in run.trainer.model.state_dict().items())
    assert hook_count(recorded.trainer.model) == 0


OTHERS = {"__init__", "oom_fields"}


def raises(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("injected")


@pytest.mark.parametrize(
    "method",
    # What only follows an exception: test_exceptions.py.
    first(sorted({name for name, value in vars(RunRecorder).items() if inspect.isfunction(value)} - OTHERS)),
)
def test_an_error_in_any_part(
    method: str, make_trainer: Any, bare: Trainer, monkeypatch: pytest.MonkeyPatch, allocator: Any
) -> None:
    called = []
    monkeypatch.setattr(RunRecorder, method, lambda *args, **kwargs: called.append(method) or raises())
    trainer = make_trainer(**EVERYTHING)
    callback = attach(trainer, readers=[allocator])
    trainer.train()
    assert losses_of(trainer) == losses_of(bare) and trainer.state.global_step == 3
    assert called and callback.callback_errors >= 1


def test_an_error_before_the_recorder_is_asked() -> None:
    class Training:
        silent = property(raises)

    callback: Any = MemoryReportCallback()
    callback._training = Training()
    callback.on_step_begin(None, None, None)
    assert callback.callback_errors == 1


def test_an_error_in_every_method_of_a_reader(make_trainer: Any, bare: Trainer, allocator: Any) -> None:
    methods = ("capacity", "peak", "read", "reset_peak")
    for method in methods:
        setattr(allocator, method, raises)
    trainer = make_trainer(**EVERYTHING)
    callback = attach(trainer, readers=[allocator, HostReader()])
    trainer.train()
    assert losses_of(trainer) == losses_of(bare)
    records = read_records(callback.path)
    assert len(steps(records)) == 3 and all("host_rss_gib" in step for step in steps(records))
    assert records[-1]["reader_errors"] == {f"FakeAllocator.{method}": "RuntimeError: injected" for method in methods}
    assert records[-1]["callback_errors"] == 0


def test_errors_are_reported_once_and_kept_short(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PhaseTracker, "step_begin", raises)
    callback = MemoryReportCallback()
    make_trainer([callback], max_steps=8).train()
    end = read_records(callback.path)[-1]
    assert end["callback_errors"] == 8
    assert end["callback_error_messages"] == ["on_step_begin: RuntimeError: injected"] * 5
    assert len([r for r in caplog.records if r.name.startswith("hf_memkit")]) == 1


def test_the_output_folder_goes_away(make_trainer: Any, bare: Trainer) -> None:
    class Delete(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step < 3:
                assert callback.path is not None and callback.path.exists(), "it is made anew"
                shutil.rmtree(args.output_dir)
            if state.global_step == 2:
                Path(args.output_dir).write_text("a file where the folder was")

    callback = MemoryReportCallback()
    trainer = make_trainer([callback, Delete()], **{**EVERYTHING, "save_strategy": "no"})
    trainer.train()
    assert losses_of(trainer) == losses_of(bare) and callback.callback_errors == 0
    assert callback._training is not None and callback._training.recorder.writer.lost > 0


class Boom(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise ZeroDivisionError


@pytest.mark.parametrize("same_callback", [True, False])
def test_a_second_training_after_one_that_raised(make_trainer: Any, same_callback: bool) -> None:
    first = MemoryReportCallback()
    trainer = make_trainer([first, Boom()])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert hook_count(trainer.model) > 0  # Trainer told nobody
    assert first.phase == "data"
    if not same_callback:
        first.close()
        assert hook_count(trainer.model) == 0
    second = first if same_callback else MemoryReportCallback()
    again = make_trainer([second], model=trainer.model, max_steps=1)
    again.train()
    assert hook_count(again.model) == 0
    records = [record for record in read_records(second.path) if record["kind"] != "modules"]
    assert [record["kind"] for record in records] == ["run", "step", "step", "end", "run", "step", "end"]
    assert [record.get("status") for record in records if record["kind"] == "end"] == ["failed", "finished"]
    assert [step["samples"] for step in steps(records)] == [2] and "after_oom" not in records[4]


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


def compile_root(model: Any) -> None:
    model.compile(backend="eager", fullgraph=True)  # compiles `__call__`, and the hooks unless they are hidden


def compile_layers(model: Any) -> None:
    for layer in model.transformer.h:
        layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)


@pytest.fixture
def counters() -> Any:
    return importlib.import_module("torch._dynamo.utils").counters


@pytest.mark.parametrize(
    "compiled", [None, *(pytest.param(part, marks=pytest.mark.slow) for part in (compile_root, compile_layers))]
)
@pytest.mark.slow
def test_compiled_training_has_no_more_graphs(make_trainer: Any, allocator: Any, counters: Any, compiled: Any) -> None:
    result = []
    # The first run warms up: a process compiles some helpers only once.
    for callbacks in ([], [], [callback := MemoryReportCallback(readers=[allocator])]):
        torch._dynamo.reset()
        counters.clear()
        model = tiny_gpt2()
        model.loss_type = "ForCausalLM"  # else the model logs that there is none, and that breaks a graph
        if compiled is not None:
            compiled(model)
        backend = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled is None else {}
        trainer = make_trainer(callbacks, model=model, max_steps=2, **backend)
        trainer.train()
        breaks = sum(counters["graph_break"].values())
        result.append((losses_of(trainer), dict(counters["stats"]), dict(counters["frames"]), breaks))
    assert result[1] == result[2]
    step = steps(read_records(callback.path))[0]
    assert "recomputed_layers" not in step and callback.callback_errors == 0
    # A root that is one whole graph has no hooks, and then nobody sees its inputs, or when it runs.
    unseen = compiled is compile_root
    assert step.get("samples") == (None if unseen else 2) and ("phases" in step) is not unseen
    assert step["peak_allocated_gib"] == 10.0
