"""The pack: every variant of every recipe in `recipes/` is checked, predicted and rehearsed.

No list of names stands here, so that a new recipe is tested as soon as its file is there.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.common import resources
from hf_memkit.presets import PRESETS
from hf_memkit.recipes.schema import read_recipe
from hf_memkit.recipes.stored_predictions import checksum, stored
from hf_memkit.setup.techniques.registry import TECHNIQUES
from tests.conftest import ROOT, read_json_lines
from tests.fewer import one_each
from tests.loaded import Loaded

FILES = sorted((ROOT / "recipes").rglob("*.yaml"))
read = functools.cache(read_recipe)
PACK = [(path.stem, variant) for path in FILES for variant in read(path).variants]
FURTHER = [(name, variant) for name, variant in PACK if name != "gpt2-on-16gb"]
"""Those of gpt2-on-16gb are rehearsed whole in test_variants.py, and exported in test_export.py."""


def techniques(case: tuple[str, str], families: Sequence[str] = ("offload", "adapters")) -> list[str]:
    """Of a variant: its engine and its adapters."""
    name, variant = case
    own = (*PRESETS[variant].techniques, *read(ROOT / "recipes" / f"{name}.yaml").variants[variant].techniques)
    last = {TECHNIQUES[each].family: each for each in own}
    return [last[family] for family in families if family in last]


def engine(case: tuple[str, str]) -> str:
    return " ".join(techniques(case, ["offload"]))


def task(case: tuple[str, str]) -> str:
    return read(ROOT / "recipes" / f"{case[0]}.yaml").task


def marked(cases: list[Any]) -> list[Any]:
    """With the marker of those that DeepSpeed trains."""
    return [
        pytest.param(*case.values, marks=[*case.marks, pytest.mark.operators] if engine(case.values) else case.marks)
        for case in cases
    ]


RESIDENT_FIRST = sorted(FURTHER, key=lambda case: case[1] != "resident")
VARIED = marked(one_each(RESIDENT_FIRST, lambda case: " ".join(techniques(case))))
"""A variant for each engine with its adapters. test_pack_exports.py trains one of each task."""

ADAPTERS = ("lora", "qlora")
"""Adapters beside random weights cannot learn much; they must move."""

STEPS, TOKENS = (20, 40), 40_000
"""Of a rehearsal here, enough for a loss that falls: between so many steps, for about so many tokens."""


def test_the_pack_is_whole() -> None:
    assert FILES and sorted(path.stem for path in FILES) == resources.names("recipes")


@pytest.mark.parametrize(("name", "variant"), PACK)
def test_every_variant_is_predicted_to_fit_or_says_why_not(name: str, variant: str) -> None:
    entry = stored()["recipes"].get(name)
    recipe = read(ROOT / "recipes" / f"{name}.yaml")
    assert entry is not None and entry["sha256"] == checksum(recipe), "run scripts/recipe_predictions.py"
    mine = [each for each in entry["predicted"] if each["variant"] == variant and each["bf16"]]
    refused = [why for which, why in entry["not_predicted"] if which == variant]
    assert mine or refused
    for each in mine:
        one = each["prediction"]
        assert one["verdict"] in ("fits", "tight", "does not fit") and one["why"]
        assert sum(one["categories"].values()) == pytest.approx(one["peak_allocated_gib"])
    assert refused or any(each["prediction"]["verdict"] != "does not fit" for each in mine), "no way that fits"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), VARIED)
def test_every_variant_rehearses(process: Loaded, tmp_path: Path, name: str, variant: str) -> None:
    spec = read(ROOT / "recipes" / f"{name}.yaml").rehearsal
    steps = min(STEPS[1], spec.steps, max(STEPS[0], TOKENS // (spec.sequences_per_step * spec.sequence_length)))
    command = ["memkit", "recipe", name, "--variant", variant, "--gpus", "1", "--output", "run"]
    ran = process.run([*command, "--max-steps", str(steps)], tmp_path)
    assert ran.returncode == 0, ran.output[-4000:]
    lines = [line for line in ran.output.splitlines() if line.startswith("PROBLEM")]
    problems = [line for line in lines if not line.startswith("PROBLEM: needs ")]  # RAM or disk that is not here
    assert "REHEARSAL" in ran.output and not problems
    content = json.loads((tmp_path / "run" / "memkit-run.json").read_text())
    result = content["result"]
    print(f"{name} {variant}: {result['held_out_loss_before']} -> {result['held_out_loss']}")
    assert content["status"] == "finished" and content["rehearsal"]
    fall = 0.01 if variant in ADAPTERS else 0.05
    assert math.isfinite(result["held_out_loss"])
    assert result["held_out_loss"] < (1 - fall) * result["held_out_loss_before"]

    records = read_json_lines(tmp_path / "run" / "memory-rank0.jsonl")
    assert all(record["schema"] == 1 for record in records)
    assert records[0]["kind"] == "run" and records[-1]["kind"] == "end" and records[-1]["status"] == "finished"
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, steps + 1))
    assert records[-1]["callback_errors"] == 0 and records[-1]["reader_errors"] == {}, records[-1]
    assert (tmp_path / "run" / "model").is_dir()
