"""A real Trainer on counted memory. In: a case. Out: the records of its callback, and what no record tells."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.diagnosis.counted_memory import CountedMemory
from benchmarks.diagnosis.generated_runs import GeneratedRun, truth
from benchmarks.diagnosis.simulated_job import Hidden
from hf_memkit.callback import MemoryReportCallback
from hf_memkit.compat import to_installed_arguments
from hf_memkit.memory.records import read_records, steps
from hf_memkit.units import GIB

_SCALE = 1024
_VOCABULARY = 64
_POSITIONS = 64

Hoard = list[torch.Tensor]
"""What a case keeps and should not: the truth about its leak, and the leak."""


@dataclass(frozen=True)
class RealCase:
    """One training of a tiny GPT-2."""

    name: str
    lengths: Sequence[int]
    """Of the samples, in the order in which they come."""
    meant: frozenset[str] = frozenset()
    """The kinds of the states that it is made to show."""
    capacity_gib: float = 1.0
    """Of the GPU on which its bytes are laid, each counted `_SCALE` times."""
    batch: int = 2
    arguments: Mapping[str, Any] = field(default_factory=dict)
    habit: Callable[[Trainer, Hoard], None] | None = None
    """What a user has added to the Trainer."""
    adapt: Callable[[nn.Module], nn.Module] | None = None
    killed_at: int | None = None
    """Ends after this step, and is resumed by another process from its last checkpoint."""


class _Samples(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, lengths: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(1)
        self._rows = [torch.randint(1, _VOCABULARY, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def _padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Dynamic padding: a batch is as long as its longest sample."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100), "attention_mask": (ids != 0).long()}


class _Watch(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
    """By step, what no record tells."""

    def __init__(self) -> None:
        self.leaked: dict[int, int] = {}
        self.highest: dict[int, int] = {}
        self.memory: CountedMemory | None = None
        self.hoard: Hoard = []
        self.last_step: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.memory is not None
        self.leaked[state.global_step] = self.memory.bytes_of(self.hoard)
        self.highest[state.global_step] = self.memory.highest_so_far()
        control.should_training_stop |= state.global_step == self.last_step


def train(case: RealCase, folder: Path) -> GeneratedRun:
    """Trains it. Out: what a diagnosis gets, and what it must find.

    Raises:
        AssertionError: the case does not show what it is made to show.
    """
    watch = _Watch()
    if case.killed_at is not None:
        _one_process(case, folder, watch, stop_at=case.killed_at)
    _one_process(case, folder, watch, resume=case.killed_at is not None)
    records = read_records(folder / "memory-rank0.jsonl")
    found = steps(records)
    none = [0] * len(found)
    hidden = Hidden(
        leaked=[watch.leaked[record["step"]] for record in found],
        others=none,
        peak=[round(record["peak_allocated_gib"] * GIB) for record in found],
        reserved=[round(record["reserved_gib"] * GIB) for record in found],
        outside=none,
        highest=[watch.highest[record["step"]] for record in found],
        measured=[False] * len(found),
    )
    capacity = int(case.capacity_gib * GIB)
    states = truth(found, hidden, capacity, meant=case.meant)
    kinds = frozenset(state.kind for state in states) if states is not None else None
    figures = {
        "steps": len(found),
        "highest peak": max(hidden.peak) / capacity,
        "highest reserved": max(hidden.reserved) / capacity,
        "leaked": max(hidden.leaked) / capacity,
        "retries": found[-1]["alloc_retries"],
    }
    assert kinds == case.meant, f"{case.name}: shows {kinds}; {json.dumps(figures)}"
    run = next(record for record in reversed(records) if record["kind"] == "run")
    return GeneratedRun(case.name, [dict(step) for step in found], run, states or ())


def _one_process(
    case: RealCase, folder: Path, watch: _Watch, *, stop_at: int | None = None, resume: bool = False
) -> None:
    """A process: what the one before has kept is gone, and its counters start anew."""
    watch.memory, watch.hoard, watch.last_step = CountedMemory(int(case.capacity_gib * GIB), scale=_SCALE), [], stop_at
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=_VOCABULARY, n_positions=_POSITIONS, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = GPT2LMHeadModel(config)
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "num_train_epochs": 1,
        "per_device_train_batch_size": case.batch,
        "train_sampling_strategy": "sequential",
        "log_level": "error",
        "save_strategy": "no",
        "logging_strategy": "no",
        **case.arguments,
    }
    trainer = Trainer(
        model=case.adapt(model) if case.adapt is not None else model,
        args=TrainingArguments(**to_installed_arguments(arguments)),
        train_dataset=_Samples(case.lengths),
        eval_dataset=_Samples([max(case.lengths)] * 4),
        data_collator=_padded,
        callbacks=[MemoryReportCallback(folder, summary=False, html=False, readers=[watch.memory]), watch],
    )
    trainer.remove_callback(PrinterCallback)
    if case.habit is not None:
        case.habit(trainer, watch.hoard)
    with watch.memory.counting(trainer.model):
        trainer.train(resume_from_checkpoint=resume)
    assert not watch.memory.full, f"{case.name}: its GPU is too small"
