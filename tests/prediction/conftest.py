"""One process with the libraries loaded for the tests of a file, from which each trace's process is forked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_memkit.prediction.worker import Worker
from tests.prediction.fake_and_real_child import Child


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker()
    made.wait()
    yield made
    made.close()


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """Compares fake tensors with real ones."""
    with Child() as started:
        started.ask("gpt2", "plain", "fake")  # loads the libraries
        yield started
