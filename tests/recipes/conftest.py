"""What tests of a recipe's data share: a small GPU, an empty cache, and ways to write data."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from hf_memkit.catalog.hardware import Machine, gpu_of_size
from hf_memkit.common.units import GIB


@pytest.fixture(scope="session")
def small_gpu() -> Machine:
    return Machine(gpu_of_size("8GB"), ram_bytes=64 * GIB, disk_free_bytes=200 * GIB, disk_path="/data", cpu_count=8)


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for the rows that the datasets library prepares."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


def lines(*values: object) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
