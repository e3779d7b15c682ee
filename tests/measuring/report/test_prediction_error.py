"""Predicted beside measured: which term is off."""

from __future__ import annotations

from hf_memkit.measuring.report.sanitize import clean_record
from hf_memkit.measuring.report.summary import compared, furthest_off

PREDICTED = {
    "peak_allocated_gib": 10.0,
    "peak_reserved_gib": [10.5, 11.5],
    "phases": {"backward": {"peak_allocated_gib": 10.0, "peak_reserved_gib": None}, "optimizer": "?"},
    "categories": {"weights_gib": 3.0, "activations_gib": 6.0, "loss_gib": 1.0, "other_gib": float("nan")},
}
PREDICTION = clean_record({"kind": "run", "prediction": PREDICTED})["prediction"]


def test_rows_stand_side_by_side_and_the_term_that_is_off_is_named() -> None:
    measured = {"weights": 3.1, "activations": 7.5, "gradients": 1.0}
    rows = tuple(compared(PREDICTION, 11.6, 12.0, {"backward": 11.6, "optimizer": 4.0}, measured))
    assert rows[:3] == (
        ("peak allocated", "10.00", 11.6), ("peak reserved", "10.50–11.50", 12.0), ("backward", "10.00", 11.6)
    )  # fmt: skip
    assert [what for what, _, _ in rows[3:]] == ["weights", "activations", "loss"], "no number, no row"
    assert furthest_off(rows) == "Furthest off: activations, predicted 6.00 GiB, measured 7.50 GiB (+1.50 GiB)."


def test_what_is_right_is_said_too() -> None:
    rows = tuple(compared(PREDICTION, 10.1, None, {}, {"weights": 3.1, "activations": 5.9}))
    assert furthest_off(rows) == "Every category is within 2 % of the predicted peak."
    assert furthest_off(tuple(compared(PREDICTION, 10.1, None, {}, {}))) is None
    assert tuple(compared({}, 10.0, 11.0, {"backward": 10.0}, {"weights": 1.0})) == ()
    assert tuple(compared(clean_record({"phases": 7, "categories": ["x"]}), 1.0, 1.0, {}, {})) == ()
