"""Draws the pictures of README.md, light and dark, from committed evidence.

A picture is a part of one of memkit's own pages in headless Chromium. Beside the pictures stands a digest of what each
was drawn from: the page of the evidence, the style sheet, the script and Plotly.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Final

from evidence_tables import RESULTS, ROOT

from hf_memkit.common.answer.document import document
from hf_memkit.common.answer.html import Html

FOLDER: Final = ROOT / "docs" / "pictures"
DIGESTS: Final = FOLDER / "drawn_from.json"
SCHEMES: Final = ("light", "dark")
CHROMIUM: Final = "/usr/bin/chromium"
WIDTH, HEIGHT = 1100, 620
"""Of the window, in CSS pixels."""


def plan_page() -> str:
    """The page of the plan that README.md shows."""
    content = json.loads((RESULTS / "plan_example.json").read_text())["examples"]["one"]["page"]
    return document(content["title"], Html(content["body"]), content["charts"], guide="plan.md")


def draw(page: str) -> None:
    """Writes `plan-light.png` and `plan-dark.png`."""
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "page.html"
        path.write_text(page)
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        for scheme in SCHEMES:
            tab = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
            tab.goto(path.as_uri())
            tab.wait_for_selector(".chart .main-svg")
            tab.locator(".chart").first.evaluate("chart => scrollTo(0, chart.closest('section').offsetTop)")
            tab.locator("section", has=tab.locator(".chart")).first.screenshot(path=FOLDER / f"plan-{scheme}.png")
        chromium.close()


def update(*, check: bool) -> int:
    """Draws them, or only says whether they are stale. The exit status."""
    page = plan_page()
    digest = {"plan": hashlib.sha256(page.encode()).hexdigest()}
    if not check:
        draw(page)
        DIGESTS.write_text(json.dumps(digest, indent=1) + "\n")
    elif not DIGESTS.exists() or json.loads(DIGESTS.read_text()) != digest:
        print("docs/pictures is not current: run scripts/docs.py pictures")
        return 1
    return 0
