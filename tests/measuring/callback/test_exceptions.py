"""Training that raises: what is recorded, what is said, and that the exception goes on as it was."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_memkit import MemoryReportCallback, oom_advice
from hf_memkit.common.terms import at
from hf_memkit.measuring.callback.oom_note import out_of_memory
from hf_memkit.measuring.memory.hooks import HookSet
from hf_memkit.measuring.memory.records import read_records
from tests.fewer import some
from tests.measuring.recorded import QUIET, hook_count
from tests.tiny_trainer import losses_of

OOM = (
    "CUDA out of memory. Tried to allocate 2.34 GiB. GPU 0 has a total capacity of 15.77 GiB of which 0.21 GiB is "
    "free. Process 12345 has 15.55 GiB memory in use. Of the allocated memory 14.01 GiB is allocated by PyTorch, and "
    "0.10 GiB is reserved by PyTorch but unallocated."
)
PHASES = ("data", "forward", "backward", "optimizer", "evaluate", "save")
ERRORS: dict[str, Callable[[], BaseException]] = {
    "out of memory": lambda: torch.OutOfMemoryError(OOM),
    "another error": lambda: ValueError("no such thing"),
    "interrupt": KeyboardInterrupt,
    "exit": lambda: SystemExit(3),
}


def fail_in(phase: str, trainer: Any, make_error: Callable[[], BaseException]) -> None:
    """From now on `trainer` raises in this phase of step 2, or after it."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise make_error()

    if phase in ("evaluate", "save"):
        mlp = trainer.model.transformer.h[1].mlp
        forward = mlp.forward
        if phase == "save":
            trainer._save_optimizer_and_scheduler = fails
        else:
            mlp.forward = lambda x: forward(x) if mlp.training else fails()
        return
    if phase == "data":
        collate = trainer.data_collator
        # With nothing prefetched, accelerate still takes one batch ahead: that of step 2 is the second or third.
        trainer.data_collator = lambda rows: fails() if trainer.state.global_step == 1 else collate(rows)
        return

    class Arm(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step != 1:
                return
            if phase == "optimizer":
                trainer.optimizer.optimizer.step = fails
            elif phase == "forward":
                trainer.model.transformer.h[1].mlp.forward = fails
            else:
                forward = trainer.model.transformer.h[1].mlp.forward
                trainer.model.transformer.h[1].mlp.forward = lambda x: FailsBackward.apply(forward(x), fails)

    trainer.add_callback(Arm())


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: Callable[[], Any]) -> torch.Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.fails()


@pytest.fixture
def shown() -> Iterator[list[BaseException]]:
    """What reaches the hook that was there before any training, as Python's own would be reached."""
    seen: list[BaseException] = []
    before = sys.excepthook
    sys.excepthook = lambda kind, error, trace: seen.append(error)
    yield seen
    sys.excepthook = before


