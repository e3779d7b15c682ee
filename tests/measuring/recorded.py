"""Trainings that many tests read: without memkit, with its callback as users have it, and with an allocator."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import Trainer

from hf_memkit import MemoryReportCallback, attach
from hf_memkit.measuring.memory.readers.host import HostReader
from hf_memkit.measuring.memory.recorder import RunRecorder
from hf_memkit.measuring.memory.records import read_records
from tests.record_shape import misfits_in
from tests.tiny_trainer import FakeAllocator, trainer_in

EVERYTHING: dict[str, Any] = {
    "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True,
    "save_strategy": "steps", "save_steps": 2, "optim_args": "foreach=False",
}  # fmt: skip
QUIET: dict[str, Any] = {"summary": False, "html": False}
PREDICTED = {"peak_allocated_gib": 0.5, "categories": {"weights_gib": 0.25}}


@dataclass(frozen=True)
class Recorded:
    """A training that has ended, its records, the phases in the order in which they ended, and what was printed."""

    trainer: Trainer
    callback: MemoryReportCallback
    records: list[dict[str, Any]]
    boundaries: list[str]
    printed: str

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]


def note_boundaries(patch: pytest.MonkeyPatch) -> list[str]:
    """The phases from now on, in the order in which they end."""
    ended: list[str] = []
    original = RunRecorder._on_boundary

    def note(self: RunRecorder, phase: Any) -> None:
        ended.append(phase)
        original(self, phase)

    patch.setattr(RunRecorder, "_on_boundary", note)
    return ended


def record(trainer: Trainer, callback: MemoryReportCallback) -> Recorded:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        boundaries = note_boundaries(patch)
        trainer.train()
    assert callback.path is not None and callback.callback_errors == 0 and not misfits_in(callback.path.parent)
    return Recorded(trainer, callback, read_records(callback.path), boundaries, printed.getvalue())


def with_peaks(trainer: Trainer, allocator: FakeAllocator) -> Trainer:
    """Loading takes 3 GiB, forward 2, backward 5, the optimizer 1 on top of what is resident; evaluation takes 7."""
    allocator.use(3)
    model = trainer.model
    model.lm_head.register_forward_hook(lambda module, args, out: allocator.use(2 if module.training else 7))
    model.transformer.wpe.weight.register_post_accumulate_grad_hook(lambda parameter: allocator.use(5))
    trainer.create_optimizer()
    trainer.optimizer.register_step_post_hook(lambda *_: allocator.use(1))
    return trainer


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """After a training without any callback of ours."""
    trainer = trainer_in(tmp_path_factory.mktemp("bare"), **EVERYTHING)
    trainer.train()
    return trainer


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """By the callback alone, on a CPU."""
    callback = MemoryReportCallback(run_facts={"recipe": "tiny"}, prediction=PREDICTED)
    folder = tmp_path_factory.mktemp("recorded")
    return record(trainer_in(folder, [callback], **EVERYTHING, disable_tqdm=False), callback)


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """With the callback attached, and the numbers that a GPU's allocator would have."""
    allocator = FakeAllocator()
    trainer = with_peaks(trainer_in(tmp_path_factory.mktemp("measured"), **EVERYTHING), allocator)
    return record(trainer, attach(trainer, readers=[allocator, HostReader()], **QUIET))


def hook_count(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
