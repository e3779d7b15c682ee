"""A Trainer allocates the same on fake tensors as on real ones, with the same kernels on a CPU.

Every architecture of `architectures.py` is trained, and every setting; and what else a training does: padding, a save,
predictions kept for metrics, experts.

Compared are the tensors: what a CPU's kernel makes and frees again while it runs is left out of the real side
(`fake_and_real.py` says why, and the benchmark what it comes to).
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.fewer import pairs
from tests.prediction.architectures import ARCHITECTURES, MIXTURES, SETTINGS, UNSEEN
from tests.prediction.fake_and_real_child import REFUSED, Child, assert_equal

CASES: Final = tuple(
    (architecture.name, setting)
    for architecture in (*ARCHITECTURES, *UNSEEN)
    for setting in SETTINGS
    if (architecture.name, setting) not in REFUSED
)
"""All of them; without `--exhaustive` three architectures, each at another setting where there is one."""

FURTHER: Final = (
    *((name, setting) for name in ("gpt2", "llama", "bert", "t5") for setting in ("padded", "padded, bf16")),
    *((name, "saved") for name in ("gpt2", "bert", "t5", "vit", "mixtral", "qwen3_moe")),
    *((name, setting) for name in ("llama", "distilbert") for setting in ("saved, lora", "saved, accumulation")),
    *((name, "metrics") for name in ("gpt2", "bert", "t5", "whisper")),
    *((name, "metrics moved") for name in ("gpt2", "bert", "t5")),
    *((name, "metrics by batch") for name in ("gpt2", "vit")),
    *((mixture.name, setting) for mixture in MIXTURES for setting in ("plain", "bf16")),
)


@pytest.mark.tracing
@pytest.mark.parametrize(("architecture", "setting"), pairs(CASES, quick=2))
def test_fake_equals_real(child: Child, architecture: str, setting: str) -> None:
    fake, real = (child.ask(architecture, setting, kind) for kind in ("fake", "real"))
    assert_equal(fake, real)
    assert real["phases"]["optimizer"] < real["peak_bytes"], "activations decide, or nothing of them is compared"


@pytest.mark.parametrize(("architecture", "setting"), pairs(FURTHER, quick=1))
def test_fake_equals_real_in_all_that_a_training_does(child: Child, architecture: str, setting: str) -> None:
    fake, real = (child.ask(architecture, setting, kind) for kind in ("fake", "real"))
    assert_equal(fake, real)
    assert ("save" in real["phases"]) == setting.startswith("saved")


@pytest.mark.parametrize(("architecture", "setting"), list(REFUSED))
def test_what_transformers_refuses_is_refused_on_fake_tensors_too(
    child: Child, architecture: str, setting: str
) -> None:
    fake, real = (child.ask(architecture, setting, kind) for kind in ("fake", "real"))
    assert REFUSED[architecture, setting] in real["error"] and fake["error"] == real["error"]


def test_experts_one_by_one_are_refused(child: Child) -> None:
    """How many tokens an expert gets follows from the router's values."""
    answer = child.ask("mixtral", "experts one by one", "fake")
    assert answer["kind"] == "Unmodelled" and "nonzero" in answer["error"] and "\n" not in answer["error"]


@pytest.mark.slow
def test_the_trace_is_the_same_each_time(child: Child) -> None:
    first, second = (child.ask("gpt2", "plain", "fake", again=again) for again in (False, True))
    assert first["events"] > 1000 and second["fingerprint"] == first["fingerprint"]
