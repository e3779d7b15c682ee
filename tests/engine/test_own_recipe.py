"""docs/your-own-recipe.md, followed as a newcomer would: its files are written and its commands run, in its order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.loaded import Loaded

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "your-own-recipe.md"
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.exhaustive
def test_the_guide_works_as_it_stands(process: Loaded, tmp_path: Path) -> None:
    commands = 0
    for kind, name, content in BLOCK.findall(PAGE.read_text()):
        if name:
            (tmp_path / name).write_text(content)
        if name or kind == "text":  # an output: scripts/docs_examples.py
            continue
        assert kind == "bash", f"a block of {kind!r} is neither a file nor commands"
        for line in content.splitlines():
            if "--resume" in line:  # only after Ctrl-C: here the run is finished
                continue
            ran = process.run(shlex.split(line, comments=True), tmp_path)
            assert ran.returncode == 0, f"{line}\n{ran.output[-3000:]}"
            commands += 1
    assert commands >= 6
    ran = process.run([tmp_path / "tickets-job" / "train_text_classification.py"], tmp_path)
    assert ran.returncode == 0, ran.output[-3000:]
    assert (tmp_path / "tickets-run" / "memory-report.html").exists()
    assert (tmp_path / "tickets-run" / "model").is_dir()
