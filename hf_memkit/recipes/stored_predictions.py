"""Stored predictions of every variant of every recipe, for `memkit recipe` and recipes/README.md.

A trace takes seconds, and there are dozens of variants: `scripts/recipe_predictions.py` writes
`recipes/predictions.json`, which has each recipe with the checksum of its file. A variant is predicted with each kind
of checkpointing that it lists, for the recipe's own GPU, and for one without bf16.
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
"""File name next to the recipes."""


@dataclass(frozen=True)
class StoredPrediction:
    """One variant with one kind of checkpointing.

    Attributes:
        checkpointing: the kind, `none`, or empty if the variant lists none.
        bf16: whether the GPU computes in bf16; fp16 otherwise.
        micro_batch_size, accumulation: sequences in a forward pass of a GPU, and micro-batches in a step.
        gpus: on each machine.
        prediction: its needs; the verdict is for the GPU of the prediction.
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
    """A variant with its prediction for one machine."""

    recipe: Recipe
    predicted: StoredPrediction

    @property
    def verdict(self) -> str:
        return str(self.predicted.prediction.verdict)

    @property
    def gpu_bytes(self) -> int:
        """Maximum GPU memory, including the context."""
        return self.predicted.prediction.total_bytes[1]

    @property
    def ram_bytes(self) -> int:
        prediction = self.predicted.prediction
        return (prediction.host_rss_bytes or 0) + (prediction.pinned_bytes or 0)


def checksum(recipe: Recipe) -> str:
    """SHA-256 of the values that a prediction depends on: the recipe's without its rehearsal."""
    content = recipe.model_dump(mode="json", exclude={"path", "summary", "rehearsal"})
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def stored() -> dict[str, Any]:
    """Content of `recipes/predictions.json`; empty if missing."""
    path = resources.folder("recipes") / FILE
    if not path.is_file():
        return {"recipes": {}}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _of_recipe(recipe: Recipe) -> list[StoredPrediction]:
    """Stored predictions of the recipe; empty if its file has changed since."""
    entry = stored()["recipes"].get(recipe.name)
    if entry is None or entry["sha256"] != checksum(recipe):
        return []
    return [StoredPrediction.from_json(content) for content in entry["predicted"]]


def options(recipe: Recipe, machine: Machine) -> list[Option]:
    """The recipe's variants on this machine, in the recipe's order, each with the cheapest checkpointing that fits,
    else the cheapest that is tight, else the last. Empty if the recipe's file has changed since, or the GPU is
    unknown. The GPU's dtypes select predictions; its memory and the machine's RAM and disk decide the verdict."""
    by_variant: dict[str, Option] = {}
    if machine.gpu is None:
        return []
    for entry in _of_recipe(recipe):
        earlier = by_variant.get(entry.variant)
        if entry.bf16 != machine.gpu.bf16:
            continue
        option = Option(recipe, replace(entry, prediction=entry.prediction.with_verdict(machine)))
        if earlier is None or earlier.verdict == "does not fit" or option.verdict == "fits" != earlier.verdict:
            by_variant[entry.variant] = option
    return list(by_variant.values())


_STORED: Final = "stored with the recipe"


def is_stored(prediction: Prediction) -> bool:
    """Whether it is a stored prediction."""
    return prediction.confidence.rests_on.endswith(_STORED)


def _of_setup(recipe: Recipe, setup: Setup) -> list[StoredPrediction]:
    """Stored predictions of the setup's variant and checkpointing, for such a GPU; none for a changed training."""
    request, gpu = setup.request or Request(), setup.resolved_for.machine.gpu
    if request.model or request.arguments or gpu is None:
        return []
    kinds = recipe.variants[setup.preset].checkpointing
    kind = next((name for name in kinds if name in setup.techniques), NO_CHECKPOINTING if kinds else "")
    wanted = (setup.preset, kind, gpu.bf16)
    return [entry for entry in _of_recipe(recipe) if (entry.variant, entry.checkpointing, entry.bf16) == wanted]


def stored_prediction(recipe: Recipe, setup: Setup) -> Prediction:
    """The stored prediction of this setup, judged on its machine. Raises InputError if there is none: the recipe's
    file has changed, or the setup is another one."""
    job = setup.resolved_for
    for entry in _of_setup(recipe, setup):
        sizes = (entry.micro_batch_size, entry.accumulation, entry.sequence_length, entry.gpus, entry.nodes)
        if sizes == (setup.micro_batch_size, setup.accumulation, setup.sequence_length, job.gpus, job.nodes):
            known = entry.prediction.confidence
            confidence = replace(known, rests_on=f"{known.rests_on}, {_STORED}")
            prediction = replace(entry.prediction, confidence=confidence, warnings=())
            # RAM and disk are those of this setup, which depend on the machine: little RAM is not page-locked.
            host, pinned, disk = (setup.ledger.total_bytes(place) for place in ("host", "pinned", "disk"))
            prediction = replace(prediction, host_rss_bytes=host, pinned_bytes=pinned, disk_bytes=disk)
            return prediction.with_warnings(emulated_by_setup(setup)).with_verdict(job.machine)
    name = setup.request.recipe if setup.request is not None else None
    raise InputError(f"memkit recipe {name or recipe.name} --variant {setup.preset} --dry-run predicts it")


def stored_length(recipe: Recipe, setup: Setup) -> int:
    """Sequence length of the stored prediction, if the recipe computes it; else the setup's."""
    return next((entry.sequence_length for entry in _of_setup(recipe, setup)), setup.sequence_length)


def fitting(recipes: list[Recipe], machine: Machine) -> tuple[list[list[Option]], list[list[Option]]]:
    """The variants of each recipe that fit, and all variants of each recipe without one; recipes that use most of the
    GPU first. Fitting variants precede tight ones."""
    fit, others = [], []
    for recipe in recipes:
        recipe_options = options(recipe, machine)
        fitting_options = [option for option in recipe_options if option.verdict in ("fits", "tight")]
        fitting_options.sort(key=lambda option: option.verdict != "fits")  # stable: else the recipe's order
        if fitting_options:
            fit.append(fitting_options)
        elif recipe_options:
            others.append(recipe_options)
    fit.sort(key=lambda fitting_options: (fitting_options[0].verdict != "fits", -fitting_options[0].gpu_bytes))
    return fit, others
