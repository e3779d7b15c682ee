from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_memkit import MemoryReportCallback, attach
from hf_memkit.measuring.memory.recorder import RunRecorder
from hf_memkit.measuring.memory.records import read_records, steps
from hf_memkit.measuring.memory.windows import LogNumbers


@pytest.fixture
def boundaries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The phases in the order in which they ended."""
    ended: list[str] = []
    original = RunRecorder._on_boundary

    def note(self: RunRecorder, phase: Any) -> None:
        ended.append(phase)
        original(self, phase)

    monkeypatch.setattr(RunRecorder, "_on_boundary", note)
    return ended


@pytest.mark.compat
@pytest.mark.parametrize("checkpointing", [False, True])
def test_order_with_accumulation(make_trainer: Any, boundaries: list[str], checkpointing: bool) -> None:
    trainer = make_trainer(
        [MemoryReportCallback()],
        max_steps=2,
        gradient_accumulation_steps=2,
        activation_checkpointing=checkpointing,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    step = ["data", "forward", "backward", "data", "forward", "backward", "optimizer", "evaluate", "save"]
    assert boundaries == ["load", *step, *step]


class OwnLoss(Trainer):
    """Takes the logits and leaves the model's own loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        logits = model(**inputs).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


class LossOutside(OwnLoss):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


class OfAnotherOutput(Trainer):  # type: ignore[misc]
    """As TRL's SFTTrainer: the model gives a loss, and what is trained on is another of its outputs."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return model(**inputs).log_probs.mean()


def with_log_probs(module: Any, args: Any, output: Any) -> Any:
    output["log_probs"] = output.logits.log_softmax(-1)
    return output


@pytest.mark.parametrize("trainer_class", [OwnLoss, LossOutside])
def test_losses_of_the_users_own(make_trainer: Any, boundaries: list[str], trainer_class: type[Trainer]) -> None:
    callback = MemoryReportCallback()
    trainer = make_trainer([callback], trainer_class=trainer_class, max_steps=1, activation_checkpointing=True)
    trainer.train()
    assert boundaries == ["load", "data", "forward", "backward", "optimizer"]
    assert steps(read_records(callback.path))[0]["recomputed_layers"] == 2


def test_where_deepspeed_steps_in_backward(
    make_trainer: Any, boundaries: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_memkit.measuring.memory.facts.is_deepspeed", lambda *_: True)
    make_trainer([MemoryReportCallback()], max_steps=1).train()
    assert boundaries == ["load", "data", "forward", "backward", "optimizer"]  # the hook on the optimizer inside


def with_peaks(trainer: Trainer, allocator: Any) -> Trainer:
    """Forward takes 2 GiB, backward 5 and the optimizer 1 on top of what is resident; evaluation takes 7."""
    model = trainer.model
    model.lm_head.register_forward_hook(lambda module, args, out: allocator.use(2 if module.training else 7))
    model.transformer.wpe.weight.register_post_accumulate_grad_hook(lambda parameter: allocator.use(5))
    trainer.create_optimizer()
    trainer.optimizer.register_step_post_hook(lambda *_: allocator.use(1))
    return trainer


def test_each_phase_has_its_own_peak(make_trainer: Any, allocator: Any) -> None:
    allocator.use(3)  # loading
    trainer = with_peaks(make_trainer(gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2), allocator)
    callback = attach(trainer, readers=[allocator])
    trainer.train()
    records = read_records(callback.path)
    assert records[0]["phases"] == {"load": {"peak_allocated_gib": 13, "peak_reserved_gib": 14}}
    for step in steps(records):
        assert {phase: peak["peak_allocated_gib"] for phase, peak in step["phases"].items()} == {
            "data": 10, "forward": 12, "backward": 15, "optimizer": 11,
        }  # fmt: skip
        assert step["peak_allocated_gib"] == 15 and step["peak_reserved_gib"] == 16
        assert step["capacity_gib"] == 16 and step["allocated_gib"] == 10
    evaluate = next(r for r in records if r["kind"] == "evaluate")
    assert evaluate["phases"] == {"evaluate": {"peak_allocated_gib": 17, "peak_reserved_gib": 18}}
    assert records[-1]["peak_allocated_gib"] == 17


def test_without_phases_the_counter_is_left_alone(make_trainer: Any, allocator: Any) -> None:
    trainer = with_peaks(make_trainer(), allocator)
    callback = attach(trainer, readers=[allocator], phases=False)
    trainer.train()
    assert allocator.resets == 0
    step = steps(read_records(callback.path))[0]
    assert step["peak_allocated_gib"] == 15 and "phases" not in step and step["samples"] == 2


class Generates(Trainer):  # type: ignore[misc]
    """Passes without gradients before the step's own, as a reference model or generation makes them."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            model(**inputs)
            model.eval()
            model(**inputs)
        return super().training_step(model.train(), inputs, *args, **kwargs)


