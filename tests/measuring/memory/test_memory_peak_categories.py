"""Categories at the peak of real trainings, against a count of every storage by the time it was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from hf_memkit import attach
from hf_memkit.measuring.memory.records import read_records, steps
from hf_memkit.measuring.memory.timeline import Moment, Segment, categories_of
from tests.measuring.memory.live_storages import GIB, LiveStorages
from tests.tiny_trainer import trainer_in

pytestmark = pytest.mark.compat

LENGTH, BATCH, LAYERS = 32, 4, 4


class Labels(TrainerCallback):  # type: ignore[misc]
    """Labels storages with what Trainer is doing when they are made, by hooks of the test's own."""

    def __init__(self, live: LiveStorages, model: Any, head: Any) -> None:
        self.live = live
        self.peaks: list[dict[str, int]] = []
        model.register_forward_pre_hook(lambda *_: self.say("body"))
        head.register_forward_pre_hook(self.at_head)

    def say(self, label: str) -> None:
        self.live.label = label

    def at_head(self, module: Any, args: Any) -> None:
        self.say("loss")
        if args[0].requires_grad:
            args[0].register_hook(lambda _: self.say("backward"))

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.say("data")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.say("optimizer")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.say("data")
        self.peaks.append(self.live.end_step())


class Result(NamedTuple):
    """Bytes by category and by label, step for step; the trained model."""

    steps: list[dict[str, int]]
    records: list[dict[str, Any]]
    labels: list[dict[str, int]]
    model: Any


Train = Callable[..., Result]


@pytest.fixture
def train(tmp_path: Any) -> Train:
    def run(
        vocabulary: int = 64,
        *,
        length: int = LENGTH,
        tied: bool = True,
        wrap: Callable[[Any], Any] = lambda model: model,
        **settings: Any,
    ) -> Result:
        torch.manual_seed(0)
        config = GPT2Config(
            n_embd=32, n_layer=LAYERS, n_head=2, vocab_size=vocabulary, n_positions=LENGTH, tie_word_embeddings=tied,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = wrap(GPT2LMHeadModel(config))
        rows = [torch.randint(0, vocabulary, (length,)) for _ in range(64)]
        with LiveStorages() as live:
            trainer = trainer_in(tmp_path, model=model, **{"per_device_train_batch_size": BATCH, **settings})
            trainer.train_dataset = [{"input_ids": row, "labels": row.clone()} for row in rows]
            for tensor in (*model.parameters(), *model.buffers()):
                live.track(tensor)
            callback = attach(trainer, readers=[live], summary=False, html=False)
            labels = Labels(live, model, model.get_output_embeddings())
            trainer.add_callback(labels)
            trainer.train()
        assert callback.callback_errors == 0 and callback.path is not None
        records = steps(read_records(callback.path))
        categories = [{name[:-4]: round(gib * GIB) for name, gib in r["categories"].items()} for r in records]
        return Result(categories, records, labels.peaks, model)

    return run


def bytes_of(parameters: Any) -> int:
    return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parameters}.values())


def check_sums(result: Result) -> None:
    for categories, record, labels in zip(result.steps, result.records, result.labels, strict=True):
        peak = round(record["peak_allocated_gib"] * GIB)
        assert sum(categories.values()) == pytest.approx(peak, abs=4) and min(categories.values()) >= 0
        assert peak == pytest.approx(sum(labels.values()), abs=1)  # the phases bracket the true peak
        assert categories["weights"] == pytest.approx(bytes_of(result.model.parameters()), abs=1)


def test_loss_of_a_large_vocabulary(train: Train) -> None:
    """The peak is in the loss: there, activations and loss are exact."""
    result = train(4096)
    check_sums(result)
    weights = bytes_of(result.model.parameters())
    for number, (categories, labels) in enumerate(zip(result.steps, result.labels, strict=True)):
        assert categories["activations"] == pytest.approx(labels["body"], abs=16)
        assert categories["loss"] == pytest.approx(labels["loss"], abs=16)
        assert categories["loss"] > 2 * BATCH * LENGTH * 4096 * 4  # logits, and as much again
        assert categories["gradients"] == 0
        assert categories["optimizer"] == pytest.approx(0 if number == 0 else 2 * weights, rel=0.01)
        assert categories["other"] < 0.01 * sum(categories.values())


