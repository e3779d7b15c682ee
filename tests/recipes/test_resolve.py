"""One function from recipe, machine and request to a setup: the choice of the variant, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from hf_memkit.catalog.adapter_layers import adapter_tensors
from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
from hf_memkit.catalog.hardware import Machine, gpu_of_size, named_gpu
from hf_memkit.common.errors import DoesNotFitError, RunError, SettingError
from hf_memkit.common.units import GIB
from hf_memkit.recipes.rehearse import rehearse
from hf_memkit.recipes.schema import Recipe, load_recipe
from hf_memkit.recipes.variant_search import choose, stored_or
from hf_memkit.setup.build import build_model, missing_package, refuse_random_weights
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup
from tests.recipes.resolving import resolve


def make(recipe: Recipe, machine: Machine, variant: str = "auto", **request: object) -> Setup:
    return resolve(recipe, machine, Request(variant=variant, **request), use_hub=False)  # type: ignore[arg-type]


def of(machine: Machine, card: str, ram_gib: float, disk_gib: float = 200) -> Machine:
    gpu = named_gpu(card) if card in KNOWN_GPUS else gpu_of_size(card)
    return replace(machine, gpu=gpu, ram_bytes=int(ram_gib * GIB), disk_free_bytes=int(disk_gib * GIB))


@pytest.mark.parametrize(
    ("card", "ram_gib", "disk_gib", "expected"),
    [
        ("16GB", 64, 200, "resident"),
        ("16GB", 13, 200, "resident"),
        ("T4", 64, 200, "offload"),
        ("T4", 29, 200, "infinity"),
        ("T4", 12, 20, "lora"),
        ("8GB", 13, 20, "lora"),
    ],
)
def test_auto_takes_the_first_variant_that_fits_and_says_why(
    recipe: Recipe, machine: Machine, card: str, ram_gib: float, disk_gib: float, expected: str
) -> None:
    resolved = make(recipe, of(machine, card, ram_gib, disk_gib))
    assert resolved.preset == expected
    assert "predicted: " in resolved.why
    before = list(recipe.variants)[: list(recipe.variants).index(expected)]
    assert [name for name, _ in resolved.rejected] == before
    assert all(why for _, why in resolved.rejected)


def test_sixteen_and_thirty_two_sequences_at_once_fit_a_16_gb_gpu(recipe: Recipe, machine: Machine) -> None:
    resident, offload = (make(recipe, machine, name) for name in ("resident", "offload"))
    for setup, micro_batch, accumulation in ((resident, 16, 2), (offload, 32, 1)):
        assert not setup.problems and "chunked-loss" in setup.techniques
        assert setup.arguments["per_device_train_batch_size"] == micro_batch
        assert setup.arguments["gradient_accumulation_steps"] == accumulation


def test_a_gpu_on_which_nothing_fits_gets_the_last_checkpointing_and_a_message(
    recipe: Recipe, machine: Machine
) -> None:
    setup = make(recipe, of(machine, "12GB", 64), "resident")
    assert "activation-checkpointing" in setup.techniques and setup.problems
    assert any("the nearest to fitting, by prediction" in note for note in setup.notes)


def test_without_accumulation_offload_holds_no_accumulators(recipe: Recipe, machine: Machine) -> None:
    def ram(accumulation: int) -> tuple[float, bool]:
        chosen = {"gradient_accumulation_steps": accumulation}
        setup = make(recipe, of(machine, "16GB", 33), "offload", arguments=chosen)  # so little that nothing is pinned
        accumulators = any(row.term == "16-bit accumulators" for row in setup.ledger.rows)
        return setup.ledger.total_bytes("host", "pinned") / GIB, accumulators

    (less, without), (more, with_them) = ram(1), ram(2)
    assert with_them and not without
    assert more - less == pytest.approx(2 * 1_557_611_200 / GIB, abs=0.01), "2 bytes a parameter"


def test_a_gpu_without_bf16_gets_fp16_and_a_reason(recipe: Recipe, machine: Machine) -> None:
    setup = make(recipe, of(machine, "T4", 64), "offload")
    assert setup.arguments["fp16"] is True and setup.arguments["bf16"] is False
    assert setup["model.dtype"] == "float16"
    reason = next(s.reason for s in setup.settings if s.key == "arguments.fp16")
    assert "T4" in reason and "loss scaling" in reason


def test_an_explicit_variant_that_does_not_fit_is_shown_with_its_problem(recipe: Recipe, machine: Machine) -> None:
    setup = make(recipe, of(machine, "16GB", 24), "offload")
    assert len(setup.problems) == 1 and "of RAM; the machine has 24.00 GiB" in setup.problems[0]
    assert make(recipe, of(machine, "T4", 64), "resident").problems[0].startswith("needs a GPU that computes in")


def test_offload_pins_only_where_the_rounded_blocks_fit(recipe: Recipe, machine: Machine) -> None:
    def pinned(ram_gib: float) -> bool:
        config = make(recipe, of(machine, "16GB", ram_gib), "offload")["deepspeed.config"]
        return bool(config["zero_optimization"]["offload_optimizer"]["pin_memory"])

    assert pinned(64) and not pinned(33)
    setup = make(recipe, of(machine, "16GB", 33), "offload")
    assert "keeps gradients and optimizer states in RAM: 26.26 GiB" in setup.notes[0]
    sizes = {size["key"]: size["reason"] for size in setup["deepspeed.sizes"]}
    assert "round up to powers of two" in sizes["zero_optimization.offload_optimizer.pin_memory"]


def test_infinity_says_what_it_writes_and_where(recipe: Recipe, machine: Machine) -> None:
    setup = make(recipe, machine, "infinity", output="out", nvme_path="/fast")
    zero = setup["deepspeed.config"]["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == "/fast/out"
    assert zero["offload_param"]["buffer_size"] >= 80_411_200
    assert "18.7 GB are written to /fast/out at every optimizer step" in setup.notes[0]
    assert setup.ledger.total_bytes("disk") == pytest.approx(28.0e9, rel=0.01)


def test_checkpoints_are_kept_as_far_as_the_disk_allows(recipe: Recipe, machine: Machine) -> None:
    plenty = make(recipe, of(machine, "16GB", 64, 200), "infinity").arguments
    assert plenty["save_strategy"] == "steps" and plenty["save_total_limit"] == 2
    assert make(recipe, of(machine, "16GB", 64, 80), "infinity").arguments["save_total_limit"] == 1
    none = make(recipe, of(machine, "16GB", 64, 40), "infinity")
    assert none.arguments["save_strategy"] == "no" and "save_steps" not in none.arguments


def test_the_user_s_value_overrides_and_the_other_half_of_the_batch_follows(recipe: Recipe, machine: Machine) -> None:
    chosen = {"per_device_train_batch_size": 2, "learning_rate": 1e-3}
    resolved = make(recipe, machine, "resident", arguments=chosen, max_steps=7, sequence_length=512)
    arguments = resolved.arguments
    assert arguments["gradient_accumulation_steps"] == 16
    assert (arguments["learning_rate"], arguments["max_steps"], arguments["eval_steps"]) == (1e-3, 7, 7)
    assert resolved["data.sequence_length"] == 512
    fewer = make(recipe, machine, "resident", arguments={"gradient_accumulation_steps": 16}).arguments
    assert fewer["per_device_train_batch_size"] == 2


@pytest.mark.parametrize(
    ("chosen", "variant", "message"),
    [
        ({"per_device_train_batch_size": 0}, "resident", "must be a whole number above 0"),
        ({"max_steps": 0}, "resident", "max_steps=0: must be a whole number above 0"),
        ({"per_device_eval_batch_size": 0}, "lora", "per_device_eval_batch_size=0"),
        ({"num_train_epochs": 3.0}, "lora", "Write --max-steps"),
        ({"save_only_model": True}, "lora", "save_only_model=true: no run could continue"),
        ({"fp16": True, "activation_checkpointing": False}, "resident", "fp16: the variant sets it"),
        ({"optim": "sgd"}, "resident", "has its own optimizer"),
        ({"optim": "sgd"}, "offload", "silently replaces an offloaded optimizer with DeepSpeedCPUAdam"),
    ],
)
def test_settings_that_cannot_hold_are_refused(
    recipe: Recipe, machine: Machine, chosen: dict[str, object], variant: str, message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        make(recipe, machine, variant, arguments=chosen)


def test_a_folder_for_a_variant_that_swaps_nothing_is_refused(recipe: Recipe, machine: Machine) -> None:
    with pytest.raises(SettingError, match="does not use the disk"):
        make(recipe, machine, "lora", nvme_path="/fast")


def test_a_machine_without_a_gpu_resolves_for_the_recipe_s(recipe: Recipe, machine: Machine) -> None:
    resolved = make(recipe, machine.with_gpu(None))
    assert resolved.resolved_for.machine.gpu is not None and resolved.resolved_for.machine.gpu.name == "16GB GPU"


def test_a_setting_without_effect_is_left_out_with_a_note(recipe: Recipe, machine: Machine) -> None:
    """The preset's loss in chunks, where a micro-batch is one chunk; a variant that names it keeps it."""
    chosen = {"per_device_train_batch_size": 4}
    setup = make(recipe, machine, "resident", sequence_length=64, arguments=chosen)
    assert "chunked-loss" not in setup.techniques and not setup.section("model_parts")
    assert [note for note in setup.notes if note.startswith("chunked-loss is left out: a micro-batch of 4 × 64")]
    named = recipe.variants["resident"].model_copy(update={"techniques": ["chunked-loss"]})
    own = recipe.model_copy(update={"variants": {"resident": named}})
    setup = make(own, machine, "resident", sequence_length=64, arguments=chosen)
    assert "chunked-loss" in setup.techniques


