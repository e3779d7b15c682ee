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
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from hf_memkit import resources
from hf_memkit.bf16_on_gpus import emulated_by_setup
from hf_memkit.errors import InputError
from hf_memkit.hardware import Machine, gpu_of_size
from hf_memkit.prediction import Prediction
from hf_memkit.recipe.schema import NO_CHECKPOINTING, Recipe
from hf_memkit.setup import Setup

if TYPE_CHECKING:
    from hf_memkit.request import Request


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


def options(recipe: Recipe, machine: Machine) -> list[Option]:
    """The recipe's variants on this machine, in the recipe's order: of each the cheapest checkpointing that fits, or
    the last. Empty where the recipe's file was changed after it was predicted, or no GPU is known.

    The GPU's dtypes decide which predictions count, its memory and the machine's RAM and disk decide the verdict.
    """
    entry = stored()["recipes"].get(recipe.name)
    if entry is None or entry["sha256"] != checksum(recipe) or machine.gpu is None:
        return []
    found: dict[str, Option] = {}
    for content in entry["predicted"]:
        each = StoredPrediction.from_json(content)
        earlier = found.get(each.variant)
        if each.bf16 != machine.gpu.bf16 or (earlier is not None and earlier.verdict == "fits"):
            continue
        found[each.variant] = Option(recipe, replace(each, prediction=each.prediction.judged(machine)))
    return list(found.values())


def predicted_beforehand(recipe: Recipe, setup: Setup) -> Prediction:
    """The stored prediction of this setup of the recipe, judged on its machine.

    Raises:
        InputError: there is none: the recipe's file was changed since, or the setup is another one.
    """
    job, kinds = setup.resolved_for, recipe.variants[setup.preset].checkpointing
    gpu, usual = job.machine.gpu, NO_CHECKPOINTING if kinds else ""
    entry = stored()["recipes"].get(recipe.name)
    if entry is not None and gpu is not None and entry["sha256"] == checksum(recipe):
        wanted = {
            "variant": setup.preset,
            "checkpointing": next((kind for kind in kinds if kind in setup.techniques), usual),
            "bf16": gpu.bf16,
            "micro_batch_size": setup["arguments.per_device_train_batch_size"],
            "accumulation": setup["arguments.gradient_accumulation_steps"],
            "sequence_length": setup["data.sequence_length"],
            "gpus": job.gpus,
            "nodes": job.nodes,
        }
        for content in entry["predicted"]:
            if all(content[name] == value for name, value in wanted.items()):
                found = StoredPrediction.from_json(content).prediction.judged(job.machine)
                return replace(found, warnings=()).with_warnings(emulated_by_setup(setup))  # of this GPU
    raise InputError("no stored prediction for this setup")


def chosen_beforehand(
    recipe: Recipe, machine: Machine, request: Request, *, use_hub: bool, runs: bool = False
) -> Setup | None:
    """The setup that the stored predictions choose for `machine`, or for the recipe's GPU where it has none; None
    where they are of another setup than was asked for. `runs`: as for `choose`.

    Raises:
        InputError, SettingError, DoesNotFitError: as `choose` does.
    """
    from hf_memkit.recipe.choose import choose

    solves = any(variant.solve_for for variant in recipe.variants.values())  # a length, which takes several traces
    if request.model or request.sequence_length or request.arguments or solves:
        return None
    described = machine.with_gpu(machine.gpu or gpu_of_size(recipe.card))
    judge = partial(predicted_beforehand, recipe)
    setup, found = choose(recipe, described, request, use_hub=use_hub, judge=judge, runs=runs)
    return setup if found is not None else None


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
