"""Objects of a live process ⇄ a file, without the values of weights. Nothing of what is written is changed.

```
parameter, large buffer, tensor on a GPU    shape, strides, dtype, place; hooks, attributes and ties are kept
4 or 8 bits (bitsandbytes, torchao)         the same of codes and scales
other tensor, array, data set, tokenizer    as it is
class or function of a notebook, lambda     its code (cloudpickle)
class or function of a module               its name
lock                                        another one
open file, connection                       its type: who uses it in the other process is told what it was
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

_MOST_ELEMENTS: Final = 2**20
"""Buffers of at most so many elements keep their values: models ask positions and masks for them."""

PREPARED: Final = "memkit_prepared"
"""Attribute of a module that accelerate had prepared (`Accelerator.prepare_model`), which is undone in the file."""

ON_HOST: Final = "memkit_was_on_host"
"""Attribute of a Trainer: whether it was made on a machine without a GPU."""

_OF_THE_MACHINE: Final = ("distributed_state", "deepspeed_plugin", "hf_deepspeed_config")
"""Of TrainingArguments: what they found out about the machine that they were made on."""


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """What a Trainer is made of in the process that predicts.

    Attributes:
        model: an `nn.Module`, or what makes one without arguments.
        arguments: a TrainingArguments, or a setup's `arguments.*`.
        rows: the data set; None: rows of `length` tokens that mean nothing, for a model of transformers.
        kind: the class; None: `transformers.Trainer`.
        options: what the class takes beside these.
    """

    model: Any
    arguments: Any
    rows: Any
    length: int | None
    kind: Any
    options: Mapping[str, Any]


def write_objects(objects: Any, path: Path) -> None:
    """Writes `objects` to a file.

    Raises:
        InputError: something of it cannot be described, with the reason.
    """
    described = _large_buffers()
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
    """What `write_objects` wrote. Parameters have no values.

    Raises:
        Exception: whatever the modules raise that it imports.
    """
    with path.open("rb") as file:
        return pickle.load(file)  # written by the process that asks, into a folder that only its user may enter


def _large_buffers() -> set[int]:
    """`id` of what has the size of weights, and is none: buffers, and states of optimizers."""
    found = gc.get_objects()
    modules = [each for each in found if issubclass(type(each), nn.Module)]
    buffers = [each for module in modules for each in module._buffers.values() if each is not None]
    optimizers = [each for each in found if issubclass(type(each), torch.optim.Optimizer)]
    states = [each for one in optimizers for state in one.state.values() for each in dict(state).values()]
    tensors = (each for each in (*buffers, *states) if isinstance(each, torch.Tensor))
    return {id(each) for each in tensors if each.numel() > _MOST_ELEMENTS}


def _dead_reference() -> weakref.ref[Any]:
    return weakref.ref(type("Gone", (), {})())


_FILES: Final = (io.FileIO, io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom)
_MADE_ANEW: Final = {type(make()): make for make in (threading.Lock, threading.RLock)}


class _Writer(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes tensors of these `id`s without values, and parameters and what is on a GPU."""

    def __init__(self, file: io.BufferedWriter, described: set[int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._described = described
        self._storages: dict[int, _Storage] = {}

    def reducer_override(self, obj: Any) -> Any:
        """As pickle's: how an object is made again; NotImplemented: as pickle does it."""
        if isinstance(obj, type | types.FunctionType):
            if hasattr(obj, "_torchdynamo_orig_callable"):
                name = getattr(obj, "__qualname__", type(obj).__name__)
                raise InputError(f"torch.compile({name}): what a compiled model keeps cannot be traced; omit it")
            return super().reducer_override(obj)
        if isinstance(obj, torch.Tensor):
            return self._of_tensor(obj)
        if isinstance(obj, weakref.ref):
            return (weakref.ref, (obj(),)) if obj() is not None else (_dead_reference, ())
        if isinstance(obj, _FILES):
            return _absent(obj)  # cloudpickle would send what is in it
        if type(obj) in _MADE_ANEW:
            return _MADE_ANEW[type(obj)], ()
        known = _of_a_library(obj)
        if known is not None:
            return known
        reducer = self.dispatch_table.get(type(obj))
        try:
            return reducer(obj) if reducer is not None else obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception:  # whatever an object's own `__getstate__` raises
            return _absent(obj)

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        kind, trained = type(tensor), tensor.requires_grad
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: getattr(tensor, name) for name in names}
            self._described |= set(map(id, inner.values()))
            parameter = trained if isinstance(tensor, nn.Parameter) else None
            return _wrapping, (kind, inner, context, tensor.shape, tensor.stride(), parameter)
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
        about = (kind, storage, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, trained)
        return _tensor, about, _attributes(tensor), None, None, _set_attributes


# ---- tensors ----


class _Storage:
    """What one or more tensors lie in; one of them is given."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cuda" and tensor.device.index not in (None, torch.cuda.current_device()):
            raise InputError(
                f"a tensor is on {tensor.device}: a model on several GPUs cannot be predicted; put it on one"
            )
        self._tensor = tensor  # no other storage may come to lie at its address

    def __reduce__(self) -> Any:
        place = "cuda" if self._tensor.device.type == "cuda" else "cpu"
        return _bytes, (self._tensor.untyped_storage().nbytes(), place)


def _bytes(count: int, place: str) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=place if torch.cuda.is_available() else "cpu")


def _tensor(
    kind: Any,
    storage: torch.Tensor,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    trained: bool,
) -> torch.Tensor:
    whole = storage[: storage.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    plain = whole.as_strided(shape, strides, offset).detach()
    if issubclass(kind, nn.Parameter):
        parameter: torch.Tensor = torch.Tensor._make_subclass(kind, plain, trained)
        return parameter
    return plain.requires_grad_(trained)


def _wrapping(
    kind: Any, inner: dict[str, Any], context: Any, size: Any, strides: Any, trained: bool | None
) -> torch.Tensor:
    """A tensor of several others (torch: utils/_python_dispatch.py, `is_traceable_wrapper_subclass`). `inner` and
    `context` are what `__tensor_flatten__` gave; `trained`: of a parameter; None: it is none."""
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, size, strides)
    return made if trained is None else nn.Parameter(made, trained)


def _attributes(tensor: torch.Tensor) -> dict[str, Any] | None:
    hooks = {name: getattr(tensor, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")}
    state = {**vars(tensor), **{name: each for name, each in hooks.items() if each}}
    if tensor.is_leaf and tensor.grad is not None:
        state["grad"] = tensor.grad
    return state or None


def _set_attributes(made: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(made, name, value)


# ---- what libraries make ----


def _of_a_library(obj: Any) -> Any:
    """How an object is made that belongs to the machine it was made on; None: it does not."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

    owner = obj.__self__ if isinstance(obj, types.MethodType) else obj
    if isinstance(owner, Accelerator | AcceleratorState | GradientState | PartialState):
        return _absent(owner)  # the other process makes its own
    if isinstance(obj, CallbackHandler):
        return _new, (type(obj),), {**vars(obj), "optimizer": None, "lr_scheduler": None}
    if isinstance(obj, TrainerCallback):
        return _new, (type(obj),)  # none is called
    if isinstance(obj, TrainingArguments):
        return _new, (type(obj),), _arguments(obj)
    if isinstance(obj, Trainer):
        return _new, (type(obj),), {**vars(obj), **_as_before(obj), ON_HOST: obj.args.device.type != "cuda"}
    if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
        before = parametrize.type_before_parametrizations(obj)
        return _new, (before,), vars(obj), None, None, _parametrized
    if isinstance(obj, nn.Module) and "_original_forward" in vars(obj):
        state = {**vars(obj), PREPARED: True}
        original = state.pop("_original_forward")
        # accelerate 1.15.0: accelerator.py, `prepare_model`; what it puts there belongs to the device
        del state["forward"]
        is_its_own = getattr(original, "__func__", None) is type(obj).forward
        return _new, (type(obj),), state if is_its_own else {**state, "forward": original}
    return None


def _as_before(trainer: Any) -> dict[str, Any]:
    """What a Trainer that has trained would begin with again: its optimizer, before accelerate prepared it, without
    states."""
    from accelerate.optimizer import AcceleratedOptimizer

    if not isinstance(trainer.optimizer, AcceleratedOptimizer):
        return {}
    optimizer = _new(type(trainer.optimizer.optimizer))
    vars(optimizer).update(vars(trainer.optimizer.optimizer), state=defaultdict(dict))
    return {"optimizer": optimizer, "lr_scheduler": None}


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _parametrized(made: nn.Module, state: dict[str, Any]) -> None:
    """Such as weight norm: its class is of the module alone (torch 2.13: nn/utils/parametrize.py)."""
    vars(made).update(state)
    parametrize._inject_new_class(made)
    for name in made.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(made, name)


def _arguments(arguments: Any) -> dict[str, Any]:
    state = {**vars(arguments), **dict.fromkeys(_OF_THE_MACHINE), "use_cpu": False}  # on the GPU that is asked for
    state.pop("_setup_devices", None)  # a cached property
    if arguments.deepspeed:  # as `child/libraries/deepspeed_engine.py` has it
        state |= {"memkit_engine": _content(arguments.deepspeed), "mixed_precision": "no"}
    return state


def _content(given: Any) -> dict[str, Any]:
    return dict(given) if isinstance(given, Mapping) else dict(json.loads(Path(given).read_text(encoding="utf-8")))


def _absent(obj: Any) -> Any:
    return _Absent, (f"{type(obj).__module__}.{type(obj).__qualname__}",)


class _Absent:
    """Something that no other process can be given."""

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