def test_the_ledger_counts_the_optimizer_that_was_set(recipe: Recipe, machine: Machine) -> None:
    def states(**chosen: str) -> int:
        setup = resolve(recipe, machine, Request(variant="lora", arguments=chosen), use_hub=False)
        return sum(row.size_bytes for row in setup.ledger.rows if row.category == "optimizer")

    assert 0 < states(optim="adafactor") < states() / 10


def test_the_longest_sequence_is_the_stored_one_and_can_be_overridden(machine: Machine) -> None:
    own = load_recipe("long-context-8b-on-80gb")
    large = of(machine, "80GB", 256)
    solved = make(own, large)
    length = solved["data.sequence_length"]
    assert own.sequence_length < length < 131072 and length % 1024 == 0 and not solved.problems
    reason = next(s.reason for s in solved.settings if s.key == "data.sequence_length")
    assert f"{length} fits" in reason
    assert make(own, large, sequence_length=20000)["data.sequence_length"] == 20000
    smaller = make(own, of(machine, "48GB", 256), "longest-sequence")
    assert smaller["data.sequence_length"] == own.sequence_length, (
        "nothing is known of it but that the stored one is too long"
    )
    pinned = {row.term: row.size_bytes for row in solved.ledger.rows if row.place == "pinned"}
    assert pinned["inputs of the checkpointed layers"] == 32 * GIB, "which the RAM must hold"


