"""Loads tensor files of a script on the host; tensors for the GPU become fake tensors there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hf_memkit.prediction.child.gpu.cuda_queries import replace_everywhere


def patch_loading() -> None:
    """Replaces `torch.load` and safetensors' reader: a storage on the GPU has no memory (torch 2.13: serialization.py,
    `_get_restore_location`)."""
    _patch_safetensors()
    original = torch.load

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        moved: set[int] = set()

        def locate(storage: Any, location: str) -> Any:
            target = location if map_location is None else map_location
            if isinstance(map_location, Mapping):
                target = map_location.get(location, location)
            elif callable(map_location):
                target = map_location(storage, location)
            if isinstance(target, str | torch.device):
                if torch.device(target).type == "cuda":
                    moved.add(storage._cdata)
                return storage
            return storage if target is None else target

        def move(leaf: Any) -> Any:
            if isinstance(leaf, torch.nn.Module):
                return leaf.to("cuda") if moved else leaf
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata in moved:
                return leaf.to("cuda")
            return leaf

        return tree_map(move, original(f, locate, *args, **kwargs))

    torch.load = load


def _patch_safetensors() -> None:
    """Patches safetensors, which would copy to the GPU (safetensors 0.8: `safe_open`, which `load_file` calls)."""
    import safetensors
    import safetensors.torch

    original = safetensors.safe_open

    class Opened:
        """`safe_open` on the host."""

        def __init__(self, filename: Any, framework: str, device: Any = "cpu", **options: Any) -> None:
            self._device = torch.device(device)
            host = "cpu" if self._device.type == "cuda" else device
            self._file: Any = original(filename, framework, host, **options)

        def __enter__(self) -> Opened:
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_tensor(self, name: str) -> Any:
            return self._move(self._file.get_tensor(name))

        def get_tensors(self, *args: Any) -> Any:
            return {name: self._move(tensor) for name, tensor in self._file.get_tensors(*args).items()}

        def _move(self, tensor: Any) -> Any:
            return tensor.to(self._device) if self._device.type == "cuda" else tensor

    replace_everywhere(original, Opened)
