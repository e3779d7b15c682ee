"""What the target of a rehearsal will need: on the page and in the text, from facts that may hold anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from hf_memkit.measuring.report.load import load_run
from hf_memkit.measuring.report.page import page, write_page
from hf_memkit.measuring.report.target import target_of
from hf_memkit.measuring.report.text import report_json, text_report
from tests.chromium import Watched
from tests.measuring.report import synthetic_records as made

HOSTILE: list[Any] = [None, True, "x", [], {}, [[{}]], [1], ["x", "y"], -1e300, 10**400, float("nan"), {"a": 5}]


def test_the_page_shows_the_target_in_place_of_the_small_models_memory(
    tmp_path: Path, show: Callable[..., tuple[Page, Watched]]
) -> None:
    """Finds: a rehearsal's page with charts of a few MiB, without the target's phases and categories, or too wide."""
    run = load_run(made.write(tmp_path, made.rehearsal()))
    tab, watched = show(write_page(run, tmp_path / "page.html"), width=390, scheme="dark")
    assert "5.5 of 7.8 GiB" in tab.locator("h1").inner_text()
    sections = tab.locator("section").evaluate_all("all => all.map(s => s.id)")
    assert sections[:2] == ["next", "target"] and "timeline" not in sections
    bar = tab.locator("#target .card").get_attribute("aria-label") or ""
    assert bar.startswith("Of 7.80 GiB: weights 1.81 GiB") and "outside the allocator 0.49" in bar
    rows = tab.locator("#target tr").evaluate_all("all => all.map(r => r.innerText.trim().split(/\\s+/))")
    assert ["forward", "4.85"] in rows and ["activations", "0.96", "12", "%"] in rows
    assert "memkit recipe bert-large-on-8gb --variant 8bit" in tab.locator("#next").inner_text()
    assert "target_prediction" not in tab.locator("#facts").inner_text(), "shown above, not as a lump of JSON"
    tab.locator("#facts summary").click()
    assert "half the bytes" in tab.locator("#facts table").inner_text()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390 and watched.found == []


@pytest.mark.parametrize(("verdict", "state"), [("fits", "good"), ("tight", "near"), ("does not fit", "near")])
def test_a_target_that_does_not_fit_is_no_good_news(tmp_path: Path, verdict: str, state: str) -> None:
    """Finds: a green bar, or the command of a run that would fail, where the target is predicted not to fit."""
    run = load_run(made.write(tmp_path, made.rehearsal(verdict=verdict)))
    assert f'class="lead {state}"' in page(run)
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


def test_any_value_in_the_facts_leaves_a_page(tmp_path: Path) -> None:
    """Finds: a value of another type, or a huge one, that ends the report."""
    names = list(made.rehearsal()[0]["facts"]["target_prediction"])
    for number, (name, value) in enumerate((name, value) for name in names for value in HOSTILE):
        run = load_run(made.write(tmp_path / str(number), made.rehearsal(2, **{name: value})))
        assert text_report(run) and report_json(run), (name, value)
        if number % 7 == 0:
            assert page(run)
    whole = made.rehearsal(2)
    for number, value in enumerate(HOSTILE):
        whole[0]["facts"]["target_prediction"] = whole[0]["facts"]["setup"] = value
        run = load_run(made.write(tmp_path / f"whole-{number}", whole))
        assert text_report(run) and page(run)
