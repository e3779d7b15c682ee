"""Which optimizer steps are traced, with which batches of the user's data, and what is to be said of these."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from hf_memkit.prediction.child.trainer_kinds.online import draws_whose_answers
from hf_memkit.prediction.child.trainer_kinds.sft import padding_free_change
from hf_memkit.prediction.child.training.batches import (
    Chosen,
    chosen_batches,
    first_batches,
    longest_row,
    shapes_of,
    without_padding,
)
from hf_memkit.prediction.child.training.plan_facts import needs_padding
from hf_memkit.prediction.child.training.traced_batches import Batches, on_host
from hf_memkit.prediction.traced_training import BatchShapes, PlanFacts

STEPS: Final = 2
"""Optimizer states exist from the end of the first step on: the second step has them all along."""

FLASH: Final = "flash_attention_2"


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step to trace: a batch for each micro-batch.

    Attributes:
        kind: `"usual"`, `"worst"`, or what the user would change for it.
        flash: whether the model computes it with flash attention, whatever it has.
        own_answers: where chance decides (`draws_whose_answers`), whether it trains on the model's own answers.
    """

    kind: str
    batches: Batches
    flash: bool = False
    own_answers: bool = True


@dataclass(frozen=True, slots=True)
class ChosenSteps:
    """What is traced: steps in order, of the batches that were chosen (None: the loader's first), and these in words
    (None: all are alike)."""

    steps: Sequence[Step]
    chosen: Chosen | None = None
    shapes: BatchShapes | None = None

    @property
    def worst(self) -> Batches:
        return [batch for step in self.steps if step.kind == "worst" for batch in step.batches]

    def size(self) -> tuple[int | None, int | None]:
        """(rows, tokens of each) of the largest of the worst batches; None: it is none of tokens."""
        ids = [each["input_ids"] for each in self.worst if isinstance(each, Mapping) and "input_ids" in each]
        shapes = [tuple(each.shape) for each in ids if isinstance(each, torch.Tensor)]
        largest = max((shape for shape in shapes if len(shape) > 1), key=math.prod, default=(None, None))
        return largest[0], largest[-1]

    def notes(self) -> Iterator[str]:
        """What is to be said of the batches."""
        if self.chosen is not None:
            yield f"traced: {self.chosen.said}"
            if self.chosen.unreadable is not None:
                row, why = self.chosen.unreadable
                yield f"row {row:,} of the training data cannot be read ({why}): a run stops there"

    def known(self, plan: PlanFacts) -> PlanFacts:
        """With what is known of the batches."""
        plan = replace(plan, tokens={step.kind: _tokens(step.batches) for step in self.steps})
        if self.chosen is None:
            return plan
        padding = replace(plan.padding, share=self.chosen.padding, longest_row=longest_row(self.chosen.worst))
        return replace(plan, padding=padding, rows_digest=self.chosen.digest, mean=dict(self.chosen.mean))


def chosen_steps(trainer: Any, accumulation: int, *, worst: bool, on_gpu: bool) -> ChosenSteps:
    """Two steps of usual batches, then the worst, then what would need less; the worst alone where all batches are
    alike.

    Args:
        trainer: as the script made it.
        accumulation: micro-batches of a step.
        worst: as of `traced_training`.
        on_gpu: whether there is flash attention.
    """
    loader = on_host(trainer.get_train_dataloader())
    if not worst:
        batches = first_batches(loader, STEPS * accumulation)
        starts = range(0, len(batches), accumulation)
        return ChosenSteps([Step("worst", batches[at : at + accumulation]) for at in starts])
    chosen = chosen_batches(loader)

    def steps_of(kind: str, *batches: Any, flash: bool = False) -> list[Step]:
        filled = list(itertools.islice(itertools.cycle(batches), max(len(batches), accumulation)))
        parts = [filled[at : at + accumulation] for at in range(0, len(filled), accumulation)]
        return [Step(kind, [*part, *part][:accumulation], flash) for part in parts]

    found = steps_of("worst", chosen.worst, *chosen.others)
    of_data = [replace(step, own_answers=False) for step in found] if draws_whose_answers(trainer) else []
    shapes = shapes_of(chosen)
    if shapes is None:
        return ChosenSteps([*found, *of_data, *found * (STEPS - 1)], chosen)
    steps = [*steps_of("usual", chosen.usual) * STEPS, *of_data, *found]
    arguments = trainer.args
    rows, own = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    if chosen.half is not None and chosen.rows == rows:  # else the argument does not decide it
        label = f"per_device_train_batch_size={rows // 2} and gradient_accumulation_steps={2 * own}"
        steps += steps_of(label, chosen.half)
    if chosen.cut is not None:
        steps += steps_of(f"rows of at most {chosen.cut[1]:,} tokens", chosen.cut[0])
    change = (
        padding_free_change(trainer, longest_row(chosen.worst), FLASH) if on_gpu and not needs_padding(trainer) else ""
    )
    if change and (behind := without_padding(chosen.worst)) is not None:
        steps += steps_of(change, behind, flash=True)
    return ChosenSteps(steps, chosen, shapes)


def _tokens(batches: Batches) -> float | None:
    found = []
    for batch in batches:
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if isinstance(mask, torch.Tensor) and isinstance(ids, torch.Tensor) and mask.shape == ids.shape:
            found.append(int(mask.sum()))
        elif isinstance(ids, torch.Tensor):
            found.append(ids.numel())
    return sum(found) / len(found) if found else None
