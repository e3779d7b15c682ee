"""Chosen by prediction: the cheapest checkpointing that fits, the longest sequence, and what is not worth a trace.

Every prediction here is a real trace of a small model, where none is made up for its verdict; the GPUs are made as
large as the predictions need.
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
from hf_memkit.prediction import Prediction, predict
from hf_memkit.prediction.prediction import with_rest
from hf_memkit.recipes.schema import Recipe, read_recipe
from hf_memkit.recipes.variant import MULTIPLE
from hf_memkit.recipes.variant_search import FAR_OFF, choose, nearest_that_fits, unjudged
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup
from tests.prediction.test_prediction import made
from tests.recipes.resolving import resolve

SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
    "vocab_size": 8000,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
}


class Counting:
    """The real prediction, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []

    def __call__(self, resolved: Setup) -> Prediction:
        kind = next((name for name in resolved.techniques if name.endswith("-checkpointing")), "none")
        self.asked.append((resolved.preset, kind, resolved.sequence_length))
        return predict(resolved)


def small_recipe(recipe: Recipe, folder: Path, **changes: Any) -> Recipe:
    content = yaml.safe_load(recipe.path.read_text())
    content["model"] = {"hub_id": "nobody/small-llama", "architecture": SMALL}
    path = folder / "small.yaml"
    path.write_text(
        yaml.safe_dump({**content, "sequence_length": 2048, "sequences_per_step": 8, **changes}, sort_keys=False)
    )
    return read_recipe(path)


@pytest.fixture
def chooses(recipe: Recipe, tmp_path: Path) -> Recipe:
    kinds = ["none", "selective-checkpointing", "activation-checkpointing"]
    variants = {"resident": {"micro_batch_size": 8, "learning_rate": 1e-4, "checkpointing": kinds}}
    variants["lora"] = {"micro_batch_size": 1, "learning_rate": 1e-4}
    return small_recipe(recipe, tmp_path, variants=variants)


def with_gpu_of(machine: Machine, usable_bytes: int) -> Machine:
    gpu = gpu_of_size("16GB")
    return replace(machine, gpu=gpu.with_capacity(usable_bytes + gpu.context_bytes))


def gpu_of(resolved: Setup) -> Gpu:
    assert resolved.resolved_for.machine.gpu is not None
    return resolved.resolved_for.machine.gpu


def needs(found: Prediction) -> int:
    """Bytes of a GPU on which a prediction is `fits`."""
    return found.confidence.with_slack(found.peak_reserved_bytes[1])


def peaks(recipe: Recipe, machine: Machine) -> dict[str, int]:
    found = {}
    for kind in recipe.variants["resident"].checkpointing:
        variants = {"resident": recipe.variants["resident"].model_copy(update={"checkpointing": [kind]})}
        only = recipe.model_copy(update={"variants": variants})
        found[kind] = needs(predict(resolve(only, machine, Request(variant="resident"), use_hub=False)))
    return found


@pytest.mark.timeout(300)
def test_the_cheapest_checkpointing_that_is_predicted_to_fit(chooses: Recipe, machine: Machine) -> None:
    large = with_gpu_of(machine, 64 * GIB)
    need = peaks(chooses, large)
    assert need["none"] > need["selective-checkpointing"] > need["activation-checkpointing"]
    counting = Counting()
    roomy, found = choose(chooses, with_gpu_of(machine, need["none"]), Request(), use_hub=False, judge=counting)
    assert [kind for _, kind, _ in counting.asked] == ["none"], "the first that fits ends the search"
    assert found is not None and found.verdict == "fits"
    assert "arguments.activation_checkpointing" not in roomy or not roomy.get("arguments.activation_checkpointing")
    counting = Counting()
    tighter = with_gpu_of(machine, need["selective-checkpointing"])
    chosen, found = choose(chooses, tighter, Request(), use_hub=False, judge=counting)
    assert chosen.preset == "resident" and "selective-checkpointing" in chosen.techniques
    assert found is not None and needs(found) <= gpu_of(chosen).usable_bytes
    (note,) = [note for note in chosen.notes if note.startswith("Activation checkpointing")]
    assert "selective-checkpointing, the first that is predicted to fit. Also tried: none" in note
    assert not chosen.problems
    assert chosen.request == Request(), "what was asked for, not what was tried"


