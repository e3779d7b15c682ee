"""`from_pretrained` without weights: the config is read, parameters are shapes, and no file of weights is opened. What
transformers does around it is its own: class, dtype, attention, device map, adapters, missing heads, ties. Of a model
of the hub the config alone is fetched, and where that names no dtype the header of its safetensors."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import types
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_memkit.prediction.child.gpu.real_and_fake import RealAndFake
from hf_memkit.prediction.child.libraries.adapters import place_of
from hf_memkit.prediction.child.libraries.checkpoints import DTYPES, Shapes, headers_in, sizes_that_differ
from hf_memkit.prediction.child.libraries.quantised import quantised, quantizers
from hf_memkit.prediction.child.older_libraries import (
    HowLoaded,
    expanded_device_map,
    how_it_is_loaded,
    parameters_on_meta,
    what_loading_gives,
)
from hf_memkit.prediction.child.trainer_kinds.trl_base import loads_the_model
from hf_memkit.prediction.traced_training import CallPlace

_loaded_at: weakref.WeakKeyDictionary[Any, CallPlace | None] = weakref.WeakKeyDictionary()
_with_device_map: weakref.WeakSet[Any] = weakref.WeakSet()


def is_loaded(model: Any) -> bool:
    """Whether `from_pretrained` made it."""
    return model in _loaded_at


def loaded_at(model: Any) -> CallPlace | None:
    """The call of the user's in which `from_pretrained` made a model; None: nobody knows."""
    return _loaded_at.get(model)


def has_device_map(model: Any) -> bool:
    """Whether the script gave `from_pretrained` a `device_map` for it, also where that is one GPU."""
    return model in _with_device_map


def _users_call() -> CallPlace | None:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if (found := place_of(frame)) is not None:
            return found
        frame = frame.f_back
    return None


def weights_are_shapes(boundary: RealAndFake) -> None:
    """Replaces how transformers finds and reads checkpoints, in this process (transformers 5.23.0: modeling_utils.py,
    `_get_resolved_checkpoint_files`, `PreTrainedModel._load_pretrained_model`)."""
    from transformers import modeling_utils

    resolve = modeling_utils._get_resolved_checkpoint_files
    stored: dict[str, torch.dtype | None] = {}
    shapes: Shapes = {}

    def resolved(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        shapes.clear()
        files, metadata = found(*args, **kwargs)
        stored["dtype"] = None if files else (metadata or {}).get("dtype")
        missing = [each for each in files or () if not Path(each).exists()]
        if missing and len(missing) < len(files):  # without any, nobody expects them here
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), missing[0])
        for number, each in enumerate(files or ()):
            headers = headers_in(each)
            shapes.update({name: shape for name, (shape, _) in headers.items()})
            if number == 0:  # several types in one file: the first one's
                stored["dtype"] = next((dtype for _, dtype in headers.values()), None)
        return files, metadata

    def found(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        name = kwargs.get("pretrained_model_name_or_path", args[0] if args else None)
        if name is None or Path(str(name)).is_dir():
            try:
                return resolve(*args, **kwargs)  # type: ignore[no-any-return]
            except OSError:  # no weights there, which nobody reads
                if name is None:
                    raise
                return None, {"dtype": torch.float32}
        dtype, on_hub = _on_hub(str(name), dict(kwargs.get("download_kwargs") or {}))
        shapes.update(on_hub)
        return None, {"dtype": dtype}

    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        names = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
        asked = how_it_is_loaded(model, load_config, kwargs)
        places = expanded_device_map(asked.device_map, names)
        checked = asked.quantizer is None and not asked.ignores_sizes
        loaded = what_loading_gives(model, sizes_that_differ(model, shapes, asked.mapping) if checked else set())
        host = boundary.tracer.host
        with host.loading(stored["dtype"]) if host is not None else contextlib.nullcontext():
            _made(model, places, asked, boundary)
        _loaded_at[model] = _users_call()
        if asked.device_map is not None and not loads_the_model():
            _with_device_map.add(model)
        return loaded

    parameters_on_meta()
    modeling_utils.get_hf_quantizer = quantizers(modeling_utils.get_hf_quantizer)
    modeling_utils._get_resolved_checkpoint_files = resolved
    modeling_utils.PreTrainedModel._load_pretrained_model = staticmethod(load)


def _made(model: Any, places: Mapping[str, Any], asked: HowLoaded, boundary: RealAndFake) -> None:
    """Gives parameters and buffers that are on the meta device their place; what is tied stays tied. A weight that is
    to be quantised is, by the library's own code."""
    quantizer = asked.quantizer
    made: dict[int, Any] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            path = f"{prefix}.{name}" if prefix else name
            if tensor is None or tensor.device.type != "meta" or name in module._non_persistent_buffers_set:
                continue
            table = module._parameters if name in module._parameters else module._buffers
            if id(tensor) not in made:
                dtype = asked.kept(path) if tensor.is_floating_point() else None
                shaped = torch.empty_like(tensor, dtype=dtype or tensor.dtype)
                place = places.get(path, "cpu")
                new: Any
                if quantizer is not None and quantizer.param_needs_quantization(model, path):
                    new = quantised(quantizer, model, path, shaped, place, boundary)
                else:
                    new = boundary.empty_like(shaped, place)
                    if isinstance(tensor, nn.Parameter):  # frozen ones are thawed: core_model_loading.py, 1447
                        new = nn.Parameter(new, new.is_floating_point())
                new._is_hf_initialized = True
                made[id(tensor)] = tensor, new  # the old one too: its id must not be given away
            table[name] = made[id(tensor)][1]


def _on_hub(name: str, options: dict[str, Any]) -> tuple[torch.dtype, Shapes]:
    """What most of a checkpoint's weights are stored in, and their shapes, by its safetensors' headers; fp32 where
    there are none."""
    from huggingface_hub import get_safetensors_metadata

    with contextlib.suppress(Exception):  # offline, .bin files
        found = get_safetensors_metadata(name, revision=options.get("revision"), token=options.get("token"))
        largest = max(found.parameter_count.items(), key=lambda pair: pair[1])[0]
        files = found.files_metadata.values()
        shapes = {key: tuple(each.shape) for file in files for key, each in file.tensors.items()}
        return DTYPES.get(str(largest), torch.float32), shapes
    return torch.float32, {}
