"""Changes to a module of a library at the moment it is imported, so that nothing is imported before its time."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec


def when_imported(name: str, then: Callable[[types.ModuleType], None]) -> None:
    """Calls `then` with the module once it has been imported, or at once if it was. Of several for one module the
    one that was asked for last is called last."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Import(name, then))


class _Import:
    """A finder on `sys.meta_path`. Waits for one import, and is gone then."""

    def __init__(self, name: str, then: Callable[[types.ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)  # by whoever else finds it
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_change(module: types.ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = then_change  # type: ignore[method-assign]  # of this loader alone
        return spec
