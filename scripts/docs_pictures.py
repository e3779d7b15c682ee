"""Draws the pictures of docs/plan.md, light and dark: a part of a plan's page from the evidence, in headless Chromium.

Beside them stands a digest of that page, with its style sheet and its script: what they were drawn from.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

from docs_blocks import RESULTS, ROOT

from hf_memkit.common.answer.document import document
from hf_memkit.common.answer.html import Html

NAME = "docs/pictures"
FOLDER = ROOT / NAME
DIGESTS = FOLDER / "drawn_from.json"


def update(*, check: bool) -> bool:
    """Draws the pictures; with `check` only says whether they are current."""
    content = json.loads((RESULTS / "plan_example.json").read_text())["examples"]["one"]["page"]
    page = document(content["title"], Html(content["body"]), content["charts"], guide="plan.md")
    digest = json.dumps({"plan": hashlib.sha256(page.encode()).hexdigest()}, indent=1) + "\n"
    if check:
        return DIGESTS.read_text() == digest
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        (path := Path(folder) / "page.html").write_text(page)
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=arguments)
        for scheme in ("light", "dark"):
            tab = chromium.new_page(viewport={"width": 1100, "height": 620}, color_scheme=scheme)
            tab.goto(path.as_uri())
            tab.wait_for_selector(".chart .main-svg")
            tab.locator(".chart").first.evaluate("chart => scrollTo(0, chart.closest('section').offsetTop)")
            tab.locator("section", has=tab.locator(".chart")).first.screenshot(path=FOLDER / f"plan-{scheme}.png")
        chromium.close()
    DIGESTS.write_text(digest)
    return True
