"""A variant → its preset's setup, with what the variant adds and the cheapest checkpointing that it lists and fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from hf_memkit.job import Job
from hf_memkit.presets import apply_preset
from hf_memkit.recipe.schema import NO_CHECKPOINTING, Variant
from hf_memkit.technique import Family
from hf_memkit.training_setup import TrainingSetup
from hf_memkit.units import format_size

__all__ = ["apply_variant"]

_CHECKPOINTING: Final[tuple[Family, ...]] = ("checkpointing",)


def apply_variant(
    name: str,
    variant: Variant,
    job: Job,
    left_out: Mapping[str, str],
    change: Callable[[TrainingSetup], TrainingSetup] | None = None,
    *,
    checkpointing: str | None = None,
) -> TrainingSetup:
    """The variant's techniques, with the first of its kinds of checkpointing with which it fits the card, or the last.

    Args:
        name, variant: the variant.
        job: what it is for; its machine has a card.
        left_out: techniques that are left out, each with why.
        change: what is done to the setup after its techniques, before its ledger is computed.
        checkpointing: one of the variant's kinds, whether it fits or not; None: the first that fits by formula.
    """
    if not variant.checkpointing:
        return apply_preset(name, job, variant.techniques, left_out=left_out, change=change)
    if checkpointing is not None:
        return _with_checkpointing(name, variant, job, checkpointing, left_out, change)
    assert job.machine.gpu is not None
    limit, tried = job.machine.gpu.usable_bytes, []
    for choice in variant.checkpointing:
        setup = _with_checkpointing(name, variant, job, choice, left_out, change)
        needed = setup.ledger.total_bytes("device")
        tried.append(f"{choice} {format_size(needed)}")
        if needed <= limit:
            break
    which = (
        "the first of those listed that fits by formula" if needed <= limit else "with none of those listed it fits"
    )
    # Other models than causal language models have a class of their own, and no formula for their activations.
    bare = job.model is not None and job.model.model_class is not None
    without = " (which has no activations of such a model: a prediction may choose another)" if bare else ""
    return setup.with_notes(
        f"Activation checkpointing: {choice}, {which}{without}. On the card, by formula: {', '.join(tried)}, of "
        f"{format_size(limit)}."
    )


def _with_checkpointing(
    name: str,
    variant: Variant,
    job: Job,
    choice: str,
    left_out: Mapping[str, str],
    change: Callable[[TrainingSetup], TrainingSetup] | None,
) -> TrainingSetup:
    if choice == NO_CHECKPOINTING:
        return apply_preset(name, job, variant.techniques, without=_CHECKPOINTING, left_out=left_out, change=change)
    return apply_preset(name, job, [*variant.techniques, choice], left_out=left_out, change=change)
