"""What a user's own script brings to a traced training, as plain data for the child process.

In: names that the child can import, and files that this process wrote for it. Out: the same as JSON.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from hf_memkit.errors import InputError

__all__ = ["UserTraining", "import_path"]

_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class UserTraining:
    """The parts of a training that its user wrote.

    Attributes:
        factory: `"package.module:name"` of a class or function that makes the model without arguments.
        module_file: file that holds the model without its values (`user_module.py`).
        batch_file: file that holds a batch to train on, and one to evaluate with (`user_batch.py`).
        trainer_class: `"package.module:name"` of a subclass of Trainer.
        metrics: whether evaluations compute metrics of the predictions, which are kept for them.
        search_path: folders in which modules are found, as `sys.path`.
    """

    factory: str | None = None
    module_file: str | None = None
    batch_file: str | None = None
    trainer_class: str | None = None
    metrics: bool = False
    search_path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))

    @property
    def brings_model(self) -> bool:
        return self.factory is not None or self.module_file is not None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(**{**content, "search_path": tuple(content["search_path"])})


def import_path(given: Any, what: str) -> str:
    """`"package.module:name"` of a class or function, or such a text itself.

    Args:
        given: the class, function or text.
        what: the argument's name, for the message.

    Raises:
        InputError: another process could not import it.
    """
    if isinstance(given, str):
        if not _PATH.fullmatch(given):
            raise InputError(f"{what}={given!r}: write a module and a name in it, such as 'my_package.models:build'")
        module, name = given.split(":")
        if module.partition(".")[0] == "__main__":
            raise InputError(_in_script(what, name))
        try:
            found = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise InputError(f"{what}={given!r}: there is no module {module} in the folders that Python looks in")
        return given
    module, name = getattr(given, "__module__", None) or "", getattr(given, "__qualname__", None) or ""
    if not module or not name:
        raise InputError(
            f"{what}: an object of {type(given).__name__} has no name that can be imported; give a class or function"
        )
    if module == "__main__":
        raise InputError(_in_script(what, name))
    if "<" in name:
        raise InputError(
            f"{what}: {name} of {module} cannot be imported by another process; make it a function or class at the "
            f"top of its module"
        )
    return f"{module}:{name}"


def _in_script(what: str, name: str) -> str:
    return (
        f"{what}: {name} stands in the script that runs (or a notebook), which the process that traces cannot import; "
        f"put it into a module of its own, such as my_model.py, and import it from there"
    )
