"""Pages are opened in a real browser; predictions share a process whose libraries are loaded."""

import pytest

from hf_memkit.prediction.worker import shared_worker
from tests.chromium import browser, show  # noqa: F401


@pytest.fixture(scope="session")
def loaded_worker() -> None:
    """What loading the libraries costs is no test's."""
    shared_worker().wait()
