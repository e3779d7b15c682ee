"""The page of a plan in a real Chromium: drawn, readable, no network, nothing that a name puts into it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Page

from hf_memkit.common.answer import page
from hf_memkit.common.errors import InputError
from hf_memkit.plan.answer import plan_answer
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.plot import frontier, plot
from hf_memkit.plan.verify import Verified
from tests.chromium import CONTRAST, Watched
from tests.plan.made_plans import EIGHT_BITS, plan, setup, typical_plan

Show = Callable[..., tuple[Page, Watched]]


def write_page(plans: Sequence[Plan], prices: Mapping[str, float], path: Path, ran: Sequence[Verified] = ()) -> Path:
    return page.write_page(path, plan_answer(plans, prices, ran), guide="plan.md", command="memkit plan train.py")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1400, "light")])
def test_drawn_and_readable(tmp_path: Path, show: Show, width: int, scheme: str) -> None:
    """Would notice: a plot that is not drawn or has no mark for a setup, a page that scrolls sideways, text that
    cannot be read, arguments whose lines run into one."""
    tab, watched = show(write_page([typical_plan()], {}, tmp_path / "plan.html"), width=width, scheme=scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(CONTRAST) == []
    assert (
        tab.locator("h1").inner_text().startswith("FASTEST THAT FITS RTX 3090: 8 × 1, checkpointing: up to 19.00 GiB")
    )
    box = tab.locator("#chart-plan-0 .cartesianlayer").bounding_box()
    assert box is not None and box["width"] > 200 and box["height"] > 150
    marks = tab.locator("#chart-plan-0 .trace .points path").count()
    labels = tab.locator("#chart-plan-0 .textpoint").all_text_contents()  # SVG has no inner text
    assert marks == 5 + len(labels) and labels == ["best", "yours", "A", "B"]
    assert tab.locator("#chart-plan-0 ~ dl dt").all_inner_texts() == labels, "each label is explained below"
    footer = tab.locator("footer").inner_text()
    assert "memkit plan train.py" in footer and str(datetime.date.today().year) in footer
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.locator(".code button").first.click()
    assert tab.evaluate("navigator.clipboard.readText()") == tab.locator("pre").first.text_content()
    pasted = tab.locator("pre").first.inner_text().splitlines()
    assert [line.endswith("\\") for line in pasted] == [True, True, True, False]
    assert "activation_checkpointing: true" in (tab.locator("details pre").first.text_content() or "").splitlines()
    names = tab.locator("td:first-child").evaluate_all("cells => cells.map(cell => cell.clientWidth)")
    assert min(names) > 150, "names are not broken letter by letter"
    assert watched.problems == []


@pytest.mark.slow
def test_several_gpus_and_none_that_fits(tmp_path: Path, show: Show) -> None:
    """Would notice: a GPU without a setup that has no row, a cost without a price, charts that share a place."""
    gpus = [plan(setup(8, 1, 42.8, 1.0, gpu="T4"), gpu="T4"), typical_plan(), typical_plan("RTX 4090")]
    tab, watched = show(write_page(gpus, {"RTX 3090": 0.2}, tmp_path / "plan.html"))
    rows = tab.locator("table").first.locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["RTX 3090", "RTX 4090", "T4"]
    assert "29.40 GiB over the limit" in rows[2] and rows[2].count("—") == 5 and rows[1].count("—") == 2
    assert tab.locator("h1").inner_text().startswith("CHEAPEST: RTX 3090") and tab.locator("h1").count() == 1
    assert tab.locator(".chart .main-svg").count() >= 3
    assert watched.problems == []


@pytest.mark.slow
def test_setups_that_ran_here(tmp_path: Path, show: Show) -> None:
    """Would notice: a setup that failed here, of which the page knows nothing; another table than the terminal's."""
    judgement = typical_plan().traced[1]
    ran = (
        Verified(judgement, failed="failed in the save", last_lines=("OSError: <b>full</b>",)),
        Verified(judgement, peak_allocated_gib=18.25, step_time_s=1.375, evaluated=True, notes=("run by torchrun",)),
    )
    tab, _ = show(write_page([typical_plan()], {}, tmp_path / "plan.html", ran))
    for how, each in zip(("failed", "ran"), ran, strict=True):
        table = tab.locator("section", has_text=f"8 × 1, checkpointing: {how} here").first.locator("tbody tr")
        assert [tuple(row.split("\t")) for row in table.all_inner_texts()] == list(each.rows())
    text = tab.locator("main").inner_text()
    assert all(part in text for part in ("failed in the save.", "OSError: <b>full</b>", "Note: run by torchrun."))


@pytest.mark.slow
def test_without_times_there_is_no_plot_and_without_a_script_all_figures(tmp_path: Path, show: Show) -> None:
    """Would notice: marks at 0 tokens/s for setups whose time nobody knows; figures that only the plot has."""
    assert plot(plan(setup(8, 1, 12, None))) is None
    tab, _ = show(write_page([typical_plan()], {}, tmp_path / "plan.html"), script=False)
    text = tab.locator("main").inner_text()
    assert all(
        part in text for part in ("19.00", "1.40", "5,851", "42.80", "21.01 GiB over the limit", "adamw_bnb_8bit")
    )
    assert "With other code: 8 × 1, fused loss" in text and 'loss = fused("<b>")' in text


def test_nothing_of_a_name_becomes_part_of_the_page(tmp_path: Path, show: Show) -> None:
    """Would notice: a script's name or a library's message that is read as HTML, in the page or in the plot."""
    evil = "<img src=x onerror=alert(1)></script>"
    odd = replace(EIGHT_BITS, name=evil, result=evil)
    made = replace(plan(setup(8, 1, 42, 1.0), setup(8, 1, 12, 2.0, odd)), name=evil, notes=(evil,))
    tab, watched = show(write_page([made], {}, tmp_path / "plan.html"))
    assert tab.locator("main img").count() == 0 and evil in tab.locator("h1").inner_text()
    charts = json.loads(tab.locator("#charts").text_content() or "")
    assert evil not in json.dumps(charts)
    assert watched.problems == []


def test_a_page_that_memkit_did_not_write_stays(tmp_path: Path) -> None:
    """Would notice: a file of the user's that is replaced."""
    path = tmp_path / "mine.html"
    path.write_text("<p>mine</p>")
    with pytest.raises(InputError, match="not a page written by memkit"):
        write_page([typical_plan()], {}, path)
    assert path.read_text() == "<p>mine</p>"


def test_the_frontier() -> None:
    """Would notice: a setup on it than which another is both faster and smaller; one that needs another script."""
    made = plan(
        setup(8, 1, 10, 2.0), setup(4, 2, 10, 3.0), setup(2, 4, 12, 2.5), setup(8, 1, 20, 1.0, EIGHT_BITS),
        setup(1, 8, 5, 9.0), setup(16, 1, 4, None),
    )  # fmt: skip
    assert [each.needs_bytes >> 30 for each in frontier(made)] == [5, 10, 20]
    assert all(not each.candidate.code for each in frontier(typical_plan()))
