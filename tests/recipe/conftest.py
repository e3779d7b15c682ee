"""What tests of a recipe's data share."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for the rows that the datasets library prepares."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder
