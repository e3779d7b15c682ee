"""The page in a real Chromium: drawn, readable in light and dark, narrow and wide, no network, no injection."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from hf_memkit.common.answer.document import as_json
from hf_memkit.common.answer.html import join
from hf_memkit.common.answer.page import page
from hf_memkit.common.errors import InputError
from hf_memkit.common.resources import REPOSITORY, documentation
from hf_memkit.measuring.report.answer import report_answer, write_page
from hf_memkit.measuring.report.charts import POINTS, charts
from hf_memkit.measuring.report.load import load_run
from hf_memkit.measuring.report.summary import summarise
from tests.chromium import CONTRAST, Watched
from tests.fewer import first
from tests.measuring.report import synthetic_records as made


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each sort of run."""
    base = tmp_path_factory.mktemp("pages")
    prediction = {"peak_allocated_gib": 11.0, "peak_reserved_gib": [11.5, 12.5], "phases": {"backward": 11.0}}
    for name, records in (
        ("healthy", made.healthy(prediction=prediction)),
        ("oom", made.out_of_memory()),
        ("cpu", made.on_a_cpu()),
        ("rehearsal", made.rehearsal()),
        ("short", made.healthy(1)[:-1]),
    ):
        made.write(base / name, records)
    made.of_ranks(base / "ranks", 4, 30)
    return {run.name: write_page(load_run(run), run / "page.html") for run in base.iterdir()}


@pytest.mark.parametrize(
    ("width", "scheme"),
    first([(360, "light"), (1400, "dark"), (360, "dark"), (1400, "light")]),
)
def test_drawn_and_readable_on_every_screen(
    written: dict[str, Path], show: Callable[..., tuple[Page, Watched]], width: int, scheme: str, tmp_path: Path
) -> None:
    tab, watched = show(written["oom"], width=width, scheme=scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
    wide = "e => e.getBoundingClientRect().right > innerWidth + 1"
    outside = f"[...document.querySelectorAll('main *:not(.scroll *):not(svg *)')].filter({wide}).length"
    assert tab.evaluate(outside) == 0
    names = set(json.loads(tab.locator("#charts").text_content() or ""))
    assert {"timeline", "phases", "lengths", "host"} <= names
    for name in names:
        box = tab.locator(f"#chart-{name} .cartesianlayer").bounding_box()
        assert box is not None and box["width"] > 200 and box["height"] > 150, name
        drawn = tab.locator(f"#chart-{name} .trace path").evaluate_all("paths => paths.map(p => p.getAttribute('d'))")
        assert drawn and all(path and "NaN" not in path for path in drawn), name
    assert tab.evaluate(CONTRAST) == []
    heading = tab.locator("h1").inner_text()
    assert heading.startswith("Out of memory in backward of step 61: 1.04 GiB ")
    assert tab.locator("h1").bounding_box()["y"] < 200, "the verdict is what one sees first"  # type: ignore[index]
    light, dark = (255, 255, 255), (17, 22, 27)
    ground = tuple(map(int, re.findall(r"\d+", tab.evaluate("getComputedStyle(document.body).backgroundColor"))))
    assert ground == (dark if scheme == "dark" else light)
    tab.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)
    assert watched.problems == []


@pytest.mark.slow
def test_every_sort_of_run_is_drawn(written: dict[str, Path], show: Callable[..., tuple[Page, Watched]]) -> None:
    expected = {
        "healthy": ["filled", "timeline", "phases", "lengths", "predicted", "host", "modules", "facts", "words"],
        "ranks": ["filled", "timeline", "phases", "lengths", "ranks", "host", "modules", "facts", "words"],
        "cpu": ["timeline", "host", "facts", "words"],
        "rehearsal": ["target", "host", "facts", "words"],
        "short": ["filled", "timeline", "host", "modules", "facts", "words"],
    }
    for name, places in expected.items():
        tab, watched = show(written[name], width=360)
        result = tab.locator("section").evaluate_all("all => all.map(s => s.id)")
        assert result[0] == "next" and [place for place in result if place in places] == places, name
        assert name != "rehearsal" or "timeline" not in result, "of the small model"
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360, name
        assert watched.problems == [], name
    tab, _ = show(written["healthy"])
    shown = tab.locator("#predicted").inner_text()
    assert "peak allocated\t11.00\t11.41\t+4 %" in shown and "11.50–12.50" in shown
    assert "774,030,080" in tab.locator("#modules tr").last.inner_text()
    bar = tab.locator(".card").get_attribute("aria-label") or ""
    assert bar.startswith("Of 15.77 GiB: weights 1.44 GiB, gradients 1.44 GiB") and "outside the allocator 0.42" in bar
    widths = tab.locator(".card span").evaluate_all("all => all.map(s => s.getBoundingClientRect().width)")
    shares = [float(share) for share in re.findall(r"([\d.]+) GiB(?=,|$)", bar)]
    scale = sum(widths) / sum(shares)
    assert all(abs(width - share * scale) < 4 for width, share in zip(widths, shares, strict=True))


