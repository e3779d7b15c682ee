"""Handles saves of weights without values: no file gets made-up contents, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import Trainer

from hf_memkit.prediction.child.gpu.cuda_queries import replace_everywhere
from hf_memkit.prediction.child.output import say
from hf_memkit.prediction.child.user_code import users_line


def skip_fake_saves() -> None:
    """Before `train()`: saves only content with values; a script that saves its model continues after a message."""
    import safetensors.torch

    save, save_file = torch.save, safetensors.torch.save_file

    def save_values(content: Any, *args: Any, **kwargs: Any) -> Any:
        return _report_skipped() if _has_fakes(content) else save(content, *args, **kwargs)

    def save_file_of_values(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return _report_skipped() if _has_fakes(tensors) else save_file(tensors, *args, **kwargs)

    torch.save = save_values  # type: ignore[assignment]
    safetensors.torch.save_file = save_file_of_values
    _replace("safe_save_file", save_file_of_values)
    patch_storage_ids()
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")


def patch_storage_ids() -> None:
    """Identifies storages by number: saving compares addresses to find shared memory, and fake ones are all 0."""
    import huggingface_hub.serialization._torch as hub

    def storage_of(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
        return tensor.device, tensor.untyped_storage()._cdata, tensor.nbytes

    hub.get_torch_storage_id = storage_of
    _replace("id_tensor_storage", storage_of)


def _replace(name: str, function: Any) -> None:
    """Replaces a function in the libraries that have imported it by name."""
    for module in ("transformers.modeling_utils", "transformers.pytorch_utils", "peft.peft_model"):
        if hasattr(sys.modules.get(module), name):
            setattr(sys.modules[module], name, function)


def _report_skipped() -> None:
    say(f"{users_line()}: writes no weights: a prediction has none")


def _has_fakes(content: Any) -> bool:
    leaves = tree_leaves(content)
    parameters = [tensor for leaf in leaves if isinstance(leaf, nn.Module) for tensor in leaf.state_dict().values()]
    return any(isinstance(leaf, FakeTensor) for leaf in (*leaves, *parameters))


def skip_writing(all_fake: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext) -> None:
    """From `train()` on: makes all tensors that a real save makes, and writes no bytes.

    Reading such a file gives tensors of the saved shapes, created within `all_fake`.

    State dictionaries refer to weights and states; saving copies them to the host tensor by tensor. It needs more if
    weights are saved in another form: transformers splits the merged experts of a mixture into one copy each
    (`revert_weight_conversion`), and makes tensors contiguous.
    """
    import safetensors.torch

    saved: dict[str, Any] = {}  # file → its content

    def save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        Path(filename).touch()
        saved[os.path.realpath(filename)] = tree_map_only(torch.Tensor, _Shape.of, dict(tensors))

    def save(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(file, str | Path):
            Path(file).touch()
            saved[os.path.realpath(file)] = tree_map_only(torch.Tensor, _Shape.of, content)

    load, load_file = torch.load, safetensors.torch.load_file

    def load_fake(file: Any, device: Any) -> Any:
        with all_fake():
            return tree_map_only(_Shape, lambda shape: shape.tensor(device), saved[os.path.realpath(file)])

    def load_saved(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | Path) and os.path.realpath(file) in saved:
            return load_fake(file, map_location if isinstance(map_location, str | torch.device) else None)
        return load(file, map_location, *args, **kwargs)

    def load_saved_file(filename: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        if os.path.realpath(filename) in saved:
            return load_fake(filename, device)
        return load_file(filename, device, **kwargs)

    safetensors.torch.save_file = save_file
    torch.save = save  # type: ignore[assignment]
    torch.load = load_saved  # type: ignore[assignment]
    replace_everywhere(load_file, load_saved_file)
    Trainer._save_rng_state = lambda self, folder: None  # reads the GPU's generator
    _replace("safe_save_file", save_file)
    patch_storage_ids()


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor in a saved file."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def tensor(self, device: Any) -> torch.Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=self.device if device is None else device)
