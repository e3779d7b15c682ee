"""Steps that others measured beside what memkit says of them: the evidence has every row, and its bars are kept."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from benchmarks import plan_speed, published_models
from tests.conftest import ROOT

EVIDENCE: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "plan_speed.json").read_text())
ROWS = published_models.read_rows(published_models.FOLDER / "speed.jsonl")


def test_no_row_is_left_out_and_none_without_a_reason() -> None:
    """Defect: a miss that is not shown."""
    found = {row["id"]: row for row in EVIDENCE["rows"]}
    assert found.keys() == ROWS.keys()
    for name, row in found.items():
        assert row["measured_s"] == ROWS[name]["step_seconds"]
        assert ("error" in row) == (plan_speed.why_not(ROWS[name]) is None), name
        if "error" in row:
            low, middle, high = row["predicted_s"]
            assert low <= middle <= high and row["error"] == pytest.approx(middle / row["measured_s"] - 1)


@pytest.mark.parametrize("group", EVIDENCE["groups"])
def test_bars_are_judged_by_the_rows(group: str) -> None:
    """Defect: a bar that is called met, and is not; a figure that went with other rows."""
    errors = [abs(row["error"]) for row in EVIDENCE["rows"] if row["group"] == group and "error" in row]
    said = EVIDENCE["groups"][group]
    assert said["predicted"] == len(errors) > 10
    assert said["median"] == pytest.approx(statistics.median(errors)) and said["worst"] == pytest.approx(max(errors))
    assert said["met"] == (said["median"] <= said["bar_median"] and said["worst"] <= said["bar_worst"])


def test_what_was_traced_is_priced_as_the_evidence_says() -> None:
    """Defect: a change of step_time, or of the rates, that nobody measured with: `plan_speed.py --stored` does."""
    said = {row["id"]: row.get("predicted_s") for row in EVIDENCE["rows"]}
    for row in plan_speed.answers_of(ROWS, plan_speed.stored()):
        assert row.get("predicted_s") == (pytest.approx(said[row["id"]]) if said[row["id"]] else None), row["id"]


def test_the_share_of_the_rates_is_the_fitted_one() -> None:
    """Defect: a share that was chosen with the rows that judge it, or not fitted anew after a change of step_time."""
    fitted, judged = EVIDENCE["halves"].values()
    assert not set(fitted["models"]) & set(judged["models"])
    assert abs(fitted["median_of_models"]) <= 0.006, "another whole percent is nearer"
    assert judged["groups"]["training, one GPU"]["met"] and judged["groups"]["forward and backward, fp32"]["met"]


def test_bars_of_one_gpu_are_met() -> None:
    """Defect: rates or rules that make predictions worse than they were."""
    assert EVIDENCE["groups"]["training, one GPU"]["met"]
    assert EVIDENCE["groups"]["forward and backward, fp32"]["met"]
