"""Chooses the optimizer steps to trace, with batches of the user's data, and describes them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from hf_memkit.prediction.child.trainer_kinds.online import mixes_answers
from hf_memkit.prediction.child.trainer_kinds.sft import padding_free_change
from hf_memkit.prediction.child.training.batches import (
    ChosenBatches,
    chosen_batches,
    first_batches,
    longest_row,
    shapes_of,
    without_padding,
)
from hf_memkit.prediction.child.training.plan_facts import why_padding_needed
from hf_memkit.prediction.child.training.traced_batches import Batches, on_host
from hf_memkit.prediction.traced_training import BatchShapes, PlanFacts

STEPS: Final = 2  # two, because optimizer states exist from the end of the first step on

FLASH: Final = "flash_attention_2"


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step to trace: a batch for each micro-batch."""

    kind: str  # `"typical"`, `"worst"`, or the setting that the user would change
    batches: Batches
    flash: bool = False  # whether to compute it with flash attention
    own_answers: bool = True  # whether it trains on the model's own answers, if that is random (`mixes_answers`)


@dataclass(frozen=True, slots=True)
class ChosenSteps:
    """Steps to trace, in order."""

    steps: Sequence[Step]
    chosen: ChosenBatches | None = None  # the batches; None: the loader's first
    shapes: BatchShapes | None = None  # the batches in words; None: all have about the same size

    @property
    def worst(self) -> Batches:
        return [batch for step in self.steps if step.kind == "worst" for batch in step.batches]

    @property
    def required(self) -> int:
        """How many steps must be traced: all up to the last worst one."""
        return 1 + max(number for number, step in enumerate(self.steps) if step.kind == "worst")

    def size(self) -> tuple[int | None, int | None]:
        """(rows, tokens per row) of the largest of the worst batches; None if it has no tokens."""
        ids = [batch["input_ids"] for batch in self.worst if isinstance(batch, Mapping) and "input_ids" in batch]
        shapes = [tuple(tensor.shape) for tensor in ids if isinstance(tensor, torch.Tensor)]
        largest = max((shape for shape in shapes if len(shape) > 1), key=math.prod, default=(None, None))
        return largest[0], largest[-1]

    def notes(self) -> Iterator[str]:
        """Sentences about the batches."""
        if self.chosen is not None:
            yield f"traced: {self.chosen.description}"
            if self.chosen.unreadable is not None:
                row, why = self.chosen.unreadable
                yield f"row {row:,} of the training data cannot be read ({why}): a run stops there"

    def added_to(self, plan: PlanFacts) -> PlanFacts:
        """The plan's facts with those about the batches."""
        plan = replace(plan, tokens={step.kind: _tokens(step.batches) for step in self.steps})
        if self.chosen is None:
            return plan
        padding = replace(plan.padding, share=self.chosen.padding, longest_row=longest_row(self.chosen.worst))
        return replace(plan, padding=padding, rows_digest=self.chosen.digest, mean=dict(self.chosen.mean))


def chosen_steps(trainer: Any, accumulation: int, *, worst: bool, on_gpu: bool) -> ChosenSteps:
    """Two steps with typical batches, then the worst, then batches that would need less; only the worst if all batches
    have about the same size. `worst`: False: the loader's first batches; `on_gpu`: flash attention is available."""
    loader = on_host(trainer.get_train_dataloader())
    if not worst:
        batches = first_batches(loader, STEPS * accumulation)
        starts = range(0, len(batches), accumulation)
        return ChosenSteps([Step("worst", batches[start : start + accumulation]) for start in starts])
    chosen = chosen_batches(loader)

    def steps_of(kind: str, *batches: Any, flash: bool = False) -> list[Step]:
        filled = list(itertools.islice(itertools.cycle(batches), max(len(batches), accumulation)))
        parts = [filled[start : start + accumulation] for start in range(0, len(filled), accumulation)]
        return [Step(kind, [*part, *part][:accumulation], flash) for part in parts]

    worst_steps = steps_of("worst", chosen.worst, *chosen.others)
    on_data = [replace(step, own_answers=False) for step in worst_steps] if mixes_answers(trainer) else []
    shapes = shapes_of(chosen)
    if shapes is None:
        return ChosenSteps([*worst_steps, *on_data, *worst_steps * (STEPS - 1)], chosen)
    steps = [*steps_of("typical", chosen.typical) * STEPS, *on_data, *worst_steps]
    arguments = trainer.args
    rows, own = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    if chosen.half is not None and chosen.rows == rows:  # else the argument does not set the batch size
        label = f"per_device_train_batch_size={rows // 2} and gradient_accumulation_steps={2 * own}"
        steps += steps_of(label, chosen.half)
    if chosen.cut is not None:
        steps += steps_of(f"rows of at most {chosen.cut[1]:,} tokens", chosen.cut[0])
    change = ""
    if on_gpu and not why_padding_needed(trainer):
        change = padding_free_change(trainer, longest_row(chosen.worst), FLASH)
    if change and (unpadded := without_padding(chosen.worst)) is not None:
        steps += steps_of(change, unpadded, flash=True)
    return ChosenSteps(steps, chosen, shapes)


def _tokens(batches: Batches) -> float | None:
    counts = []
    for batch in (batch for batch in batches if isinstance(batch, Mapping)):
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if isinstance(ids, torch.Tensor):
            same = isinstance(mask, torch.Tensor) and mask.shape == ids.shape
            counts.append(int(mask.sum()) if mask is not None and same else ids.numel())
    return sum(counts) / len(counts) if counts else None
