"""Caches the results of operations on fake tensors, by operation and shapes.

A training repeats a few hundred operations for each layer, micro-batch and step. FakeTensorMode has a cache for that,
but spends most of its time on making keys and results. Here both are made from fewer and cheaper checks. A result is
cached only if torch caches it, from torch's own entry, and if the tensor made from it equals the one that torch
returned. Anything special about an argument or an operation goes to torch each time.

It uses `FakeTensorMode._cache_key`, `FakeTensorMode.cache` and their entries as of torch 2.13. If they are missing,
everything goes to torch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, extract_tensor_metadata

from hf_memkit.prediction.trace.work import Caller

Arguments = Sequence[Any]
Make = Callable[[Arguments], Any]
"""Creates the result of an operation from its arguments."""

Rule = Callable[..., Any]

_device_of: Final = operator.attrgetter("_fake_device" if hasattr(FakeTensor, "fake_device") else "fake_device")
"""The device of a fake tensor. Torch 2.11 has only the attribute, newer versions a property around it."""

_PLAIN: Final = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_SEQUENCES: Final = frozenset({list, tuple, torch.Size})
_MAX_LENGTH: Final = 64
"""Length of lists, except for operations on all parameters at once."""
_NO_KEY: Final[tuple[Any, ...]] = ()  # replaces a key if the call must go to torch


@dataclass(slots=True, eq=False)
class CacheEntry:
    """A cached operation on arguments of one kind."""

    make: Make | None  # creates its result; None: torch does each time
    work: dict[tuple[Caller, int], tuple[int, ...]] = field(default_factory=dict)
    """Its rows in a `Work`, by caller and stream."""


class FastFakes:
    """Caches results of operations on the fake tensors of one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.last: CacheEntry | None = None  # of the last operation
        self._mode = mode
        self._entries: dict[tuple[Any, ...], CacheEntry] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        self._protect = (  # as `FakeTensor.__new__` does
            torch._C._set_warn_deprecated_on_mutable_data_ptr
            if getattr(mode, "_allow_unsafe_data_ptr_access", False)
            else torch._C._set_throw_on_mutable_data_ptr
        )
        self._usable = bool(
            getattr(mode, "cache_enabled", False)
            and not getattr(mode, "cache_crosscheck_enabled", False)
            and getattr(mode, "shape_env", 0) is None
            and isinstance(getattr(FakeTensorMode, "cache", None), dict)
            and hasattr(FakeTensorMode, "_cache_key")
            and all(hasattr(fake_tensor, name) for name in ("_CacheKeyState", "_DispatchCacheValidEntry"))
        )

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], rule: Rule | None = None) -> Any:
        """The result of `func(*args, **kwargs)`, or of `rule`. Only the fake mode may be active. A rule depends only
        on the metadata of its arguments, not on values or references, and creates new tensors."""
        self.last = None
        if args and args[0].__class__ is list and len(args[0]) > _MAX_LENGTH and self._usable:
            if _only_writes(func):
                return None
            if rule is None and _makes_new(func):
                rule = func  # torch's cache has no lists of this length
        key = self._key(func, args, kwargs, rule is func) if self._usable else _NO_KEY
        if key is _NO_KEY:
            return (rule or func)(*args, **kwargs)
        entry = self._entries.get(key)
        if entry is None:
            result, make = self._learn(func, args, kwargs, rule)
            self.last = self._entries[key] = CacheEntry(make)
            return result
        self.last = entry
        make = entry.make
        return (rule or func)(*args, **kwargs) if make is None else make(args)

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], long: bool) -> tuple[Any, ...]:
        """Everything that torch's key distinguishes (torch 2.13: fake_tensor.py, `FakeTensorMode._cache_key`).

        `long`: whether lists of any length are allowed."""
        parts = [
            id(func),  # hashing an operation runs Python code
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
        ]
        if not self._add(parts, args, long):
            return _NO_KEY
        if kwargs:
            for name, value in kwargs.items():
                parts.append(name)
                if not self._add(parts, (value,), long):
                    return _NO_KEY
        return tuple(parts)

    def _add(self, parts: list[Any], values: Arguments, long: bool) -> bool:
        """Adds the metadata of arguments to a key; False if a call must go to torch."""
        for value in values:
            kind = value.__class__
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self._mode:
                    return False
                parts += (
                    value.dtype,
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.untyped_storage().nbytes(),
                    _device_of(value),
                    value.requires_grad,
                    # Layout, quantised, conjugated, negated and inference tensors have different key sets.
                    torch._C._dispatch_keys(value).raw_repr(),
                )
            elif kind in _PLAIN:
                parts += (kind, value)  # 1, 1.0 and True are equal
            elif kind in _SEQUENCES:
                if len(value) > _MAX_LENGTH and not long:
                    return False
                parts += (kind, len(value))
                if not self._add(parts, value, long):
                    return False
            else:
                return False
        return True

    # ---- new entries ----

    def _learn(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], rule: Rule | None
    ) -> tuple[Any, Make | None]:
        """(the result, a function that recreates it): calls the rule or torch, and copies torch's cache entry."""
        if rule is not None:
            result = rule(*args, **kwargs)
            return result, self._maker(_entry(result), func, args, result)
        mode: Any = self._mode
        torch_fakes: Any = fake_tensor
        try:
            with torch._C._DisableTorchDispatch():
                torch_key = mode._cache_key(torch_fakes._CacheKeyState(None), func, args, kwargs)
        except Exception:  # torch raises if it caches nothing
            torch_key = None
        result = func(*args, **kwargs)
        entry = None if torch_key is None else FakeTensorMode.cache.get(torch_key)
        return result, self._maker(entry, func, args, result)

    def _maker(self, entry: Any, func: Any, args: tuple[Any, ...], result: Any) -> Make | None:
        if not isinstance(entry, fake_tensor._DispatchCacheValidEntry | SimpleNamespace):
            return None
        makers = [self._output_maker(info, func) for info in entry.output_infos]
        results = result if entry.is_output_tuple else (result,)
        container = list if isinstance(result, list) else tuple
        if len(makers) != len(results) or any(maker is None for maker in makers):
            return None
        chosen: list[Make] = [maker for maker in makers if maker is not None]
        if not all(_alike(maker(args), expected) for maker, expected in zip(chosen, results, strict=True)):
            return None
        if entry.is_output_tuple:
            return lambda args: container([maker(args) for maker in chosen])
        return chosen[0]

    def _output_maker(self, info: Any, func: Any) -> Make | None:
        """Recreates one result (torch 2.13: fake_tensor.py, `_get_output_tensor_from_cache_entry`)."""
        position = info.inplace_idx
        if position is not None:
            return lambda args: args[position]
        if info.metadata is None:
            constant = info.constant_value
            return (lambda args: constant) if constant is None or isinstance(constant, int) else None
        metadata = info.metadata
        if metadata.layout is not torch.strided or metadata.is_conj or metadata.is_neg:
            return None
        shape, stride, offset = tuple(metadata.shape), tuple(metadata.stride), metadata.storage_offset
        options = {"dtype": metadata.dtype, "device": "meta", "requires_grad": metadata.requires_grad}
        needs_gradient, device = metadata.requires_grad, metadata.device
        viewed = info.view_idx
        empty_strided, no_modes = torch.empty_strided, torch._C._DisableTorchDispatch
        attributes = self._attributes.get(device)  # of a new fake tensor
        if attributes is None:
            with no_modes():
                template: Any = FakeTensor(self._mode, torch.empty(0, device="meta"), device)
            attributes = self._attributes[device] = dict(vars(template))
        subclass, protect = torch._C.TensorBase._make_subclass, self._protect

        def make(args: Arguments) -> FakeTensor:
            with no_modes():
                empty = empty_strided(shape, stride, **options)
                if viewed is not None:
                    empty.set_(args[viewed].untyped_storage(), offset, shape, stride)
                made: Any = subclass(
                    FakeTensor, empty, needs_gradient, dispatch_device=True, device_for_backend_keys=device
                )
            protect(made)
            made.__dict__.update(attributes)
            return made  # type: ignore[no-any-return]

        return make


