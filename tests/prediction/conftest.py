"""One process with the libraries loaded for the tests of a file, which compares fake tensors with real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.prediction.fake_and_real_child import Child


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child() as started:
        started.ask("gpt2", "plain", "fake")  # loads the libraries
        yield started
