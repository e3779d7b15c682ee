"""What the target of a rehearsal will need: on the page and in the text. The whole of both: golden/rehearsal.*"""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_memkit.common.answer.page import page
from hf_memkit.measuring.report.answer import report_answer, text_report
from hf_memkit.measuring.report.load import load_run
from hf_memkit.measuring.report.target import target_of
from tests.measuring.report import synthetic_records as made


@pytest.mark.parametrize(("verdict", "state"), [("fits", "good"), ("tight", "near"), ("does not fit", "near")])
def test_a_target_that_does_not_fit_is_no_good_news(tmp_path: Path, verdict: str, state: str) -> None:
    """Finds: a green bar, or the command of a run that would fail, where the target is predicted not to fit."""
    run = load_run(made.write(tmp_path, made.rehearsal(verdict=verdict)))
    assert f'class="lead {state}"' in page(report_answer(run), guide="report.md")
    assert ("--dry-run" in text_report(run)) is (verdict == "does not fit")


def test_ram_that_this_machine_lacks_is_not_blamed_on_the_gpu(tmp_path: Path) -> None:
    """Finds: "does not fit on RTX 4060" of a run that needs more RAM than the machine that rehearsed it has."""
    changed = {"verdict": "does not fit", "gpu_verdict": "fits", "host_rss_gib": 181.0, "ram_gib": 23.5}
    shown = " ".join(text_report(load_run(made.write(tmp_path, made.rehearsal(**changed)))).split())
    assert "predicted to fit on RTX 4060" in shown and "181.0 GiB of host RAM; this machine has 23.5" in shown
    assert "--dry-run" not in shown


def test_only_a_rehearsal_has_a_target(tmp_path: Path) -> None:
    """Finds: facts of the user's own script that are taken for a prediction."""
    records = made.rehearsal()
    records[0]["facts"]["rehearsal"] = False
    assert target_of(load_run(made.write(tmp_path / "run", records))) is None
    assert target_of(load_run(made.write(tmp_path / "gpu", made.healthy(3)))) is None


def test_a_rehearsal_that_failed_says_so_first(tmp_path: Path) -> None:
    """Finds: a failure that the good news of the prediction hides."""
    records = made.rehearsal()
    records[-1] |= {"status": "failed", "error_type": "ValueError", "error": "boom"}
    run = load_run(made.write(tmp_path, records))
    assert "fit" not in text_report(run).splitlines()[0] and "ValueError: boom" in text_report(run)
