from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import Trainer

from hf_memkit import MemoryReportCallback, attach
from hf_memkit.measuring.memory.records import read_records, steps
from hf_memkit.measuring.memory.windows import LogNumbers
from tests.measuring.recorded import Recorded, note_boundaries, with_peaks


@pytest.fixture
def boundaries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return note_boundaries(monkeypatch)


@pytest.mark.compat
def test_order_with_accumulation_and_an_evaluation_before(recorded: Recorded) -> None:
    step = ["data", "forward", "backward", "data", "forward", "backward", "optimizer"]
    assert recorded.boundaries[:19] == ["load", "evaluate", *step, *step, "evaluate", "save", *step[:1]]


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


@pytest.mark.compat
def test_each_phase_has_its_own_peak(measured: Recorded) -> None:
    assert measured.of("run")[0]["phases"] == {"load": {"peak_allocated_gib": 13, "peak_reserved_gib": 14}}
    for step in measured.of("step"):
        assert {phase: peak["peak_allocated_gib"] for phase, peak in step["phases"].items()} == {
            "data": 10, "forward": 12, "backward": 15, "optimizer": 11,
        }  # fmt: skip
        assert step["peak_allocated_gib"] == 15 and step["peak_reserved_gib"] == 16
        assert step["capacity_gib"] == 16 and step["allocated_gib"] == 10
    for evaluate in measured.of("evaluate"):
        assert evaluate["phases"] == {"evaluate": {"peak_allocated_gib": 17, "peak_reserved_gib": 18}}
    assert measured.records[-1]["peak_allocated_gib"] == 17


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


def test_headroom_is_what_others_leave() -> None:
    numbers = LogNumbers()
    step = {"peak_reserved_gib": 10.0, "capacity_gib": 16.0, "reserved_gib": 8.0}
    for reported in ({"device_used_gib": 11.0}, {}):  # NVML is not asked at every step
        numbers.step({**step, **reported})
        assert numbers.take()["headroom_gib"] == 16 - 10 - (11 - 8)
