"""Generated tables of docs/techniques: honest about what was not measured, and right where something was."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from benchmarks.techniques_cases import comparisons, rungs
from hf_memkit.recipe.schema import read_recipe
from hf_memkit.technique import TECHNIQUES
from tests.conftest import ROOT, load_script


@pytest.fixture(scope="module")
def docs() -> SimpleNamespace:
    return load_script("technique_docs.py")


def test_every_technique_is_in_the_overview_with_its_page(docs: SimpleNamespace) -> None:
    lines = docs.overview_table({}).splitlines()[2:]
    assert len(lines) == len(TECHNIQUES)
    for one in TECHNIQUES.values():
        (line,) = [line for line in lines if line.startswith(f"| [`{one.name}`]({one.family}.md#{one.name}) ")]
        assert line.count("|") - line.count("\\|") == 7, "six columns"


def test_without_evidence_nothing_is_claimed(docs: SimpleNamespace, tmp_path: Path) -> None:
    assert docs.measured(tmp_path) == {}
    for text in (docs.ladder_tables({}), docs.gpu_table("loss", {})):
        assert docs.NOT_YET in text and "GiB," not in text
    assert "not yet measured on a GPU" in docs.overview_table({})


def test_the_page_s_examples_work(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "techniques" / "README.md").read_text()
    python, example = (re.search(f"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("python", "yaml"))  # type: ignore[index]
    names: dict[str, Any] = {}
    exec(python, names)
    assert not names["setup"].problems and "adafactor" in names["setup"].techniques
    content = yaml.safe_load((ROOT / "recipes" / "gpt2-on-16gb.yaml").read_text())
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({**content, **yaml.safe_load(example)}))
    assert read_recipe(path).variants["resident"].techniques == ["fused-gelu"]


def row(case: str, peak: float, loss: float) -> dict[str, Any]:
    return {
        "case": case, "status": "fits", "peak_allocated_gib": peak, "peak_reserved_gib": peak + 0.5,
        "phases": {"forward": peak - 1, "backward": peak}, "tokens_per_s": 12345.6, "losses": [9.0, loss],
        "versions": {"torch": "2.11", "transformers": "5.17"}, "hardware": {"gpu": {"name": "Some GPU"}},
    }  # fmt: skip


def test_evidence_becomes_tables(docs: SimpleNamespace, tmp_path: Path) -> None:
    one = next(one for one in comparisons() if one.technique == "chunked-loss")
    ladder = rungs("gpt2-xl")[0][1]
    refused = {**row(rungs("gpt2-xl")[1][1].name, 1, 1), "status": "does not fit", "why": "CUDA out of | memory"}
    del refused["peak_allocated_gib"]
    rows = [row(one.base.name, 8.125, 3.0), row(one.case.name, 6.5, 3.001), row(ladder.name, 40, 2.5), refused]
    (tmp_path / "techniques.json").write_text(json.dumps({"cases": rows}))
    gpu = docs.measured(tmp_path)
    assert "GPU: 8.12 → 6.50 GiB" in docs.evidence_of(TECHNIQUES["chunked-loss"], {}, gpu)
    table = docs.gpu_table("loss", gpu)
    assert "| 8.12 GiB, 12,346 tokens/s, loss 3.000 | 6.50 GiB, 12,346 tokens/s, loss 3.001 |" in table
    ladders = docs.ladder_tables(gpu)
    assert "| `defaults` | 40.00 | 40.50 | backward | 12,346 | 2.500 |" in ladders
    assert "does not fit: CUDA out of \\| memory" in ladders and "not yet measured" in ladders
    assert "Measured on Some GPU with torch 2.11" in table and "differ" not in table
    (tmp_path / "techniques.json").write_text(json.dumps({"cases": [rows[0], row(one.case.name, 6.5, 3.1)]}))
    assert "loss 3.100 **the losses differ** |" in docs.gpu_table("loss", docs.measured(tmp_path))