def die(trainer: Trainer) -> BaseException:
    """Trains, and does what Python does with an exception that nobody catches."""
    try:
        trainer.train()
    except BaseException as error:
        before = (str(error), error.args, error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        assert (str(error), error.args, error.__traceback__) == before
        return error
    raise AssertionError("training did not raise")


SAVING = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


@pytest.mark.compat
@pytest.mark.parametrize(
    ("phase", "kind"),
    some(
        [(phase, kind) for phase in PHASES for kind in ERRORS],
        ("backward", "out of memory"), ("evaluate", "out of memory"), ("save", "another error"),
        ("data", "interrupt"), ("optimizer", "exit"),
    ),
)  # fmt: skip
def test_an_exception_in_each_phase(
    phase: str, kind: str, make_trainer: Any, allocator: Any, shown: list[BaseException]
) -> None:
    hook = sys.excepthook
    callback = MemoryReportCallback(readers=[allocator], **QUIET)
    trainer = make_trainer([callback], **SAVING, gradient_accumulation_steps=2)
    fail_in(phase, trainer, ERRORS[kind])
    error = die(trainer)

    assert shown == [error] and sys.excepthook is hook and hook_count(trainer.model) == 0
    assert callback.callback_errors == 0
    records = read_records(callback.path)
    assert [r["kind"] for r in records].count("end") == 1
    end = records[-1]
    assert end["kind"] == "end" and end["error_type"] == type(error).__name__
    assert end["status"] == ("interrupted" if kind in ("interrupt", "exit") else "failed")
    notes = getattr(error, "__notes__", [])
    if kind != "out of memory":
        assert not notes and callback.advice is None and not any(r["kind"] == "oom" for r in records)
        return

    oom = records[-2]
    assert oom["kind"] == "oom" and oom["phase"] == phase and oom["step"] == 2
    assert oom["error_type"] == "OutOfMemoryError" and oom["error"] == OOM and oom["cause"] == "size"
    assert oom["requested_gib"] == pytest.approx(2.34) and oom["free_gib"] == pytest.approx(0.21)
    assert oom["allocated_gib"] == 10.0  # the counters of that moment
    assert sum(oom.get("categories", {"": 10.0}).values()) == pytest.approx(10.0, abs=0.01)
    assert len(oom["changes"]) <= 3 and (oom["changes"] or phase not in ("forward", "backward"))
    assert ("micro_batch" in oom) is (phase in ("forward", "backward"))
    assert oom.get("prediction_loss_only") == (True if phase == "evaluate" else None)  # it has no compute_metrics
    (note,) = notes
    assert note.startswith(f"memkit: out of memory {at(phase, 2)}")
    assert "2.34 GiB" in note and "0.21 GiB of 15.77 GiB" in note and "Cause: size." in note
    assert note.count(". Costs: ") == len(oom["changes"]) and f"memkit explain {callback.path.parent}" in note
    assert callback.advice is not None and callback.advice.text() == note
    assert note in "".join(traceback.format_exception(error))


def run_kinds(callback: MemoryReportCallback) -> list[str]:
    assert callback.path is not None
    return [r["kind"] for r in read_records(callback.path) if r["kind"] != "modules"]


def fails_caught(make_trainer: Any, *, advised: bool = False, **options: Any) -> tuple[Any, MemoryReportCallback]:
    """A training that runs out of memory in step 2, in a script that catches that."""
    callback = MemoryReportCallback(**QUIET, **options)
    trainer = make_trainer([callback])
    fail_in("forward", trainer, ERRORS["out of memory"])
    with contextlib.suppress(torch.OutOfMemoryError), oom_advice() if advised else contextlib.nullcontext():
        trainer.train()
    return trainer, callback


def test_a_notebook(make_trainer: Any) -> None:
    """Where `sys.excepthook` is not called, and a cell is run again: new objects, the same folder."""
    undisturbed = make_trainer()
    undisturbed.train()
    trainer, failed = fails_caught(make_trainer, advised=True)
    assert failed.advice is not None and hook_count(trainer.model) == 0
    callback = MemoryReportCallback(**QUIET)
    again = make_trainer([callback])
    with oom_advice():
        again.train()
    assert losses_of(again) == losses_of(undisturbed)
    assert run_kinds(callback) == ["run", "step", "oom", "end", "run", "step", "step", "step", "end"]
    assert not any("after_oom" in record for record in read_records(callback.path))
    assert callback.advice is None and callback.callback_errors == 0


def test_advice_as_a_decorator_and_without_a_callback(make_trainer: Any) -> None:
    @oom_advice()
    def train(error: BaseException) -> None:
        raise error

    raised = RuntimeError("CUDA error: out of memory")
    with pytest.raises(RuntimeError) as caught:
        train(raised)
    assert caught.value is raised and raised.__notes__[0].startswith("memkit: out of memory.")
    with pytest.raises(RuntimeError), oom_advice():  # a second time it says nothing new
        train(raised)
    assert len(raised.__notes__) == 1
    for other in (ValueError("CUDA out of memory, they say"), RuntimeError("shapes differ"), SystemExit(3)):
        with pytest.raises(type(other)):
            train(other)
        assert not hasattr(other, "__notes__")
    with pytest.raises(torch.OutOfMemoryError) as explained:
        train(torch.OutOfMemoryError(OOM))
    (note,) = explained.value.__notes__
    assert "2.34 GiB" in note and "per_device_train_batch_size: half" in note and "MemoryReportCallback()" in note


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
                      "you tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)"), True),
        (MemoryError(), True),
        (torch.OutOfMemoryError("words of a version to come"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 2x2)"), False),
        (KeyError("out of memory"), False),
    ],
)  # fmt: skip
def test_errors_that_are_out_of_memory(error: BaseException, expected: bool) -> None:
    assert (out_of_memory(error) is not None) is expected
    try:
        try:
            raise error
        except type(error):
            raise LookupError("while cleaning up") from None
    except LookupError as later:
        result = out_of_memory(later)
        assert (result is not None and result[0] is error) is expected


