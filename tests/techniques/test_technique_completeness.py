"""A technique is done when it has its page, its proof of the same result, its memory case and its refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache

from hf_memkit.checks import RULES
from hf_memkit.presets import PRESETS
from hf_memkit.setup.build import needed_packages
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import FAMILIES, TECHNIQUES, Technique
from tests.conftest import ROOT
from tests.techniques.jobs import gpt2_job

RESULTS = ROOT / "benchmarks" / "results"


def lacking(has: Callable[[Technique], bool]) -> list[str]:
    return [name for name, one in sorted(TECHNIQUES.items()) if not has(one)]


@cache
def proved() -> frozenset[tuple[str, str]]:
    """(kind, technique) of every test that carries `@proves` with names written out."""
    marker = re.compile(r'@proves\(\s*"(same-result|memory)"((?:,\s*"[\w-]+")+)')
    actual = [
        (kind, name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for kind, names in marker.findall(path.read_text())
        for name in re.findall(r'"([\w-]+)"', names)
    ]
    return frozenset(actual)


@cache
def drawn() -> frozenset[str]:
    """Techniques whose learning curve is kept."""
    arms = json.loads((RESULTS / "optimizer_curves.json").read_text())["arms"]
    return frozenset(arm["technique"] for arm in arms.values() if arm["technique"])


def has_a_page(one: Technique) -> bool:
    page = (ROOT / "docs" / "techniques" / f"{one.family}.md").read_text()
    sections = re.findall(rf"^## {re.escape(one.name)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    actual = [
        part for text in sections for part in text.strip().split("\n\n") if part[:1].isalnum() or part[:1] in "`*"
    ]
    return len(sections) == 1 and bool(actual) and len(actual[0].split()) >= 20


def test_each_has_its_page_with_a_paragraph_that_a_person_can_read() -> None:
    assert lacking(has_a_page) == []


def test_each_says_what_it_saves_costs_and_when_not() -> None:
    def says(one: Technique) -> bool:
        return all(line and "\n" not in line and line[-1] != "." for line in (one.saves, one.costs, one.not_when))

    assert lacking(says) == []


def test_each_has_its_proof_of_the_result_or_says_why_only_a_gpu_can_show_it() -> None:
    shown = {"cpu": {name for kind, name in proved() if kind == "same-result"}, "curve": drawn()}
    assert lacking(lambda one: one.name in shown[one.proof] if one.proof in shown else bool(one.gpu_only)) == []


def test_each_has_its_memory_case() -> None:
    assert lacking(lambda one: ("memory", one.name) in proved() or bool(one.gpu_only)) == [], (
        "bytes on a CPU, or why not"
    )


def test_each_has_its_refusals() -> None:
    """A rule that says when it does not apply."""
    refused = {name for rule in RULES.values() for name in rule.techniques}
    assert lacking(lambda one: one.name in refused) == []


def test_packages_are_seen_in_what_each_puts() -> None:
    """`needed_packages` asks the settings, so that what the user replaced needs nothing."""

    def seen(one: Technique) -> bool:
        made = one(Setup("x", job=gpt2_job())).made_by([one.name])
        return needed_packages(made) == dict.fromkeys(one.packages, one.name)

    assert lacking(seen) == []
    assert lacking(lambda one: needed_packages(Setup("x").made_by([one.name])) == {}) == []


def test_rules_name_techniques_that_exist() -> None:
    """In `techniques`, and in the words of a fix."""
    named = {name for rule in RULES.values() for name in rule.techniques}
    pattern = re.compile(r"\btechniques? ([a-z0-9]+(?:-[a-z0-9]+)+)(?: (?:and|or) ([a-z0-9]+(?:-[a-z0-9]+)+))?")
    named |= {name for rule in RULES.values() for pair in pattern.findall(rule.fix) for name in pair if name}
    assert named <= set(TECHNIQUES)


def test_no_proof_is_of_something_else() -> None:
    assert {name for _, name in proved()} <= set(TECHNIQUES)


def test_every_family_has_techniques_and_every_technique_a_way_in() -> None:
    assert {one.family for one in TECHNIQUES.values()} == set(FAMILIES)
    for preset in PRESETS.values():
        assert set(preset.techniques) <= set(TECHNIQUES)
        assert set(preset.where_possible) <= set(preset.techniques)
