"""What a user's own script brings, made again here: the model on fake tensors, its batches, the class of its Trainer.

In: an `UserTraining`, whose modules are imported before anything is fake. Out: the objects.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from hf_memkit.errors import InputError
from hf_memkit.prediction.user_training import UserTraining

__all__ = ["UserObjects"]


class UserObjects:
    """The user's objects. Make it outside the fake mode, and call its methods inside.

    Raises:
        InputError: something cannot be imported, or is not what it should be.
    """

    def __init__(self, own: UserTraining | None) -> None:
        import torch
        from transformers import Trainer

        own = own or UserTraining()
        for folder in own.search_path:
            if folder not in sys.path:
                sys.path.append(folder)
        self.trainer_class: Any = _imported(own.trainer_class, "trainer_class") if own.trainer_class else Trainer
        if not (isinstance(self.trainer_class, type) and issubclass(self.trainer_class, Trainer)):
            raise InputError(f"trainer_class: {own.trainer_class} is no subclass of transformers.Trainer")
        self._factory = _imported(own.factory, "model") if own.factory else None
        self._name = own.factory
        # Written by the process that asks, for this one, into a temporary folder that only its user may enter.
        self._module = torch.load(own.module_file, weights_only=False) if own.module_file else None
        self._batches: dict[str, Any] | None = None
        if own.batch_file:
            self._batches = torch.load(own.batch_file, weights_only=False)

    @property
    def has_batches(self) -> bool:
        return self._batches is not None

    def model(self) -> Any:
        """The model, on fake tensors; None where the setup names it."""
        from torch import nn

        if self._factory is not None:
            model = self._factory()
            if not isinstance(model, nn.Module):
                raise InputError(f"model: {self._name} must make an nn.Module, and made a {type(model).__name__}")
            return model
        return None if self._module is None else self._module._apply(_fake)

    def collator(self, which: str) -> Callable[[Any], Any]:
        """A collator that makes the batch to train on (`"train"`), or to evaluate with, whatever rows it gets."""
        from torch.utils._pytree import tree_map

        assert self._batches is not None
        batch = self._batches[which]
        return lambda rows: tree_map(_fake, batch)


def _imported(path: str, what: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = None
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise InputError(f"{what}={path!r}: the module {module} has no {name}") from None
    except Exception as error:  # the user's code raises whatever it likes
        first = (str(error).strip().splitlines() or [""])[0]
        raise InputError(f"{what}={path!r}: importing {module} failed: {type(error).__name__}: {first}") from error
    return found


def _fake(value: Any) -> Any:
    """A fake tensor like `value`, made under the fake mode as a host's tensor is; with its values if it has any."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type != "meta":
        return torch.tensor(value.tolist(), dtype=value.dtype)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
