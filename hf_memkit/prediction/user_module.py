"""An `nn.Module` that was built already → a file from which another process makes it again, without its values.

Shapes, dtypes, ties, what is frozen and every other attribute are kept. Nothing of the weights is copied.
"""

from __future__ import annotations

import copy
import pickle
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_memkit.errors import InputError
from hf_memkit.prediction.user_training import import_path

if TYPE_CHECKING:
    from torch import nn

__all__ = ["write_module"]

_KEPT_ELEMENTS: Final = 2**16
"""Whole numbers of buffers no larger than this keep their values: models ask positions and masks for them."""


def write_module(module: nn.Module, path: Path) -> None:
    """Writes `module` without the values of its parameters to `path`.

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
