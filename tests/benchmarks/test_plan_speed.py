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


def test_training_on_one_gpu_meets_its_bar() -> None:
    """Defect: a change of step_time, or of the rates, that makes predictions worse than they were."""
    assert EVIDENCE["groups"]["training, one GPU"]["met"]
    assert EVIDENCE["groups"]["forward and backward, fp32"]["met"]
