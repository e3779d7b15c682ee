"""What an operation gives on fake tensors, from memory: the same operation on tensors of the same shapes came before.

A training repeats a few hundred operations for each layer, micro-batch and step. FakeTensorMode has a cache for that,
and takes most of its time to make the key and the answer. Here both are made from fewer and cheaper questions. Nothing
is decided here: an answer is kept where torch keeps one, from torch's own entry, and only if the tensor made of it is
like the one that torch gave. What is unusual about an argument or an operation goes to torch, each time.

It rests on `FakeTensorMode._cache_key`, `FakeTensorMode.cache` and their entries, as torch 2.13 has them. Where they
are missing, everything goes to torch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, extract_tensor_metadata

Arguments = Sequence[Any]
Make = Callable[[Arguments], Any]
"""Arguments of an operation → its result."""

Rule = Callable[..., Any]

_device_of: Final = operator.attrgetter("_fake_device" if hasattr(FakeTensor, "fake_device") else "fake_device")
"""Where a fake tensor says it lies. Newer versions of torch have a property around the attribute, torch 2.11 has the
attribute alone."""

_PLAIN: Final = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_SEQUENCES: Final = frozenset({list, tuple, torch.Size})
_LONGEST: Final = 64
"""Of lists, but for the operations of all parameters at once."""
_UNUSUAL: Final[tuple[Any, ...]] = ()
"""In the place of a key: torch is asked."""


@dataclass(slots=True, eq=False)
class Known:
    """What is remembered of an operation on arguments of one kind: how its result is made (None: torch is asked each
    time), and the numbers of its rows in a `Work` where Python or autograd's engine calls it (None: not known yet)."""

    make: Make | None
    work: tuple[int, ...] | None = None
    engine_work: tuple[int, ...] | None = None


class FastFakes:
    """Results of operations on the fake tensors of one mode.

    Attributes:
        last: what is remembered of the last operation; None: nothing.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.last: Known | None = None
        self._mode = mode
        self._known: dict[tuple[Any, ...], Known] = {}
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
        """What `func(*args, **kwargs)` gives, or the rule in its place. To be called where only the mode is active.

        A rule is a function of what its arguments are, and not of what they hold or who holds them, which makes new
        tensors.
        """
        self.last = None
        if args and args[0].__class__ is list and len(args[0]) > _LONGEST and self._usable:
            if _is_silent(func):
                return None
            if rule is None and _makes_new(func):
                rule = func  # torch's cache keeps no lists of this length
        key = self._key(func, args, kwargs, rule is func) if self._usable else _UNUSUAL
        if key is _UNUSUAL:
            return (rule or func)(*args, **kwargs)
        known = self._known.get(key)
        if known is None:
            result, make = self._learn(func, args, kwargs, rule)
            self.last = self._known[key] = Known(make)
            return result
        self.last = known
        make = known.make
        return (rule or func)(*args, **kwargs) if make is None else make(args)

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], long: bool) -> tuple[Any, ...]:
        """All that torch's key distinguishes (torch 2.13: fake_tensor.py, `FakeTensorMode._cache_key`).

        `long`: whether lists of any length are looked through."""
        parts = [
            id(func),  # an operation stays; its own hash is computed in Python
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
        ]
        if not self._add(parts, args, long):
            return _UNUSUAL
        if kwargs:
            for name, value in kwargs.items():
                parts.append(name)
                if not self._add(parts, (value,), long):
                    return _UNUSUAL
        return tuple(parts)

    def _add(self, parts: list[Any], values: Arguments, long: bool) -> bool:
        """Puts what matters of some arguments into a key; False: something is unusual."""
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
                    # Layout, quantised, conjugated, negated and inference tensors: each has a key of its own.
                    torch._C._dispatch_keys(value).raw_repr(),
                )
            elif kind in _PLAIN:
                parts += (kind, value)  # 1, 1.0 and True are equal
            elif kind in _SEQUENCES:
                if len(value) > _LONGEST and not long:
                    return False
                parts += (kind, len(value))
                if not self._add(parts, value, long):
                    return False
            else:
                return False
        return True

    # ---- what is not known yet ----

    def _learn(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], rule: Rule | None
    ) -> tuple[Any, Make | None]:
        """(the result, how it is made again): asks the rule, or torch, and keeps what torch's cache has kept."""
        if rule is not None:
            result = rule(*args, **kwargs)
            return result, self._maker(_entry(result), func, args, result)
        mode: Any = self._mode
        torchs: Any = fake_tensor
        try:
            with torch._C._DisableTorchDispatch():
                theirs = mode._cache_key(torchs._CacheKeyState(None), func, args, kwargs)
        except Exception:  # torch raises where it keeps nothing
            theirs = None
        result = func(*args, **kwargs)
        entry = None if theirs is None else FakeTensorMode.cache.get(theirs)
        return result, self._maker(entry, func, args, result)

    def _maker(self, entry: Any, func: Any, args: tuple[Any, ...], result: Any) -> Make | None:
        if not isinstance(entry, fake_tensor._DispatchCacheValidEntry | SimpleNamespace):
            return None
        makers = [self._one(info, func) for info in entry.output_infos]
        results = result if entry.is_output_tuple else (result,)
        container = list if isinstance(result, list) else tuple
        if len(makers) != len(results) or any(maker is None for maker in makers):
            return None
        chosen: list[Make] = [maker for maker in makers if maker is not None]
        if not all(_alike(maker(args), each) for maker, each in zip(chosen, results, strict=True)):
            return None
        if entry.is_output_tuple:
            return lambda args: container([maker(args) for maker in chosen])
        return chosen[0]

    def _one(self, info: Any, func: Any) -> Make | None:
        """How one result is made (torch 2.13: fake_tensor.py, `_get_output_tensor_from_cache_entry`)."""
        position = info.inplace_idx
        if position is not None:
            return lambda args: args[position]
        if info.metadata is None:
            constant = info.constant_value
            return (lambda args: constant) if constant is None or isinstance(constant, int) else None
        about = info.metadata
        if about.layout is not torch.strided or about.is_conj or about.is_neg:
            return None
        shape, stride, offset = tuple(about.shape), tuple(about.stride), about.storage_offset
        options = {"dtype": about.dtype, "device": "meta", "requires_grad": about.requires_grad}
        needs_gradient, device = about.requires_grad, about.device
        attributes = self._attributes_on(device)
        viewed = info.view_idx
        empty_strided, no_modes = torch.empty_strided, torch._C._DisableTorchDispatch
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

    def _attributes_on(self, device: torch.device) -> dict[str, Any]:
        """What a new fake tensor on this device has as attributes."""
        known = self._attributes.get(device)
        if known is None:
            with torch._C._DisableTorchDispatch():
                made: Any = FakeTensor(self._mode, torch.empty(0, device="meta"), device)
            known = self._attributes[device] = dict(vars(made))
        return known


