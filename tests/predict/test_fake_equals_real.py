"""What a Trainer allocates on fake tensors is what it allocates on real ones: the same kernels, on a CPU.

CI runs two settings of each architecture, so that each setting is run with six or more; `benchmarks/predict_equality.py`
runs all of them, and architectures that nothing was tuned to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.predict.architectures import ARCHITECTURES, IN_CI, SETTINGS
from tests.predict.fake_and_real_child import BAR, Child, difference

REFUSED = {("convnext", "checkpointing"): "does not support activation checkpointing"}
"""What transformers refuses, and says."""


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child() as started:
        yield started


@pytest.mark.parametrize(("architecture", "setting"), [case for case in IN_CI if case not in REFUSED])
def test_fake_equals_real(child: Child, architecture: str, setting: str) -> None:
    fake, real = (child.ask(architecture, setting, kind) for kind in ("fake", "real"))
    assert "error" not in fake and "error" not in real, (fake, real)
    assert abs(difference(fake["peak_bytes"], real["peak_bytes"])) <= BAR, (fake, real)
    assert fake["phases"].keys() == real["phases"].keys()
    for phase in ("forward", "backward", "optimizer"):
        assert abs(difference(fake["phases"][phase], real["phases"][phase])) <= PHASE_BAR, (phase, fake, real)
    assert real["phases"]["optimizer"] < real["peak_bytes"], "activations decide, or nothing of them is compared"
