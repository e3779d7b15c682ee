"""What a Trainer allocates on fake tensors is what it allocates on real ones: the same kernels, on a CPU.

Every architecture of `architectures.py` is trained, and every setting; what else a training does, and architectures
that were chosen later, are in `test_fake_equals_real_further.py`.

Compared are the tensors: what a CPU's kernel makes and frees again while it runs is left out of the real side
(`fake_and_real.py` says why, and the benchmark what it comes to).
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.fewer import pairs
from tests.prediction.architectures import ARCHITECTURES, SETTINGS
from tests.prediction.fake_and_real_child import REFUSED, Child, assert_equal

CASES: Final = tuple(
    (architecture.name, setting)
    for architecture in ARCHITECTURES
    for setting in SETTINGS
    if (architecture.name, setting) not in REFUSED
)
"""All of them; without `--exhaustive` every architecture at one setting, and every setting at three."""


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


def test_the_trace_is_the_same_each_time(child: Child) -> None:
    first, second = (child.ask("gpt2", "plain", "fake", again=again) for again in (False, True))
    assert first["events"] > 1000 and second["fingerprint"] == first["fingerprint"]
