"""Writes objects of a live process to a file without the values of weights, and reads them; changes none of them.

```
parameter, large buffer, tensor on a GPU    shape, strides, dtype, device; hooks, attributes and ties are kept
4 or 8 bits (bitsandbytes, torchao)         the same for codes and scales
other tensor, array, data set, tokenizer    unchanged
class or function of a notebook, lambda     its code (cloudpickle)
class or function of a module               its name
lock                                        a new one
open file, connection                       its type, for the error message if the other process uses it
```
"""

from __future__ import annotations

import gc
import io
import json
import pickle
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import cloudpickle
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_memkit.common.errors import InputError, Unmodelled

_MAX_ELEMENTS: Final = 2**20  # smaller buffers keep their values, because models read positions and masks from them

PREPARED: Final = "memkit_prepared"
"""Attribute of a module that accelerate has prepared (`Accelerator.prepare_model`); the file has the original."""

ON_HOST: Final = "memkit_was_on_host"  # attribute of a Trainer: whether it was created on a machine without a GPU

_MACHINE_FIELDS: Final = ("distributed_state", "deepspeed_plugin", "hf_deepspeed_config")
"""Attributes of TrainingArguments that depend on the machine on which they were created."""


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """Parts from which the other process creates a Trainer."""

    model: Any  # an `nn.Module`, or a function that creates one
    arguments: Any  # TrainingArguments, or a setup with `arguments.*`
    rows: Any  # the data set; None: example rows of `length` tokens, for a model of transformers
    length: int | None
    kind: Any  # the class; None: `transformers.Trainer`
    options: Mapping[str, Any]  # other arguments of the class


