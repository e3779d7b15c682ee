"""Under which names the loaded modules have functions that each case replaces."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import MethodType, ModuleType
from typing import Any, Final


class Names:
    """The names of these functions, and of methods bound to an object, in all modules or in those of some packages.

    A forked process that looks through all modules copies much of their memory. So the first call looks through them,
    before cases are forked, and later ones only through modules with more or fewer names than then.
    """

    def __init__(self, functions: Iterable[Any], *packages: str) -> None:
        self._functions: Final = list(functions)
        self._packages: Final = packages
        self._known: Final[dict[ModuleType, tuple[int, list[str]]]] = {}

    def places(self) -> Iterator[tuple[dict[str, Any], str]]:
        """(the names of a module, one of those that it has for a function)."""
        wanted = set(map(id, self._functions))
        for name, module in list(sys.modules.items()):
            package = name.partition(".")[0]
            if not isinstance(module, ModuleType) or (self._packages and package not in self._packages):
                continue
            names = vars(module)
            size, keys = self._known.get(module, (-1, []))
            if size != len(names):
                keys = [key for key, value in names.items() if id(_function(value)) in wanted]
                self._known[module] = len(names), keys
            yield from ((names, key) for key in keys)


def _function(value: Any) -> Any:
    return value.__func__ if type(value) is MethodType else value
