"""Chosen by prediction: the cheapest checkpointing that fits, the longest sequence, and what is not worth a trace.

Predictions are made up for their verdicts here; what is stored with recipes comes from real ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_memkit.catalog.hardware import Gpu, Machine, gpu_of_size
from hf_memkit.common.errors import DoesNotFitError, NoKernel
from hf_memkit.common.units import GIB
from hf_memkit.prediction import Prediction
from hf_memkit.prediction.prediction import with_rest
from hf_memkit.recipes.schema import Recipe, read_recipe
from hf_memkit.recipes.variant_search import choose, nearest_that_fits, predict_nothing
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup
from tests.prediction.test_prediction import made

SMALL = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 1536, "vocab_size": 8000, "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
}  # fmt: skip
PEAKS = {"none": 40, "selective-checkpointing": 30, "activation-checkpointing": 20, "lora": 10}
"""GiB, of the ways to checkpoint `resident`, and of the other variant."""


class Judging:
    """Made-up predictions, and what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def __call__(self, resolved: Setup) -> Prediction:
        kind = next((name for name in resolved.techniques if name.endswith("-checkpointing")), "none")
        self.asked.append((resolved.preset, kind))
        peak = PEAKS["lora" if resolved.preset == "lora" else kind] * GIB
        return made_up(peak, resolved)


def made_up(peak_bytes: int, resolved: Setup) -> Prediction:
    """Of activations alone, so that the next length follows from it in proportion."""
    return made(
        peak_allocated_bytes=peak_bytes, peak_reserved_bytes=(peak_bytes, peak_bytes), smallest_cap_bytes=peak_bytes,
        categories=with_rest({"activations": peak_bytes}, peak_bytes),
    ).with_verdict(resolved.resolved_for.machine)  # fmt: skip


def small_recipe(recipe: Recipe, folder: Path, **changes: Any) -> Recipe:
    content = yaml.safe_load(recipe.path.read_text())
    content["model"] = {"hub_id": "nobody/small-llama", "architecture": SMALL}
    content |= {"sequence_length": 2048, "sequences_per_step": 8, **changes}
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return read_recipe(path)


@pytest.fixture
def chooses(recipe: Recipe, tmp_path: Path) -> Recipe:
    kinds = ["none", "selective-checkpointing", "activation-checkpointing"]
    variants = {"resident": {"micro_batch_size": 8, "learning_rate": 1e-4, "checkpointing": kinds}}
    variants["lora"] = {"micro_batch_size": 1, "learning_rate": 1e-4}
    return small_recipe(recipe, tmp_path, variants=variants)


def with_gpu_of(machine: Machine, usable_bytes: int) -> Machine:
    gpu = gpu_of_size("16GB")
    return replace(machine, gpu=replace(gpu, capacity_bytes=usable_bytes + gpu.context_bytes))


def gpu_of(resolved: Setup) -> Gpu:
    assert resolved.resolved_for.machine.gpu is not None
    return resolved.resolved_for.machine.gpu


@pytest.mark.parametrize(("usable", "chosen", "tried"), [(44, "none", 1), (33, "selective-checkpointing", 2)])
def test_the_cheapest_checkpointing_that_is_predicted_to_fit(
    chooses: Recipe, machine: Machine, usable: int, chosen: str, tried: int
) -> None:
    judge = Judging()
    setup, result = choose(chooses, with_gpu_of(machine, usable * GIB), Request(), use_hub=False, judge=judge)
    assert judge.asked == [("resident", kind) for kind in list(PEAKS)[:tried]], "the first that fits ends the search"
    assert result is not None and result.verdict == "fits" and not setup.problems
    assert (chosen in setup.techniques) is (chosen != "none")
    (note,) = [note for note in setup.notes if note.startswith("Activation checkpointing")]
    assert f"{chosen}, the first that is predicted to fit" in note and ("Also tried: none" in note) is (tried == 2)
    assert setup.request == Request(), "what was asked for, not what was tried"


def test_a_variant_that_does_not_fit_gives_way_and_says_its_peaks(chooses: Recipe, machine: Machine) -> None:
    small, judge = with_gpu_of(machine, 15 * GIB), Judging()
    chosen, result = choose(chooses, small, Request(), use_hub=False, judge=judge)
    assert chosen.preset == "lora" and result is not None
    assert chosen.why.startswith("the first variant that fits (predicted: fits: needs up to ")
    ((name, why),) = chosen.rejected
    assert name == "resident" and "does not fit: needs at least " in why
    named, result = choose(chooses, small, Request(variant="resident"), use_hub=False, judge=judge)
    assert result is not None and result.verdict == "does not fit"
    assert named.problems and nearest_that_fits(chooses, named, use_hub=False, judge=judge) == "lora"
    with pytest.raises(
        DoesNotFitError, match=r"no variant of small is predicted to fit this machine: resident .*; lo"
    ):
        choose(chooses, with_gpu_of(machine, 5 * GIB), Request(), use_hub=False, judge=judge)


