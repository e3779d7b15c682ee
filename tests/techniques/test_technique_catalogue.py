"""The catalogue of what saves memory: a new row shows up everywhere, and every row is used as it is written."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from importlib import reload
from typing import get_args

import pytest

from hf_memkit import checks
from hf_memkit.catalog.hardware import described_machine
from hf_memkit.checks.rules import loss, optimizer_states
from hf_memkit.common.terms import PHASES
from hf_memkit.measuring.out_of_memory import explain_oom, suggest
from hf_memkit.measuring.out_of_memory.advice import _SAME_ADVICE
from hf_memkit.measuring.out_of_memory.conditions import ADAPTED, ESTIMATES, WHEN
from hf_memkit.measuring.out_of_memory.message import Memory
from hf_memkit.measuring.out_of_memory.traceback import Feature, Place
from hf_memkit.plan import choices
from hf_memkit.setup.techniques.registry import CATALOGUE, TECHNIQUES, InPlans, Technique, setting_of
from tests.conftest import ROOT, load_script
from tests.measuring.out_of_memory.oom_messages import EXAMPLES
from tests.measuring.out_of_memory.test_oom_changes import oom, run
from tests.measuring.out_of_memory.tracebacks import OLDER
from tests.plan.made_trainings import MADE

SIZE = next(example.text for example in EXAMPLES if example.name == "torch 2.2-2.9: size")

NEW = Technique(
    "rare-cache", "allocator", "the cache is emptied every 4 steps", "the next step allocates anew",
    settings={"arguments.torch_empty_cache_steps": 4},
    frees={"activations": 0.99},
    offered={"logits": 0},
    planned=InPlans("allocator", "rare cache"),
)  # fmt: skip


def test_a_new_row_shows_up_in_plans_advice_and_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: a list of techniques beside the catalogue, which a new row would have to join too."""
    monkeypatch.setitem(CATALOGUE, NEW.name, NEW)
    key, value = "arguments.torch_empty_cache_steps", 4
    ways = choices.choices_for(MADE, described_machine("L4", None, None, None), {}, gpus=1, left_out={})
    (tried,) = (each for each in ways["allocator"] if each is not None and each.name == "rare cache")
    assert (tried.settings, tried.group, tried.costs_time) == ({key: value}, "same result", False)
    first = explain_oom(OLDER["logits"][0] + SIZE).changes[0]
    assert (first.key, first.value, first.reason, first.cost) == (key, value, NEW.saves, NEW.costs)
    present = [explain_oom(OLDER["logits"][0] + SIZE, {"torch_empty_cache_steps": each}).changes[0] for each in (8, 4)]
    assert present[0].current == 8 and present[1].key != key, "it is on"
    (measured,) = (change for change in suggest(run(), oom(), limit=99) if change.key == key)
    assert measured.at_most_gib == pytest.approx(0.99 * 12) and "12.00 GiB" in measured.reason
    assert "at_most_gib" not in measured.to_json()
    assert "| `rare-cache` | `torch_empty_cache_steps: 4` |" in load_script("docs_code.py").changes()


def test_fixes_of_rules_have_the_settings_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: a fix with a setting written by hand, which a changed row leaves wrong."""
    liger = replace(CATALOGUE["liger"], settings={"arguments.rare_kernel": True})
    fused = replace(CATALOGUE["adamw-fused"], settings={"arguments.optim": "rare_adamw"})
    with monkeypatch.context() as changed:
        changed.setitem(CATALOGUE, "liger", liger)
        changed.setitem(CATALOGUE, "adamw-fused", fused)
        changed.setattr(checks.rule, "RULES", {})
        reload(loss)
        reload(optimizer_states)
        fixes = {name: rule.fix for name, rule in checks.rule.RULES.items()}
    assert "rare_kernel: true" in fixes["liger-config-unused"]
    assert "optim: rare_adamw" in fixes["adapters-too-small-for-8-bit"]


def test_no_rule_writes_a_technique_s_setting_by_hand() -> None:
    rows = [row for row in CATALOGUE.values() if row.settings and row.key.startswith("arguments.")]
    settings = [setting_of(row.name).split(": ", 1) for row in rows]
    assert ["bf16", "true"] in settings and ["optim", "adamw_bnb_8bit"] in settings
    forms = [rf"\b{name}(: |=| = | to ){re.escape(value)}(?!\w)" for name, value in settings]
    for path in (ROOT / "hf_memkit" / "checks" / "rules").glob("*.py"):
        parts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        by_hand = [part for part in parts if isinstance(part, str) and re.search("|".join(forms), part)]
        assert by_hand == [], f"{path.name}: use setting_of(TECHNIQUE)"


def test_rows_name_what_exists() -> None:
    """Defect: a row that is never proposed, because a place, a feature or a device is misspelt."""
    special = {"anything", "else", "larger than the GPU", "one large tensor", "dispatched", "vLLM", "unsloth",
               "DeepSpeed", "data loader", "managed memory", "offload"}  # fmt: skip
    places = {*special, *get_args(Place), *PHASES} - set(_SAME_ADVICE) | {"forward"}
    for row in CATALOGUE.values():
        for key in row.offered:
            memory, _, place = key.rpartition("/")
            assert key == "host" or (place in places and memory in ("", *get_args(Memory))), (row.name, key)
        assert set(row.only_with) <= set(get_args(Feature)), row.name
        assert set(row.devices) <= {"cuda", "rocm", "xpu", "hpu", "npu"}, row.name
        assert (row.saves and row.costs and row.settings) or row.apply, row.name
        assert row.planned is None or row.planned.never or row.planned.slot in (*choices._SLOTS, "evaluation")
    assert {*WHEN, *ADAPTED, *ESTIMATES, *choices._CONDITIONS} <= set(CATALOGUE)


def test_an_advice_row_is_no_technique() -> None:
    """Defect: a row that only advice has, in a recipe or at the command line."""
    assert {name for name, row in CATALOGUE.items() if row.apply is not None} == set(TECHNIQUES)