@pytest.mark.parametrize("settings", [{}, {"tied": False}, {"gradient_accumulation_steps": 2}], ids=str)
def test_activations_at_a_peak_in_backward(train: Train, settings: dict[str, Any]) -> None:
    result = train(64, **settings)
    check_sums(result)
    accumulating = settings.get("gradient_accumulation_steps", 1) > 1
    trained = bytes_of(result.model.parameters())
    for categories, labels in zip(result.steps, result.labels, strict=True):
        layer = categories["activations"] / LAYERS
        assert labels["body"] - 1 <= categories["activations"] <= labels["body"] + 1.2 * layer
        assert categories["loss"] == 0
        if accumulating:
            assert categories["gradients"] == pytest.approx(trained, abs=1)
        else:
            assert categories["gradients"] < trained / 2
        assert categories["other"] < 0.15 * sum(categories.values())


def test_checkpointed_layers_keep_their_inputs_only(train: Train) -> None:
    plain, checkpointed = train(64), train(64, activation_checkpointing=True)
    check_sums(checkpointed)
    hidden = BATCH * LENGTH * 32 * 4
    for categories, labels, before in zip(checkpointed.steps, checkpointed.labels, plain.steps, strict=True):
        assert categories["activations"] < before["activations"] / 3
        assert abs(categories["activations"] - labels["body"]) <= hidden
        assert categories["loss"] == 0


def test_lora(train: Train) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    result = train(4096, wrap=lambda model: get_peft_model(model, config))
    check_sums(result)
    adapters = bytes_of(p for p in result.model.parameters() if p.requires_grad)
    # What enters a frozen output embedding is not kept, and freed while the loss is computed.
    hidden = BATCH * LENGTH * 32 * 4
    for categories, labels in zip(result.steps[1:], result.labels[1:], strict=True):
        assert categories["loss"] == pytest.approx(labels["loss"], abs=hidden + 16)
        assert categories["activations"] == pytest.approx(labels["body"], abs=hidden + 16)
        assert categories["optimizer"] == pytest.approx(2 * adapters, rel=0.05)


def test_peak_in_the_optimizer(train: Train) -> None:
    """Temporaries of a step that updates all tensors at once are `other`; nothing of forward is left."""
    result = train(
        4096, length=4, wrap=lambda model: model.bfloat16(), per_device_train_batch_size=1, optim="adamw_torch",
        optim_args="foreach=True",
    )  # fmt: skip
    check_sums(result)
    weights = bytes_of(result.model.parameters())
    at_optimizer = [n for n, r in enumerate(result.records) if is_highest(r, "optimizer")]
    assert at_optimizer
    for number in at_optimizer:
        categories = result.steps[number]
        assert categories["activations"] == categories["loss"] == 0
        assert categories["gradients"] == pytest.approx(weights, abs=1)
        assert categories["optimizer"] == pytest.approx(2 * weights, rel=0.01)


def is_highest(record: dict[str, Any], phase: str) -> bool:
    return bool(record["phases"][phase]["peak_allocated_gib"] == record["peak_allocated_gib"])


def test_gradients_that_come_before_the_loss_is_through_are_no_loss() -> None:
    """Such as the output embedding's. Of 100 bytes 40 were there before forward, and 20 of the rest are gradients."""
    segment = Segment(
        "loss", peak=100, start=Moment(80, gradients=30), base=Moment(40, gradients=10), activations=20, losses=0,
        body_start=None,
    )  # fmt: skip
    categories = categories_of(segment, {("weights", "device"): 10})
    assert (categories["weights"], categories["gradients"], categories["activations"], categories["loss"]) == (
        10,
        30,
        20,
        20,
    )
    assert categories["other"] == 20
