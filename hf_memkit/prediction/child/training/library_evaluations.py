"""Evaluations that a library makes, called by the script: an evaluator of sentence-transformers, a metric of evaluate.

Such a call computes with the model and then reads values, which a trace does not have. Its forward passes are traced,
what it reads is made up, and what it gives is NaN; one that reads nothing made up is as it was. Which calls these are
is seen by where they are defined: in a library's module whose name says that it evaluates.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.gpu.real_and_fake import RealAndFake
from hf_memkit.prediction.child.libraries.library_rules import shapes_from_values_are_unmodelled
from hf_memkit.prediction.child.training.evaluations import Metrics, without_values
from hf_memkit.prediction.child.users_code import MEMKIT, is_library, users_line

_WORD: Final = "evaluat"
_METHODS: Final = ("__init__", "__call__", "evaluate", "compute", "run")
_LIMIT_S: Final = 20.0
"""Of one evaluation: its longest rows come first, or it has none much longer than others."""


class LibraryEvaluations:
    """Watches the modules of libraries that are imported. `notes`: what a reader has to know comes there; `begins`:
    called before something is made up, which may be written down; `in_training`: whether an evaluation is part of a
    traced training."""

    def __init__(self, boundary: RealAndFake, notes: dict[str, None], begins: Callable[[], None]) -> None:
        self.in_training = False
        self._boundary, self._notes, self._begins = boundary, notes, begins

    def install(self) -> None:
        for name, module in list(sys.modules.items()):
            if _evaluates(name):
                self._watch(module)
        sys.meta_path.insert(0, _Finder(self._watch))

    def _watch(self, module: ModuleType) -> None:
        file = getattr(module, "__file__", None) or ""
        if not is_library(file) or file.startswith(MEMKIT):
            return
        for name, each in list(vars(module).items()):
            if getattr(each, "__module__", None) != module.__name__:
                continue
            if inspect.isclass(each):
                for method in _METHODS:
                    if inspect.isfunction(found := vars(each).get(method)):
                        setattr(each, method, self._called(found, each.__name__))
            elif inspect.isfunction(each) and _WORD in name.lower():
                setattr(module, name, self._called(each, name))

    def _called(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            """As the library has it; a text, because evaluate adds to that of a copy (0.4.6: module.py 229)."""
            place, in_training = users_line(), self.in_training
            with contextlib.ExitStack() as stack:
                read = stack.enter_context(self._boundary.values_are_made_up(self._begins))
                stack.enter_context(self._boundary.tracer.limited(_LIMIT_S))
                if not in_training:
                    self._boundary.tracer.ended("load")
                    stack.callback(self._boundary.tracer.ended, "evaluate")
                try:
                    with shapes_from_values_are_unmodelled():
                        found = method(*args, **kwargs)
                except Exception as error:
                    if method.__name__ == "__init__" or not (in_training or read or isinstance(error, Unmodelled)):
                        raise
                    self._notes[f"{place}: {name} gives NaN; it is predicted up to {_said(error)}"] = None
                    return Metrics()
            if not (in_training or read):
                return found
            if not in_training:
                self._notes[f"{place}: {name} gives NaN; its forward passes are predicted"] = None
            return without_values(found)

        return called


def _said(error: Exception) -> str:
    what = str(error) if isinstance(error, Unmodelled) else f"{type(error).__name__}: {error}"
    return (what.splitlines() or [""])[0][:200]


def _evaluates(module: str) -> bool:
    """Of a dotted name."""
    return any(part.startswith(_WORD) for part in module.split("."))


class _Finder:
    """Finds modules as others do, and shows those that evaluate when they are imported."""

    def __init__(self, watch: Callable[[ModuleType], None]) -> None:
        self._watch = watch

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _evaluates(name):
            return None
        found = (
            each.find_spec(name, path, target)
            for each in sys.meta_path
            if each is not self and hasattr(each, "find_spec")
        )
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._watch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
