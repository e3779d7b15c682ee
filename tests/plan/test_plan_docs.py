"""docs/plan.md: its options are those of the verb."""

from __future__ import annotations

import re
from typing import Any

import typer

from hf_memkit.catalog.fit import FULL_SHARE
from hf_memkit.cli.main import app
from hf_memkit.plan.time_limit import LIMIT_S, MOST_TIMES
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "plan.md").read_text()


def test_the_page_has_the_options_of_the_verb() -> None:
    """Would notice: an option that is missing in the table, an option on a page that no longer exists, another
    limit."""
    commands: Any = typer.main.get_command(app)
    own = {name for each in commands.commands["plan"].params for name in each.opts if name.startswith("-")}
    table = PAGE[PAGE.index("## What to give") : PAGE.index("## How to read")]
    assert set(re.findall(r"`(--?[a-z][a-z-]*)", table)) >= own
    for page in (PAGE, (ROOT / "README.md").read_text()):
        typed = [line for line in page.splitlines() if line.startswith("memkit plan")]
        assert typed
        for line in typed:
            options = set(re.findall(r"(?<= )--?[a-z][a-z-]*", line.partition(" -- ")[0]))
            assert options <= own, line
    (limit,) = (line for line in table.splitlines() if line.startswith("| `--limit"))
    (option,) = (each for each in commands.commands["plan"].params if "--limit" in each.opts)
    for text in (limit, option.help):
        assert re.findall(r"\d+", text) == [f"{LIMIT_S:.0f}", f"{MOST_TIMES * LIMIT_S:.0f}"]
    assert f"{FULL_SHARE:.0%}".replace("%", " %") in PAGE
