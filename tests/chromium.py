"""Pages that memkit writes, opened in a real Chromium: fixtures for the tests of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
WAIT_MS = 300_000
"""For what hangs: its own limits are 30 s, which a busy machine may need."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for all tests. Where there is none they fail: a page that nobody has seen is not tested."""
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=WAIT_MS)
        yield chromium
        chromium.close()


class Watched:
    """What a page did that it must not."""

    def __init__(self, tab: Page) -> None:
        self.problems: list[str] = []
        tab.on("dialog", lambda dialog: (self.problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
        tab.on("pageerror", lambda error: self.problems.append(f"error {error}"))
        tab.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        tab.on("request", lambda request: self.problems.append(f"request {request.url[:80]}"))


@pytest.fixture
def show(browser: Browser) -> Iterator[Callable[..., tuple[Page, Watched]]]:
    """Opens a file as it will be opened; whatever it asks the network for is on its list."""
    contexts = []

    def show(path: Path, *, width: int = 1400, scheme: str = "light", script: bool = True) -> tuple[Page, Watched]:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=script, offline=True
        )  # type: ignore[arg-type]
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)
        tab = context.new_page()
        watched = Watched(tab)
        tab.goto(path.as_uri())
        if script and tab.locator(".chart").count():
            tab.wait_for_selector(".chart .main-svg")
        assert watched.problems[:1] == [f"request {path.as_uri()[:80]}"]
        watched.problems.clear()
        return tab, watched

    yield show
    for context in contexts:
        context.close()


CONTRAST = """() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour[3] > 0.99) return colour;
    }
    return [255, 255, 255, 1];
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest("script, noscript")) continue;
    const style = getComputedStyle(element);
    const text = parse(element.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(text), light(behind(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push([walker.currentNode.data.trim().slice(0, 40), ratio]);
  }
  return poor;
}"""
"""Texts of a page that are hard to read before what lies behind them: (text, ratio of contrast)."""
