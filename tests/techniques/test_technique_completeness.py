"""A technique is done when it has its page, its proof of the same result, its memory case and its refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache

import pytest

from benchmarks.techniques_cases import COVERED, cases
from hf_memkit.build import needed_packages
from hf_memkit.check import RULES
from hf_memkit.presets import PRESETS
from hf_memkit.technique import FAMILIES, TECHNIQUES, Technique
from hf_memkit.training_setup import TrainingSetup
from tests.conftest import ROOT
from tests.techniques.jobs import gpt2_job

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(params=sorted(TECHNIQUES), ids=str)
def one(request: pytest.FixtureRequest) -> Iterator[Technique]:
    yield TECHNIQUES[request.param]


@cache
def proved() -> frozenset[tuple[str, str]]:
    """(kind, technique) of every test that carries `@proves` with names written out."""
    marker = re.compile(r'@proves\(\s*"(same-result|memory)"((?:,\s*"[\w-]+")+)')
    found = [
        (kind, name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for kind, names in marker.findall(path.read_text())
        for name in re.findall(r'"([\w-]+)"', names)
    ]
    return frozenset(found)


@cache
def drawn() -> frozenset[str]:
    """Techniques whose learning curve is kept."""
    arms = json.loads((RESULTS / "optimizer_curves.json").read_text())["arms"]
    return frozenset(arm["technique"] for arm in arms.values() if arm["technique"])


def test_has_its_page(one: Technique) -> None:
    page = (ROOT / "docs" / "techniques" / f"{one.family}.md").read_text()
    (section,) = re.findall(rf"^## {re.escape(one.name)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    paragraphs = [part for part in section.strip().split("\n\n") if part[:1].isalnum() or part[:1] in "`*"]
    assert paragraphs and len(paragraphs[0].split()) >= 20, "a paragraph that a person can read"


def test_says_what_it_saves_costs_and_when_not(one: Technique) -> None:
    for line in (one.saves, one.costs, one.not_when):
        assert line and "\n" not in line and not line.endswith(".")


def test_has_its_proof_of_the_result(one: Technique) -> None:
    if one.proof == "cpu":
        assert ("same-result", one.name) in proved()
    elif one.proof == "curve":
        assert one.name in drawn()
    else:
        assert one.gpu_only, "why only a card can show it"


def test_has_its_memory_case(one: Technique) -> None:
    assert ("memory", one.name) in proved() or one.gpu_only, "bytes on a CPU, or why a CPU cannot show them"
    on_a_card = {name for case in cases() for name in case.techniques} | set(COVERED)
    assert one.name in on_a_card, "a case of benchmarks/techniques_section.py"


def test_has_its_refusals(one: Technique) -> None:
    rules = [rule.id for rule in RULES.values() if one.name in rule.techniques]
    assert bool(rules) != bool(one.always_applies), "a rule that says when it does not apply, or why there is none"


def test_its_packages_are_seen_in_what_it_puts(one: Technique) -> None:
    """`needed_packages` asks the settings, so that what the user replaced needs nothing."""
    made = one(TrainingSetup("x"), gpt2_job()).made_by([one.name])
    assert needed_packages(made) == dict.fromkeys(one.packages, one.name)
    assert needed_packages(TrainingSetup("x").made_by([one.name])) == {}


def test_rules_name_techniques_that_exist() -> None:
    named = {name for rule in RULES.values() for name in rule.techniques}
    assert named <= set(TECHNIQUES)


def test_no_proof_is_of_something_else() -> None:
    assert {name for _, name in proved()} <= set(TECHNIQUES)


def test_every_family_has_techniques_and_every_technique_a_way_in() -> None:
    assert {one.family for one in TECHNIQUES.values()} == set(FAMILIES)
    for preset in PRESETS.values():
        assert set(preset.techniques) <= set(TECHNIQUES)
        assert set(preset.where_possible) <= set(preset.techniques)
