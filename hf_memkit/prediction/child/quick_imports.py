"""Speeds up the import of transformers.Trainer in the child process, because a user waits for it.

All patches are removed afterwards, except libraries that are imported lazily.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, Final


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Within it imports are faster.

    - No garbage is collected. Afterwards all objects are frozen, so that a forked process does not copy their pages.
    - Caches have no limit: transformers' holds 128 folders, and it has 450 models (transformers 5.23:
      utils/import_utils.py, `create_import_structure_from_path`).
    - As within `without_lines`.
    """
    cache, collects = functools.lru_cache, gc.isenabled()

    def lru_cache(maxsize: Any = None, typed: bool = False) -> Any:
        return cache(None, typed)(maxsize) if callable(maxsize) else cache(None, typed)

    gc.disable()
    functools.lru_cache = lru_cache
    try:
        with without_lines():
            yield
    finally:
        functools.lru_cache = cache
        gc.freeze()  # without it, a collection would visit all objects now
        if collects:
            gc.enable()


@contextlib.contextmanager
def without_lines() -> Iterator[None]:
    """Within it custom operations do not store the line that registers them, for which torch searches all modules
    (torch 2.13: _library/utils.py, `get_source`)."""
    import torch._library.utils as library

    source = library.get_source
    library.get_source = lambda stacklevel: ""
    try:
        yield
    finally:
        library.get_source = source


_MODULE_ATTRIBUTES: Final = ("__all__", "__path__", "__version__")


class _LazyModule(ModuleType):
    """Placeholder that imports its module when an attribute is read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _MODULE_ATTRIBUTES:
            raise AttributeError(name)  # `inspect` reads attributes of all modules
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_lazily(name: str) -> None:
    """Imports an installed library only when an attribute is read; `importlib.util.find_spec` still finds it."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is not None:
        module = _LazyModule(name)
        module.__spec__, module.__file__ = spec, spec.origin
        sys.modules[name] = module


def is_loaded(name: str) -> bool:
    """Whether a library has been imported in full."""
    return name in sys.modules and not isinstance(sys.modules[name], _LazyModule)


_PRELOADED: Final = ("transformers.", "torch.", "torchao", "peft.")
"""Modules of libraries, which do not depend on a case's patches."""


def preload(names: Iterable[str]) -> None:
    """Imports modules that a forked case has imported, for the next cases; ignores errors."""
    wanted = [name for name in names if name.startswith(_PRELOADED) and name not in sys.modules]
    with contextlib.suppress(Exception):  # built once per process, from a thousand patterns, when a model is saved
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("")
    if not wanted:
        return
    with quick_imports():
        for name in wanted:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
