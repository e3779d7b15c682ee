"""Records every storage that torch operations allocate on one type of device, and when it is freed.

A dispatch mode sees each operation below autograd and autocast, also those of the backward pass and of the optimizer.
A weak reference reports when a storage is freed. The order of events is that of the real run, except for cycles that
the garbage collector would find later.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Self

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.tensor import DTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_memkit.common.errors import Unmodelled
from hf_memkit.common.terms import CATEGORIES, Category, Phase
from hf_memkit.prediction.child.tracer.constant_propagation import WITHOUT_FAKE, KnownValues
from hf_memkit.prediction.child.tracer.cuda_dtypes import REFUSED, refuse_types
from hf_memkit.prediction.child.tracer.fast_fakes import FastFakes
from hf_memkit.prediction.child.tracer.gpu_events import GpuEvents
from hf_memkit.prediction.child.tracer.host_memory import HostWatch
from hf_memkit.prediction.child.tracer.kernel_rules import KERNEL_RULES
from hf_memkit.prediction.child.tracer.plain_tensors import device_type, is_fake, plain_tensors_in
from hf_memkit.prediction.child.tracer.work_recorder import WorkRecorder, activate
from hf_memkit.prediction.trace.trace import ABSENT_GRADIENT, Trace

_DEVICE: Final = torch.ops.prim.device.default
_ITEM: Final = torch.ops.aten._local_scalar_dense.default
_COMPARISONS_OF_TENSORS: Final = frozenset({torch.ops.aten.allclose.default, torch.ops.aten.equal.default})
_ASSUMED_FALSE: Final = tuple(f"aten.{name}." for name in ("isnan", "isinf", "any", "ne", "lt", "le", "gt", "ge"))
"""Operations whose bool is assumed to be False: no overflow, no LayerDrop."""
_LAYERDROP_COMPARISONS: Final = frozenset({torch.ops.aten.lt.Scalar, torch.ops.aten.lt.Tensor})
"""Comparisons by which LayerDrop uses a number drawn on the host. Others there are checks that a training passes."""
_CAST: Final = torch.ops.aten._to_copy.default
_ZEROS: Final = torch.ops.aten.zeros.default

_ADD: Final = torch.ops.aten.add.Tensor
_SHAPE_RULES: Final = frozenset(op for op in KERNEL_RULES if op is not _ADD and not op._schema.is_mutable)
"""Operations whose rule depends only on metadata and makes new tensors; a backward sum also depends on references."""

_DTENSOR: Final = DTensor

_RULES: Final = {id(operation): rule for operation, rule in WITHOUT_FAKE.items()}
"""By id, here and below, because hashing an operation runs Python code."""


_stream: Final = [0]  # of this process, as each case has a separate process


def allocate_on(stream: int) -> None:
    """From now on storages are allocated on the CUDA stream with this number; 0: the default one."""
    _stream[0] = stream


class StorageTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills `trace` while it is active.

    Args:
        device_type: device whose storages are recorded, such as `"cuda"`.
        capability: of the GPU whose libraries' memory is added; None: none is added.
        work: whether `recorder` records operations, too.
    """

    def __init__(self, device_type: str, capability: tuple[int, int] | None = None, *, work: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace(operations=[""], modules=[""])  # complete after `finish`
        self.default: Category = "other"  # of new storages that nothing else labels
        self.items: Counter[str] = Counter()  # number of made-up values that were read, by module
        self.made_up: Callable[[], None] = lambda: None  # called for each of them
        self._until: float | None = None
        self._limit_s = 0.0
        self.device_type = device_type
        self.host = HostWatch() if device_type != "cpu" else None  # RAM of tensors while a GPU trains
        self.recorder = WorkRecorder(device_type) if work else None
        if self.recorder is not None:
            self.trace.work = self.recorder.work
            activate(self.recorder)
        self._gpu = GpuEvents(capability, self.keep) if capability is not None else None
        self._live: dict[int, int] = {}  # address of a storage → its number
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._operation_ids: dict[int | str, int] = {}
        self._module_ids: dict[str, int] = {"": 0}
        self._emptied: set[int] = set()  # addresses of storages that were resized to nothing
        self._module = 0
        self.known = KnownValues()  # values of fake tensors that follow from known ones
        self._values: KnownValues | None = None  # `known` once tensors are fake
        self._fakes: FastFakes
        self._refused = REFUSED if device_type == "cuda" else {}

    def stop_recording_work(self) -> None:
        """From now on records storages only."""
        self.recorder = self.trace.work = None
        activate(None)

    def __enter__(self) -> Self:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if mode is not None and self._values is None:
            self._values = self.known
            self._fakes = FastFakes(mode)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @property
    def module(self) -> str:
        """Dotted name of the running module."""
        return self.trace.modules[self._module]

    @module.setter
    def module(self, name: str) -> None:
        number = self._module_ids.get(name)
        if number is None:
            number = self._module_ids[name] = len(self.trace.modules)
            self.trace.modules.append(name)
        self._module = number

    def end_phase(self, phase: Phase) -> None:
        """Assigns everything since the last call to `phase`."""
        self.trace.marks.append((len(self.trace.events), phase))
        if self.recorder is not None:
            self.recorder.end_phase(phase)
        if self.host is not None:
            self.host.end_phase(phase)

    def label(self, tensors: Iterable[Any], category: Category) -> None:
        """Sets the category of the storages of `tensors`."""
        number = CATEGORIES.index(category)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and device_type(tensor) == self.device_type:
                for plain in plain_tensors_in((tensor,)):
                    storage = self._live.get(plain.untyped_storage()._cdata)
                    if storage is not None:
                        self.trace.category_of[storage - 1] = number

    def adopt(self, weights: Iterable[torch.Tensor]) -> None:
        """Records weights that were allocated before the tracer was active."""
        tensors = list(weights)
        self.default, before = "weights", self.default
        for tensor in tensors:
            self._watch(tensor, "before training", ())
        self.default = before
        self.label(tensors, "weights")

    def keep(self, size_bytes: int, category: Category, operation: str) -> None:
        """Records memory of the device's libraries that is allocated now and stays."""
        self._allocate(size_bytes, category, self._operation(operation))

    def live_bytes(self) -> tuple[int, int]:
        """(allocated bytes now, their maximum so far)."""
        sizes = self.trace.sizes_bytes
        totals = list(
            itertools.accumulate(sizes[event - 1] if event > 0 else -sizes[-event - 1] for event in self.trace.events)
        )
        return (totals[-1], max(totals)) if totals else (0, 0)

    def finish(self, phase: Phase) -> Trace:
        """The trace; events after the last boundary belong to `phase`. Frees between two allocations are sorted by
        allocation order: autocast frees its copies in the order of their addresses, which differs between processes.
        """
        self.end_phase(phase)
        start = 0
        for end, _ in self.trace.marks:
            events = self.trace.events[start:end]
            for made, group in itertools.groupby(enumerate(events), lambda pair: pair[1] > 0):
                if not made:
                    indices, freed = zip(*group, strict=True)
                    events[indices[0] : indices[-1] + 1] = sorted(freed, reverse=True)
            self.trace.events[start:end] = events
            start = end
        return self.trace

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is recorded when it runs, not while it is compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled, and keeping torch.compile out of every call would take a fifth of the time."""
        return False

    @contextlib.contextmanager
    def limited(self, limit_s: float) -> Iterator[None]:
        """Within it the first operation after `limit_s` seconds raises Unmodelled; an outer limit takes precedence."""
        outer = self._until
        if outer is None:
            self._until, self._limit_s = time.monotonic() + limit_s, limit_s
        try:
            yield
        finally:
            self._until = outer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _DTENSOR in types:
            return NotImplemented  # what it does to this rank's part comes here, too
        if func is _DEVICE and (device := getattr(args[0], "fake_device", None)) is not None:
            return device  # read by autograd and optimizers twice as often as they compute
        if self._until is not None and time.monotonic() > self._until:
            raise Unmodelled(f"the end of its first {self._limit_s:.0f} s")
        kwargs = kwargs or {}
        if (refusal := self._refused.get(id(func))) is not None:
            refuse_types(func, args, kwargs, refusal, self.module)
        values, entry = self._values, None
        if values is None:
            result = func(*args, **kwargs)
        elif func is _ITEM and is_fake(args[0]):
            if self.recorder is not None:
                self.recorder.call(func, args, kwargs, None, None)
            return self._item(args[0], values)
        else:
            try:
                rule = _RULES.get(id(func))
                if rule is None or func in _SHAPE_RULES:
                    result = self._fakes.run(func, args, kwargs, rule)
                    entry = self._fakes.last
                elif func is _ADD and torch._C._current_graph_task_id() == -1:
                    result = self._fakes.run(func, args, kwargs)
                    entry = self._fakes.last
                else:
                    result = rule(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                if func in _COMPARISONS_OF_TENSORS:
                    try:
                        return values.compute(func, args, kwargs)
                    except LookupError:
                        return True  # components compare their result with the model's
                result = values.shaped(func, args, kwargs)
            values.follow(func, args, kwargs, result)
        if self.recorder is not None:
            self.recorder.call(func, args, kwargs, result, entry)
        if isinstance(result, torch.Tensor):
            self._watch(result, func, args)
        elif isinstance(result, tuple | list):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self._watch(item, func, args)
                elif isinstance(item, tuple | list):
                    for leaf in tree_leaves(item):
                        if isinstance(leaf, torch.Tensor):
                            self._watch(leaf, func, args)
        if self._gpu is not None and (scratch := self._gpu.scratch(func, args, kwargs)):
            number = self._allocate(scratch, self.default, self._operation(f"{func} (scratch)"))
            self.trace.events.append(-number)
        return result

    def _item(self, tensor: torch.Tensor, values: KnownValues) -> bool | float:
        value = values.of(tensor)
        if value is not None:
            with no_dispatch():
                return value.item()
        self.items[self.module] += 1
        self.made_up()
        if tensor.dtype is not torch.bool:
            return 1.0 if tensor.dtype.is_floating_point else 1
        number = self._live.get(tensor.untyped_storage()._cdata)
        operation = getattr(tensor, "memkit_made_by", "")
        if number is not None:
            operation = self.trace.operations[self.trace.operation_of[number - 1]]
        return not operation.startswith(_ASSUMED_FALSE)

    def _watch(self, tensor: torch.Tensor, func: Any, args: tuple[Any, ...]) -> None:
        if hasattr(tensor, "__tensor_flatten__") and not is_fake(tensor):
            for inner in plain_tensors_in((tensor,)):
                self._watch(inner, func, args)
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._live:
            return
        if device_type(tensor) != self.device_type:
            if self.host is not None and device_type(tensor) == "cpu" and is_fake(tensor):
                self.host.watch(tensor, func)
                if func in _LAYERDROP_COMPARISONS:
                    tensor.memkit_made_by = str(func)  # type: ignore[attr-defined]
            return
        size = storage.nbytes()
        if size == 0:
            return
        category = self.default
        if func is _CAST and self._category_of(args[0]) == "weights":
            category = "weights"  # autocast's 16-bit copy, which lives until autocast ends
        operation = f"{func} {ABSENT_GRADIENT}" if func is _ZEROS and _is_absent_gradient() else func
        number = self._allocate(size, category, self._operation(operation))
        self._live[address] = number
        self._watched[number] = weakref.ref(storage, lambda _: self._freed(address, number))

    def resized(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Records that a storage has been resized in place."""
        address = storage._cdata
        number = self._live.get(address)
        if number is not None:
            self._freed(address, number)
            self._emptied.add(address)
        if size_bytes and address in self._emptied:
            self._emptied.discard(address)
            number = self._allocate(size_bytes, "buffers", self._operation("UntypedStorage.resize_"))
            self._live[address] = number
            self._watched[number] = weakref.ref(storage, lambda _: self._freed(address, number))

    def _freed(self, address: int, number: int) -> None:
        if self._live.get(address) == number:
            del self._live[address]
        self._watched.pop(number, None)
        self.trace.events.append(-number)

    def _allocate(self, size_bytes: int, category: Category, operation: int) -> int:
        category_number = CATEGORIES.index(category)
        number = self.trace.add(size_bytes, category_number, operation, self._module, _stream[0])
        self.trace.events.append(number)
        return number

    def _category_of(self, tensor: Any) -> Category | None:
        if not isinstance(tensor, torch.Tensor) or device_type(tensor) != self.device_type:
            return None
        number = self._live.get(tensor.untyped_storage()._cdata)
        return None if number is None else CATEGORIES[self.trace.category_of[number - 1]]

    def _operation(self, func: Any) -> int:
        key = func if isinstance(func, str) else id(func)
        number = self._operation_ids.get(key)
        if number is None:
            number = self._operation_ids[key] = len(self.trace.operations)
            self.trace.operations.append(str(func))
        return number


def _is_absent_gradient() -> bool:
    """Whether autograd creates zeros for an output of compiled code that the loss does not use: AOTAutograd wants a
    gradient for each output (pytorch#131794)."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "CompiledFunctionBackward"
