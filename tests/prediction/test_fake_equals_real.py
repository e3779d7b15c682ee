"""What a Trainer allocates on fake tensors is what it allocates on real ones: the same kernels, on a CPU.

Every architecture of `architectures.py` is trained, and every setting; what else a training does, and architectures
that were chosen later, are in `test_fake_equals_real_further.py`.

Compared are the tensors: what a CPU's kernel makes and frees again while it runs is left out of the real side
(`fake_and_real.py` says why, and the benchmark what it comes to).
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.fewer import first, pairs
from tests.prediction.architectures import ARCHITECTURES, SETTINGS
from tests.prediction.fake_and_real import changes_of_kernel, peaks
from tests.prediction.fake_and_real_child import REFUSED, Child, assert_equal

CASES: Final = tuple(
    (architecture.name, setting)
    for architecture in ARCHITECTURES
    for setting in SETTINGS
    if (architecture.name, setting) not in REFUSED
)
"""All of them; without `--exhaustive` every architecture at one setting, and every setting at three."""

AGAIN: Final = (
    ("gpt2", "plain"), ("bert", "bf16"), ("t5", "lora"), ("vit", "accumulation"), ("whisper", "checkpointing"),
)  # fmt: skip
"""An architecture of each kind, and each setting."""


def test_every_architecture_and_every_setting_is_run() -> None:
    assert len(CASES) + len(REFUSED) == len(ARCHITECTURES) * len(SETTINGS)


@pytest.mark.tracing
@pytest.mark.parametrize(("architecture", "setting"), pairs(CASES, quick=6))
def test_fake_equals_real(child: Child, architecture: str, setting: str) -> None:
    fake, real = (child.ask(architecture, setting, kind) for kind in ("fake", "real"))
    assert_equal(fake, real)
    assert real["phases"]["optimizer"] < real["peak_bytes"], "activations decide, or nothing of them is compared"


@pytest.mark.parametrize(("architecture", "setting"), list(REFUSED))
def test_what_transformers_refuses_is_refused_on_fake_tensors_too(
    child: Child, architecture: str, setting: str
) -> None:
    fake, real = (child.ask(architecture, setting, kind) for kind in ("fake", "real"))
    assert REFUSED[architecture, setting] in real["error"] and fake["error"] == real["error"]


@pytest.mark.parametrize(("architecture", "setting"), first(AGAIN))
def test_the_trace_is_the_same_each_time(child: Child, architecture: str, setting: str) -> None:
    first = child.ask(architecture, setting, "fake")
    second = child.ask(architecture, setting, "fake", again=True)
    assert first["events"] > 1000 and second["fingerprint"] == first["fingerprint"]


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_torch_s_own_tracker_sees_the_same_peak(child: Child, architecture: str) -> None:
    answer = child.ask(architecture, "plain", "mem_tracker")
    assert "error" not in answer, answer
    assert answer["traced_bytes"] == answer["mem_tracker_bytes"] > 2**20


def test_peaks_of_changes_and_marks() -> None:
    assert peaks([10, 20, "load", -20, 5, "data", "forward", 7, -7, "data"]) == (
        30,
        {"load": 30, "data": 30, "forward": 15},
    )


def test_only_pairs_within_a_kernel_are_scratch() -> None:
    assert changes_of_kernel([100, 7, -7, -50, 9, 9, -9]) == [100, -50, 9]
