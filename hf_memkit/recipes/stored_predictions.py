"""Every variant of every recipe, predicted beforehand: what `memkit recipe` lists and recipes/README.md shows.

A trace takes seconds, and the pack has dozens of variants: `scripts/recipe_predictions.py` makes them once and writes
`recipes/predictions.json`, where each recipe stands with the checksum of the file that it was made from. A variant is
predicted there with each kind of checkpointing that it lists, for the recipe's own GPU, and for one that has no bf16.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from hf_memkit.catalog.hardware import Machine
from hf_memkit.common import resources
from hf_memkit.common.errors import InputError
from hf_memkit.prediction import Prediction
from hf_memkit.recipes.schema import NO_CHECKPOINTING, Recipe
from hf_memkit.setup.bf16_on_gpus import emulated_by_setup
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup

FILE: Final = "predictions.json"
"""Beside the recipes."""


@dataclass(frozen=True)
class StoredPrediction:
    """One variant with one kind of checkpointing.

    Attributes:
        variant: its name.
        checkpointing: the kind, `none`, or empty where the variant lists none.
        bf16: whether the GPU computes in bf16; fp16 otherwise.
        micro_batch_size, accumulation: sequences in a forward pass of a GPU, and how many make a step.
        sequence_length: tokens.
        gpus, nodes: GPUs on each machine, and machines.
        prediction: what it needs; its verdict is of the GPU that it was made for.
    """

    variant: str
    checkpointing: str
    bf16: bool
    micro_batch_size: int
    accumulation: int
    sequence_length: int
    gpus: int
    nodes: int
    prediction: Prediction

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "prediction"}
        return {**values, "prediction": self.prediction.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(**{**content, "prediction": Prediction.from_json(content["prediction"])})


@dataclass(frozen=True)
class Option:
    """A variant on one machine: `predicted` judged there."""

    recipe: Recipe
    predicted: StoredPrediction

    @property
    def verdict(self) -> str:
        return str(self.predicted.prediction.verdict)

    @property
    def gpu_bytes(self) -> int:
        """What it takes of a GPU at most, the context included."""
        return self.predicted.prediction.total_bytes[1]

    @property
    def ram_bytes(self) -> int:
        found = self.predicted.prediction
        return (found.host_rss_bytes or 0) + (found.pinned_bytes or 0)


def checksum(recipe: Recipe) -> str:
    """SHA-256 of what a prediction can depend on: the recipe's values without those of its rehearsal."""
    content = recipe.model_dump(mode="json", exclude={"path", "summary", "rehearsal"})
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def stored() -> dict[str, Any]:
    """The content of `recipes/predictions.json`; empty where there is none."""
    path = resources.folder("recipes") / FILE
    if not path.is_file():
        return {"recipes": {}}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _of(recipe: Recipe) -> list[StoredPrediction]:
    """Those of the recipe; empty where its file was changed after it was predicted."""
    entry = stored()["recipes"].get(recipe.name)
    if entry is None or entry["sha256"] != checksum(recipe):
        return []
    return [StoredPrediction.from_json(content) for content in entry["predicted"]]


def options(recipe: Recipe, machine: Machine) -> list[Option]:
    """The recipe's variants on this machine, in the recipe's order: of each the cheapest checkpointing that fits, or
    the cheapest that is tight, or the last. Empty where the recipe's file was changed after it was predicted, or no
    GPU is known.

    The GPU's dtypes decide which predictions count, its memory and the machine's RAM and disk decide the verdict.
    """
    found: dict[str, Option] = {}
    if machine.gpu is None:
        return []
    for each in _of(recipe):
        earlier = found.get(each.variant)
        if each.bf16 != machine.gpu.bf16:
            continue
        option = Option(recipe, replace(each, prediction=each.prediction.judged(machine)))
        if earlier is None or earlier.verdict == "does not fit" or option.verdict == "fits" != earlier.verdict:
            found[each.variant] = option
    return list(found.values())


_STORED: Final = "stored with the recipe"


def is_stored(prediction: Prediction) -> bool:
    """Whether it was made beforehand."""
    return prediction.confidence.rests_on.endswith(_STORED)


def _for(recipe: Recipe, setup: Setup) -> list[StoredPrediction]:
    """Those of the setup's variant and checkpointing, on such a GPU; empty where the user changed what is trained."""
    request, gpu = setup.request or Request(), setup.resolved_for.machine.gpu
    if request.model or request.arguments or gpu is None:
        return []
    kinds = recipe.variants[setup.preset].checkpointing
    kind = next((each for each in kinds if each in setup.techniques), NO_CHECKPOINTING if kinds else "")
    wanted = (setup.preset, kind, gpu.bf16)
    return [each for each in _of(recipe) if (each.variant, each.checkpointing, each.bf16) == wanted]


def predicted_beforehand(recipe: Recipe, setup: Setup) -> Prediction:
    """The stored prediction of this setup of the recipe, judged on its machine; an InputError where there is none: the
    recipe's file was changed since, or the setup is another one."""
    job = setup.resolved_for
    for each in _for(recipe, setup):
        of_it = (each.micro_batch_size, each.accumulation, each.sequence_length, each.gpus, each.nodes)
        if of_it == (setup.micro_batch_size, setup.accumulation, setup.sequence_length, job.gpus, job.nodes):
            rests_on = f"{each.prediction.confidence.rests_on}, {_STORED}"
            # RAM and disk are those of this setup, which depend on the machine: little RAM is not page-locked.
            found = replace(
                each.prediction,
                confidence=replace(each.prediction.confidence, rests_on=rests_on),
                host_rss_bytes=setup.ledger.total_bytes("host"),
                pinned_bytes=setup.ledger.total_bytes("pinned"),
                disk_bytes=setup.ledger.total_bytes("disk"),
                warnings=(),
            )
            return found.with_warnings(emulated_by_setup(setup)).judged(job.machine)
    name = setup.request.recipe if setup.request is not None else None
    raise InputError(f"memkit recipe {name or recipe.name} --variant {setup.preset} --dry-run predicts it")


def length_beforehand(recipe: Recipe, setup: Setup) -> int:
    """Tokens of a sequence that was found to fit beforehand, where the recipe solves for them; else the setup's."""
    return next((each.sequence_length for each in _for(recipe, setup)), setup.sequence_length)


def fitting(recipes: list[Recipe], machine: Machine) -> tuple[list[list[Option]], list[list[Option]]]:
    """(of each recipe the variants that fit, of each recipe without one all its variants), the recipes that make most
    of the GPU first. A variant that fits comes before one that is tight."""
    fit, others = [], []
    for recipe in recipes:
        all_of_it = options(recipe, machine)
        some = [each for each in all_of_it if each.verdict in ("fits", "tight")]
        some.sort(key=lambda option: option.verdict != "fits")  # stable: else the recipe's order
        if some:
            fit.append(some)
        elif all_of_it:
            others.append(all_of_it)
    fit.sort(key=lambda some: (some[0].verdict != "fits", -some[0].gpu_bytes))
    return fit, others
