"""Recipe files: every shipped one is valid, and all mistakes in one are reported together."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hf_memkit.catalog.hardware import Machine, gpu_of_size
from hf_memkit.catalog.models import describe
from hf_memkit.common import resources
from hf_memkit.common.errors import InputError, RecipeError
from hf_memkit.common.units import GIB
from hf_memkit.recipes.schema import Recipe, load_recipe, read_recipe
from hf_memkit.recipes.stored_predictions import stored
from hf_memkit.setup.request import Request
from tests.recipes.resolving import resolve

FILES = sorted(resources.folder("recipes").rglob("*.y*ml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid_and_begin_with_a_spoken_header(path: Path) -> None:
    recipe = read_recipe(path)
    assert load_recipe(recipe.name) == recipe
    header = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    for word in ("For", "GPU", "RAM", "Run", "Lower first"):
        assert re.search(rf"^# {word}\s", header, re.MULTILINE), f"the header does not say: {word}"


def test_the_figures_in_the_header_are_those_of_the_ledgers(recipe: Recipe, machine: Machine) -> None:
    """Nobody writes a number by hand and lets it rot: the header's GiB are what the formulas give."""
    header = recipe.path.read_text().split("\n\n")[0]
    stated = [float(number) for number in re.findall(r"(\d+) GiB", header)]

    small = machine.with_ram(33 * GIB)

    def needed(variant: str, *places: str, on: Machine = machine) -> float:
        setup = resolve(recipe, on, Request(variant=variant), use_hub=False)
        return setup.ledger.total_bytes(*places) / GIB  # type: ignore[arg-type]

    assert stated == [
        pytest.approx(needed("resident", "host", "pinned"), abs=0.6),
        pytest.approx(needed("offload", "host", "pinned", on=small), abs=0.6),
        pytest.approx(needed("offload", "host", "pinned"), abs=0.6),
        pytest.approx(needed("infinity", "host", "pinned"), abs=0.6),
        pytest.approx(needed("infinity", "disk"), abs=1),
    ]
    assert not resolve(recipe, small, Request(variant="offload"), use_hub=False).problems


def test_the_ram_in_the_largest_recipe_s_header_is_that_of_its_predictions() -> None:
    """Would notice: a header that goes on promising less RAM than a checkpoint takes."""
    recipe = load_recipe("llama-8b-on-24gb")
    line = next(each for each in recipe.path.read_text().splitlines() if each.startswith("# RAM"))
    stated = [int(number) for number in re.findall(r"(\d+) GiB", line)]
    predictions = {each["variant"]: each["prediction"] for each in stored()["recipes"][recipe.name]["predicted"]}
    ram = [predictions[name]["host_rss_gib"] + predictions[name]["pinned_gib"] for name in ("offload", "infinity")]
    assert stated == [round(each) for each in (*ram, predictions["infinity"]["disk_gib"])]


