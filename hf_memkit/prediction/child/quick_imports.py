"""Makes the import of transformers.Trainer quicker, in the child process only: a user waits for it. What is replaced
is put back afterwards, but for libraries that are imported late."""

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
    """Within it no garbage is collected, and afterwards the collector leaves alone what there is, so that a process
    that is forked does not copy its pages; caches have no limit, because transformers' holds 128 folders and it has
    450 models (transformers 5.23: utils/import_utils.py, `create_import_structure_from_path`); and custom operations
    do not remember the line that registers them, for which torch looks through all modules (torch 2.13:
    _library/utils.py, `get_source`)."""
    import torch._library.utils as library

    cache, source, collects = functools.lru_cache, library.get_source, gc.isenabled()

    def lru_cache(maxsize: Any = None, typed: bool = False) -> Any:
        return cache(None, typed)(maxsize) if callable(maxsize) else cache(None, typed)

    gc.disable()
    functools.lru_cache = lru_cache
    library.get_source = lambda stacklevel: ""
    try:
        yield
    finally:
        functools.lru_cache, library.get_source = cache, source
        gc.freeze()  # else all of it would be looked through now
        if collects:
            gc.enable()


_OF_THE_LIBRARY: Final = ("__all__", "__path__", "__version__")


class _Late(ModuleType):
    """Stands for a module; whoever asks for something that only the module has, has it imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _OF_THE_LIBRARY:
            raise AttributeError(name)  # `inspect` looks through all modules
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_late(name: str) -> None:
    """Puts off the import of a library that is installed, until something of it is asked for;
    `importlib.util.find_spec` finds it as before."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is not None:
        late = _Late(name)
        late.__spec__, late.__file__ = spec, spec.origin
        sys.modules[name] = late


def is_loaded(name: str) -> bool:
    """Whether a library has been imported in full."""
    return name in sys.modules and not isinstance(sys.modules[name], _Late)


_WORTH_KEEPING: Final = ("transformers.", "torch.", "torchao", "peft.")
"""Libraries' own modules: they are the same whatever a case replaced before it imported them."""


def load_again(names: Iterable[str]) -> None:
    """Imports what a forked case has imported, for the cases after it, if it can be imported here."""
    wanted = [name for name in names if name.startswith(_WORTH_KEEPING) and name not in sys.modules]
    with contextlib.suppress(Exception):  # made once in a process, of a thousand patterns, when a model is saved
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("")
    if not wanted:
        return
    with quick_imports():
        for name in wanted:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
