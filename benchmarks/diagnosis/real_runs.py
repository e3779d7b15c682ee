"""Real trainings with a known truth, to judge a diagnosis by: real Trainer, callback, records and tensors.

What is true of a run is decided by the table of `generated_runs.py`, from the bytes that were counted and from those
that a case's hoard holds. Another process needs a GPU, and is not here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from benchmarks.diagnosis.generated_runs import GeneratedRun
from benchmarks.diagnosis.real_trainings import Hoard, RealCase, train

_STEPS = 48


def real_runs(folder: Path) -> list[GeneratedRun]:
    """Trains every case; each in a folder of its own."""
    return [train(case, folder / str(number)) for number, case in enumerate(CASES)]


def _lengths(length_of: Callable[[int], int], *, batch: int = 2) -> list[int]:
    """The length of every sample, from one by step (0 for the first)."""
    return [length_of(step) for step in range(_STEPS) for _ in range(batch)]


def _random_lengths() -> list[int]:
    rng = random.Random(0)
    return [rng.randint(16, 40) for _ in range(_STEPS * 2)]


# --- what users add ---


class _OnEvent(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
    """Calls a function at one of Trainer's events."""

    def __init__(self, event: str, function: Callable[..., None]) -> None:
        setattr(self, event, lambda args, state, control, **kwargs: function(state=state, **kwargs))


def _keeps_logits(trainer: Trainer, hoard: Hoard) -> None:
    """`all_outputs.append(outputs.logits)` in compute_loss."""
    compute_loss = trainer.compute_loss

    def keeping(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["return_outputs"] = True
        loss, outputs = compute_loss(model, inputs, *args, **kwargs)
        hoard.append(outputs["logits"].detach())
        return loss

    trainer.compute_loss = keeping


def _keeps_graphs(trainer: Trainer, hoard: Hoard) -> None:
    """Every fifth step a second loss "for the log", whose graph nobody frees: no backward, and no detach."""
    compute_loss = trainer.compute_loss
    graphs = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        hoard.append(tensor)
        return tensor

    def keeping(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step % 5 == 0:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                graphs.append(model(**inputs).loss)
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = keeping


def _keeps_activations(trainer: Trainer, hoard: Hoard) -> None:
    """A forward hook for "a look at the activations", never removed and never emptied."""
    trainer.model.transformer.h[0].register_forward_hook(lambda module, inputs, output: hoard.append(_first(output)))


def _first(output: Any) -> torch.Tensor:
    tensor = output[0] if isinstance(output, tuple) else output
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach()


def _keeps_gradients(trainer: Trainer, hoard: Hoard) -> None:
    """A callback that collects gradients, from the twentieth step on."""

    def collect(*, state: Any, model: nn.Module, **_: Any) -> None:
        if state.global_step >= 20:
            hoard.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)

    trainer.add_callback(_OnEvent("on_pre_optimizer_step", collect))


def _keeps_snapshots(trainer: Trainer, hoard: Hoard) -> None:
    """A copy of the weights every sixth step, "to average them at the end"."""

    def collect(*, state: Any, model: nn.Module, **_: Any) -> None:
        if state.global_step % 6 == 0:
            hoard.extend(p.detach().clone() for p in model.parameters())

    trainer.add_callback(_OnEvent("on_step_end", collect))


def _keeps_predictions(trainer: Trainer, hoard: Hoard) -> None:
    """The outputs of every evaluation."""
    prediction_step = trainer.prediction_step

    def keeping(model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        loss, logits, _ = prediction_step(model, inputs, False, ignore_keys=ignore_keys)
        hoard.append(logits)
        return loss, None, None

    trainer.prediction_step = keeping


def _keeps_history_of(count: int) -> Callable[[Trainer, Hoard], None]:
    """The last activations, and no more than so many: levels off."""

    def habit(trainer: Trainer, hoard: Hoard) -> None:
        history: list[torch.Tensor] = []

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            history.append(_first(output))
            del history[:-count]

        trainer.model.transformer.h[0].register_forward_hook(keep)

    return habit


def _lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapted: nn.Module = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))
    return adapted


_LEAK: Final = frozenset({"leak"})
_LONGER: Final = frozenset({"longer batches"})
_FRAGMENTED: Final = frozenset({"fragmentation"})
_FIXED: Final = _lengths(lambda step: 32)
_EVALUATIONS: Final = {"eval_strategy": "steps", "eval_steps": 6, "per_device_eval_batch_size": 2}

CASES: Final[Sequence[RealCase]] = (
    RealCase("fixed length", _FIXED),
    RealCase("dynamic padding", _random_lengths(), capacity_gib=2),
    RealCase("accumulation", _lengths(lambda step: 32, batch=8), arguments={"gradient_accumulation_steps": 4}),
    RealCase("evaluations", _FIXED, arguments=_EVALUATIONS),
    RealCase("saves", _FIXED, arguments={"save_strategy": "steps", "save_steps": 20}),
    RealCase("activation checkpointing", _FIXED, arguments={"activation_checkpointing": True}),
    RealCase("LoRA", _FIXED, adapt=_lora),
    RealCase("SGD", _FIXED, arguments={"optim": "sgd"}),
    RealCase("foreach AdamW", _FIXED, arguments={"optim": "adamw_torch"}),
    RealCase(
        "grouped by length",
        _random_lengths(),
        capacity_gib=2,
        arguments={"train_sampling_strategy": "group_by_length"},
    ),
    RealCase("cyclical lengths", _lengths(lambda step: 24 + 4 * (step % 4)), capacity_gib=2),
    RealCase("one longest batch", _lengths(lambda step: 35 if step == 40 else 32), capacity_gib=2),
    RealCase("history that levels off", _FIXED, capacity_gib=2, habit=_keeps_history_of(15)),
    RealCase("resumed", _FIXED, arguments={"save_strategy": "steps", "save_steps": 15}, killed_at=35),
    RealCase("logits kept", _FIXED, _LEAK, 2.5, habit=_keeps_logits),
    RealCase("logits kept, dynamic padding", _random_lengths(), _LEAK, 3, habit=_keeps_logits),
    RealCase("graphs kept", _FIXED, _LEAK, 8, habit=_keeps_graphs),
    RealCase("activations kept", _FIXED, _LEAK, 1.5, habit=_keeps_activations),
    RealCase("gradients kept later", _FIXED, _LEAK, 4, habit=_keeps_gradients),
    RealCase("snapshots kept", _FIXED, _LEAK, 1.5, habit=_keeps_snapshots),
    RealCase("predictions kept", _FIXED, _LEAK, arguments=_EVALUATIONS, habit=_keeps_predictions),
    RealCase("curriculum", _lengths(lambda step: 12 if step < 20 else 48), _LONGER, 1.3),
    RealCase("curriculum in three stages", _lengths(lambda step: 16 + 16 * (step // 16)), _LONGER, 1.8),
    RealCase("sorted by buckets of length", _lengths(lambda step: 12 + 12 * (step // 12)), _LONGER, 2),
    RealCase("one giant batch", _lengths(lambda step: 60 if step == 33 else 16), _LONGER, 1.06),
    RealCase(
        "curriculum, checkpointed",
        _lengths(lambda step: 12 if step < 30 else 60),
        _LONGER,
        1.8,
        arguments={"activation_checkpointing": True},
    ),
    RealCase("sorted ascending on a full GPU", _lengths(lambda step: 8 + 4 * (step // 4)), _LONGER | _FRAGMENTED, 1.0),
    RealCase("a little longer in each step", _lengths(lambda step: 12 + step), _LONGER | _FRAGMENTED, 1.2),
)
