"""Activation checkpointing in each way: the same numbers as without it, and the parts that do what Trainer cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_memkit.components import checkpoint_offload, checkpoint_selective, verify_checkpointing
from hf_memkit.setup.build.trainer import build_arguments, install_model_parts, trainer_options
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import find_technique
from tests.techniques.checkpointed_models import LAYERS, WAYS, model_of, one_pass, with_lora
from tests.techniques.jobs import gpt2_job
from tests.techniques.proving import proves

ALL = [way for way in WAYS if way != "none"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("way", ALL)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "lora"])
def test_one_pass_gives_the_same_numbers(way: str, kind: str) -> None:
    """Bit for bit, with dropout: the masks of the forward pass come back. Undone, the model is as before."""
    model = with_lora(model_of("llama")) if kind == "lora" else model_of(kind, dropout=0.1)
    before = one_pass(model)
    undo = WAYS[way](model)
    during = one_pass(model)
    again = one_pass(model)
    undo()
    after = one_pass(model)
    assert before.gradients
    for actual in (during, again, after):
        assert torch.equal(actual.hidden, before.hidden)
        assert actual.gradients.keys() == before.gradients.keys()
        assert all(torch.equal(actual.gradients[name], value) for name, value in before.gradients.items())


def setup_of(technique: str, **values: Any) -> Setup:
    setup = find_technique(technique)(Setup(preset=technique, job=gpt2_job(None, values=values)))
    if technique != "offloaded-checkpointing":
        return setup
    # What a rehearsal puts in its place on a CPU, where no memory can be pinned.
    assert setup["arguments.activation_checkpointing_kwargs"]["offload"] is True
    setup = setup.put("arguments.activation_checkpointing", False, "CPU")
    return setup.put("model_parts.checkpoint_offload", {"pin_memory": False}, "CPU")


def train(setup: Setup, folder: Path, model: Any = None, **more: Any) -> tuple[list[float], Trainer]:
    """Losses of a real Trainer, and the Trainer."""
    model = model_of("gpt2", dropout=0.1) if model is None else model
    own = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 2,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "save_strategy": "no",
    }  # fmt: skip
    arguments = build_arguments(setup, own)
    install_model_parts(model, setup)
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (16, 16), generator=generator)]
    options = trainer_options(setup, model=model, arguments=arguments, own={"train_dataset": rows, **more})
    trainer = Trainer(model=model, args=arguments, **options)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Any]]:
    losses, trainer = train(Setup(preset="none"), tmp_path_factory.mktemp("plain"))
    return losses, {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.slow
@proves(
    "same-result",
    "activation-checkpointing",
    "every-nth-layer-checkpointing",
    "selective-checkpointing",
    "offloaded-checkpointing",
)
@pytest.mark.parametrize("technique", ALL)
def test_trainer_ends_with_the_same_weights(technique: str, plain: Any, tmp_path: Path) -> None:
    losses, trainer = train(setup_of(technique), tmp_path)
    assert losses == plain[0]
    assert all(torch.equal(value, plain[1][name]) for name, value in trainer.model.state_dict().items())
    (callback,) = [c for c in trainer.callback_handler.callbacks if type(c).__name__ == "VerifyCheckpointing"]
    expected = LAYERS // 2 if technique == "every-nth-layer-checkpointing" else LAYERS
    assert (callback.layers, callback.recomputed) == (LAYERS, expected)
    assert not callback._handles


def test_parts_refuse_what_they_cannot_do() -> None:
    plain_model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"Linear .*GradientCheckpointingLayer"):
        checkpoint_selective.install(plain_model)
    if torch.accelerator.current_accelerator() is None:
        with pytest.raises(ValueError, match="pin_memory=True"):
            checkpoint_offload.install(model_of("gpt2"))


def test_offloading_moves_the_inputs_of_the_layers_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.Size] = []

    class Counting(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, **_: Any) -> None:
            super().__init__(lambda tensor: moved.append(tensor.shape) or tensor, lambda tensor: tensor)

    monkeypatch.setattr(checkpoint_offload, "save_on_cpu", Counting)
    model = model_of("llama")
    checkpoint_offload.install(model, pin_memory=False)
    result = one_pass(model)
    assert [shape for shape in moved if len(shape) == 3] == [result.hidden.shape] * LAYERS
    assert all(shape.numel() <= 1 for shape in moved if len(shape) != 3)  # torch's own marker


class Evaluating(TrainerCallback):  # type: ignore[misc]
    """Keeps a block in evaluation mode, as models do that freeze a part of themselves; Trainer calls `train()`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        block = model.transformer.h[2].eval()
        block.train = lambda mode=True: block


class Switching(TrainerCallback):  # type: ignore[misc]
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for block in model.transformer.h:
            block.gradient_checkpointing = False


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([Evaluating()], r"1 of 6 layers .*model\.train\(\)"),
        ([Switching()], "6 of 6 layers .*gradient_checkpointing is False"),
    ],
)
def test_checkpointing_that_does_not_happen_is_an_error(callbacks: list[Any], message: str, tmp_path: Path) -> None:
    model = model_of("gpt2", dropout=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=message):
        train(setup_of("activation-checkpointing"), tmp_path, model, callbacks=callbacks)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # before the first step


def test_lora_in_a_model_with_frozen_lower_layers_is_verified(tmp_path: Path) -> None:
    """Layers without anything to train below the first trained one have no backward, and none is asked for."""
    model = with_lora(model_of("gpt2"))
    for name, parameter in model.named_parameters():
        if ".h.0." in name or ".h.1." in name:
            parameter.requires_grad_(False)
    _, trainer = train(setup_of("selective-checkpointing"), tmp_path, model)
    (callback,) = [c for c in trainer.callback_handler.callbacks if type(c).__name__ == "VerifyCheckpointing"]
    assert (callback.layers, callback.recomputed) == (LAYERS - 2, LAYERS - 2)


def test_compiled_layers_are_not_counted() -> None:
    class Compiled:
        torch_compile = True

    given = {"model": nn.Linear(1, 1), "processing_class": None, "arguments": Compiled()}
    assert verify_checkpointing.trainer_options(**given) == {}


def test_offloaded_checkpointing_is_taken_back_whole() -> None:
    model = model_of("gpt2")
    before = [dict(vars(module)) for module in model.modules()]
    undo = checkpoint_offload.install(model, pin_memory=False)
    assert model.is_gradient_checkpointing
    undo()
    assert not model.is_gradient_checkpointing
    assert [vars(module).keys() for module in model.modules()] == [each.keys() for each in before]