def test_a_size_that_cannot_fit_is_not_traced_and_noted(chooses: Recipe, machine: Machine) -> None:
    """With `auto` nothing of it is; a variant that was asked for is traced with the last of its kinds."""
    tiny, judge = with_gpu_of(machine, GIB // 16), Judging()
    with pytest.raises(DoesNotFitError, match=r"resident needs at least .* without activations; .*: not traced"):
        choose(chooses, tiny, Request(), use_hub=False, judge=judge)
    assert "resident" not in {variant for variant, _ in judge.asked}
    judge = Judging()
    named, result = choose(chooses, tiny, Request(variant="resident"), use_hub=False, judge=judge)
    assert judge.asked == [("resident", "activation-checkpointing")]
    assert result is not None and named.problems


def test_shortages_other_than_the_gpu_s_need_no_trace(chooses: Recipe, machine: Machine) -> None:
    judge = Judging()
    with pytest.raises(DoesNotFitError, match="GiB of RAM; "):
        choose(chooses, machine.with_ram(2 * GIB), Request(), use_hub=False, judge=judge)
    assert not judge.asked


def test_of_the_lengths_that_fit_the_longest_is_taken(recipe: Recipe, machine: Machine, tmp_path: Path) -> None:
    """Also where a shorter one was tried last: twice the first was too much, by far."""
    variants = {"longest-sequence": {"micro_batch_size": 1, "learning_rate": 1e-4, "solve_for": "sequence"}}
    own = small_recipe(recipe, tmp_path, variants=variants, sequences_per_step=1)
    asked: list[int] = []

    def judge(resolved: Setup) -> Prediction:
        asked.append(int(resolved["data.sequence_length"]))
        usable = gpu_of(resolved).usable_bytes
        share = {1: 0.25, 2: 0.5, 3: 1.5}.get(len(asked), 0.8)
        return made_up(int(share * usable), resolved)

    card = replace(machine, gpu=gpu_of_size("2GB"))
    chosen, _ = choose(own, card, Request(), use_hub=False, judge=judge)
    assert len(asked) == 4, asked
    assert asked[2] > asked[1] > asked[3] and chosen["data.sequence_length"] == asked[1]


def test_of_variants_that_are_tight_the_first_is_taken(chooses: Recipe, machine: Machine) -> None:
    card = with_gpu_of(machine, 64 * GIB)
    chosen, _ = choose(chooses, card, Request(), use_hub=False, judge=lambda setup: made_up(60 * GIB, setup))
    assert chosen.preset == "resident" and [name for name, _ in chosen.rejected] == ["lora"]


def test_a_variant_that_the_gpu_refuses_gives_way(chooses: Recipe, machine: Machine) -> None:
    """Would notice: "fits" for what stops in its first step."""

    def judge(setup: Setup) -> Prediction:
        if setup.preset == "resident":
            raise NoKernel("stops in its first step")
        return made_up(10 * GIB, setup)

    card = with_gpu_of(machine, 64 * GIB)
    chosen, _ = choose(chooses, card, Request(), use_hub=False, judge=judge)
    assert chosen.preset == "lora" and chosen.rejected == (("resident", "stops in its first step"),)
    by_name, result = choose(chooses, card, Request(variant="resident"), use_hub=False, judge=judge)
    assert result is None and "stops in its first step" in by_name.problems


def test_an_unpredictable_setup_is_not_reported_to_fit(chooses: Recipe, machine: Machine) -> None:
    """A variant that is predicted to fit comes before one of which nothing is known, and that before none at all."""

    def judge(setup: Setup) -> Prediction:
        return made_up(10 * GIB, setup) if setup.preset == "lora" else predict_nothing(setup)

    card = with_gpu_of(machine, 64 * GIB)
    chosen, result = choose(chooses, card, Request(), use_hub=False, judge=judge)
    assert chosen.preset == "lora" and result is not None
    ((name, why),) = chosen.rejected
    assert name == "resident" and why.startswith("not predicted")
    unknown, result = choose(chooses, card, Request(), use_hub=False, judge=predict_nothing)
    assert unknown.preset == "resident" and result is None and "not predicted" in unknown.why
    with pytest.raises(DoesNotFitError, match="at least"):
        choose(chooses, with_gpu_of(machine, GIB // 64), Request(), use_hub=False, judge=predict_nothing)