def wait_until(tab: Page, condition: str) -> None:
    """Playwright's own way to wait would have the page evaluate text, which its policy forbids."""
    while not tab.evaluate(condition):
        tab.wait_for_timeout(50)


@pytest.mark.slow
def test_light_and_dark_change_while_it_is_open_and_paper_is_light(
    written: dict[str, Path], show: Callable[..., tuple[Page, Watched]]
) -> None:
    tab, watched = show(written["healthy"], scheme="light")
    tick = "getComputedStyle(document.querySelector('#chart-timeline .xtick text')).fill"
    before = tab.evaluate(tick)
    tab.emulate_media(color_scheme="dark")
    wait_until(tab, f"{tick} !== {json.dumps(before)}")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    wait_until(tab, f"{tick} === {json.dumps(before)}")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert tab.pdf()[:5] == b"%PDF-"
    assert watched.problems == []


@pytest.mark.slow
def test_without_javascript_all_figures_are_there(
    written: dict[str, Path], show: Callable[..., tuple[Page, Watched]]
) -> None:
    tab, watched = show(written["oom"], width=360, script=False)
    shown = tab.locator("main").inner_text()
    for words in ("Out of memory in backward", "8.08", "51 %", "per_device_train_batch_size: 2", "1.04 GiB"):
        assert words in shown, words
    assert tab.locator("noscript p").first.is_visible()
    tab.locator("summary").click()
    assert tab.locator("#timeline table tbody tr").count() >= 20
    assert watched.problems == []


TAGS = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)><svg onload=alert(3)>'\" onmouseover=alert(4) "
    "<a href=javascript:alert(5)>link</a><b>bold</b><br>&lt;i&gt; {style} {charts} %{y} $x$ ]]> --> "
    "\u202e\x1b[31m\ud800"
)


