from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Trainer

from hf_memkit.callback import MemoryReportCallback, attach
from hf_memkit.memory import read_records, steps
from hf_memkit.memory.recorder import RunRecorder


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
    monkeypatch.setattr("hf_memkit.memory.facts.is_deepspeed", lambda *_: True)
    make_trainer([MemoryReportCallback()], max_steps=1).train()
    assert boundaries == ["load", "data", "forward", "backward"]


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


def test_categories_add_up_to_the_peak(make_trainer: Any, allocator: Any) -> None:
    trainer = with_peaks(make_trainer(), allocator)
    callback = attach(trainer, readers=[allocator])
    trainer.train()
    gib = 2**30
    weights = sum(p.numel() * 4 for p in trainer.model.parameters())
    first, second, third = (step["categories"] for step in steps(read_records(callback.path)))
    for categories in (first, second, third):
        assert set(categories) == {"weights_gib", "gradients_gib", "optimizer_gib", "other_gib"}
        assert sum(categories.values()) == pytest.approx(15, rel=1e-12) and min(categories.values()) >= 0
        assert categories["weights_gib"] == pytest.approx(weights / gib)
        assert categories["gradients_gib"] == pytest.approx(weights / gib)
    assert first["optimizer_gib"] == 0  # the peak was in the first backward, before Adam made its states
    assert second["optimizer_gib"] == third["optimizer_gib"] == pytest.approx(2 * weights / gib, rel=0.01)