def write_objects(objects: Any, path: Path) -> None:
    """Writes `objects` to a file. Raises InputError if an object cannot be described, with the reason."""
    # Tensors as large as weights that are not parameters: buffers, and states of optimizers.
    alive = gc.get_objects()
    modules = [obj for obj in alive if issubclass(type(obj), nn.Module)]
    optimizers = [obj for obj in alive if issubclass(type(obj), torch.optim.Optimizer)]
    values = [buffer for module in modules for buffer in module._buffers.values()]
    values += [value for each in optimizers for state in each.state.values() for value in dict(state).values()]
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    described = {id(tensor) for tensor in tensors if tensor.numel() > _MAX_ELEMENTS}
    try:
        with path.open("wb") as file:
            _Writer(file, described).dump(objects)
    except (pickle.PicklingError, TypeError, ValueError, RuntimeError, NotImplementedError, RecursionError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise InputError(
            f"this Trainer cannot be passed to the process that predicts ({first}); predict its script: memkit "
            f"predict train.py"
        ) from error


def read_objects(path: Path) -> Any:
    """Reads what `write_objects` wrote; parameters have no values. Raises any error of the modules that it imports."""
    with path.open("rb") as file:
        return pickle.load(file)  # written by the asking process, in a folder that only its user can access


def _dead_reference() -> weakref.ref[Any]:
    return weakref.ref(type("Gone", (), {})())


_FILES: Final = (io.FileIO, io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom)
_CREATED_ANEW: Final = {type(make()): make for make in (threading.Lock, threading.RLock)}


class _Writer(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes tensors with these `id`s, parameters and tensors on a GPU without their values."""

    def __init__(self, file: io.BufferedWriter, described: set[int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._described = described
        self._storages: dict[int, _Storage] = {}

    def reducer_override(self, obj: Any) -> Any:
        """How pickle recreates an object; NotImplemented: pickle's default."""
        if isinstance(obj, type | types.FunctionType):
            if hasattr(obj, "_torchdynamo_orig_callable"):
                raise InputError(
                    f"torch.compile({obj.__qualname__}): compiled code cannot be passed to the process that predicts; "
                    "omit it, and write torch_compile=True in TrainingArguments"
                )
            return super().reducer_override(obj)
        if isinstance(obj, torch.Tensor):
            return self._reduce_tensor(obj)
        if isinstance(obj, weakref.ref):
            return (weakref.ref, (obj(),)) if obj() is not None else (_dead_reference, ())
        if isinstance(obj, _FILES):
            return _absent(obj)  # cloudpickle would send its content
        if type(obj) in _CREATED_ANEW:
            return _CREATED_ANEW[type(obj)], ()
        reduced = _reduce_library_object(obj)
        if reduced is not None:
            return reduced
        reducer = self.dispatch_table.get(type(obj))
        try:
            return reducer(obj) if reducer is not None else obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception:  # an object's `__getstate__` may raise any error
            return _absent(obj)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        kind, trained = type(tensor), tensor.requires_grad
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: getattr(tensor, name) for name in names}
            self._described |= set(map(id, inner.values()))
            parameter = trained if isinstance(tensor, nn.Parameter) else None
            return _wrapper_tensor, (kind, inner, context, tensor.shape, tensor.stride(), parameter)
        if kind is not torch.Tensor and not issubclass(kind, nn.Parameter):
            raise InputError(
                f"a {kind.__name__} cannot be described without its values; predict the script that loads the model: "
                f"memkit predict train.py"
            )
        key = tensor.untyped_storage()._cdata
        plain = kind is torch.Tensor and tensor.device.type == "cpu"
        if plain and id(tensor) not in self._described and key not in self._storages:
            return NotImplemented
        storage = self._storages.setdefault(key, _Storage(tensor))
        view = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        hooks = {name: getattr(tensor, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")}
        state = {**vars(tensor), **{name: value for name, value in hooks.items() if value}}
        if tensor.is_leaf and tensor.grad is not None:
            state["grad"] = tensor.grad
        return _tensor, (kind, storage, view, tensor.dtype, trained), state or None, None, None, _set_attributes


class _Storage:
    """The storage of one or more tensors, of which one is given."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cuda" and tensor.device.index not in (None, torch.cuda.current_device()):
            raise InputError(
                f"a tensor is on {tensor.device}: a model on several GPUs cannot be predicted; put it on one"
            )
        self._tensor = tensor  # keeps the storage alive, so that its address is not reused

    def __reduce__(self) -> Any:
        device = "cuda" if self._tensor.device.type == "cuda" else "cpu"
        return _bytes, (self._tensor.untyped_storage().nbytes(), device)


def _bytes(count: int, device: str) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device if torch.cuda.is_available() else "cpu")


def _tensor(kind: Any, storage: torch.Tensor, view: tuple[Any, Any, int], dtype: Any, trained: bool) -> torch.Tensor:
    """`view`: shape, strides, offset."""
    whole = storage[: storage.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    plain = whole.as_strided(*view).detach()
    if issubclass(kind, nn.Parameter):
        parameter: torch.Tensor = torch.Tensor._make_subclass(kind, plain, trained)
        return parameter
    return plain.requires_grad_(trained)


def _wrapper_tensor(
    kind: Any, inner: dict[str, Any], context: Any, size: Any, strides: Any, trained: bool | None
) -> torch.Tensor:
    """A tensor with several inner tensors (torch: utils/_python_dispatch.py, `is_traceable_wrapper_subclass`).
    `trained`: `requires_grad` of a parameter; None: it is no parameter."""
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, size, strides)
    return made if trained is None else nn.Parameter(made, trained)


def _set_attributes(made: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(made, name, value)


def _reduce_library_object(obj: Any) -> Any:
    """How to recreate an object that belongs to its machine; None for other objects."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

    owner = obj.__self__ if isinstance(obj, types.MethodType) else obj
    if isinstance(owner, Accelerator | AcceleratorState | GradientState | PartialState):
        return _absent(owner)  # the other process creates a new one
    if isinstance(obj, CallbackHandler):
        return _new, (type(obj),), {**vars(obj), "optimizer": None, "lr_scheduler": None}
    if isinstance(obj, TrainerCallback):
        return _new, (type(obj),)  # none is called
    if isinstance(obj, TrainingArguments):
        state = {**vars(obj), **dict.fromkeys(_MACHINE_FIELDS), "use_cpu": False}  # for the requested GPU
        state.pop("_setup_devices", None)  # a cached property
        if given := obj.deepspeed:  # as in `child/libraries/deepspeed_engine.py`
            config = given if isinstance(given, Mapping) else json.loads(Path(given).read_text(encoding="utf-8"))
            state |= {"memkit_engine": dict(config), "mixed_precision": "no"}
        return _new, (type(obj),), state
    if isinstance(obj, Trainer):
        state = {**vars(obj), ON_HOST: obj.args.device.type != "cuda"}
        if isinstance(obj.optimizer, AcceleratedOptimizer):
            # It starts again with the optimizer before accelerate prepared it, without states.
            optimizer = _new(type(obj.optimizer.optimizer))
            vars(optimizer).update(vars(obj.optimizer.optimizer), state=defaultdict(dict))
            state |= {"optimizer": optimizer, "lr_scheduler": None}
        return _new, (type(obj),), state
    if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
        before = parametrize.type_before_parametrizations(obj)
        return _new, (before,), vars(obj), None, None, _parametrized
    if isinstance(obj, nn.Module) and "_original_forward" in vars(obj):
        state = {**vars(obj), PREPARED: True}
        original = state.pop("_original_forward")
        # accelerate 1.15.0: accelerator.py, `prepare_model`; the forward that it installs belongs to the device
        del state["forward"]
        is_its_own = getattr(original, "__func__", None) is type(obj).forward
        return _new, (type(obj),), state if is_its_own else {**state, "forward": original}
    return None


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _parametrized(made: nn.Module, state: dict[str, Any]) -> None:
    """Restores a parametrization, such as weight norm: a class per module (torch 2.13: nn/utils/parametrize.py)."""
    vars(made).update(state)
    parametrize._inject_new_class(made)
    for name in made.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(made, name)


def _absent(obj: Any) -> Any:
    return _Absent, (f"{type(obj).__module__}.{type(obj).__qualname__}",)


class _Absent:
    """Placeholder for an object that cannot be sent to another process."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unmodelled(
            f"{self._kind} (.{name}): only the process that made it can use it; predict the script: memkit predict "
            "train.py"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise Unmodelled(
            f"{self._kind}: only the process that made it can call it; predict the script: memkit predict train.py"
        )