def test_a_script_that_catches(make_trainer: Any, shown: list[BaseException]) -> None:
    """Not reported, like other errors that end the script. When the training is gone, its file says that it
    did not come to its end."""
    hook = sys.excepthook
    trainer, callback = fails_caught(make_trainer)
    path, recorder = callback.path, weakref.ref(callback._training.recorder)
    later = ValueError("elsewhere")
    sys.excepthook(ValueError, later, None)
    assert shown == [later] and run_kinds(callback) == ["run", "step"]
    callback.close()
    assert sys.excepthook is hook
    del callback, trainer
    gc.collect()
    assert recorder() is None
    end = read_records(path)[-1]
    assert end["kind"] == "end" and end["status"] == "failed" and "caught" in end["error"]


def press_ctrl_c(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def end_of(trainer: Any, callback: MemoryReportCallback) -> dict[str, Any]:
    """Once nothing holds the training any more."""
    path = callback.path
    trainer.callback_handler.callbacks.clear()
    callback.close()
    callback._training = None
    gc.collect()
    return read_records(path)[-1]


@pytest.mark.parametrize(("during", "status"), [(True, "interrupted"), (False, "failed")])
def test_ctrl_c_that_the_script_catches(make_trainer: Any, during: bool, status: str) -> None:
    """While it trains, or after a training that raised."""
    before = signal.getsignal(signal.SIGINT)
    callback = MemoryReportCallback(**QUIET)
    trainer = make_trainer([callback])
    trainer.model.transformer.h[1].mlp.forward = press_ctrl_c if during else lambda x: 1 / 0
    with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
        trainer.train()
    if not during:
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
    end = end_of(trainer, callback)
    assert (end["kind"], end["status"], "error_type" in end) == ("end", status, during)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("handler", "status"), [(signal.default_int_handler, "interrupted"), (lambda *_: None, "failed")]
)
def test_ctrl_c_that_becomes_another_error(make_trainer: Any, handler: Any, status: str) -> None:
    """As on a rank whose connection breaks because the signal ended another one. A handler that raises nothing has
    only asked for a stop: what fails then is a failure."""

    def breaks(*_: Any) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            press_ctrl_c()
        raise RuntimeError("Connection closed by peer")

    before = signal.signal(signal.SIGINT, handler)
    try:
        callback = MemoryReportCallback(**QUIET)
        trainer = make_trainer([callback])
        trainer.model.transformer.h[1].mlp.forward = breaks
        with pytest.raises(RuntimeError), oom_advice():
            trainer.train()
    finally:
        signal.signal(signal.SIGINT, before)
    end = read_records(callback.path)[-1]
    assert (end["status"], end["error_type"]) == (status, "RuntimeError")


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.parametrize("batch_size_finder", [True, False])
def test_begins_again_after_an_oom_that_was_caught(batch_size_finder: bool, make_trainer: Any, allocator: Any) -> None:
    """By accelerate for `auto_find_batch_size`, or by the script; then the allocator's own count tells."""

    class RunsOut(TrainerCallback):  # type: ignore[misc]
        done = False

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and not self.done:
                self.done = allocator.ooms = True
                raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

    allocator.ooms = False
    read = allocator.read
    allocator.read = lambda: {**read(), "allocator_ooms": int(allocator.ooms)}
    callback = MemoryReportCallback(readers=[allocator], **QUIET)
    trainer = make_trainer(
        [callback, RunsOut()], per_device_train_batch_size=4, auto_find_batch_size=batch_size_finder
    )
    if not batch_size_finder:
        with pytest.raises(RuntimeError):
            trainer.train()
        callback.close()
    trainer.train()
    records = read_records(callback.path)
    first, second = (r for r in records if r["kind"] == "run")
    assert "after_oom" not in first
    assert second["after_oom"] == {"step": 3, "phase": "data", "train_batch_size": 4}
    assert second["train_batch_size"] == (3 if batch_size_finder else 4)
    assert [r["kind"] for r in records].count("end") == (1 if batch_size_finder else 2)
    assert records[-1]["status"] == "finished" and hook_count(trainer.model) == 0


