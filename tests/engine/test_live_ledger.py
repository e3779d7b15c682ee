"""The ledger of every preset against the tensors and files of the live engine, within one per cent."""

from __future__ import annotations

from typing import Any

import pytest

from hf_memkit.catalog.adapter_layers import adapter_tensors
from hf_memkit.catalog.models import ModelFacts
from hf_memkit.deepspeed.engine_ledger import zero_ledger
from hf_memkit.deepspeed.engine_terms import Term
from tests.engine.conftest import Results
from tests.engine.preset_cases import Case, one_process, small_config, two_processes, with_precision
from tests.engine.tiny_training import LORA
from tests.techniques.proving import proves

ONE = [case for case in one_process() if case.preset]
LEDGERS = [
    pytest.param(case, count, id=f"{case.name}-{count}", marks=[pytest.mark.exhaustive] * case.exhaustive)
    for count, cases in ((1, ONE), (2, two_processes()))
    for case in cases
]


OUT_OF_SIGHT = (
    "rounding of page-locked blocks",  # there is no such allocator on a CPU
    "fp32 moments, twice",  # ZenFlow's, in a separate process
)


@proves("memory", "zero2-offload", "zero3", "zero3-offload", "zero3-infinity")
@pytest.mark.parametrize(("case", "processes"), LEDGERS)
def test_ledger_holds_what_the_engine_holds(
    single: Results, double: Results, model: ModelFacts, case: Case, processes: int
) -> None:
    """Every row of RAM and disk, both ways: nothing of the engine is missing, no row is made up. On a CPU the engine
    holds what would lie on a GPU as well; those rows are compared where they are separate tensors."""
    ranks = (single if processes == 1 else double)(case.name)
    assert case.preset is not None
    config = with_precision(small_config(case.preset, "/nowhere"), bf16=case.bf16)
    adapters = adapter_tensors(model, LORA) if case.lora else ()
    ledger = zero_ledger(config, model, gpus=processes, accumulation=case.accumulation > 1, adapters=adapters)
    expected = {(row.place, row.term): row.size_bytes for row in ledger.rows if row.term not in OUT_OF_SIGHT}
    held = {
        (place, term): (max if place == "device" else sum)(held_of(rank)[place, term] for rank in ranks)
        for place, term in held_of(ranks[0])
    }
    held |= {("disk", term): sum(rank["disk"][term] for rank in ranks) for term in ranks[0]["disk"]}
    held["host", Term.SAVED_WEIGHTS.value] = sum(rank["gathered"] for rank in ranks)
    assert any(place == "device" for place, _term in held)
    off_gpu = {key: size for key, size in expected.items() if key[0] != "device" or key in held}
    assert {key: size for key, size in held.items() if size} == pytest.approx(off_gpu, rel=0.01)


def held_of(result: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {(place, term): size for place, term, size in result["held"]}


def test_what_goes_to_disk_leaves_ram(single: Results, model: ModelFacts) -> None:
    """Master weights and moments: 12 bytes a parameter in RAM with offload, next to nothing there with NVMe."""
    states = (("host", "fp32 master weights"), ("host", "fp32 moments"))
    (in_ram,), (on_disk,) = single("zero3-offload"), single("zero3-infinity")
    held = [sum(held_of(result).get(state, 0) for state in states) for result in (in_ram, on_disk)]
    assert held[0] == pytest.approx(12 * model.parameters, rel=0.01)
    assert held[1] < 0.01 * held[0]
    assert on_disk["disk"]["master weights and moments"] == pytest.approx(12 * model.parameters, rel=0.01)
    assert not any(in_ram["disk"].values())
