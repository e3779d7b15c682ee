"""Change a library's module when it is imported, without importing it early."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec


def when_imported(name: str, then: Callable[[types.ModuleType], None]) -> None:
    """Call `then` with the module after its import, or now if imported. Calls for one module run in order."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Import(name, then))


class _Import:
    """Finder on `sys.meta_path` that waits for one import and then removes itself."""

    def __init__(self, name: str, then: Callable[[types.ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)  # by the other finders
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_change(module: types.ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = then_change  # type: ignore[method-assign]  # of this loader only
        return spec
