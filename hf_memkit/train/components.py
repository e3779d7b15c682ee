"""The setup's parts on live objects: `components/NAME.py` for each `model_parts.NAME` and `trainer_parts.NAME`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_memkit import components
from hf_memkit.errors import RunError
from hf_memkit.setup import Setup

__all__ = ["install_model_parts", "part_files", "trainer_part_options"]


def part_files(name: str) -> list[Path]:
    """The source of a part, `NAME.py`, and what it is split into, `NAME_….py`. They need nothing of memkit but one
    another, so that they can be copied beside a script."""
    folder = Path(components.__path__[0])
    return [folder / f"{name}.py", *sorted(folder.glob(f"{name}_*.py"))]


def install_model_parts(model: Any, setup: Setup) -> Callable[[], None]:
    """Installs the setup's model parts on `model`; returns what takes all of them back, the last one first.

    Raises:
        RunError: a part cannot do its work on this model. What was installed before it was taken back.
    """
    undo: list[Callable[[], None]] = []

    def undo_all() -> None:
        while undo:
            undo.pop()()

    for name, options in setup.section("model_parts").items():
        module = importlib.import_module(f"{components.__name__}.{name}")
        try:
            undo.append(module.install(model, **options))
        except (TypeError, ValueError, RuntimeError, ImportError) as error:
            undo_all()
            raise RunError(f"{name.replace('_', ' ')}: {error}") from error
    return undo_all


def trainer_part_options(
    setup: Setup, *, model: Any, processing_class: Any, arguments: Any
) -> dict[str, dict[str, Any]]:
    """`{part: keyword arguments for Trainer}` of the setup's trainer parts.

    Raises:
        RunError: a part cannot do its work with these objects.
    """
    found = {}
    for name, options in setup.section("trainer_parts").items():
        module = importlib.import_module(f"{components.__name__}.{name}")
        try:
            found[name] = module.trainer_options(
                model=model, processing_class=processing_class, arguments=arguments, **options
            )
        except (TypeError, ValueError, RuntimeError, ImportError) as error:
            raise RunError(f"{name.replace('_', ' ')}: {error}") from error
    return found
