"""docs/presets.md: its commands are commands. Every preset of the docs works."""

from __future__ import annotations

import ast
import re
import shlex
from typing import Any

import pytest

from hf_memkit import preset
from hf_memkit.cli.main import main
from hf_memkit.common.errors import InputError
from hf_memkit.prediction import Prediction
from hf_memkit.setup.setup import Setup
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "presets.md").read_text()


@pytest.fixture(autouse=True)
def _without_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is accepted does not depend on what fits."""

    def refuses(setup: Setup) -> Prediction:
        raise InputError("not here")

    monkeypatch.setattr("hf_memkit.presets.for_model.predict", refuses)


def test_the_commands_of_the_page_are_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("docs")
    monkeypatch.chdir(folder)
    (folder / "mine.json").write_text('{"train_file": "x.txt", "activation_checkpointing": false}')
    commands = {
        line.partition("  #")[0].strip()
        for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
        for line in block.splitlines()
        if line.startswith("memkit preset")
    } | set(re.findall(r"`(memkit preset copy [a-z0-9]+ \S+\.[a-z]+[^`…]*)`", PAGE))
    assert commands
    for command in commands:
        overwrite = ["--overwrite"] if " copy " in command else []
        assert main([*shlex.split(command)[1:], *overwrite]) == 0, command


def test_the_python_of_the_page_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "docs/presets.md", "exec")


def call_at(text: str, start: int) -> ast.Call:
    """The call that begins at `start`; what a page leaves open (…) is Python's own ellipsis."""
    depth = 0
    for end in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0 and text[end] == ")":
            break
    call = ast.parse(text[start : end + 1].replace("…", "..."), mode="eval").body
    assert isinstance(call, ast.Call)
    return call


def given(call: ast.Call) -> tuple[str, dict[str, Any]] | None:
    """(name, arguments) as far as the page gives them; None if it names no preset."""
    if not call.args or not isinstance(call.args[0], ast.Constant) or not isinstance(call.args[0].value, str):
        return None
    result: dict[str, Any] = {}
    for keyword in call.keywords:
        nodes = list(ast.walk(keyword.value))
        is_open = any(isinstance(node, ast.Constant) and node.value is ... for node in nodes)
        if keyword.arg and not is_open and not any(isinstance(node, ast.Name) for node in nodes):
            result[keyword.arg] = ast.literal_eval(keyword.value)
    return call.args[0].value, result


def test_every_preset_that_a_page_names_is_accepted() -> None:
    """Unchanged, on any machine: a reader copies it."""
    calls: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text()
        for match in re.finditer(r"\bpreset\(", text):
            call = given(call_at(text, match.start()))
            if call is not None:
                calls.setdefault(repr(call), (page.name, *call))
    assert calls
    refused = []
    for page_name, name, arguments in calls.values():
        try:
            made = preset(name, **{"use_hub": False, **arguments})
        except InputError as error:
            refused.append(f"{page_name}: {name} {arguments}: {error}")
        else:
            assert made.settings
    assert not refused, "\n".join(refused)
