"""The kept learning curves: long enough, of the techniques' own settings, and within the bar where there is one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.optimizer_arms import ARMS
from benchmarks.optimizer_bytes import make_setup
from benchmarks.optimizer_curves import OUT
from hf_memkit.catalog.optimizers import find_optimizer
from hf_memkit.setup.techniques.registry import TECHNIQUES

EVIDENCE: dict[str, Any] = json.loads(OUT.read_text("utf-8"))
CURVES = [name for name, one in TECHNIQUES.items() if one.family == "optimizers" and one.proof == "curve"]
ARCHITECTURES = {
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 1013},
    "llama": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 1013},
}  # fmt: skip


def last(arm: dict[str, Any]) -> float:
    return float(arm["held_out"][-1][1])


def test_every_arm_ran_to_the_end_on_a_model_that_no_block_divides() -> None:
    assert set(EVIDENCE["arms"]) == set(ARMS) and EVIDENCE["steps"] >= 2000
    model = EVIDENCE["model"]
    assert model["vocabulary"] * model["width"] % 128 and EVIDENCE["versions"].keys() >= {"torch", "bitsandbytes"}
    for arm in EVIDENCE["arms"].values():
        steps = [step for step, _ in arm["held_out"]]
        assert steps[-1] == EVIDENCE["steps"] and len(steps) >= EVIDENCE["steps"] // 50
        assert 0 < last(arm) < arm["held_out"][0][1]


def test_what_is_meant_to_do_as_adamw_does_ends_within_one_per_cent() -> None:
    held = {name: arm for name, arm in EVIDENCE["arms"].items() if arm["bar"] is not None}
    assert {"adamw-8bit", "adamw-8bit-stochastic", "adamw-4bit-stochastic"} <= {
        one["technique"] for one in held.values()
    }
    for name, arm in held.items():
        baseline = last(EVIDENCE["arms"][arm["baseline"]])
        assert arm["bar"] == 0.01 and last(arm) / baseline - 1 <= arm["bar"], name


def test_plain_bf16_would_not_have_passed() -> None:
    """The bar can fail: bf16 weights without stochastic rounding miss it."""
    arms = EVIDENCE["arms"]
    assert last(arms["adamw-fused, pure bf16"]) / last(arms["adamw-fused"]) - 1 > 0.01


@pytest.mark.parametrize("name", CURVES)
def test_the_curve_is_of_the_technique_s_own_settings(name: str) -> None:
    (arm,) = [arm for arm in EVIDENCE["arms"].values() if arm["technique"] == name]
    setup = make_setup(name, ARCHITECTURES[arm["architecture"]], arm["weights"])
    ran, now = arm["optimizer"].get("class"), setup.get("optimizer.class")
    assert (ran is None) is (now is None)
    assert find_optimizer(ran or "") is find_optimizer(now or "")  # the module has moved since some of them ran
    defaults = {"optim": None, "optim_args": None, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
    for key, default in defaults.items():
        assert arm["arguments"].get(key, default) == setup.get(f"arguments.{key}", default)
    for key in ("block_size", "bf16_stochastic_round", "momentum"):
        assert arm["optimizer"].get(key) == setup.get(f"optimizer.{key}")
    if name.endswith("stochastic"):
        assert arm["weights"] == "bfloat16"
