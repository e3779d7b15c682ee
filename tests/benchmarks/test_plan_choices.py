"""What a plan would choose among published setups: how it is scored, and that the evidence has every group."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import plan_choices, plan_fits
from benchmarks.plan_choices_scores import PLAN, Setup, case, scores
from tests.conftest import ROOT

EVIDENCE: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "plan_choices.json").read_text())
GROUPS: list[dict[str, Any]] = [json.loads(line) for line in plan_choices.GROUPS.read_text().splitlines()]
LARGEST, PLAIN = "largest micro-batch that fits", "no checkpointing if it fits"

# Of four setups the one with checkpointing and 16 is the fastest, and the one with 32 does not run.
SETUPS = [
    Setup("plain 4", 100.0, 110.0, 10.0, 10.5, 4, False),
    Setup("plain 8", 104.0, 140.0, 14.0, 14.5, 8, False),
    Setup("saved 16", 120.0, 160.0, 15.0, 15.5, 16, True),
    Setup("saved 32", None, 170.0, None, 30.0, 32, True),
]


def _choices(found: dict[str, Any]) -> dict[str, list[str]]:
    return {way: said["choices"] for way, said in found["ways"].items()}


def test_choices_under_a_cap() -> None:
    """Defect: a choice among setups that do not fit, or losses against one that does not."""
    found = case(SETUPS, 14.75)
    assert found["fit"] == ["plain 4", "plain 8"] and found["best"] == "plain 8"
    assert _choices(found) == {PLAN: ["plain 8"], LARGEST: ["plain 8"], PLAIN: ["plain 8"]}
    found = case(SETUPS, 16.0)
    assert _choices(found) == {PLAN: ["saved 16"], LARGEST: ["saved 16"], PLAIN: ["plain 8"]}
    assert found["ways"][PLAIN]["losses"] == [pytest.approx(1 - 104 / 120)]
    assert found["worst_loss"] == pytest.approx(1 - 100 / 120)


def test_a_false_fit_and_nothing_that_fits_lose_everything() -> None:
    """Defect: a setup that runs out of memory counts as a good choice because it would have been fast."""
    found = case(SETUPS, 40.0)
    assert found["false_fits"] == ["saved 32"] and found["ways"][PLAN]["losses"] == [1.0]
    whole = case([replace(each, fits=each.name != "saved 16") for each in SETUPS], None)
    assert whole["best"] == "saved 16" and whole["false_fits"] == ["saved 32"]
    found = case(SETUPS, 10.2)  # one fits, and by the prediction none
    assert found["best"] == "plain 4" and found["ways"][PLAN] == {"choices": [], "losses": [1.0]}
    assert not found["false_fits"]


def test_ties_are_shared() -> None:
    """Defect: a lead within the noise is taken for a right choice, where a plan takes what changes a script least."""
    near = [Setup("lean", 90.0, 99.0, 4.0, 4.0, 1, True), Setup("fast", 100.0, 100.0, 8.0, 8.0, 2, True)]
    assert _choices(case(near, 9.0)) == {PLAN: ["lean", "fast"], LARGEST: ["fast"], PLAIN: ["fast"]}
    unknown = [Setup(each.name, each.speed, each.predicted_speed, None, None, 2, True) for each in near]
    found = case(unknown, None)
    assert found["ways"][PLAN]["choices"] == ["lean", "fast"]
    score = scores([found, case(near, 5.0)])
    assert score["ways"][PLAN]["within_5_percent"] == 1.5
    assert score["ways"][PLAN]["mean_loss"] == pytest.approx(0.025) and score["choices_that_matter"] == 1
    assert case(near, 9.0, silent=True)["ways"][LARGEST]["choices"] == ["lean", "fast"]


def _row(outcome: str | None, high: float, gib: float | None) -> dict[str, Any]:
    answer = {"peak_allocated_gib": high, "peak_reserved_gib": [high, high], "outside_allocator_gib": 0.5}
    said = {"outcome": outcome} if outcome else {}
    return {"id": f"{high}", "gpu": "RTX 3090", "gpus": 1, "measured": "max_allocated", "gib": gib, "today": answer,
            "code": "same", **said}  # fmt: skip


def test_a_false_fit_is_listed() -> None:
    """Defect: a training that ran out of memory and was said to fit is missed."""
    rows = [_row("out_of_memory", 20.0, None), _row(None, 22.0, 20.0), _row(None, 10.0, 11.0), _row(None, 9.0, 8.0)]
    found = plan_fits.summary(plan_fits.judged(rows))
    assert found["false_fits"] == ["20.0"] and found["ran_and_fit"] == 2
    assert found["ran_and_called_not_fitting"] == ["22.0"] == found["of_these_below_the_whole_gpu"]
    assert found["smaller_gpus"]["too_small"] == ["10.0"]  # 11.5 on (10 + 0.5) / 0.92 GiB


def test_no_published_row_falsely_fits() -> None:
    """Defect: a change that makes predictions too low where a training ran out of memory."""
    assert EVIDENCE["fits"]["out_of_memory"] > 5 and EVIDENCE["fits"]["false_fits"] == []
    assert EVIDENCE["fits"]["ran_and_fit"] >= 129, "of 146"
    assert EVIDENCE["fits"]["smaller_gpus"]["too_small"] == []


def test_the_evidence_has_every_group() -> None:
    """Defect: a group that is left out because of its result, or without a reason."""
    found = {group["name"]: group for group in EVIDENCE["groups"]}
    assert len(GROUPS) == 133 and {group["name"] for group in GROUPS} <= found.keys()
    for group in found.values():
        assert bool(group["expressed"]) == bool(group.get("cases")), group["name"]
        assert group["expressed"] == "speed and memory" or group["reason"], group["name"]
    for group in GROUPS:
        kept = found[group["name"]]
        if kept["expressed"] == "speed and memory":  # whoever made the groups said the same of the best
            assert {f"{each['cap_gib']:g}": each["best"] for each in kept["cases"]} == group["caps_gib"]


@pytest.mark.slow
def test_the_evidence_is_what_is_computed_today() -> None:
    """Defect: scores that went with other predictions: `benchmarks/plan_choices.py` makes them anew in seconds."""
    found = json.loads(json.dumps(plan_choices.evidence()))
    assert found["fits"] == EVIDENCE["fits"]
    for kind, said in found["scores"].items():
        assert said["cases"] == EVIDENCE["scores"][kind]["cases"]
        for way, score in said["ways"].items():
            assert score == pytest.approx(EVIDENCE["scores"][kind]["ways"][way]), (kind, way)


def test_bars() -> None:
    """Defect: a change of times or memory with which plans choose worse than was asked for."""
    said = EVIDENCE["scores"]["published, without micro-batch"]
    plan = said["ways"][PLAN]["within_5_percent"]
    assert plan >= 0.9 * said["cases"]
    assert all(said["ways"][rule]["within_5_percent"] < plan for rule in (LARGEST, PLAIN))
