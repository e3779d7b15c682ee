"""Checks of README.md and docs/: links lead somewhere, options exist, outputs are generated."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from evidence_tables import ROOT

READMES = tuple(ROOT / folder / "README.md" for folder in ("", "docs/techniques", "ds_configs", "recipes"))
PAGES = (*READMES, *sorted((ROOT / "docs").glob("*.md")))


def outputs_by_hand() -> Iterator[str]:
    """Outputs that no generator compares with what the command prints."""
    for page in PAGES:
        if page.name != "checks.md":  # generated as a whole
            text = re.sub(r"<!-- (?:evidence|fields): .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
            if "```text" in text:
                yield f"{page.relative_to(ROOT)}: an output outside of the generated sections"


def broken_links() -> Iterator[str]:
    """Links to a file or a heading that does not exist."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)|src(?:set)?=\"([^\"]+)\"", text):
            target = next(filter(None, link))
            if "://" in target:
                continue
            path, _, heading = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (heading and heading not in headings(file)):
                yield f"{page.relative_to(ROOT)}: the link {target} leads nowhere"


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def unknown_options() -> Iterator[str]:
    """Options in shown commands that the verb does not have."""
    for page in PAGES:
        for line in memkit_commands(page.read_text()):
            words = shlex.split(line, comments=True)[1:]
            words = words[: words.index("--")] if "--" in words else words
            command = _app()
            while words and hasattr(command, "commands") and words[0] in command.commands:
                command = command.commands[words.pop(0)]
            known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
            for word in words:
                if re.match(r"--?[a-z]", word) and word not in known:
                    yield f"{page.relative_to(ROOT)}: {line}: no option {word}"


def memkit_commands(text: str) -> list[str]:
    """Lines of bash blocks that call memkit, continued ones joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("memkit ")]


def outputs_of_help() -> Iterator[str]:
    """Outputs in a verb's `--help` that no page shows."""
    shown = " ".join(" ".join(page.read_text().split()) for page in PAGES)
    lines = [
        line.strip()
        for command in _app().commands.values()
        for line in (command.epilog or "").splitlines()
        if line.startswith(" " * 6)
    ]
    if not lines:
        yield "no verb's --help shows an output"
    for line in lines:
        for part in line.split("…"):
            if " ".join(part.strip(" ()").split()) not in shown:
                yield f"memkit --help: no page shows the output {line!r}"


def _app() -> Any:
    from hf_memkit.cli.main import app

    return typer.main.get_command(app)


CHECKS: tuple[Callable[[], Iterator[str]], ...] = (outputs_by_hand, broken_links, unknown_options, outputs_of_help)
