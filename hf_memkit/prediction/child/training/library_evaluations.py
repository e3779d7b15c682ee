"""Traces evaluations by libraries that the script calls: an evaluator of sentence-transformers, a metric of evaluate.

Such a call computes with the model and then reads values, which a trace does not have. Its forward passes are traced,
the values that it reads are made up, and its result is NaN; a call that reads no made-up value runs unchanged. The
calls are recognised by their module: one of a library whose name contains "evaluat".
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
from hf_memkit.prediction.child.libraries.library_rules import unmodelled_shapes
from hf_memkit.prediction.child.training.evaluations import UnknownMetrics, with_nan
from hf_memkit.prediction.child.user_code import MEMKIT, is_library, users_line

_NAME_PART: Final = "evaluat"
_METHODS: Final = ("__init__", "__call__", "evaluate", "compute", "run")
_LIMIT_S: Final = 20.0
"""Limit for one evaluation: its longest rows come first, or no row is much longer than others."""


class LibraryEvaluations:
    """Watches imported modules of libraries. `notes` gets sentences for the reader; `begins` is called before a value
    is made up, because it may be written to a file."""

    def __init__(self, boundary: RealAndFake, notes: dict[str, None], begins: Callable[[], None]) -> None:
        self.in_training = False  # whether evaluations are part of a traced training
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
        for name, member in list(vars(module).items()):
            if getattr(member, "__module__", None) != module.__name__:
                continue
            if inspect.isclass(member):
                for method in _METHODS:
                    if inspect.isfunction(function := vars(member).get(method)):
                        setattr(member, method, self._wrapped(function, member.__name__))
            elif inspect.isfunction(member) and _NAME_PART in name.lower():
                setattr(module, name, self._wrapped(member, name))

    def _wrapped(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            """A docstring, because evaluate appends to that of a copy (0.4.6: module.py 229)."""
            place, in_training = users_line(), self.in_training
            with contextlib.ExitStack() as stack:
                read = stack.enter_context(self._boundary.allow_made_up_values(self._begins))
                stack.enter_context(self._boundary.tracer.limited(_LIMIT_S))
                if not in_training:
                    self._boundary.tracer.end_phase("load")
                    stack.callback(self._boundary.tracer.end_phase, "evaluate")
                try:
                    with unmodelled_shapes():
                        result = method(*args, **kwargs)
                except Exception as error:
                    if method.__name__ == "__init__" or not (in_training or read or isinstance(error, Unmodelled)):
                        raise
                    self._notes[f"{place}: {name} gives NaN; it is predicted up to {_message(error)}"] = None
                    return UnknownMetrics()
            if not (in_training or read):
                return result
            if not in_training:
                self._notes[f"{place}: {name} gives NaN; its forward passes are predicted"] = None
            return with_nan(result)

        return wrapped


def _message(error: Exception) -> str:
    text = str(error) if isinstance(error, Unmodelled) else f"{type(error).__name__}: {error}"
    return (text.splitlines() or [""])[0][:200]


def _evaluates(module: str) -> bool:
    """Whether a module's dotted name means evaluation."""
    return any(part.startswith(_NAME_PART) for part in module.split("."))


class _Finder:
    """Import hook that passes modules for evaluation to `watch` after their import."""

    def __init__(self, watch: Callable[[ModuleType], None]) -> None:
        self._watch = watch

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _evaluates(name):
            return None
        specs = (
            finder.find_spec(name, path, target)
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        )
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._watch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
