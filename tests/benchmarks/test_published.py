"""What others measured beside what memkit predicts: the evidence shows every row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published, published_models, published_summary
from hf_memkit.catalog.fit import CONTEXT_SLACK_BYTES
from hf_memkit.common.units import MIB
from tests.conftest import ROOT, load_script

EVIDENCE: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "published.json").read_text())
ROWS = published_models.read_rows(*(published_models.FOLDER / f"{name}.jsonl" for name in ("memory", "further")))


def test_no_row_is_left_out() -> None:
    found = {row["id"]: row for row in EVIDENCE["rows"]}
    assert ROWS.keys() <= found.keys()
    for name, row in found.items():
        assert ("today" in row) != ("not_predicted" in row), name
    page = load_script("docs_evidence.py").published_errors().splitlines()
    skipped = [line.rstrip(" |").rsplit("| ", 1)[1] for line in page[page.index("|---|---|") + 1 : -2]]
    assert sum(map(int, skipped)) == sum("not_predicted" in row for row in found.values())


def test_errors_keep_what_runs_out_and_what_lies_outside_a_range() -> None:
    def row(measured: float, estimate: float) -> dict[str, Any]:
        answer = {"peak_allocated_gib": estimate, "peak_reserved_gib": [estimate, estimate + 1]}
        return {"measured": "max_allocated", "gib": measured, "gpu": "A100 80GB", "then": answer, "peers": {}}

    allocated, reserved = published_summary.protocol([row(10, 9.9), row(10, 10.2)])
    assert (allocated.too_low, reserved.too_low) == (1, 0)
    assert allocated.errors.worst == pytest.approx(0.02) and allocated.errors.median == pytest.approx(0.015)
    assert 0 < allocated.saved_gib < reserved.saved_gib, "what runs out saves nothing"
    for measured, error in ((4, 0.25), (5.5, 0), (8, -0.25)):
        kept = {"measured": "max_reserved", "gib": measured, "today": {"peak_reserved_gib": [5, 6]}}
        assert published_summary.reserved_error(kept, "today") == pytest.approx(error)


def test_compiled_trainings_are_within_3_percent() -> None:
    """Defect: a change of the trace, or of torch, that nobody sees because eager trainings stay as they are."""
    own = [row for row in EVIDENCE["rows"] if row.get("code") == "own" and "today" in row]
    assert sum("compile" in row for row in own) >= 6
    for row in own:
        error = published_summary.allocated_error(row, "today")
        assert error is not None and abs(error) < 0.03 and row["why"], row["id"]


def test_slack_is_what_the_fitting_half_asks_for() -> None:
    """New evidence that asks for another slack is noticed; the judging half is covered."""
    slack_mib = CONTEXT_SLACK_BYTES // MIB
    assert published_summary.fitted_slack_mib(EVIDENCE["rows"], EVIDENCE["fitted_on"]) == slack_mib
    fitting, judging = published_summary.calibrations(EVIDENCE["rows"], EVIDENCE["fitted_on"], slack_mib)
    assert not set(fitting.models) & set(judging.models)
    assert judging.covered == judging.below + judging.within + judging.above


@pytest.mark.tracing
def test_a_row_is_predicted_as_it_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of one layer, with the row's own method: the path that all rows go."""
    row = dict(ROWS["fms-2024-11-14-056"], micro_batch=1, seq_len=64)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    monkeypatch.setenv(published_models.ROWS, str(path))
    small = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
    models = tmp_path / "published_rows"
    models.mkdir()
    config = {**(published_models.config_of(row) or {}), **small}
    (models / "models.json").write_text(json.dumps({row["model"]: {"config": config, "as_trained": {}}}))
    monkeypatch.setattr(published_models, "FOLDER", models)
    model = getattr(published_models, published_models.attribute(row))()
    kept = {name.split(".")[-2]: parameter.dtype for name, parameter in model.named_parameters()}
    assert str(kept["norm"]) == "torch.float32" and str(kept["lm_head"]) == "torch.bfloat16"
    assert published.why_not(row) is None and published.why_not({**row, "gpus": 2}) is not None
