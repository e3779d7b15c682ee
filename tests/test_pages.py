"""The pages: what they show was recorded or runs here, what they name exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from hf_memkit.cli.main import app
from tests.conftest import ROOT

READMES = tuple(ROOT / folder / "README.md" for folder in ("", "docs/techniques", "ds_configs", "recipes"))
PAGES = (*READMES, *sorted((ROOT / "docs").glob("*.md")))
GENERATORS = (
    *sorted(path.name for path in (ROOT / "scripts").glob("*_docs.py")),
    "ds_configs_readme.py",
    "pictures.py",
)


@pytest.mark.parametrize("script", GENERATORS)
def test_what_is_generated_is_current(script: str) -> None:
    """Finds: a table that was edited by hand, evidence that changed without its table, an output that the commands no
    longer print, a picture of an older page."""
    command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_outputs_are_generated() -> None:
    """Finds: an output that nobody compares with what the command prints."""
    by_hand = []
    for page in PAGES:
        if page.name != "checks.md":  # generated as a whole
            text = re.sub(r"<!-- (?:evidence|fields): .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
            by_hand += [str(page)] * ("```text" in text)
    assert by_hand == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Finds: a file or a heading that was renamed."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)|src(?:set)?=\"([^\"]+)\"", text):
        target = next(filter(None, link))
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (heading and heading not in headings(there)):
            broken.append(target)
    assert broken == []


def headings(page: Path) -> set[str]:
    """As GitHub names them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_the_options_that_they_show(page: Path) -> None:
    """Finds: a verb or an option that was renamed."""
    commands: Any = typer.main.get_command(app)
    unknown = []
    for line in typed(page.read_text()):
        words = shlex.split(line, comments=True)[1:]
        words = words[: words.index("--")] if "--" in words else words
        command = commands
        while words and hasattr(command, "commands") and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
        unknown += [f"{line}: {word}" for word in words if re.match(r"--?[a-z]", word) and word not in known]
    assert unknown == []


def typed(text: str) -> list[str]:
    """Lines of bash blocks that call memkit, continued ones joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("memkit ")]


def test_help_shows_what_the_commands_print() -> None:
    """Finds: an output in a verb's help that no page shows any more."""
    shown = " ".join(page.read_text().replace("\n", " ") for page in PAGES)
    commands: Any = typer.main.get_command(app)
    outputs = [
        line.strip()
        for command in commands.commands.values()
        for line in (command.epilog or "").splitlines()
        if line.startswith(" " * 6)
    ]
    assert outputs
    for line in outputs:
        for part in line.split("…"):
            assert " ".join(part.strip(" ()").split()) in " ".join(shown.split()), line
