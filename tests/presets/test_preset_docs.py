"""docs/presets.md: its table is that of the presets, and its commands are commands."""

from __future__ import annotations

import re
import runpy
import shlex

import pytest

from hf_memkit.cli.main import main
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "presets.md").read_text()


def test_the_table_is_current() -> None:
    assert runpy.run_path(str(ROOT / "scripts" / "preset_docs.py"))["main"](["--check"]) == 0


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
    assert len(commands) >= 6
    for command in commands:
        overwrite = ["--overwrite"] if " copy " in command else []
        assert main([*shlex.split(command)[1:], *overwrite]) == 0, command


def test_the_python_of_the_page_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        compile(block, "docs/presets.md", "exec")
