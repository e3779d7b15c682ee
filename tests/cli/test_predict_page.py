"""The page of `memkit predict --html` in a real Chromium, as a user types it, against what the terminal says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from hf_memkit.catalog.hardware import gpu_of_size
from hf_memkit.cli.main import main
from hf_memkit.common.units import GIB
from tests.chromium import CONTRAST, Watched

Show = Callable[..., tuple[Page, Watched]]
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 100, "n_positions": 64}
LARGE = {**GPT2, "n_embd": 1536, "vocab_size": 50257, "n_positions": 1024}
TOO_LARGE = ("--model", "./large", "--gpu-memory", "2GB", "--batch-size", "2", "--ram", "64GB")
EVIL = "<img src=x onerror=alert(1)>"


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The terminal's lines; the page is `page.html`."""
    capsys.readouterr()
    assert main(["predict", *arguments, "--html", "page.html"]) in (0, 1)
    return capsys.readouterr().out.splitlines()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    for folder, config in {EVIL: GPT2, "large": LARGE}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
def test_drawn_and_readable_where_it_does_not_fit(
    tmp_path: Path, show: Show, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finds: another verdict or advice than the terminal's, a bar that ends at the GPU's memory though the job needs
    more, shares of something else than the GPU, text that cannot be read, a page that scrolls sideways or is dark on
    paper."""
    lines = predicted(capsys, *TOO_LARGE)
    for width, scheme in ((360, "dark"), (1400, "light")):
        tab, watched = show(tmp_path / "page.html", width=width, scheme=scheme)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width and tab.evaluate(CONTRAST) == []
        assert watched.problems == []
    assert lines[-1] == "Wrote page.html" and tab.locator("h1").inner_text() == lines[0]
    assert tab.locator(".lead.bad").count() == 1
    change = lines.index("What to do") + 1
    assert tab.locator("#next li").all_inner_texts() == lines[change : lines.index("", change)]
    rows = [row.split("\t") for row in tab.locator("#target table").first.locator("tbody tr").all_inner_texts()]
    gib = {name: float(size) for name, size, _ in rows}
    needs = sum(gib.values()) - gib["more than the GPU has"]
    has = needs - gib["more than the GPU has"]
    assert has == pytest.approx(gpu_of_size("2GB").capacity_bytes / GIB, abs=0.1) and needs > 1.5 * has
    assert all(float(share.strip("% ")) == pytest.approx(100 * gib[name] / has, abs=1) for name, _, share in rows)
    bar, end = (tab.locator(f"#target .card{inner}").bounding_box() for inner in ("", " .end"))
    assert bar and end and end["x"] - bar["x"] == pytest.approx(bar["width"] * has / needs, abs=3)
    assert "backward" in tab.locator(".bars td:first-child").all_inner_texts()
    tab.emulate_media(media="print")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(("--model", EVIL), id="model"),
        pytest.param(("--model", EVIL, "--preset", "lora"), id="preset", marks=pytest.mark.slow),
        pytest.param(("--recipe", "gpt2-on-16gb", "--model", EVIL), id="recipe"),
    ],
)
def test_every_form_has_a_page_on_which_names_are_text(
    tmp_path: Path, show: Show, capsys: pytest.CaptureFixture[str], asked: tuple[str, ...]
) -> None:
    """Finds: a form without its page or with another title, a note that only the terminal has, a name read as HTML."""
    lines = predicted(capsys, *asked, "--gpu", "RTX 4090", "--sequence-length", "32")
    tab, watched = show(tmp_path / "page.html")
    shown = tab.locator("main").inner_text()
    assert EVIL in tab.locator(".lead p").inner_text() and tab.locator("main img, script").count() == 0
    assert tab.locator("h1").inner_text() == lines[0] and tab.locator(".lead.good").count() == 1
    words = [line.partition("; checked")[0] for line in lines if line.startswith(("Note: ", "Peak ", "Confidence: "))]
    missing = [line for line in words if line not in shown]
    assert not missing
    assert (tmp_path / "page.html").stat().st_size < 100_000, "no chart, so no Plotly"
    assert watched.problems == []
