"""Fake tensors against real ones where a training does more: padding, a save, predictions kept for metrics, experts;
and the architectures that were chosen as a test of the others.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.fewer import pairs
from tests.prediction.architectures import MIXTURES, SETTINGS, UNSEEN
from tests.prediction.fake_and_real_child import Child, assert_equal

UNSEEN_CASES: Final = tuple((architecture.name, setting) for architecture in UNSEEN for setting in SETTINGS)

FURTHER: Final = (
    *((name, setting) for name in ("gpt2", "llama", "bert", "t5") for setting in ("padded", "padded, bf16")),
    *((name, "saved") for name in ("gpt2", "bert", "t5", "vit", "mixtral", "qwen3_moe")),
    *((name, setting) for name in ("llama", "distilbert") for setting in ("saved, lora", "saved, accumulation")),
    *((name, "metrics") for name in ("gpt2", "bert", "t5", "whisper")),
    *((name, "metrics moved") for name in ("gpt2", "bert", "t5")),
    *((name, "metrics by batch") for name in ("gpt2", "vit")),
    *((mixture.name, setting) for mixture in MIXTURES for setting in ("plain", "bf16")),
)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "setting"), pairs(UNSEEN_CASES, quick=2))
def test_fake_equals_real(child: Child, architecture: str, setting: str) -> None:
    fake, real = (child.ask(architecture, setting, kind) for kind in ("fake", "real"))
    assert_equal(fake, real)
    assert real["phases"]["optimizer"] < real["peak_bytes"], "activations decide, or nothing of them is compared"


@pytest.mark.parametrize(("architecture", "setting"), pairs(FURTHER, quick=3))
def test_fake_equals_real_in_all_that_a_training_does(child: Child, architecture: str, setting: str) -> None:
    fake, real = (child.ask(architecture, setting, kind) for kind in ("fake", "real"))
    assert_equal(fake, real)
    assert ("save" in real["phases"]) == setting.startswith("saved")


def test_experts_one_by_one_are_refused(child: Child) -> None:
    """How many tokens an expert gets follows from the router's values."""
    answer = child.ask("mixtral", "experts one by one", "fake")
    assert answer["kind"] == "Unmodelled" and "nonzero" in answer["error"] and "\n" not in answer["error"]
