"""Every rule: the real library first, then a job that breaks it and one that does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hf_memkit.checks import RULES, check
from tests.checks.cases import CASES, Case
from tests.conftest import ROOT, load_script

FOLDER = Path(__file__).parent

# They say what the ledger says, whose rows are compared with the live engine's tensors in tests/engine.
PROVED_BY_THE_LEDGER = {"card-too-small", "ram-too-small", "memlock-too-small"}

# Late as well, but their proofs need no model.
WITHOUT_A_MODEL = {
    # `real.parse` makes the config object that the engine makes when training starts: see the proof of removed-key.
    "batch-missing", "batch-product", "fp16-and-bf16", "gds-without-gpu", "lean-states-without-master",
    "lean-states-without-zero", "out-of-range", "ratio-refused", "rejected-key", "sum-at-stage-3", "wrong-type",
    # They call what the engine, the model or Trainer calls.
    "contiguous-activations", "liger-two-losses", "liger-without-gpu", "secondary-partition-size",
    # The error comes while the model is made, before its first parameter.
    "flash-not-installed", "flash-on-cpu", "flex-not-supported", "quantized-without-gpu",
}  # fmt: skip

MILDER = {
    # What fails is a disagreement, and the file alone shows one half of it.
    "hard-coded": "hint",
    # The run itself and the model that it saves are right: a resume fails.
    "checkpoint-cannot-be-loaded": "warning",
    # For a machine with TPUs it is right.
    "fsdp-for-tpus": "warning",
    # The file may be for a script with its own dataclasses.
    "unknown-argument": "hint",
    # Neither Trainer nor the engine reads the section: whoever calls DeepSpeed's configure() sees the error.
    "contiguous-activations": "warning",
}
"""Rules whose library fails, and that are no errors all the same."""
# Their proofs make a DeepSpeed engine, or its process group, which needs a compiled operator.
ON_AN_ENGINE = {
    "accumulation-missing", "activation-section-unread", "batch-search-at-stage-3", "bucket-against-card",
    "buffer-too-small", "buffers-too-few", "clipping-in-optimizer", "clipping-missing", "compile-at-stage-3",
    "contiguous-activations",
    "contiguous-forced", "disk-too-small", "duplicate-key", "fast-init-no-effect", "fp16-without-gpu",
    "fp32-accumulation", "gather-bucket-odd", "gather-from-nvme-on-cpu", "gradient-norm-off",
    "label-smoothing-makes-logits", "learning-rate-missing", "lean-master-without-offload",
    "lean-offload-without-optimizer",
    "lean-states-without-bf16", "legacy-stage-1", "liger-config-unused", "lomo-with-deepspeed",
    "no-weights-saved", "nvme-below-stage-3", "nvme-key-without-nvme", "nvme-path-missing", "nvme-path-unusable",
    "offload-at-stage-0", "offload-twice", "optimizer-params-missing", "optimizer-replaced", "optimizer-twice",
    "param-offload-below-stage-3",
    "parameter-type", "parameters-stay-in-ram", "pipelined-buffers-too-few", "quantized-gradients-bf16",
    "quantized-without-gpu", "ratio-no-effect", "removed-key", "removed-optimizer", "resume-from-nvme",
    "scheduler-params-missing", "scheduler-twice", "sft-has-its-own-loss", "states-key-without-offload",
    "super-offload-unsupported",
    "unknown-optimizer", "unknown-scheduler", "wrong-stage", "zenflow-accumulation", "zenflow-interval",
    "zenflow-offload-without-overlap", "zenflow-shared-memory", "zenflow-without-offload",
    "zenflow-without-optimizer",
}  # fmt: skip

# A proof shows a library's behaviour, independent of the rules: the plain level has the rules' own cases.
PROOFS = [
    pytest.param(rule, marks=pytest.mark.operators if rule in ON_AN_ENGINE else pytest.mark.slow)
    for rule in RULES
    if rule not in PROVED_BY_THE_LEDGER
]


@pytest.fixture(scope="session")
def proofs(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What became of the proof of each rule that is asked for (`proofs.py`); one process runs all."""
    wanted = {
        item.callspec.params["rule"]
        for item in request.session.items
        if "proofs" in vars(item).get("fixturenames", ()) and hasattr(item, "callspec")
    }
    engine = ["--engine"] if wanted & ON_AN_ENGINE else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.checks.proofs", *engine, *sorted(wanted)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=580)
    lines = [line for line in done.stdout.splitlines() if line.startswith("PROOFS ")]
    assert lines, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("PROOFS "))
    return result


def test_every_rule_has_a_case_and_a_proof() -> None:
    texts = [path.read_text() for path in FOLDER.glob("proofs_*.py")]
    proved = [rule for text in texts for rule in re.findall(r'(?:proof\(|^    \()"([\w-]+)",', text, re.MULTILINE)]
    assert set(CASES) == set(RULES)
    assert set(proved) | PROVED_BY_THE_LEDGER == set(RULES)


def test_the_page_has_every_rule_and_a_heading_for_a_new_module(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = load_script("docs_code.py").rules
    assert all(f"| `{rule}` |" in rules() for rule in RULES)
    module = ModuleType("hf_memkit.checks.rules.radiators", "Radiators: what warms the room. More.")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(RULES, "no-radiator", replace(RULES["unknown-key"], id="no-radiator", module="radiators"))
    assert (
        "## Radiators\n\n| rule | severity | why | fix | source |\n|---|---|---|---|---|\n| `no-radiator` |" in rules()
    )


@pytest.mark.parametrize("rule", PROOFS)
def test_the_library_does_what_the_rule_says(rule: str, proofs: dict[str, Any]) -> None:
    proof = proofs[rule]
    assert proof["wrong"] == ""
    if proof["fails"] == "loud":
        assert proof["refusals"] and not any(proof["refusals"]), "a loud failure is an error before there is a model"
    elif proof["fails"] == "late":
        assert proof["refusals"], "a late failure is an error"
        assert any(proof["refusals"]) is (rule not in WITHOUT_A_MODEL), "a late failure comes when there is a model"
    else:
        assert proof["asserts"], "without an assertion it shows errors at most"


@pytest.mark.slow
def test_failing_settings_are_errors(proofs: dict[str, Any]) -> None:
    failing = {rule for rule, proof in proofs.items() if proof["fails"] in ("loud", "late")} | PROVED_BY_THE_LEDGER
    assert {rule: RULES[rule].severity for rule in failing if RULES[rule].severity != "error"} == {
        rule: severity for rule, severity in MILDER.items() if rule in failing
    }


@pytest.mark.parametrize(("rule", "case"), [(rule, case) for rule, cases in CASES.items() for case in cases])
def test_a_rule_finds_its_mistake_and_nothing_else(rule: str, case: Case) -> None:
    result = [problem for problem in check(case.bad) if problem.rule == rule]
    assert [problem.key for problem in result] == [case.key]
    assert result[0].why and result[0].fix and not result[0].why.endswith(".") and not result[0].fix.endswith(".")
    assert [problem for problem in check(case.good) if problem.rule == rule] == []
