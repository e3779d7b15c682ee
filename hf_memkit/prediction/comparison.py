"""Why one job needs more in one environment than in another: versions, phases, categories and modules that differ."""

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
    """What differs between the predictions of one job in two environments, as (bytes here, bytes there), largest
    difference first: the highest that the process takes of the GPU, peaks of phases, and the peak's categories and
    modules; layers of one kind are one (`model.layers.*.mlp`), and what has no name is made outside of any module."""

    total_bytes: tuple[int, int]
    phases: Mapping[Phase, tuple[int, int]]
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
    """What differs between two predictions of one job, both from traces."""
    of_phases = [{name: peak for name, (peak, _) in each.phases.items()} for each in (here, there)]
    return Comparison(
        total_bytes=(here.total_bytes[1], there.total_bytes[1]),
        phases=_different(of_phases[0], of_phases[1]),
        categories=_different(here.categories, there.categories),
        modules=_different(here.modules, there.modules),
    )


def compare_versions(here: Mapping[str, str], there: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Distributions whose version here is not the one there, by name; None: not installed."""
    pairs = {name: (here.get(name), there.get(name)) for name in sorted({*here, *there})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _different(here: Mapping[Name, int], there: Mapping[Name, int]) -> dict[Name, tuple[int, int]]:
    pairs = {name: (here.get(name, 0), there.get(name, 0)) for name in [*here, *there]}
    found = [(name, pair) for name, pair in pairs.items() if pair[0] != pair[1]]
    return dict(sorted(found, key=lambda each: -abs(each[1][0] - each[1][1])))
