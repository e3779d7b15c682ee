"""Names of a package that are imported when they are first used, so that the package alone loads nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__` (PEP 562).

    Args:
        package: its `__name__`.
        modules: the module inside it that each name comes from.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    def names() -> list[str]:
        return sorted(vars(sys.modules[package])["__all__"])

    return get, names
