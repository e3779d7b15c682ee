"""docs/techniques: its overview has every technique, and its examples work."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hf_memkit.recipes.schema import read_recipe
from hf_memkit.setup.techniques.registry import TECHNIQUES
from tests.conftest import ROOT, load_script
from tests.presets.test_sizes import made_of


@pytest.fixture(scope="module")
def docs() -> SimpleNamespace:
    return load_script("docs_code.py")


def test_every_technique_is_in_the_overview_with_its_page(docs: SimpleNamespace) -> None:
    lines = docs.techniques().splitlines()[2:]
    assert len(lines) == len(TECHNIQUES)
    for one in TECHNIQUES.values():
        (line,) = [line for line in lines if line.startswith(f"| [`{one.name}`]({one.family}.md#{one.name}) ")]
        assert line.count("|") - line.count("\\|") == 6, "five columns"


def test_the_page_s_examples_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_memkit.presets.for_model.predict", lambda setup: made_of(6, 0.1, 3)(1))
    text = (ROOT / "docs" / "techniques" / "README.md").read_text()
    python, example = (re.search(f"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("python", "yaml"))  # type: ignore[index]
    names: dict[str, Any] = {}
    exec(python, names)
    assert not names["setup"].problems and "adafactor" in names["setup"].techniques
    content = yaml.safe_load((ROOT / "recipes" / "gpt2-on-16gb.yaml").read_text())
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({**content, **yaml.safe_load(example)}))
    assert read_recipe(path).variants["resident"].techniques == ["fused-gelu"]
