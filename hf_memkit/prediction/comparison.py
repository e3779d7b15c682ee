"""Compares predictions of one job in two environments: versions, phases, categories and modules that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hf_memkit.common.terms import Category, Phase
from hf_memkit.common.units import GIB
from hf_memkit.prediction.prediction import Prediction

Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between two predictions of one job, as (bytes here, bytes there), largest difference first.

    Attributes:
        categories, modules: parts of the peak; layers of one kind count as one module (`model.layers.*.mlp`), and
            memory allocated outside any module has an empty name.
    """

    total_bytes: tuple[int, int]  # maximum that the process takes of the GPU
    phases: Mapping[Phase, tuple[int, int]]  # peaks of phases
    categories: Mapping[Category, tuple[int, int]]
    modules: Mapping[tuple[str, Category], tuple[int, int]]

    def to_json(self) -> dict[str, Any]:
        def gib(pair: tuple[int, int]) -> dict[str, float]:
            return {"here_gib": pair[0] / GIB, "there_gib": pair[1] / GIB}

        return {
            "total": gib(self.total_bytes),
            "phases": {name: gib(pair) for name, pair in self.phases.items()},
            "categories": {name: gib(pair) for name, pair in self.categories.items()},
            "modules": [
                {"module": module, "category": category, **gib(pair)}
                for (module, category), pair in self.modules.items()
            ],
        }


def compare(here: Prediction, there: Prediction) -> Comparison:
    """Compares two predictions of one job, both from traces."""
    phases = [{name: peak for name, (peak, _) in prediction.phases.items()} for prediction in (here, there)]
    return Comparison(
        total_bytes=(here.total_bytes[1], there.total_bytes[1]),
        phases=_different(phases[0], phases[1]),
        categories=_different(here.categories, there.categories),
        modules=_different(here.modules, there.modules),
    )


def compare_versions(here: Mapping[str, str], there: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Distributions with different versions, by name: (here, there); None: not installed."""
    pairs = {name: (here.get(name), there.get(name)) for name in sorted({*here, *there})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _different(here: Mapping[Name, int], there: Mapping[Name, int]) -> dict[Name, tuple[int, int]]:
    pairs = {name: (here.get(name, 0), there.get(name, 0)) for name in [*here, *there]}
    different = [(name, pair) for name, pair in pairs.items() if pair[0] != pair[1]]
    return dict(sorted(different, key=lambda item: -abs(item[1][0] - item[1][1])))