@functools.cache
def _is_silent(func: Any) -> bool:
    """Whether it only writes to the tensors of lists: a step of an optimizer, gradients being scaled. It makes nothing
    and gives nothing, and who calls it has put together what belongs together (torch.optim, by device and type)."""
    schema = func._schema
    return not schema.returns and schema.name.startswith(("aten::_foreach_", "aten::_fused_"))


@functools.cache
def _makes_new(func: Any) -> bool:
    """Whether it gives a list of new tensors, one for each of a list: a norm, a square root."""
    schema = func._schema
    plain = all(each.alias_info is None for each in schema.arguments)
    return plain and bool(schema.returns) and schema.name.startswith("aten::_foreach_")


def _entry(result: Any) -> SimpleNamespace:
    """An entry as torch's cache would have it, of a result in new tensors."""
    several = isinstance(result, tuple | list)
    results = result if several else (result,)
    infos = [
        SimpleNamespace(
            inplace_idx=None,
            view_idx=None,
            constant_value=each,
            metadata=extract_tensor_metadata(each) if isinstance(each, torch.Tensor) else None,
        )
        for each in results
    ]
    return SimpleNamespace(output_infos=infos, is_output_tuple=several)


def _alike(made: Any, given: Any) -> bool:
    """Whether a result that was made here is what torch gave."""
    if not isinstance(given, FakeTensor):
        return given is None or (type(made) is type(given) and bool(made == given))
    if made is given:
        return True
    if not isinstance(made, FakeTensor):
        return False
    return _description(made) == _description(given)


def _description(tensor: Any) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return (
        tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), storage.nbytes(), _device_of(tensor),
        tensor.requires_grad, torch._C._dispatch_keys(tensor).raw_repr(), vars(tensor).keys(),
    )  # fmt: skip


def quick_dispatch(mode: type) -> None:
    """Makes torch's way to the tracer shorter. To be called before the first operation under a dispatch mode: torch
    keeps what it finds then.

    * Before it calls a mode, torch looks for a rule that somebody registered for this operation and this class of mode
      (torch 2.13: _library/simple_registry.py, `find_torch_dispatch_rule`). For `mode` there is none.
    * Optimizers ask each tensor of their lists for its device and type, to put together what belongs together (torch
      2.13: utils/_foreach_utils.py). Where all are alike, the lists stay as they are.
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
        kinds = {(each.fake_device, each.dtype) if each.__class__ is FakeTensor else None for each in lists[0]}
        if len(kinds) != 1 or None in kinds:
            return group(lists, with_indices)
        indices = list(range(len(lists[0]))) if with_indices else []
        return {kinds.pop(): ([list(each) for each in lists], indices)}

    core._group_tensors_by_device_and_dtype = grouped
