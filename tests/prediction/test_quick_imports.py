"""Lazy imports, and functions that are restored after quick imports."""

from __future__ import annotations

import functools
import gc
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from hf_memkit.prediction.child.quick_imports import import_lazily, is_loaded, preload, quick_imports


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package that can be imported and has not been."""
    folder = tmp_path / "late_in_tests"
    folder.mkdir()
    (folder / "__init__.py").write_text("class Dataset: pass\n")
    (folder / "inner.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("late_in_tests", "late_in_tests.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder.name


@pytest.mark.parametrize(
    "use",
    [
        "import late_in_tests; assert late_in_tests.Dataset.__name__ == 'Dataset'",
        "from late_in_tests.inner import value; assert value == 3",
    ],
)
def test_a_late_library_is_loaded_by_whoever_uses_it(package: str, use: str) -> None:
    import_lazily(package)
    assert importlib.util.find_spec(package) is not None and not is_loaded(package)
    assert not hasattr(sys.modules[package], "__wrapped__"), "whoever looks through all modules does not load it"
    exec(use, {})
    assert is_loaded(package)


def test_caches_have_no_limit_within_and_everything_is_put_back() -> None:
    import torch._library.utils as library

    before = functools.lru_cache, library.get_source, gc.isenabled()
    with quick_imports():
        assert not gc.isenabled()

        @functools.lru_cache
        def plain(number: int) -> int:
            return number

        @functools.lru_cache(maxsize=2)
        def limited(number: int) -> int:
            return number

    gc.unfreeze()  # the tests' own process goes on
    assert (functools.lru_cache, library.get_source, gc.isenabled()) == before
    for function in (plain, limited):
        assert [function(number) for number in (*range(200), *range(200))] == [*range(200), *range(200)]
        assert function.cache_info().hits == 200


@pytest.mark.slow
def test_the_child_loads_no_compiler_and_no_data_sets() -> None:
    code = (
        "import sys; from hf_memkit.prediction.child import serve; assert serve._load() is None\n"
        "from hf_memkit.prediction.child.quick_imports import is_loaded\n"
        "import transformers.trainer as trainer\n"
        "print([name for name in ('torch._inductor.compile_fx', 'datasets', 'deepspeed') if is_loaded(name)])\n"
        "assert not trainer.is_datasets_available()\n"
        "import datasets; datasets.Dataset\n"
        "assert trainer.is_datasets_available() and trainer.datasets.Dataset is datasets.Dataset\n"
        "import os; sys.stdout.flush(); os._exit(0)"  # as the child ends; libraries' own ends crash now and then
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines()[-1] == "[]"


def test_what_a_case_imported_is_there_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "transformers.models.gpt2.configuration_gpt2"
    monkeypatch.delitem(sys.modules, name, raising=False)
    preload([name, "torch.no_such_module", "antigravity"])
    gc.unfreeze()
    assert name in sys.modules and "antigravity" not in sys.modules
