"""Trainers whose model trains on its own answers: TRL's GRPO, RLOO and, at random, its distilling ones (GKD, GOLD).

| needed by the Trainer | in a trace |
|---|---|
| rewards | 0 |
| whether a step trains on the model's own answers (`lmbda`) | both, in different steps |
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from hf_memkit.prediction.child.gpu.cuda_queries import replace_everywhere

GENERATES: Final = "_generate_single_turn"
"""Method by which a step generates answers, with the model or a vLLM (trl 1.16: grpo_trainer.py and others)."""


def learns_from_answers(trainer: Any) -> bool:
    """Whether each step trains on answers that the model generates for the loader's batch (GRPO, RLOO)."""
    return hasattr(trainer, "_buffered_inputs")


def before_step(trainer: Any, *, own_answers: bool | None) -> None:
    """Makes the Trainer generate new answers in this step, even if they are normally used for several. `own_answers`:
    whether this step trains on the model's answers, if that is random (`mixes_answers`); else None."""
    if own_answers is not None:
        trainer.lmbda = float(own_answers)
    if learns_from_answers(trainer):
        trainer._buffered_inputs = None


def patch_rewards(trainer: Any) -> Iterator[str]:
    """Replaces the reward functions of a Trainer, and yields notes on it. Reward functions are the user's (networks,
    judges, sandboxes) and are not called. Reward models stay, and are counted."""
    trl_utils = sys.modules.get("trl.trainer.utils")
    if trl_utils is None:
        return

    def constant(completions: Sequence[Any], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    # In a random order the position of each answer would be unknown.
    if hasattr(trl_utils, "shuffle_sequence_dict"):  # since trl 0.19
        replace_everywhere(trl_utils.shuffle_sequence_dict, lambda sequences: sequences, ("trl",))
    rewards = getattr(trainer, "reward_funcs", None) or []
    functions = [number for number, reward in enumerate(rewards) if not isinstance(reward, torch.nn.Module)]
    for number in functions:
        rewards[number] = constant
    if functions:
        yield "reward functions are not called: each answer counts as 0"
    length = getattr(getattr(trainer, "generation_config", None), "max_new_tokens", None)
    length = getattr(trainer, "max_completion_length", None) or length
    if length is not None and getattr(trainer, "lmbda", 1) > 0:
        yield f"every answer is counted at its maximum length: {length} tokens"


def mixes_answers(trainer: Any) -> bool:
    """Whether a step trains at random on the model's own answers or on those of the data (trl 1.16: gkd, gold and
    iw_opd below experimental/, `random.random() <= self.lmbda`)."""
    is_trl = any(base.__module__.startswith("trl.") for base in type(trainer).__mro__)
    return is_trl and 0 < getattr(trainer, "lmbda", 0) < 1
