"""Predicted and measured times on a CPU: the figures follow from the rows, and a miss is shown as one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import plan_cpu
from benchmarks.plan_cpu import EIGHT, SETUPS, choices, judged, rank_correlation, without_queue
from hf_memkit.catalog.rates import Figure, GpuRates
from hf_memkit.prediction.time.step_time import step_time
from hf_memkit.prediction.trace.work import Operation, Work
from tests.conftest import ROOT

PATH = ROOT / "benchmarks" / "results" / "plan_cpu.json"
EVIDENCE: dict[str, Any] = json.loads(PATH.read_text())


def row(name: str, predicted: float, measured: float, **more: Any) -> dict[str, Any]:
    repeats = [measured, 1.01 * measured, 0.99 * measured]
    return {
        "name": name, "predicted_s": [0.9 * predicted, predicted, 1.1 * predicted], "measured_s": measured,
        "relative": repeats, "error": predicted / measured - 1, "micro_batch": 8, "techniques": "",
        "predicted_peak_bytes": 100, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("other", "expected"),
    [([1, 2, 3, 4], 1), ([4, 3, 2, 1], -1), ([10, 30, 20, 40], 0.8), ([1, 2, 2, 3], 0.948683)],
)
def test_rank_correlation_is_spearmans(other: list[float], expected: float) -> None:
    """By hand: 1 - 6 · (1 + 1) / (4 · 15) = 0.8; equal values share a rank, 4.5 / √(5 · 4.5)."""
    assert rank_correlation([1, 2, 3, 4], other) == pytest.approx(expected)


def test_each_bar_can_be_missed() -> None:
    good = [row("a", 1, 1), row("b", 2, 2.2), row("c", 3, 3.4)]
    assert judged(good)["met"]
    assert not judged([row("a", 1, 1), row("b", 2, 2.2), row("c", 2.5, 2.9)])["met"], "span"
    assert not judged([row("a", 3, 1), row("b", 2, 2.2), row("c", 1, 3.4)])["met"], "order"
    behind = judged([row(str(each), each, each) for each in range(2, 14)] + [row("first", 1, 2.2)])
    assert behind["rank_correlation"] > 0.9 and behind["first_behind_best"] == pytest.approx(0.1)
    assert not behind["met"], "ranked first, and a tenth slower than the fastest"
    noisy = judged([*good, row("d", 3, 3.41)])
    assert (noisy["pairs"], noisy["apart"]) == (6, 5), "two setups whose repeats overlap do not differ"


def test_nothing_is_queued_on_a_cpu() -> None:
    """Defect: Python's time that vanishes behind what is computed meanwhile, as it does on a GPU."""
    product = Operation("aten.mm.default", "matmul", "float32", 10**9, 10**6)
    work = Work([product], [0] * 100, [(60, "forward"), (99, "backward"), (100, "optimizer")])
    figure = Figure(1, "made up")
    rates = GpuRates({"float32": figure}, {"float32": figure}, figure, figure, figure, None, figure)

    def seconds(work: Work, host: float) -> float:
        return step_time(work, rates, capability=0.0, host=host).seconds[1]

    computed, queued, waited = seconds(work, 0), seconds(work, 1), seconds(without_queue(work), 1)
    beside = seconds(Work([replace(product, flops=0, moved_bytes=0)], work.calls, work.marks), 1)
    assert queued < 1.1 * computed
    assert waited == pytest.approx(computed + beside, rel=0.01)


def test_ways_to_choose_are_given_the_same_memory() -> None:
    rows = [
        row("8", 1, 1, predicted_peak_bytes=100),
        row("1", 1.2, 1.3, micro_batch=1, predicted_peak_bytes=50),
        row("8 checkpointed", 1.5, 1.6, techniques="checkpointing", predicted_peak_bytes=50),
    ]
    little, much = choices(rows)
    assert (little["memory_bytes"], little["fit"], little["best"]) == (50, 2, "1")
    assert little["plan"] == little["no checkpointing"] == {"names": ["1"], "behind_best": [0, 0]}
    assert little["largest micro-batch"]["names"] == ["8 checkpointed"]
    assert little["largest micro-batch"]["behind_best"] == pytest.approx([1.6 / 1.3 - 1] * 2)
    assert much["plan"]["names"] == much["no checkpointing"]["names"] == ["8"]
    assert much["largest micro-batch"]["behind_best"] == pytest.approx([0, 0.6]), "it does not say which"


def test_the_evidence_follows_from_its_rows() -> None:
    """A figure that is edited, a setup that is left out, or a bar that is lowered is noticed."""
    rows = {each["name"]: each for each in EVIDENCE["rows"]}
    assert rows.keys() == SETUPS.keys() and set(EIGHT) <= rows.keys() and len(EIGHT) == 8
    assert EVIDENCE["bars"] == plan_cpu.BARS
    assert EVIDENCE["eight"] == pytest.approx(judged([rows[name] for name in SETUPS if name in EIGHT]))
    assert EVIDENCE["all"] == pytest.approx(judged(list(rows.values())))
    assert EVIDENCE["choices"] == choices([each for each in rows.values() if each["same_result"]])


def test_the_bars_are_met() -> None:
    eight, bars = EVIDENCE["eight"], EVIDENCE["bars"]
    assert eight["rank_correlation"] >= bars["rank_correlation"] and eight["span"] >= bars["span"]
    assert eight["first_behind_best"] <= bars["behind_best"] and eight["apart"] == eight["pairs"]
