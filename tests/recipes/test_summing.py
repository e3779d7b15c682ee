"""What summing micro-gradients in bf16 costs is said where it happens, with the measured figure."""

from __future__ import annotations

import json

import pytest

from hf_memkit.catalog.hardware import Machine
from hf_memkit.recipes.schema import Recipe
from hf_memkit.recipes.settings import BF16_SUM_ERROR
from hf_memkit.setup.request import Request
from tests.conftest import ROOT
from tests.recipes.resolving import resolve


@pytest.mark.parametrize(
    ("variant", "accumulation", "has_note"),
    [("resident", 2, True), ("resident", 1, False), ("offload", 2, False), ("lora", 8, False)],
)
def test_the_note_stands_where_bf16_gradients_are_summed(
    recipe: Recipe, machine: Machine, variant: str, accumulation: int, has_note: bool
) -> None:
    chosen = {"gradient_accumulation_steps": accumulation}
    setup = resolve(recipe, machine, Request(variant=variant, arguments=chosen), use_hub=False)
    notes = [note for note in setup.notes if f"gradients of the {accumulation} micro-batches" in note]
    assert bool(notes) == has_note


def test_the_figures_are_those_of_the_evidence() -> None:
    path = ROOT / "benchmarks" / "results" / "bf16_accumulation.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    measured = {row["micro_batches"]: (row["sum"], row["arithmetic"]) for row in rows if row["micro_batches"] > 1}
    assert {count: pytest.approx(pair, rel=0.01) for count, pair in BF16_SUM_ERROR.items()} == measured