@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_a_variant_that_does_not_fit_gives_way_and_says_its_peaks(chooses: Recipe, machine: Machine) -> None:
    least = resolve(chooses, machine, Request(variant="lora"), use_hub=False)
    small = with_gpu_of(machine, needs(predict(least)))
    counting = Counting()
    chosen, found = choose(chooses, small, Request(), use_hub=False, judge=counting)
    assert chosen.preset == "lora" and found is not None
    assert chosen.why.startswith("the first variant that fits (predicted: fits: peak ")
    ((name, why),) = chosen.rejected
    assert name == "resident" and "does not fit: peak" in why
    named, found = choose(chooses, small, Request(variant="resident"), use_hub=False)
    assert found is not None and found.verdict == "does not fit"
    assert named.problems and nearest_that_fits(chooses, named, use_hub=False, judge=predict) == "lora"
    with pytest.raises(
        DoesNotFitError, match=r"no variant of small is predicted to fit this machine: resident .*; lora "
    ):
        choose(chooses, with_gpu_of(machine, least.ledger.total_bytes("device") // 4), Request(), use_hub=False)


def test_what_cannot_fit_is_not_traced_and_says_so(chooses: Recipe, machine: Machine) -> None:
    """With `auto` nothing of it is; a variant that was asked for is traced with the last of its kinds."""
    tiny = with_gpu_of(machine, GIB // 16)
    counting = Counting()
    with pytest.raises(DoesNotFitError, match=r"resident needs at least .* by formula, \d+% above .*: not traced"):
        choose(chooses, tiny, Request(), use_hub=False, judge=counting)
    assert "resident" not in {variant for variant, _, _ in counting.asked} and FAR_OFF < 1
    counting = Counting()
    named, found = choose(chooses, tiny, Request(variant="resident"), use_hub=False, judge=counting)
    assert [kind for _, kind, _ in counting.asked] == ["activation-checkpointing"]
    assert found is not None and named.problems


def test_what_the_machine_lacks_beside_the_gpu_needs_no_trace(chooses: Recipe, machine: Machine) -> None:
    counting = Counting()
    with pytest.raises(DoesNotFitError, match="of RAM by formula"):
        choose(chooses, machine.with_ram(2 * GIB), Request(), use_hub=False, judge=counting)
    assert not counting.asked


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_the_longest_sequence_is_confirmed_by_prediction(recipe: Recipe, machine: Machine, tmp_path: Path) -> None:
    variants = {"longest-sequence": {"micro_batch_size": 1, "learning_rate": 1e-4, "solve_for": "sequence"}}
    own = small_recipe(recipe, tmp_path, variants=variants, sequences_per_step=1)
    card = replace(machine, gpu=gpu_of_size("2GB"))
    counting = Counting()
    chosen, found = choose(own, card, Request(), use_hub=False, judge=counting)
    length = int(chosen["data.sequence_length"])
    lengths = [tried for _, _, tried in counting.asked]
    assert found is not None and found.verdict == "fits"
    assert length % MULTIPLE == 0 and length in lengths and len(lengths) == len(set(lengths)) <= 4
    reason = next(s.reason for s in chosen.settings if s.key == "data.sequence_length")
    assert f"{length} fits" in reason
    longer = resolve(own, card, Request(sequence_length=length * 5 // 4), use_hub=False)
    assert predict(longer).verdict != "fits", "it is the longest, as far as that can be told"
    asked, _ = choose(own, card, Request(sequence_length=4096), use_hub=False)
    assert asked["data.sequence_length"] == 4096


def made_up(peak_bytes: int, verdict: str) -> Prediction:
    """Of activations alone, so that the next length follows from it in proportion."""
    return made(
        peak_allocated_bytes=peak_bytes, peak_reserved_bytes=(peak_bytes, peak_bytes), smallest_cap_bytes=peak_bytes,
        categories=with_rest({"activations": peak_bytes}, peak_bytes), verdict=verdict,
    )  # fmt: skip


def test_of_the_lengths_that_fit_the_longest_is_taken(recipe: Recipe, machine: Machine, tmp_path: Path) -> None:
    """Also where a shorter one was tried last: twice the first was too much, by far."""
    variants = {"longest-sequence": {"micro_batch_size": 1, "learning_rate": 1e-4, "solve_for": "sequence"}}
    own = small_recipe(recipe, tmp_path, variants=variants, sequences_per_step=1)
    asked: list[int] = []

    def judge(resolved: Setup) -> Prediction:
        asked.append(int(resolved["data.sequence_length"]))
        usable = gpu_of(resolved).usable_bytes
        share = {1: 0.25, 2: 0.5, 3: 1.2}.get(len(asked), 0.8)
        return made_up(int(share * usable), "fits" if share < 1 else "does not fit")

    card = replace(machine, gpu=gpu_of_size("2GB"))
    chosen, _ = choose(own, card, Request(), use_hub=False, judge=judge)
    assert len(asked) == 4, asked
    assert asked[2] > asked[1] > asked[3] and chosen["data.sequence_length"] == asked[1]


def test_of_variants_that_are_tight_the_first_is_taken(chooses: Recipe, machine: Machine) -> None:
    card = with_gpu_of(machine, 64 * GIB)
    chosen, _ = choose(chooses, card, Request(), use_hub=False, judge=lambda _: made_up(60 * GIB, "tight"))
    assert chosen.preset == "resident" and [name for name, _ in chosen.rejected] == ["lora"]


def test_a_variant_that_the_gpu_refuses_gives_way(chooses: Recipe, machine: Machine) -> None:
    """Would notice: "fits" for what stops in its first step."""

    def judge(setup: Setup) -> Prediction:
        if setup.preset == "resident":
            raise NoKernel("stops in its first step")
        return made_up(10 * GIB, "fits")

    card = with_gpu_of(machine, 64 * GIB)
    chosen, _ = choose(chooses, card, Request(), use_hub=False, judge=judge)
    assert chosen.preset == "lora" and chosen.rejected == (("resident", "stops in its first step"),)
    by_name, found = choose(chooses, card, Request(variant="resident"), use_hub=False, judge=judge)
    assert found is None and "stops in its first step" in by_name.problems


def test_what_nobody_can_predict_is_not_said_to_fit(chooses: Recipe, machine: Machine) -> None:
    """A variant that is predicted to fit comes before one of which nothing is known, and that before none at all."""

    def judge(setup: Setup) -> Prediction:
        return made_up(10 * GIB, "fits") if setup.preset == "lora" else unjudged(setup)

    card = with_gpu_of(machine, 64 * GIB)
    chosen, found = choose(chooses, card, Request(), use_hub=False, judge=judge)
    assert chosen.preset == "lora" and found is not None
    ((name, why),) = chosen.rejected
    assert name == "resident" and why.startswith("not predicted")
    unknown, found = choose(chooses, card, Request(), use_hub=False, judge=unjudged)
    assert unknown.preset == "resident" and found is None and "not predicted" in unknown.why
    with pytest.raises(DoesNotFitError, match="at least"):
        choose(chooses, with_gpu_of(machine, GIB // 64), Request(), use_hub=False, judge=unjudged)