def test_adapters_beside_zero_3_split_the_frozen_weights_and_train_little(machine: Machine) -> None:
    own = load_recipe("llama-70b-lora-on-8x80gb")
    resolved = make(own, of(machine, "80GB", 512), gpus=own.gpus)
    rows = {(row.place, row.term): row.size_bytes for row in resolved.ledger.rows}
    adapters = sum(adapter_tensors(resolved.resolved_for.model, resolved.section("adapter")))
    share = 2 * resolved.resolved_for.model.parameters / own.gpus
    assert rows["device", "frozen weight partition"] == pytest.approx(share, rel=1e-6)
    assert rows["device", "weight partition"] == pytest.approx(2 * adapters / own.gpus, rel=1e-6)
    assert rows["device", "moments"] == pytest.approx(8 * adapters / own.gpus, rel=1e-6)
    assert any("ZeRO-3" in note for note in resolved.notes)
    assert any("splits nothing" in note for note in make(own, of(machine, "80GB", 512), "sharded").notes)


def test_weights_in_ram_say_how_long_a_step_takes_at_least(machine: Machine) -> None:
    """Twice the 16-bit weights a micro-batch, less what may stay gathered, at 32 GB/s."""
    own = load_recipe("llama-8b-on-24gb")
    setup = make(own, of(machine, "24GB", 256), "offload")
    (note,) = [note for note in setup.notes if note.startswith("A step takes at least")]
    live = setup["deepspeed.config"]["zero_optimization"]["stage3_max_live_parameters"]
    seconds = 4 * (8_030_261_248 - live) * setup["arguments.gradient_accumulation_steps"] / 32e9
    assert f"at least {seconds:.1f} s, by formula and not measured" in note
    assert setup["deepspeed.preset"] == "zero3-offload" and not setup.problems


def test_t5_is_refused_where_it_would_compute_in_fp16(machine: Machine) -> None:
    t5 = load_recipe("flan-t5-xl-on-24gb")
    with pytest.raises(DoesNotFitError, match="lora would compute in fp16, where T5's activations overflow"):
        make(t5, of(machine, "T4", 64))
    assert not make(t5, of(machine, "16GB", 64), "lora").problems


def test_where_it_runs_auto_skips_a_variant_whose_package_is_missing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    classifier, card = load_recipe("bert-large-on-8gb"), machine.with_gpu(gpu_of_size("8GB"))
    stored = stored_or(None, classifier)
    shown, _ = choose(classifier, card, Request(), use_hub=False, judge=stored)
    assert shown.preset == "8bit" and missing_package(shown) is not None
    runs, _ = choose(classifier, card, Request(), use_hub=False, judge=stored, runs=True)
    assert runs.preset == "resident" and missing_package(runs) is None
    assert [name for name, _ in runs.rejected] == ["8bit", "checkpointed"]
    assert all("pip install" in why for _, why in runs.rejected)
    named, _ = choose(classifier, card, Request(variant="8bit"), use_hub=False, judge=stored, runs=True)
    assert named.preset == "8bit"


def test_random_weights_are_trained_on_a_gpu_only_if_asked_for(recipe: Recipe, machine: Machine) -> None:
    setup = resolve(recipe, machine, Request(), use_hub=False)
    assert setup["model.origin"] == "architecture"
    with pytest.raises(RunError, match="--random-weights"):
        build_model(setup, lambda line: None)
    refuse_random_weights(setup.put("model.random_weights", True, "asked for"))
    refuse_random_weights(rehearse(recipe, setup, gpus=1).setup)
    refuse_random_weights(setup.put("model.origin", "hub", "a test's"))