@functools.cache
def _only_writes(func: Any) -> bool:
    """Whether it only writes to tensors of lists, such as a step of an optimizer or scaling of gradients, and returns
    nothing; callers have grouped the tensors (torch.optim, by device and dtype)."""
    schema = func._schema
    return not schema.returns and schema.name.startswith(("aten::_foreach_", "aten::_fused_"))


@functools.cache
def _makes_new(func: Any) -> bool:
    """Whether it returns a list with a new tensor for each of a list, such as a norm or a square root."""
    schema = func._schema
    plain = all(argument.alias_info is None for argument in schema.arguments)
    return plain and bool(schema.returns) and schema.name.startswith("aten::_foreach_")


def _entry(result: Any) -> SimpleNamespace:
    """An entry like torch's for a result in new tensors."""
    several = isinstance(result, tuple | list)
    results = result if several else (result,)
    infos = [
        SimpleNamespace(
            inplace_idx=None,
            view_idx=None,
            constant_value=value,
            metadata=extract_tensor_metadata(value) if isinstance(value, torch.Tensor) else None,
        )
        for value in results
    ]
    return SimpleNamespace(output_infos=infos, is_output_tuple=several)


def _alike(made: Any, expected: Any) -> bool:
    """Whether a recreated result equals torch's."""
    if not isinstance(expected, FakeTensor):
        return expected is None or (type(made) is type(expected) and bool(made == expected))
    return made is expected or (isinstance(made, FakeTensor) and _description(made) == _description(expected))


def _description(tensor: Any) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return (
        tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), storage.nbytes(), _device_of(tensor),
        tensor.requires_grad, torch._C._dispatch_keys(tensor).raw_repr(), vars(tensor).keys(),
    )  # fmt: skip


def speed_up_dispatch(mode: type) -> None:
    """Shortens torch's path to the tracer. Call it before the first operation under a dispatch mode, because torch
    keeps the functions that it finds then.

    * Before it calls a mode, torch looks for a rule registered for this operation and this class of mode (torch 2.13:
      _library/simple_registry.py, `find_torch_dispatch_rule`). `mode` has none.
    * Optimizers read the device and dtype of each tensor of their lists to group them (torch 2.13:
      utils/_foreach_utils.py). If all are equal, the lists stay as they are.
    """
    import torch._library.simple_registry

    registry: Any = torch._library.simple_registry
    find = getattr(registry, "find_torch_dispatch_rule", None)
    if find is not None:
        registry.find_torch_dispatch_rule = lambda operation, kind: None if kind is mode else find(operation, kind)

    core: Any = torch._C
    group = getattr(core, "_group_tensors_by_device_and_dtype", None)
    if group is None:
        return

    def grouped(lists: Sequence[Sequence[Any]], with_indices: bool = False) -> Any:
        kinds = {(t.fake_device, t.dtype) if t.__class__ is FakeTensor else None for t in lists[0]}
        if len(kinds) != 1 or None in kinds:
            return group(lists, with_indices)
        indices = list(range(len(lists[0]))) if with_indices else []
        return {kinds.pop(): ([list(tensors) for tensors in lists], indices)}

    core._group_tensors_by_device_and_dtype = grouped