class ReferenceBetween(Trainer):  # type: ignore[misc]
    """Two forwards with gradients and one without between them; the loss is computed outside, as DPO does."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        first = model(input_ids=inputs["input_ids"]).logits
        with torch.no_grad():
            model(input_ids=inputs["input_ids"])
        second = model(input_ids=inputs["input_ids"]).logits
        return (first.logsumexp(-1) - second.mean(-1)).mean()


@pytest.mark.parametrize("trainer_class", [Generates, OfAnotherOutput])
def test_one_pass_with_gradients_is_the_step_s(
    make_trainer: Any, boundaries: list[str], trainer_class: type[Trainer]
) -> None:
    trainer = make_trainer([MemoryReportCallback()], trainer_class=trainer_class, max_steps=1)
    trainer.model.register_forward_hook(with_log_probs)  # before ours
    trainer.train()
    assert boundaries == ["load", "data", "forward", "backward", "optimizer"]


def test_several_forwards_of_one_micro_batch(make_trainer: Any, boundaries: list[str], allocator: Any) -> None:
    trainer = make_trainer(trainer_class=ReferenceBetween, max_steps=1, activation_checkpointing=True)
    callback = attach(trainer, readers=[allocator])
    trainer.train()
    assert boundaries == ["load", "data", "forward", "backward", "forward", "backward", "optimizer"]
    step = steps(read_records(callback.path))[0]
    assert step["recomputed_layers"] == 4  # not those of the pass without gradients
    assert step["micro_batches"] == 1 and step["samples"] == 4


def test_evaluation_before_training(make_trainer: Any, boundaries: list[str]) -> None:
    make_trainer(
        [MemoryReportCallback()], max_steps=1, eval_strategy="steps", eval_steps=1, eval_on_start=True
    ).train()
    step = ["data", "forward", "backward", "optimizer"]
    assert boundaries == ["load", "evaluate", *step, "evaluate"]


def test_a_second_training_does_not_begin_with_the_peak_of_the_first(make_trainer: Any, allocator: Any) -> None:
    class Boom(Exception): ...

    def fail(*_: Any) -> None:
        allocator.use(4)
        raise Boom

    trainer = make_trainer()
    callback = attach(trainer, readers=[allocator])
    handle = trainer.model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(Boom):
        trainer.train()
    handle.remove()
    trainer.train()
    runs = [record for record in read_records(callback.path) if record["kind"] == "run"]
    assert len(runs) == 2 and runs[1]["phases"]["load"]["peak_allocated_gib"] == 10


def test_a_parameter_that_a_model_returns_gets_no_hook(make_trainer: Any) -> None:
    trainer = make_trainer([MemoryReportCallback()])
    forward, scale = trainer.model.forward, trainer.model.transformer.ln_f.weight

    @functools.wraps(forward)
    def returns_its_scale(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output["scale"] = scale
        return output

    trainer.model.forward = returns_its_scale
    trainer.train()
    assert not scale._backward_hooks


@pytest.mark.parametrize("log", ["few", "all"])
def test_numbers_of_a_dashboard(make_trainer: Any, allocator: Any, log: Any) -> None:
    trainer = with_peaks(make_trainer(logging_steps=2, max_steps=4), allocator)
    callback = attach(trainer, readers=[allocator], log=log)
    seen: list[dict[str, float]] = []

    class Ask(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            allocator.use(3 if state.global_step == 2 else 0)
            if state.global_step in (2, 4):
                assert callback._training is not None
                seen.append(callback._training.recorder.log_numbers())

    trainer.add_callback(Ask())
    trainer.train()
    few = {"peak_allocated_gib": 15, "peak_reserved_gib": 16, "peak_reserved_percent": 100, "headroom_gib": 0}
    assert len(seen) == 2
    for numbers in seen:
        assert few.items() <= numbers.items()
        if log == "few":
            assert numbers == few
        else:
            assert numbers["forward_peak_allocated_gib"] == 12 and numbers["allocated_gib"] == 10
            assert {"weights_gib", "other_gib"} <= numbers.keys()


def test_headroom_is_what_others_leave() -> None:
    numbers = LogNumbers()
    step = {"peak_reserved_gib": 10.0, "capacity_gib": 16.0, "reserved_gib": 8.0}
    for told in ({"device_used_gib": 11.0}, {}):  # NVML is not asked at every step
        numbers.step({**step, **told})
        assert numbers.take()["headroom_gib"] == 16 - 10 - (11 - 8)
