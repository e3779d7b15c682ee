"""The evidence of docs/fsdp.md: shares add up to the whole, and what a rank sends follows the formulas of a ring."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.provenance import RESULTS
from hf_memkit.common.units import GIB

PARAMETERS = 8_030_261_248


def rows_of(setup: str) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / "sharding.json").read_text())["rows"]
    return [row for row in rows if row["setup"] == setup]


@pytest.mark.parametrize(("setup", "bytes_a_parameter"), [("FSDP2", 4 + 8), ("ZeRO-3", 2 + 12)])
def test_shares_of_weights_and_states_add_up(setup: str, bytes_a_parameter: int) -> None:
    for row in rows_of(setup):
        share = row["categories"]["weights_gib"] + row["categories"]["optimizer_gib"]
        assert share * GIB * row["gpus"] == pytest.approx(bytes_a_parameter * PARAMETERS, rel=1e-3)


@pytest.mark.parametrize(
    ("setup", "bytes_a_parameter"),
    [
        ("DDP", 2 * 4),  # an all-reduce of fp32 gradients
        ("ZeRO-2", 2 * 2 + 2),  # an all-reduce in bf16, and a gather of weights
        ("ZeRO-3", 3 * 2),  # two gathers, and a reduce-scatter
        ("FSDP2", 3 * 2),  # the same, but the last layer stays gathered
        ("FSDP2, weights stay gathered", 2 * 2),
    ],
)
def test_bytes_sent_are_those_of_rings(setup: str, bytes_a_parameter: int) -> None:
    for row in rows_of(setup):
        of_ring = (row["gpus"] - 1) / row["gpus"] * bytes_a_parameter * PARAMETERS
        assert row["sent_bytes"] == pytest.approx(of_ring, rel=0.03)