def test_others_in_the_chain_of_hooks_keep_their_place(make_trainer: Any, shown: list[BaseException]) -> None:
    heard: list[BaseException] = []
    bottom = sys.excepthook

    class Wraps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            before = sys.excepthook

            def hook(kind: Any, error: BaseException, trace: Any) -> None:
                heard.append(error)
                before(kind, error, trace)

            sys.excepthook = self.hook = hook

    wraps = Wraps()
    make_trainer([MemoryReportCallback(**QUIET), wraps]).train()
    assert sys.excepthook is wraps.hook  # not ours to take away
    error = ValueError("later")
    sys.excepthook(ValueError, error, None)
    assert heard == [error] and shown == [error]

    callback = MemoryReportCallback(**QUIET)
    trainer = make_trainer([callback])
    fail_in("optimizer", trainer, ERRORS["out of memory"])
    died = die(trainer)
    assert heard == [error, died] and shown == [error, died] and len(died.__notes__) == 1
    assert sys.excepthook is wraps.hook
    sys.excepthook = bottom


@pytest.mark.parametrize(
    "place",
    some(
        ["callback.exception.changes_for_run", "callback.exception.out_of_memory",
         "callback.one_training.record_exception", "memory.recorder.RunRecorder.oom_fields",
         "memory.peak_sampler.PeakSampler.at"],
        "memory.peak_sampler.PeakSampler.at",
    ),
)  # fmt: skip
def test_a_failure_in_the_advice_never_takes_the_place_of_the_error(
    make_trainer: Any, shown: list[BaseException], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    callback = MemoryReportCallback(**QUIET)
    trainer = make_trainer([callback])
    fail_in("forward", trainer, ERRORS["out of memory"])
    monkeypatch.setattr(f"hf_memkit.measuring.{place}", lambda *args, **kwargs: 1 / 0)
    error = die(trainer)
    assert shown == [error] and type(error) is torch.OutOfMemoryError and str(error) == OOM
    assert callback.callback_errors == 1 and hook_count(trainer.model) == 0
    records = read_records(callback.path)
    if "record_exception" not in place:
        assert records[-1]["error_type"] == "OutOfMemoryError"
    if place.endswith(".at"):  # what else is known of the moment
        assert (records[-2]["phase"], records[-2]["step"], records[-2]["samples"]) == ("forward", 2, 2)


@pytest.mark.parametrize("how", ["died", "advised", "caught"])
def test_the_model_of_a_training_that_raised_can_be_freed(make_trainer: Any, shown: list[Any], how: str) -> None:
    """And its hook on exceptions goes with it."""
    hook = sys.excepthook
    if how == "died":
        callback = MemoryReportCallback(**QUIET)
        trainer = make_trainer([callback])
        fail_in("forward", trainer, ERRORS["out of memory"])
        die(trainer)
        shown.clear()
    else:
        trainer, callback = fails_caught(make_trainer, advised=how == "advised")
    parts = [weakref.ref(part) for part in (*trainer.model.modules(), *trainer.model.parameters())]
    del trainer
    if how == "caught":
        del callback  # else the callback is still here; the model is not
    gc.collect()
    assert parts and all(part() is None for part in parts), HookSet._owner
    make_trainer([MemoryReportCallback(**QUIET)], max_steps=1).train()
    assert sys.excepthook is hook