def of_strings(value: Any, name: str = "") -> Any:
    """The record with every text, and some names, replaced by what no page may obey."""
    if isinstance(value, dict):
        free = name in ("arguments", "facts", "inputs", "versions", "places")
        return {(TAGS + key if free else key): of_strings(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [of_strings(item, name) for item in value]
    return TAGS if isinstance(value, str) and name not in ("kind", "phase", "status", "device_type") else value


def test_nothing_from_the_records_becomes_part_of_the_page(
    tmp_path: Path, show: Callable[..., tuple[Page, Watched]]
) -> None:
    records = made.out_of_memory(30)
    records.insert(9, {"kind": "save", "step": 5, "peak_allocated_gib": 4.0, "checkpoint": "x"})
    records[0]["facts"] = {"recipe": "x", "variant": "x", "y": {"z": ["x"]}}
    folder = made.write(tmp_path / "</title><img src=x onerror=alert(6)>", [of_strings(record) for record in records])
    tab, watched = show(write_page(load_run(folder), tmp_path / "page.html"))
    link = f"svg a, a[href]:not([href^='{REPOSITORY}/'])"
    assert tab.locator(f"img, iframe, object, embed, base, form, {link}, main script, main b, main i").count() == 0
    assert tab.locator("script").count() == 3 and tab.locator("[onerror], [onload], [onmouseover]").count() == 0
    shown = tab.locator("main").inner_text()
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in shown and "\\u202e\\x1b[31m\\ud800" in shown
    assert "\u202e" not in shown and "\x1b" not in shown
    save = "document.getElementById('chart-timeline').data.findIndex(trace => trace.name === 'save')"
    tab.evaluate(f"Plotly.Fx.hover('chart-timeline', [{{curveNumber: {save}, pointNumber: 0}}])")
    label = tab.locator("#chart-timeline .hoverlayer")
    label.locator("text").first.wait_for(state="attached")
    assert "</script><script>alert(1)" in (label.text_content() or ""), "it is shown as it is written"
    assert label.locator("a").count() == 0 and tab.locator(".hoverlayer tspan[style*='bold']").count() == 0
    assert watched.problems == []


def test_only_addresses_of_the_documentation_become_links() -> None:
    page = join([f'<b> see {documentation("plan.md#which-gpu")}. https://example.org/x {REPOSITORY}" onclick=x'])
    assert f'<a href="{REPOSITORY}/blob/main/docs/plan.md#which-gpu">which gpu</a>.' in page
    assert page.count("<a ") == 2 and "<b>" not in page and "example.org" in page and '" onclick' not in page


@pytest.mark.slow
def test_the_policy_forbids_what_escaping_might_miss(
    written: dict[str, Path], show: Callable[..., tuple[Page, Watched]]
) -> None:
    tab, _ = show(written["short"])
    attempts = """() => {
      const script = document.createElement("script");
      script.textContent = "window.ran = 1";
      document.body.append(script);
      document.body.insertAdjacentHTML("beforeend", '<img src="https://example.org/x.png" onerror="window.ran = 2">');
      fetch("https://example.org/").catch(() => {});
    }"""
    tab.evaluate(
        "addEventListener('securitypolicyviolation', e => (window.refused ??= []).push(e.effectiveDirective))"
    )
    tab.evaluate(attempts)
    refused = "connect-src img-src script-src-attr script-src-elem"
    wait_until(tab, f"[...new Set(window.refused)].sort().join(' ') === '{refused}'")
    assert tab.evaluate("window.ran") is None


def test_data_cannot_end_the_element_that_it_stands_in() -> None:
    made_json = as_json({"</script>": "<!--<script>&"})
    assert not set("<>&") & set(made_json) and json.loads(made_json) == {"</script>": "<!--<script>&"}


def test_a_long_run_is_thinned_and_keeps_its_highest(tmp_path: Path) -> None:
    records = made.healthy(6000)
    peaks = [record["peak_allocated_gib"] for record in records if record["kind"] == "step"]
    highest = max(range(6000), key=peaks.__getitem__)
    content = page(report_answer(load_run(made.write(tmp_path, records))), guide="report.md")
    result = re.search(r'<script type="application/json" id="charts">(.*?)</script>', content)
    assert result is not None
    data = json.loads(result[1])
    for chart in data.values():
        for trace in chart["traces"]:
            assert len(trace["x"]) == len(trace["y"]) <= POINTS
    for name, where in (("timeline", "peak allocated"), ("lengths", "step")):
        trace = next(trace for trace in data[name]["traces"] if trace["name"] == where)
        assert max(trace["y"]) == round(peaks[highest], 4)
    assert len(result[1]) < 1_500_000


def test_a_page_is_small_enough_to_send(written: dict[str, Path]) -> None:
    """Finds: Plotly uncompressed, or all of it."""
    assert max(each.stat().st_size for each in written.values()) < 1_000_000


def test_what_memkit_did_not_write_stays(tmp_path: Path) -> None:
    run = load_run(made.write(tmp_path, made.healthy(2)))
    path = tmp_path / "mine.html"
    path.write_text("<html>mine</html>")
    with pytest.raises(InputError, match=r"mine\.html: .*--html FILE"):
        write_page(run, path)
    assert path.read_text() == "<html>mine</html>"
    path.unlink()
    assert write_page(run, path) == path
    write_page(run, path)  # its own it replaces
    assert path.stat().st_mode & 0o777 == 0o644
    with pytest.raises(InputError, match=r"cannot be written: .*mkdir -p .*/nowhere"):
        write_page(run, tmp_path / "nowhere" / "page.html")
    with pytest.raises(InputError, match="cannot be written"):
        write_page(run, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["memory-rank0.jsonl", "mine.html"]


def test_a_tiny_model_is_drawn_in_mib(tmp_path: Path) -> None:
    records = made.on_a_cpu()
    for record in records:
        if "held" in record:
            record["held"] = {"host": {"weights_gib": 0.00003, "optimizer_gib": 0.00006}}
    run = load_run(made.write(tmp_path, records))
    chart = charts(run, summarise(run))["timeline"]
    assert "MiB" in chart.y
    assert [trace["y"][0] for trace in chart.traces] == pytest.approx([0.03072, 0.06144], rel=0.01)
    assert all("MiB" in trace["hovertemplate"] for trace in chart.traces)
