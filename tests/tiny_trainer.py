"""A real Trainer on a real, tiny GPT-2, on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hf_memkit.catalog.library_versions import to_installed_arguments
from tests.record_shape import misfits_in

LAYERS = 2


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    # With dropout, a callback that changes the random state changes the losses.
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=LAYERS, n_head=2, vocab_size=64, n_positions=16))


def samples(count: int = 64, length: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (length,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def trainer_in(
    folder: Path, callbacks: Iterable[Any] = (), *, model: Any = None, trainer_class: Any = Trainer, **arguments: Any
) -> Trainer:
    settings = {
        "output_dir": str(folder / "run"),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        **arguments,
    }
    trainer: Trainer = trainer_class(
        model=model if model is not None else tiny_gpt2(),
        args=TrainingArguments(**to_installed_arguments(settings)),
        train_dataset=samples(),
        eval_dataset=samples(4),
        callbacks=list(callbacks),
    )
    return trainer


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Makes Trainers; checks that all their records have the types of `hf_memkit.measuring.record_types`."""
    yield functools.partial(trainer_in, tmp_path)
    assert not misfits_in(tmp_path)


def losses_of(trainer: Trainer) -> list[float]:
    """The losses that Trainer logged, for exact comparison."""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses += [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses
    return losses


class FakeAllocator:
    """A memory reader that returns a GPU allocator's figures without a GPU; the test sets them."""

    def __init__(self) -> None:
        self.device: torch.device | None = torch.device("cpu")  # the device on which the weights count
        self.resident_gib = self.high_gib = 10.0
        self.resets = 0

    def use(self, extra_gib: float) -> None:
        """Allocates and frees this much in addition."""
        self.high_gib = max(self.high_gib, self.resident_gib + extra_gib)

    def read(self) -> dict[str, float]:
        return {"allocated_gib": self.resident_gib, "reserved_gib": self.resident_gib + 1}

    def peak(self) -> dict[str, float]:
        return {"peak_allocated_gib": self.high_gib, "peak_reserved_gib": self.high_gib + 1}

    def reset_peak(self) -> None:
        self.resets += 1
        self.high_gib = self.resident_gib

    def capacity(self) -> dict[str, float]:
        return {"capacity_gib": 16.0}


@pytest.fixture
def allocator() -> FakeAllocator:
    return FakeAllocator()
