"""Every DeepSpeed preset through real Trainer and DeepSpeed makes the losses and weights of plain Trainer.

Two processes share the single-process cases, one launcher trains all cases of two processes (`preset_driver`).
Tolerances are twice what was measured, on mean losses of about 7.5 nats.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Results
from tests.engine.preset_cases import (
    CHECKPOINT,
    OTHER_ALGORITHM,
    Case,
    not_on_cpu,
    one_process,
    two_processes,
)
from tests.techniques.proving import proves

CLIPPING = 5e-7
"""fp32 with the optimizer that Trainer makes: the same to the last bit, but for the norm that clipping divides by."""
TWO_PROCESSES = 1e-6
"""Sums in another order."""
CPU_ADAM = 5e-6
"""DeepSpeedCPUAdam rounds differently from torch's AdamW."""
BF16 = 4e-3
"""16-bit weights with fp32 masters, against plain Trainer's fp32 weights under autocast."""
LEAN = 6e-3
"""The same with bf16 masters and moments."""


def largest_difference(losses: list[float], plain: list[float]) -> float:
    assert len(losses) == len(plain) and plain[-1] < plain[0] - 0.05, "the plain training learned nothing to compare"
    return max(abs(loss - expected) for loss, expected in zip(losses, plain, strict=True))


def tolerance(case: Case, result: dict[str, Any]) -> float:
    _wrapper, optimizer = result["classes"]
    if case.bf16:
        return LEAN if case.preset == "zero2-lean" else BF16
    if optimizer == "DeepSpeedCPUAdam":
        return CPU_ADAM
    return CLIPPING if case.clips else 0.0


def ids(cases: list[Case]) -> dict[str, Any]:
    marks = {False: [], True: [pytest.mark.exhaustive]}
    return {"argvalues": [pytest.param(case, marks=marks[case.exhaustive], id=case.name) for case in cases]}


SAME_LOSSES = [case for case in one_process() if case.preset and case.preset not in OTHER_ALGORITHM]


@proves("same-result", "zero2-offload", "zero3", "zero3-offload", "zero3-infinity")
@pytest.mark.parametrize("case", **ids(SAME_LOSSES))
def test_losses_are_those_of_plain_trainer(single: Results, case: Case) -> None:
    (result,) = single(case.name)
    (plain,) = single(case.plain)
    allowed = tolerance(case, result)
    assert largest_difference(result["losses"], plain["losses"]) <= allowed
    if case.preset is not None and case.preset.startswith("zero3") and not case.lora:
        assert result["split_when_made"], "the weights were made whole: zero.Init was not used"


@pytest.mark.parametrize("case", **ids(two_processes()))
def test_two_processes_make_the_losses_of_one(single: Results, double: Results, case: Case) -> None:
    ranks = double(case.name)
    (plain,) = single(case.plain)
    # Accelerate deals the batches out in turn: batch 0 to rank 0, batch 1 to rank 1, batch 2 to rank 0 …
    dealt = [loss for pair in zip(*(rank["losses"] for rank in ranks), strict=True) for loss in pair]
    assert largest_difference(dealt, plain["losses"]) <= tolerance(case, ranks[0]) + TWO_PROCESSES
    if case.preset is not None and case.preset.startswith("zero3"):
        assert all(rank["split_when_made"] for rank in ranks)


@pytest.mark.parametrize("case", **ids([case for case in one_process() if case.saves and case.preset]))
def test_saved_weights_are_the_trained_ones(single: Results, folder: Path, case: Case) -> None:
    (result,) = single(case.name)
    assert result["saved_difference"] == 0.0
    assert weight_difference(folder / "1" / case.name, folder / "1" / case.plain) <= 10 * tolerance(case, result)


@pytest.mark.parametrize("case", **ids([case for case in two_processes() if case.saves]))
def test_two_processes_save_the_trained_weights(double: Results, folder: Path, single: Results, case: Case) -> None:
    first, _second = double(case.name)
    single(case.plain)
    assert first["saved_difference"] == 0.0
    # Adam divides by the root of the second moment: a difference in a gradient near zero becomes one of a step's size.
    assert weight_difference(folder / "2" / case.name, folder / "1" / case.plain) <= 1e-3


def weight_difference(folder: Path, other: Path) -> float:
    from safetensors.torch import load_file

    weights, expected = (load_file(path / "saved" / "model.safetensors") for path in (folder, other))
    assert weights.keys() >= expected.keys()  # below stage 3 the tied output layer is saved under its own name too
    return max(float((weights[name] - weight).abs().max()) for name, weight in expected.items())


@pytest.mark.parametrize("case", **ids([case for case in one_process() if case.resumes]))
def test_resumed_training_goes_on_as_if_it_had_not_stopped(single: Results, case: Case) -> None:
    (result,) = single(case.name)
    expected = result["losses"][CHECKPOINT * case.accumulation :]
    assert largest_difference([9.0, *result["resumed_losses"]], [9.0, *expected]) <= tolerance(case, result)


NEW_ALGORITHM = [case for case in one_process() if case.preset in OTHER_ALGORITHM]


@pytest.mark.parametrize("case", **ids(NEW_ALGORITHM))
def test_other_algorithms_learn(single: Results, case: Case) -> None:
    (result,) = single(case.name)
    assert all(name.startswith("ZenFlow") for name in result["classes"])
    assert min(result["losses"][1:]) < result["losses"][0] - 0.05


@pytest.mark.parametrize("name", not_on_cpu())
def test_presets_for_a_gpu_are_read_by_deepspeed(single: Results, folder: Path, name: str) -> None:
    single("plain")
    assert json.loads((folder / "1" / "more-rank0.json").read_text())["read"][name] is None
