"""What a user's own script brings to a traced training, as plain data for the child process.

In: names that the child can import, and files that this process wrote for it. Out: the same as JSON.
"""

from __future__ import annotations

import copy
import importlib.util
import pickle
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from hf_memkit.errors import InputError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["UserTraining", "import_path", "write_module"]

_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class UserTraining:
    """The parts of a training that its user wrote.

    Attributes:
        factory: `"package.module:name"` of a class or function that makes the model without arguments.
        module_file: file that holds the model without its values (`write_module`).
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


_KEPT_ELEMENTS: Final = 2**16
"""Whole numbers of buffers no larger than this keep their values: models ask positions and masks for them."""


def write_module(module: nn.Module, path: Path) -> None:
    """Writes a module that was built already to `path`, from which another process makes it again: shapes, dtypes,
    ties, what is frozen and every other attribute are kept, and nothing of the weights is copied.

    Raises:
        InputError: another process could not make it again: its class stands in the script that runs, it holds
            something that cannot be pickled, or its weights are quantised.
    """
    import torch

    for kind in {type(each) for each in module.modules()}:
        import_path(kind, "model")
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        if type(parameter) is not torch.nn.Parameter:
            raise InputError(
                f"model: {name} is a {type(parameter).__name__} (quantised, or made by a library), which cannot be "
                f"described without its values; give the model's hub ID or folder to `memkit predict --preset qlora`"
            )
    for tensor in chain(module.parameters(), module.buffers()):
        memo[id(tensor)] = _without_values(tensor)
    try:
        described = copy.deepcopy(module, memo)
        for tensor in module.parameters():
            memo.pop(id(tensor), None)
        with path.open("wb") as file:
            torch.save(described, file)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise InputError(
            f"model: this {type(module).__name__} cannot be passed to the process that traces it ({first}); give the "
            f"function that builds it, as 'my_package.models:build'"
        ) from None


def _without_values(tensor: Any) -> Any:
    import torch

    if isinstance(tensor, torch.nn.Parameter):
        empty = torch.empty_like(tensor, device="meta")
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    if whole and tensor.numel() <= _KEPT_ELEMENTS and tensor.device.type != "meta":
        return tensor.detach().to("cpu", copy=True)
    return torch.empty_like(tensor, device="meta")
