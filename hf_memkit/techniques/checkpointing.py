"""Activation checkpointing: keep the inputs of layers, compute the rest again in the backward pass."""

from __future__ import annotations

from hf_memkit.job import Job, activation_rows
from hf_memkit.training_setup import TrainingSetup

__all__ = ["every_layer"]


def every_layer(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """Checkpoint every layer through Trainer's own switch.

    Saves all activations but one layer's and each layer's input. Costs about one more forward pass (a third more
    arithmetic). Not worth it where activations are not what fills the card (short sequences, small batches).
    """
    return setup.put_all(
        "arguments",
        {
            "activation_checkpointing": (
                True,
                "keeps one input a layer and recomputes the rest: a third more arithmetic",
            ),
            "activation_checkpointing_kwargs": (
                {"use_reentrant": False},
                "the reentrant form drops gradients of inputs that need none, and torch recommends this one",
            ),
        },
    ).with_rows(*activation_rows(job))
