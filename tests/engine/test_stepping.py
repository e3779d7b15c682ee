"""What `stepping_optimizer` says steps, and what the real engine steps with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_memkit.deepspeed.optimizer import stepping_optimizer
from tests.engine.conftest import Results
from tests.engine.stepping_cases import CASES, config_of

TRAINERS_OWN = {"adamw_torch": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}


@pytest.mark.parametrize("name", CASES)
def test_stepping_optimizer_is_the_one_that_steps(single: Results, folder: Path, name: str) -> None:
    single("plain")
    steps = json.loads((folder / "1" / "more-rank0.json").read_text())["stepping"][name]
    config, optim = config_of(name)
    stepping = stepping_optimizer(config, optim)
    if steps.endswith("Error"):
        assert not stepping.same_algorithm and steps in stepping.why
        return
    assert steps == (stepping.optimizer or TRAINERS_OWN[optim])


def test_what_is_not_computed_as_asked_says_so() -> None:
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    for optim in ("adamw_bnb_8bit", "sgd", "adafactor"):
        stepping = stepping_optimizer(offload, optim)
        assert not stepping.same_algorithm and optim in stepping.why
    assert stepping_optimizer(offload, "adamw_torch").same_algorithm
    assert stepping_optimizer({"zero_optimization": {"stage": 2}}, "adamw_bnb_8bit").same_algorithm
    twice = stepping_optimizer({"optimizer": {"type": "AdamW"}}, "adamw_bnb_8bit")
    assert twice.optimizer == "FusedAdam" and not twice.same_algorithm
