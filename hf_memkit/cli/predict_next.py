"""What to try if a job does not fit: the nearest setup with the same batch that fits, or a recipe's next variant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_memkit.common.errors import InputError
from hf_memkit.common.units import GIB, format_gib

if TYPE_CHECKING:
    from hf_memkit.plan.judgement import Judgement
    from hf_memkit.recipes.schema import Recipe
    from hf_memkit.recipes.variant_search import Judge
    from hf_memkit.setup.setup import Setup


@dataclass(frozen=True, slots=True)
class NextSetup:
    """A traced setup with the same batch that fits."""

    judgement: Judgement

    def __str__(self) -> str:
        candidate = self.judgement.candidate
        batch = f"micro-batch {candidate.micro_batch_size} × accumulation {candidate.accumulation}"
        setup = ", ".join([batch, *(choice.name for choice in candidate.choices)])
        result = f" ({candidate.group}: {candidate.result})" if candidate.result else ""
        needs = format_gib(self.judgement.needs_bytes)
        return f"{setup}{result}: {needs}, fits. For the fastest setup that fits: memkit plan"

    @property
    def flags(self) -> str:
        """The setup's command-line flags; keywords of TrainingArguments if the script reads no flags."""
        from hf_memkit.plan.pasted import pasted

        text = pasted(self.judgement.candidate)
        own = " ".join(text.flags)
        if self.judgement.training is not None and not self.judgement.training.facts.parses_arguments:
            own = " ".join(text.python[text.python.index("TrainingArguments(") :].split())
        return "".join(f"{command}; then " for command in text.typed_first) + own

    def to_json(self) -> dict[str, Any]:
        candidate = self.judgement.candidate
        return {
            "setup": candidate.name,
            "overrides": candidate.overrides.to_json(),
            "group": candidate.group,
            "result": candidate.result,
            "peak_gib": self.judgement.needs_bytes / GIB,
            "basis": "trace",
        }


@dataclass(frozen=True, slots=True)
class NextVariant:
    """A variant of the recipe that is predicted to fit."""

    variant: str

    def __str__(self) -> str:
        return f"--variant {self.variant}, which is predicted to fit"

    def to_json(self) -> dict[str, Any]:
        return {"variant": self.variant, "basis": "prediction"}


def next_variant(recipe: Recipe, setup: Setup, *, judge: Judge) -> NextVariant | None:
    """The next variant of the recipe that `judge` predicts to fit; None if there is none."""
    from hf_memkit.catalog.models import hub_reachable
    from hf_memkit.recipes.variant_search import nearest_that_fits

    name = nearest_that_fits(recipe, setup, use_hub=hub_reachable(), judge=judge)
    return NextVariant(name) if name is not None else None


def next_setup(nearest: Callable[[], Judgement | None]) -> NextSetup | None:
    """The setup that `nearest` returns; None if there is none, or if no setup can be traced."""
    try:
        judgement = nearest()
    except InputError:  # the prediction has the reason
        return None
    return NextSetup(judgement) if judgement is not None else None
