"""Every rule: the real library first, then a job that breaks it and one that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hf_memkit.check import RULES, check
from tests.check.cases import CASES, Case
from tests.conftest import ROOT

# They say what the ledger says, whose rows are compared with the live engine's tensors in tests/engine.
PROVED_BY_THE_LEDGER = {"card-too-small", "ram-too-small", "memlock-too-small"}


@pytest.fixture(scope="session")
def proofs() -> dict[str, str]:
    """Rule → what went wrong when the real library was tried, or nothing. One process for all of them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.check.proofs"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=580)
    lines = [line for line in done.stdout.splitlines() if line.startswith("PROOFS ")]
    assert lines, done.stderr[-3000:]
    found: dict[str, str] = json.loads(lines[-1].removeprefix("PROOFS "))
    return found


def test_every_rule_has_a_case_and_a_proof(proofs: dict[str, str]) -> None:
    assert set(CASES) == set(RULES)
    assert set(proofs) | PROVED_BY_THE_LEDGER == set(RULES)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in PROVED_BY_THE_LEDGER])
def test_the_library_does_what_the_rule_says(rule: str, proofs: dict[str, str]) -> None:
    assert proofs[rule] == ""


@pytest.mark.parametrize(("rule", "case"), [(rule, case) for rule, cases in CASES.items() for case in cases])
def test_a_rule_finds_its_mistake_and_nothing_else(rule: str, case: Case) -> None:
    found = [problem for problem in check(case.bad) if problem.rule == rule]
    assert [problem.key for problem in found] == [case.key]
    assert found[0].why and found[0].fix and not found[0].why.endswith(".") and not found[0].fix.endswith(".")
    assert [problem for problem in check(case.good) if problem.rule == rule] == []
