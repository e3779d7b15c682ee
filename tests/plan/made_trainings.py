"""A traced training with made-up facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_memkit.prediction.traced_training import (
    BatchEffects,
    ModelTraits,
    Padding,
    PlanFacts,
    RunLength,
    TracedArguments,
    TracedModel,
    TracedTraining,
    Weights,
)

MADE = TracedTraining(
    trainer="Trainer",
    arguments=TracedArguments(optim="adamw_torch"),
    model=TracedModel("LlamaForCausalLM", "", 1000, 1000, ("float32",), ("float32",)),
    plan=PlanFacts(
        model=ModelTraits("llama", "sdpa", True, True, True, True, None, False, False, False, False),
        weights=Weights((1000,), (), 4000, 0, 4),
        batch=BatchEffects(),
        length=RunLength(),
        padding=Padding(None, None, False, "", False, True),
        made_at=None,
        parses_arguments=True,
        own_optimizer=False,
        schedule=(),
    ),
)


def changed(value: Any, **fields: Any) -> Any:
    """A copy of a dataclass with other values of these fields; `plan__padding__share` is a field of a field of a
    field."""
    for path, new in fields.items():
        name, _, rest = path.partition("__")
        value = replace(value, **{name: changed(getattr(value, name), **{rest: new}) if rest else new})
    return value
