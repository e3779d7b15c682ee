"""benchmarks/gpu.py, section `recipes`: its cases, and one of each kind of batch end to end on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu, recipes_section
from hf_memkit import resources


def test_every_recipe_and_variant_is_a_case() -> None:
    found = recipes_section.cases()
    assert {case.recipe for case in found} == set(resources.names("recipes"))
    assert len({case.name for case in found}) == len(found)
    assert all(0 < case.cap_gib < case.gpu.capacity_bytes / 2**30 for case in found)
    assert {case.card for case in found if case.recipe == "gpt2-on-16gb"} == {"16GB", "T4"}


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "recipe", ["vit-large-on-8gb", pytest.param("llama-8b-qlora-on-16gb", marks=pytest.mark.exhaustive)]
)
def test_a_case_runs_end_to_end(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolving, rehearsing, child, records, evidence; marked as a rehearsal, with nothing measured of a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    case = next(each for each in recipes_section.cases() if each.recipe == recipe)
    monkeypatch.setattr(recipes_section, "cases", lambda: [case])
    assert gpu.main(["--section", "recipes", "--rehearse", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "recipes-rehearsal.json").read_text())
    (found,) = content["cases"]
    assert content["rehearsal"] and found["status"] == "fits" and found["steps"] == recipes_section.STEPS, found
    assert found["recipe"] == recipe and "peak_allocated_gib" not in found
    assert ("tokens_per_s" in found) == (recipe != "vit-large-on-8gb")


def test_a_recipe_for_several_gpus_is_refused_on_one(tmp_path: Path) -> None:
    case = next(each for each in recipes_section.cases() if each.recipe == "llama-70b-lora-on-8x80gb")
    assert recipes_section.prepare(case, str(tmp_path), on_cpu=False) == "needs 8 GPUs"
