"""Records every storage that torch operations make on one kind of device, and when it goes away. A dispatch mode sees
each operation below autograd and autocast, also those of the backward pass and of the optimizer. A weak reference
tells when a storage is freed: the order of events is that of the real run, but for cycles that the garbage collector
would find later."""

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
from hf_memkit.prediction.trace.trace import Trace

_DEVICE: Final = torch.ops.prim.device.default
_ITEM: Final = torch.ops.aten._local_scalar_dense.default
_SAME: Final = frozenset({torch.ops.aten.allclose.default, torch.ops.aten.equal.default})
_RARELY: Final = tuple(f"aten.{name}." for name in ("isnan", "isinf", "any", "ne", "lt", "le", "gt", "ge"))
"""What computes a bool that is taken for False: nothing overflows, and no layer is left out by chance."""
_BY_CHANCE: Final = frozenset({torch.ops.aten.lt.Scalar, torch.ops.aten.lt.Tensor})
"""By these LayerDrop compares what it has drawn on the host. Other comparisons there are a library's checks, which a
training passes."""
_CAST: Final = torch.ops.aten._to_copy.default

_ADD: Final = torch.ops.aten.add.Tensor
_OF_SHAPES: Final = frozenset(each for each in KERNEL_RULES if each is not _ADD and not each._schema.is_mutable)
"""Rules that follow from what their arguments are, and make new tensors; a sum in backward follows from who holds
them, too."""

_RULES: Final = {id(operation): rule for operation, rule in WITHOUT_FAKE.items()}
"""By id, here and below: an operation stays, its own hash is computed in Python."""


class StorageTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills `trace` while it is active.

    Args:
        device_type: which storages count, such as `"cuda"`.
        capability: of the GPU whose own libraries' memory is traced too; None: of none.
        work: whether what is computed is recorded too, by `recorder`.

    Attributes:
        trace: what has been recorded; complete after `finish`.
        default: the category of what is made from now on, and nothing else names.
        module: the dotted name of the module that is running, set from outside.
        items: how often the value of a tensor was asked for, by module, and was made up; then `made_up` is called.
        host: what lies in RAM beside a GPU; None: the CPU itself trains.
        known: the values of fake tensors, where they follow from what was given.
    """

    def __init__(self, device_type: str, capability: tuple[int, int] | None = None, *, work: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace(operations=[""], modules=[""])
        self.default: Category = "other"
        self.items: Counter[str] = Counter()
        self.made_up: Callable[[], None] = lambda: None
        self._until: float | None = None
        self._limit_s = 0.0
        self.device_type = device_type
        self.host = HostWatch() if device_type != "cpu" else None
        self.recorder = WorkRecorder(device_type) if work else None
        if self.recorder is not None:
            self.trace.work = self.recorder.work
            activate(self.recorder)
        self._gpu = GpuEvents(capability, self.keep) if capability is not None else None
        self._live: dict[int, int] = {}  # address of the storage → its number
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._operation_ids: dict[int | str, int] = {}
        self._module_ids: dict[str, int] = {"": 0}
        self._module = 0
        self.known = KnownValues()
        self._values: KnownValues | None = None  # the same, as soon as tensors are fake
        self._fakes: FastFakes
        self._refused = REFUSED if device_type == "cuda" else {}

    def __enter__(self) -> Self:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if mode is not None and self._values is None:
            self._values = self.known
            self._fakes = FastFakes(mode)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    # ---- told from outside ----

    @property
    def module(self) -> str:
        return self.trace.modules[self._module]

    @module.setter
    def module(self, name: str) -> None:
        number = self._module_ids.get(name)
        if number is None:
            number = self._module_ids[name] = len(self.trace.modules)
            self.trace.modules.append(name)
        self._module = number

    def ended(self, phase: Phase) -> None:
        """What has happened since the last call fell into `phase`."""
        self.trace.marks.append((len(self.trace.events), phase))
        if self.recorder is not None:
            self.recorder.ended(phase)
        if self.host is not None:
            self.host.ended(phase)

    def label(self, tensors: Iterable[Any], category: Category) -> None:
        """Names what `tensors` hold, whenever it was made."""
        number = CATEGORIES.index(category)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and device_type(tensor) == self.device_type:
                for plain in plain_tensors_in((tensor,)):
                    storage = self._live.get(plain.untyped_storage()._cdata)
                    if storage is not None:
                        self.trace.category_of[storage - 1] = number

    def adopt(self, weights: Iterable[torch.Tensor]) -> None:
        """Counts weights that were made before this was active."""
        tensors = list(weights)
        self.default, before = "weights", self.default
        for tensor in tensors:
            self._watch(tensor, "before training", ())
        self.default = before
        self.label(tensors, "weights")

    def keep(self, size_bytes: int, category: Category, operation: str) -> None:
        """Something of the device's libraries that is made now and stays."""
        self._made(size_bytes, category, self._operation(operation))

    def live_bytes(self) -> tuple[int, int]:
        """(what is allocated now, the most that was)."""
        sizes = self.trace.sizes_bytes
        totals = list(
            itertools.accumulate(sizes[each - 1] if each > 0 else -sizes[-each - 1] for each in self.trace.events)
        )
        return (totals[-1], max(totals)) if totals else (0, 0)

    def finish(self, phase: Phase) -> Trace:
        """The trace, with what came after the last boundary named `phase`."""
        self.ended(phase)
        self._order_frees()
        return self.trace

    def _order_frees(self) -> None:
        """What is freed between two allocations comes in the order in which it was made: autocast frees its copies in
        the order of their addresses, which is another one in each process."""
        start = 0
        for end, _ in self.trace.marks:
            events = self.trace.events[start:end]
            for made, group in itertools.groupby(enumerate(events), lambda pair: pair[1] > 0):
                if not made:
                    places, freed = zip(*group, strict=True)
                    events[places[0] : places[-1] + 1] = sorted(freed, reverse=True)
            self.trace.events[start:end] = events
            start = end

    # ---- what torch tells ----

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: keeping torch.compile out of every call would take a fifth of the time."""
        return False

    @contextlib.contextmanager
    def limited(self, limit_s: float) -> Iterator[None]:
        """Within it, after so many seconds the next operation is refused; within another one, by that one."""
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
        if func is _DEVICE and (device := getattr(args[0], "fake_device", None)) is not None:
            return device  # autograd and the optimizers ask for it twice as often as they compute
        if self._until is not None and time.monotonic() > self._until:
            raise Unmodelled(f"the end of its first {self._limit_s:.0f} s")
        kwargs = kwargs or {}
        if (refusal := self._refused.get(id(func))) is not None:
            refuse_types(func, args, kwargs, refusal, self.module)
        values, known = self._values, None
        if values is None:
            result = func(*args, **kwargs)
        elif func is _ITEM and is_fake(args[0]):
            if self.recorder is not None:
                self.recorder.call(func, args, kwargs, None, None)
            return self._item(args[0], values)
        else:
            try:
                rule = _RULES.get(id(func))
                if rule is None or func in _OF_SHAPES:
                    result = self._fakes.run(func, args, kwargs, rule)
                    known = self._fakes.last
                elif func is _ADD and torch._C._current_graph_task_id() == -1:
                    result = self._fakes.run(func, args, kwargs)
                    known = self._fakes.last
                else:
                    result = rule(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                if func in _SAME:
                    try:
                        return values.compute(func, args, kwargs)
                    except LookupError:
                        return True  # parts compare what they compute with what the model computes
                result = values.shaped(func, args, kwargs)
            values.follow(func, args, kwargs, result)
        if self.recorder is not None:
            self.recorder.call(func, args, kwargs, result, known)
        if isinstance(result, torch.Tensor):
            self._watch(result, func, args)
        elif isinstance(result, tuple | list):
            for each in result:
                if isinstance(each, torch.Tensor):
                    self._watch(each, func, args)
                elif isinstance(each, tuple | list):
                    for leaf in tree_leaves(each):
                        if isinstance(leaf, torch.Tensor):
                            self._watch(leaf, func, args)
        if self._gpu is not None and (scratch := self._gpu.scratch(func, args, kwargs)):
            number = self._made(scratch, self.default, self._operation(f"{func} (scratch)"))
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
        if number is None:
            operation = getattr(tensor, "memkit_made_by", "")
        else:
            operation = self.trace.operations[self.trace.operation_of[number - 1]]
        return not operation.startswith(_RARELY)

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
                if func in _BY_CHANCE:
                    tensor.memkit_made_by = str(func)  # type: ignore[attr-defined]
            return
        size = storage.nbytes()
        if size == 0:
            return
        category = self.default
        if func is _CAST and self._category_of(args[0]) == "weights":
            category = "weights"  # autocast's 16-bit copy, kept until autocast ends
        number = self._made(size, category, self._operation(func))
        self._live[address] = number
        self._watched[number] = weakref.ref(storage, lambda _: self._gone(address, number))

    def _gone(self, address: int, number: int) -> None:
        if self._live.get(address) == number:
            del self._live[address]
        self._watched.pop(number, None)
        self.trace.events.append(-number)

    def _made(self, size_bytes: int, category: Category, operation: int) -> int:
        number = self.trace.add(size_bytes, CATEGORIES.index(category), operation, self._module)
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
