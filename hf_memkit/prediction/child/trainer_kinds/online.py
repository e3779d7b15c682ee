"""Trainers whose model trains on its own answers: TRL's GRPO, RLOO and, by chance, its distilling ones (GKD, GOLD).

| asked for | what there is |
|---|---|
| rewards | 0 |
| whether a step trains on the model's own answers (`lmbda`) | both, in different steps |
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from hf_memkit.prediction.child.gpu.cuda_questions import replace_everywhere

GENERATES: Final = "_generate_single_turn"
"""The method by which a step generates answers, by the model or a vLLM (trl 1.16: grpo_trainer.py and others)."""


def learns_from_answers(trainer: Any) -> bool:
    """Whether each step trains on answers that the model generates to the loader's batch (GRPO, RLOO)."""
    return hasattr(trainer, "_buffered_inputs")


def before_step(trainer: Any, *, own_answers: bool | None) -> None:
    """Answers are generated in every step, also where they last for several. `own_answers`: whether this step trains
    on the model's, where chance decides (`draws_whose_answers`); None: it does not."""
    if own_answers is not None:
        trainer.lmbda = float(own_answers)
    if learns_from_answers(trainer):
        trainer._buffered_inputs = None


def answers_are_made_up(trainer: Any) -> Iterator[str]:
    """Notes on a Trainer that generates answers and learns from them: with rewards, or from a teacher. Reward
    functions are the user's: networks, judges, sandboxes. Reward models stay, and are counted."""
    trl_utils = sys.modules.get("trl.trainer.utils")
    if trl_utils is None:
        return

    def constant(completions: Sequence[Any], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    # In an order by chance nobody knows which answers are where.
    if hasattr(trl_utils, "shuffle_sequence_dict"):  # since trl 0.19
        replace_everywhere(trl_utils.shuffle_sequence_dict, lambda found: found, ("trl",))
    rewards = getattr(trainer, "reward_funcs", None) or []
    own = [number for number, each in enumerate(rewards) if not isinstance(each, torch.nn.Module)]
    for number in own:
        rewards[number] = constant
    if own:
        yield "reward functions are not called: each answer counts as 0"
    length = getattr(getattr(trainer, "generation_config", None), "max_new_tokens", None)
    length = getattr(trainer, "max_completion_length", None) or length
    if length is not None and getattr(trainer, "lmbda", 1) > 0:
        yield f"every answer is counted at its maximum length: {length} tokens"


def draws_whose_answers(trainer: Any) -> bool:
    """Whether chance decides if a step trains on the model's own answers or on those of the data (trl 1.16: gkd, gold
    and iw_opd below experimental/, `random.random() <= self.lmbda`)."""
    own = any(each.__module__.startswith("trl.") for each in type(trainer).__mro__)
    return own and 0 < getattr(trainer, "lmbda", 0) < 1