def test_all_mistakes_are_reported_at_once(recipe: Recipe, tmp_path: Path) -> None:
    text = recipe.path.read_text()
    for right, wrong in {
        "summary:": "sumary:",
        "card: 16GB": "card: 16XB",
        "  offload:": "  ofload:",
        "    micro_batch_size: 8 ": "    micro_batch_size: 7 ",
        "      rank: 16": "      rnak: 16\n      alpha: many\n    lr: 3",
        "steps: 500": "steps: many",
        "    checkpointing: [none, selective-": "    techniques: [chunk-loss]\n    checkpointing: [nothing, selectiv-",
        "  infinity:": "    techniques: [chunked-loss, liger]\n  infinity:",
    }.items():
        assert right in text
        text = text.replace(right, wrong, 1)
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    reported = str(caught.value)
    assert all(line.startswith(f"{path}: ") for line in reported.splitlines())
    for expected in (
        "summary: missing",
        "sumary: unknown key; did you mean 'summary'?",
        "card: '16XB': '16XB' is not a size",
        "variants.ofload: 'ofload': no preset of this name; did you mean 'offload'?",
        "variants.lora.lr: unknown key",
        "steps: 'many'",
        "variants.lora.values.rnak: unknown key; did you mean 'rank'?",
        "variants.lora.values.alpha: 'many': must be int",
        "variants.resident.techniques.0: 'chunk-loss': no technique of this name; did you mean 'chunked-loss'?",
        "variants.resident.checkpointing.0: 'nothing': no checkpointing technique",
        "variants.resident.checkpointing.1: 'selectiv-checkpointing': no checkpointing technique; did you mean "
        "'selective-checkpointing'?; allowed: none, ",
        "variants.infinity.micro_batch_size: 7: must divide sequences_per_step (32)",
    ):
        assert expected in reported


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1\n", r"broken\.yaml:2:1: not valid YAML"),
        ("- 1\n", "is a list, not keys and values"),
        ("", "is empty"),
        ("a: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=expected):
        read_recipe(path)


def test_a_recipe_file_of_ones_own(recipe: Recipe, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(recipe.path.read_text())
    assert load_recipe(str(path)).name == "mine"
    with pytest.raises(InputError, match="no such file"):
        load_recipe(str(tmp_path / "no.yaml"))


def test_a_technique_of_the_variant_brings_its_values(recipe: Recipe, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        recipe.path.read_text().replace(
            "      rank: 16",
            "      rank: 16\n      checkpoint_every: 3\n    techniques: [every-nth-layer-checkpointing]",
        )
    )
    variant = read_recipe(path).variants["lora"]
    assert variant.techniques == ["every-nth-layer-checkpointing"] and variant.values == {
        "rank": 16,
        "checkpoint_every": 3,
    }


LANGUAGE_MODELS = {
    "qwen3-1.7b-on-16gb": 1_720_574_976,
    "llama-8b-qlora-on-16gb": 8_030_261_248,
    "llama-8b-lora-on-24gb": 8_030_261_248,
    "llama-8b-on-24gb": 8_030_261_248,
    "llama-8b-on-80gb": 8_030_261_248,
    "llama-70b-lora-on-8x80gb": 70_553_706_496,
    "long-context-8b-on-80gb": 8_030_261_248,
}
"""Recipes of this kind, with the parameters that each model's page states."""


@pytest.mark.parametrize(("name", "parameters"), LANGUAGE_MODELS.items())
def test_parameters_and_ram_are_what_pages_and_header_say(name: str, parameters: int, machine: Machine) -> None:
    """With RAM enough to page-lock what is to be locked."""
    recipe = load_recipe(name)
    assert describe(recipe.model.hub_id, recipe.model.architecture, use_hub=False).parameters == parameters
    if recipe.model.hub_id.startswith("meta-llama/"):  # gated
        assert recipe.model.open_alternative
        assert f"--model {recipe.model.open_alternative}" in recipe.path.read_text(), "the header says what to take"
    header = " ".join(line.lstrip("# ") for line in recipe.path.read_text().split("\n\n")[0].splitlines())
    ram = header[header.index(" RAM ") : header.index(" Run ")]
    stated = re.findall(r"(\d+) GiB for `([\w-]+)`(?: \(and (\d+) GiB of disk\))?", ram)
    assert {variant for _, variant, _ in stated} == set(recipe.variants), "the header leaves one out"
    large = replace(machine, gpu=gpu_of_size(recipe.card), ram_bytes=256 * GIB, disk_free_bytes=500 * GIB)
    for number, variant, disk in stated:
        ledger = resolve(recipe, large, Request(variant=variant, gpus=recipe.gpus), use_hub=False).ledger
        assert float(number) == pytest.approx(ledger.total_bytes("host", "pinned") / GIB, abs=0.6)
        assert float(disk or 0) == pytest.approx(ledger.total_bytes("disk") / GIB, abs=1)
