"""What a Trainer allocates on fake tensors is what it allocates on real ones: the same kernels, on a CPU.

CI runs two settings of each architecture, and each setting with five or more; `benchmarks/predict_equality.py`
runs all of them, and architectures that nothing was tuned to.

Compared are the tensors: what a CPU's kernel makes and frees again while it runs is left out of the real side
(`fake_and_real.py` says why, and the benchmark what it comes to).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import pytest

from tests.predict.architectures import ARCHITECTURES, IN_CI, SETTINGS, UNSEEN
from tests.predict.fake_and_real import changes_of_kernel, peaks
from tests.predict.fake_and_real_child import BAR, REFUSED, Child, difference

PHASES: Final = ("data", "forward", "backward", "optimizer", "evaluate")
"""Those that a user's training has too; a model is loaded there, and built from its config here."""

AGAIN: Final = tuple(dict(reversed(IN_CI[:: len(IN_CI) // 5])).items())
"""An architecture of each kind."""


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child() as started:
        yield started


def test_ci_runs_every_architecture_and_every_setting() -> None:
    runs = [case for case in IN_CI if case not in REFUSED]
    assert {name for name, _ in runs} == {each.name for each in ARCHITECTURES}
    assert len(ARCHITECTURES) >= 15 and len(SETTINGS) == 5 and len(UNSEEN) == 5
    settings = Counter(setting for _, setting in runs)
    assert settings.keys() == SETTINGS.keys() and min(settings.values()) >= 5


@pytest.mark.parametrize(("architecture", "setting"), [case for case in IN_CI if case not in REFUSED])
def test_fake_equals_real(child: Child, architecture: str, setting: str) -> None:
    fake, real = (child.ask(architecture, setting, kind) for kind in ("fake", "real"))
    assert "error" not in fake and "error" not in real, (fake, real)
    assert abs(difference(fake["peak_bytes"], real["peak_bytes"])) <= BAR, (fake, real)
    for phase in PHASES:
        assert abs(difference(fake["phases"][phase], real["phases"][phase])) <= BAR, (phase, fake, real)
    assert real["phases"]["optimizer"] < real["peak_bytes"], "activations decide, or nothing of them is compared"


@pytest.mark.parametrize(("architecture", "setting"), list(REFUSED))
def test_what_transformers_refuses_is_refused_on_fake_tensors_too(
    child: Child, architecture: str, setting: str
) -> None:
    fake, real = (child.ask(architecture, setting, kind) for kind in ("fake", "real"))
    assert REFUSED[architecture, setting] in real["error"] and fake["error"] == real["error"]


@pytest.mark.parametrize(("architecture", "setting"), AGAIN)
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
