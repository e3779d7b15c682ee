"""What is recorded of the moment in which memory runs out, in each phase of a real training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_memkit import attach
from tests.measuring.memory.live_storages import GIB, LiveStorages
from tests.measuring.recorded import QUIET

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."


class RunsOut:
    """Raises as the allocator does, at the `at`-th call."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError(TEXT)


def fields_of(make_trainer: Any, place: str, step: int, **settings: Any) -> tuple[dict[str, Any], int, Any]:
    with LiveStorages() as live:
        trainer = make_trainer(gradient_accumulation_steps=2, **settings)
        for tensor in (*trainer.model.parameters(), *trainer.model.buffers()):
            live.track(tensor)
        callback = attach(trainer, readers=[live], **QUIET)
        trainer.create_optimizer()
        fails = RunsOut(step if place == "optimizer" else 2 * step)  # in the second micro-batch
        model = trainer.model
        if place == "forward":
            model.transformer.h[1].mlp.register_forward_pre_hook(fails)
        elif place == "backward":
            model.transformer.h[0].ln_1.weight.register_hook(fails)
        else:
            trainer.optimizer.register_step_pre_hook(fails)
        try:
            trainer.train()
        except torch.OutOfMemoryError:
            assert callback._training is not None
            fields = callback._training.recorder.oom_fields()
            callback.close()
            return fields, live.allocated, trainer
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("place", "step"), [("forward", 1), ("forward", 5), ("backward", 5), ("optimizer", 1)]
)  # the first steps are watched closely
def test_categories_of_the_moment(make_trainer: Any, place: str, step: int) -> None:
    fields, allocated, trainer = fields_of(make_trainer, place, step, max_steps=6)
    assert fields["phase"] == place and fields["step"] == step and fields["micro_batch"] == 2
    assert (fields["samples"], fields["tokens"], fields["longest_sequence"]) == (2, 16, 8)
    assert fields["inputs"]["input_ids"] == [2, 8] and fields["inputs"]["labels"] == [2, 8]
    categories = {name[:-4]: round(gib * GIB) for name, gib in fields["categories"].items()}
    assert sum(categories.values()) == pytest.approx(round(fields["allocated_gib"] * GIB), abs=4)
    assert fields["allocated_gib"] * GIB <= allocated + 1
    weights = sum(p.numel() * 4 for p in trainer.model.parameters())
    assert (categories["weights"], categories["gradients"]) == pytest.approx((weights, weights), abs=1)
    assert categories["optimizer"] == pytest.approx(0 if step == 1 else 2 * weights, rel=0.02)
    activations = categories["activations"] / sum(categories.values())
    assert activations > 0.1 if place == "forward" else activations < 0.5
    assert (activations > 0) == (place != "optimizer")
    assert categories["loss"] == 0
    assert fields["held"]["device"]["weights_gib"] == pytest.approx(weights / GIB)
