"""Runs `from_pretrained` without weights: it reads the config, makes fake parameters and opens no weight file.

transformers does the rest: class, dtype, attention, device map, adapters, missing heads, tied weights. For a model on
the hub only the config is downloaded, and the header of its safetensors if the config names no dtype.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_memkit.prediction.child.gpu.real_and_fake import RealAndFake
from hf_memkit.prediction.child.libraries.adapters import call_place
from hf_memkit.prediction.child.libraries.checkpoints import DTYPES, Shapes, headers_in, sizes_that_differ
from hf_memkit.prediction.child.libraries.quantised import quantised, quantizers
from hf_memkit.prediction.child.older_libraries import (
    LoadingOptions,
    expanded_device_map,
    loading_options,
    loading_result,
    patch_init_empty_weights,
)
from hf_memkit.prediction.child.trainer_kinds.trl_base import is_loading_model
from hf_memkit.prediction.traced_training import CallPlace

_loaded_at: weakref.WeakKeyDictionary[Any, CallPlace | None] = weakref.WeakKeyDictionary()
_by_first_rank: weakref.WeakSet[Any] = weakref.WeakSet()
_with_device_map: weakref.WeakSet[Any] = weakref.WeakSet()


def is_loaded(model: Any) -> bool:
    """Whether `from_pretrained` created the model."""
    return model in _loaded_at


def is_loaded_by_first_rank(model: Any) -> bool:
    """Whether `from_pretrained` read the weights in the first rank only, for FSDP (`cpu_ram_efficient_loading`)."""
    return model in _by_first_rank


def loaded_at(model: Any) -> CallPlace | None:
    """The user's call in which `from_pretrained` created a model; None if unknown."""
    return _loaded_at.get(model)


def has_device_map(model: Any) -> bool:
    """Whether the script passed a `device_map` to `from_pretrained`, even for one GPU."""
    return model in _with_device_map


def patch_from_pretrained(boundary: RealAndFake) -> None:
    """Replaces transformers' search and reading of checkpoints (transformers 5.23.0: modeling_utils.py,
    `_get_resolved_checkpoint_files`, `PreTrainedModel._load_pretrained_model`)."""
    from huggingface_hub import get_safetensors_metadata
    from transformers import modeling_utils
    from transformers.modeling_utils import is_fsdp_enabled

    resolve = modeling_utils._get_resolved_checkpoint_files
    stored: dict[str, torch.dtype | None] = {}
    shapes: Shapes = {}

    def resolved(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        shapes.clear()
        files, metadata = locate(*args, **kwargs)
        stored["dtype"] = None if files else (metadata or {}).get("dtype")
        missing = [file for file in files or () if not Path(file).exists()]
        if missing and len(missing) < len(files):  # if all are missing, the weights are elsewhere
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), missing[0])
        for number, file in enumerate(files or ()):
            headers = headers_in(file)
            shapes.update({name: shape for name, (shape, _) in headers.items()})
            if number == 0:  # a file with several dtypes counts as its first tensor's
                stored["dtype"] = next((dtype for _, dtype in headers.values()), None)
        return files, metadata

    def locate(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        name = kwargs.get("pretrained_model_name_or_path", args[0] if args else None)
        if name is None or Path(str(name)).is_dir():
            try:
                return resolve(*args, **kwargs)  # type: ignore[no-any-return]
            except OSError:  # there are no weights, and none are needed
                if name is None:
                    raise
                return None, {"dtype": torch.float32}
        options = dict(kwargs.get("download_kwargs") or {})
        dtype = torch.float32  # of most weights, from the checkpoint's safetensors headers, if it has any
        with contextlib.suppress(Exception):  # offline, .bin files
            checkpoint = get_safetensors_metadata(
                str(name), revision=options.get("revision"), token=options.get("token")
            )
            counts = checkpoint.parameter_count
            dtype = DTYPES.get(str(max(counts, key=counts.__getitem__)), torch.float32)
            for file in checkpoint.files_metadata.values():
                shapes.update({key: tuple(tensor.shape) for key, tensor in file.tensors.items()})
        return None, {"dtype": dtype}

    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        names = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
        options = loading_options(model, load_config, kwargs)
        devices = expanded_device_map(options.device_map, names)
        checked = options.quantizer is None and not options.ignores_sizes
        loaded = loading_result(model, sizes_that_differ(model, shapes, options.mapping) if checked else set())
        host = boundary.tracer.host
        with host.loading(stored["dtype"]) if host is not None else contextlib.nullcontext():
            _materialize(model, devices, options, boundary)
        places = (call_place(frame) for frame, _ in traceback.walk_stack(sys._getframe()))
        _loaded_at[model] = next((place for place in places if place is not None), None)
        if is_fsdp_enabled():  # before Trainer is created: only with `ACCELERATE_USE_FSDP`
            _by_first_rank.add(model)
        if options.device_map is not None and not is_loading_model():
            _with_device_map.add(model)
        return loaded

    patch_init_empty_weights()
    modeling_utils.get_hf_quantizer = quantizers(modeling_utils.get_hf_quantizer)
    modeling_utils._get_resolved_checkpoint_files = resolved
    modeling_utils.PreTrainedModel._load_pretrained_model = staticmethod(load)


def _materialize(model: Any, devices: Mapping[str, Any], options: LoadingOptions, boundary: RealAndFake) -> None:
    """Moves parameters and buffers from the meta device to their device; tied ones stay tied. Weights to quantise are
    quantised by the library's own code."""
    quantizer = options.quantizer
    made: dict[int, Any] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            path = f"{prefix}.{name}" if prefix else name
            if tensor is None or tensor.device.type != "meta" or name in module._non_persistent_buffers_set:
                continue
            table = module._parameters if name in module._parameters else module._buffers
            if id(tensor) not in made:
                dtype = options.kept_dtype(path) if tensor.is_floating_point() else None
                local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, this rank's part
                shaped = torch.empty_like(local, dtype=dtype or tensor.dtype)
                device = devices.get(path, "cpu")
                new: Any
                if quantizer is not None and quantizer.param_needs_quantization(model, path):
                    new = quantised(quantizer, model, path, shaped, device, boundary)
                else:
                    new = boundary.empty_like(shaped, device)
                    if local is not tensor:
                        new = as_part(new, tensor)
                    if isinstance(tensor, nn.Parameter):  # frozen ones get gradients: core_model_loading.py, 1447
                        new = nn.Parameter(new, new.is_floating_point())
                new._is_hf_initialized = True
                made[id(tensor)] = tensor, new  # keeps the old one alive, so that its id is not reused
            table[name] = made[id(tensor)][1]


def as_part(local: torch.Tensor, whole: Any) -> torch.Tensor:
    """A DTensor like `whole`, of which this rank has `local` (transformers 5.23.0: distributed/sharding_utils.py,
    `_dtensor_from_local_like`)."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
