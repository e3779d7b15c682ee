"""What to try where a job is predicted not to fit: the first preset that fits by formula, or of a recipe the next
variant that is predicted to fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_memkit.units import GIB, format_size

if TYPE_CHECKING:
    from hf_memkit.recipe.choose import Judge
    from hf_memkit.recipe.schema import Recipe
    from hf_memkit.setup import Setup

__all__ = ["Next", "NextVariant", "next_preset", "next_variant"]


@dataclass(frozen=True, slots=True)
class Next:
    """A preset that fits by formula; nothing of it was traced.

    Attributes:
        preset: its name.
        for_whom: the person it is for.
        device_bytes, host_bytes: what it needs on a card, and in one machine's RAM.
    """

    preset: str
    for_whom: str
    device_bytes: int
    host_bytes: int

    def __str__(self) -> str:
        return (
            f"--preset {self.preset} ({self.for_whom}): {format_size(self.device_bytes)} on the card and "
            f"{format_size(self.host_bytes)} of RAM by formula, not traced"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "preset": self.preset,
            "device_gib": self.device_bytes / GIB,
            "host_gib": self.host_bytes / GIB,
            "basis": "formula",
        }


@dataclass(frozen=True, slots=True)
class NextVariant:
    """A variant of the recipe that is predicted to fit, by a trace or else by formula."""

    variant: str
    traced: bool = True

    def __str__(self) -> str:
        how = "which is predicted to fit" if self.traced else "which fits or is tight, estimated by formula"
        return f"--variant {self.variant}, {how}"

    def to_json(self) -> dict[str, Any]:
        return {"variant": self.variant, "basis": "prediction" if self.traced else "formula"}


def next_variant(recipe: Recipe, setup: Setup, *, trace: bool, judge: Judge) -> NextVariant | None:
    """The next variant of the recipe that `judge` predicts to fit; None where there is none."""
    from hf_memkit.models import hub_reachable
    from hf_memkit.recipe.choose import nearest_that_fits

    name = nearest_that_fits(recipe, setup, use_hub=hub_reachable(), trace=trace, judge=judge)
    return NextVariant(name, trace) if name is not None else None


def next_preset(setup: Setup) -> Next | None:
    """The first preset, in the order of their list, that fits by formula with the same batch, length and arguments.

    None where there is none, and where no shapes are known to compute from.
    """
    from hf_memkit.errors import SettingError
    from hf_memkit.job import DEFAULT_NVME
    from hf_memkit.presets import PRESETS
    from hf_memkit.presets.resolve import preset_for
    from hf_memkit.presets.setup import mistakes_of
    from hf_memkit.request import Request

    job = replace(setup.sized_job, nvme_path=DEFAULT_NVME, values={})
    if job.model is None or job.machine.gpu is None:
        return None
    asked = {word.strip() for word in setup.preset.split("+")}
    for name, preset in PRESETS.items():
        if name in asked or preset.solves_for != "micro-batch":
            continue
        request = replace(setup.request or Request(), preset=name, techniques=(), values={})
        try:
            made = preset_for(job, request)
        except SettingError:  # it contradicts the user's own arguments
            continue
        lacks = {str(problem) for problem in mistakes_of(made)[1]}  # which say less than the ledger does
        if lacks.issuperset(made.problems):
            device, host = made.ledger.total_bytes("device"), made.ledger.total_bytes("host", "pinned")
            return Next(name, preset.for_whom, device, host)
    return None
