"""What checkpointing holds: storages that live in real models, against the formulas that the ledger uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_memkit.ledger import Ledger
from hf_memkit.models import ModelFacts, describe
from hf_memkit.setup import Setup
from hf_memkit.technique import find_technique
from hf_memkit.techniques.activation_bytes import (
    Mode,
    Numbers,
    activation_rows,
    backward_bytes,
    best_segment,
    layer_of,
    root_segment,
)
from hf_memkit.units import MIB
from tests.techniques.checkpointed_models import LAYERS, LENGTH, ROWS, WAYS, WIDTH, config_of, model_of, one_pass
from tests.techniques.jobs import gpt2_job
from tests.techniques.proving import proves

TOKENS = ROWS * LENGTH
UNIT = TOKENS * WIDTH
MODES: dict[str, tuple[Mode, int]] = {
    "none": ("none", 1), "activation-checkpointing": ("every-layer", 1),
    "every-nth-layer-checkpointing": ("every-nth-layer", 2), "segment-checkpointing": ("segments", 4),
    "selective-checkpointing": ("selective", 1),
}  # fmt: skip
NUMBERS: dict[Numbers, torch.dtype] = {"16-bit": torch.bfloat16, "32-bit": torch.float32, "autocast": torch.float32}


def facts_of(kind: str, **changes: Any) -> ModelFacts:
    return describe("small", config_of(kind, **changes), use_hub=False)


def measured(kind: str, way: str, numbers: Numbers, **changes: Any) -> tuple[int, int]:
    """(held between the passes, highest point) in bytes."""
    model = model_of(kind, dtype=NUMBERS[numbers], **changes)
    WAYS[way](model)
    with torch.autocast("cpu", torch.bfloat16, enabled=numbers == "autocast"):
        result = one_pass(model, measure=True)
    return result.held, result.peak


@pytest.mark.parametrize(
    ("kind", "numbers", "changes"),
    [
        ("gpt2", "16-bit", {}),
        ("gpt2", "32-bit", {}),
        ("gpt2", "16-bit", {"activation_function": "gelu_pytorch_tanh"}),
        ("llama", "16-bit", {}),
        ("llama", "32-bit", {}),
        ("qwen3", "16-bit", {}),
    ],
)
def test_what_one_layer_keeps(kind: str, numbers: Numbers, changes: dict[str, Any]) -> None:
    """Within 1 %: the difference that layers make, so that embeddings and the last norm fall out."""
    name = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    few, many = (measured(kind, "none", numbers, **changes, **{name: count})[0] for count in (2, 4))
    layer = layer_of(facts_of(kind, **changes), TOKENS, numbers)
    assert (many - few) / 2 == pytest.approx(layer.kept, rel=0.01)
    few, many = (
        measured(kind, "activation-checkpointing", numbers, **changes, **{name: count})[0] for count in (2, 4)
    )
    assert (many - few) / 2 == layer.input


@proves(
    "memory",
    "activation-checkpointing",
    "every-nth-layer-checkpointing",
    "segment-checkpointing",
    "selective-checkpointing",
    "offloaded-checkpointing",
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_highest_point_of_backward_is_as_predicted_and_in_that_order(kind: str) -> None:
    """Within 5 % and what is no layer's: embeddings, the last norm, and its gradients, at most 19 bytes a token and
    hidden unit."""
    layer = layer_of(facts_of(kind), TOKENS)
    found = {way: measured(kind, way, "16-bit")[1] for way in MODES}
    predicted = {way: backward_bytes(mode, layer, LAYERS, every).device for way, (mode, every) in MODES.items()}
    for way, peak in found.items():
        assert 0.95 * predicted[way] <= peak <= 1.05 * predicted[way] + 19 * UNIT, way
    assert sorted(found, key=found.__getitem__) == sorted(predicted, key=predicted.__getitem__)
    assert found["activation-checkpointing"] < found["selective-checkpointing"] < found["none"]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 6])
def test_segments_hold_what_their_length_predicts(length: int) -> None:
    from hf_memkit.components import checkpoint_segments

    model = model_of("gpt2", dtype=torch.bfloat16)
    checkpoint_segments.install(model, segment_layers=length)
    result = one_pass(model, measure=True)
    layer = layer_of(facts_of("gpt2"), TOKENS)
    predicted = backward_bytes("segments", layer, LAYERS, length).device
    assert 0.95 * predicted <= result.peak <= 1.05 * predicted + 5 * UNIT
    inputs = -(-LAYERS // length) * layer.input
    assert inputs <= result.held <= inputs + 5 * UNIT


def test_autocast_is_covered() -> None:
    """Within 5 %: 16-bit copies of the weights, which autocast keeps for backward, are not activations."""
    for kind in ("gpt2", "llama"):
        name = "n_layer" if kind == "gpt2" else "num_hidden_layers"
        few, many = (measured(kind, "none", "autocast", **{name: count})[0] for count in (2, 4))
        facts = facts_of(kind)
        copies = 2 * sum(linear.elements for linear in facts.linears if not linear.head) / LAYERS
        layer = layer_of(facts, TOKENS, "autocast")
        assert (many - few) / 2 - copies == pytest.approx(layer.kept, rel=0.05)


def test_gpt2_xl_is_held_least_by_single_layers_and_by_pairs_with_a_fused_gelu() -> None:
    """√48 ≈ 7 layers hold two and a half times as much as single ones; a fused GELU makes pairs the best."""
    job = gpt2_job("gpt2-xl", micro_batch_size=1, sequence_length=1024)
    assert job.model is not None
    layer = layer_of(job.model, job.tokens)
    root = root_segment(48)
    single, roots = (backward_bytes("segments", layer, 48, k).device / MIB for k in (1, root))
    # 48 inputs of 2 bytes × 1024 × 1600, 58 bytes × 1024 × 1600 a layer, 16 of them more for gradients, 100 bytes a
    # token for 25 heads.
    each = 1024 * 1600 / MIB
    statistics = 4 * 25 * 1024 / MIB
    assert single == pytest.approx(48 * 2 * each + 58 * each + 16 * each + statistics)
    assert roots == pytest.approx(7 * 2 * each - 2 * each + 7 * (58 * each + statistics) + 16 * each)
    assert root == 7 and round(roots / single, 1) == 2.6
    assert best_segment(layer, 48) == 1
    assert best_segment(layer_of(job.model, job.tokens, fused_gelu=True), 48) == 2
    setup = find_technique("segment-checkpointing")(Setup(preset="x", job=job).put("model.dtype", "bfloat16", "x"))
    assert setup["model_parts.checkpoint_segments"] == {"segment_layers": 1}
    (reason,) = [s.reason for s in setup.settings if s.key == "model_parts.checkpoint_segments"]
    assert f"√48 ≈ 7: {roots:.1f} MiB" in reason and f"single layers: {single:.1f} MiB" in reason


@pytest.mark.parametrize("way", [*MODES, "offloaded-checkpointing"])
def test_the_ledger_says_what_is_held(way: str) -> None:
    job = gpt2_job()
    assert job.model is not None
    setup = Setup(preset="x", job=job).put("model.dtype", "bfloat16", "x")
    if way != "none":
        values = {"segment_layers": 4, "checkpoint_every": 2}
        setup = find_technique(way)(replace(setup, job=replace(job, values=values)))
    rows = activation_rows(setup, job.model)
    mode, every = MODES.get(way, ("offloaded", 1))
    expected = backward_bytes(mode, layer_of(job.model, job.tokens), job.model.layers, every)
    ledger = Ledger(rows)
    assert ledger.total_bytes("device") == expected.device
    assert ledger.total_bytes("pinned") == expected.pinned
    assert {row.category for row in rows} == {"activations"} and all(row.source for row in rows)


def test_pinned_blocks_are_rounded_up_to_powers_of_two() -> None:
    job = gpt2_job("gpt2-xl", micro_batch_size=1, sequence_length=1024)
    assert job.model is not None
    offloaded = backward_bytes("offloaded", layer_of(job.model, job.tokens), 48)
    assert offloaded.pinned == 48 * 4 * MIB  # 3.125 MiB each
    assert offloaded.device < backward_bytes("every-layer", layer_of(job.model, job.tokens), 48).device
