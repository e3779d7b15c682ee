"""Records the operations of a traced training, call by call.

The tracer records each operation; kernels outside the dispatcher are recorded by `launched`, or listed in
`NOT_COUNTED` with the reason (tests/prediction/test_work_recorder.py finds kernels with neither).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import distributed

from hf_memkit.common.terms import Phase
from hf_memkit.prediction.child.tracer.fast_fakes import CacheEntry
from hf_memkit.prediction.child.tracer.operation_work import kernel_operation, operations_of
from hf_memkit.prediction.child.tracer.plain_tensors import device_type, plain_tensors_in
from hf_memkit.prediction.trace.work import EXCHANGES, Caller, Operation, Wait, Work

NOT_COUNTED: Final[Mapping[str, str]] = {
    "prefetch_tensor": "bitsandbytes fetches paged states ahead; they stay on the GPU while there is room",
    "fill": "bitsandbytes fills new paged states, once",
    "stable_randn": "APOLLO's projection is drawn by torch.randn here, which passes the dispatcher",
    "is_pinned": "a query, no kernel",
    "pin_memory": "a copy within RAM, in another thread of a run",
    "record_stream": "no kernel",
}
"""Functions that this package replaces, which may run a kernel or a copy, and are not recorded → the reason."""

_FUNCTIONAL: Final[Mapping[str, str]] = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
}
"""Operations of `_c10d_functional` → the collective."""


class WorkRecorder:
    """Fills `work` with the operations on one type of device."""

    def __init__(self, device_type: str) -> None:
        self.work = Work()
        self.device_type = device_type
        self.in_compiled_code = False
        self.with_streams = False  # whether to record streams and collectives; without them all runs on one stream
        self._stream = 0
        self._numbers: dict[Operation, int] = {}

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, entry: CacheEntry | None
    ) -> None:
        """Records a call of an operation. `entry`: its cache entry for such arguments, if any."""
        if self.with_streams and func.namespace == "_c10d_functional":
            self._functional_collective(func.__name__, args)
            return
        caller = self._caller()
        key = caller, self._stream
        rows = entry.work.get(key) if entry is not None else None
        if rows is None:
            rows = self._rows(operations_of(func, args, kwargs, result, self.device_type), caller)
            if entry is not None:
                entry.work[key] = rows
        self.work.calls += rows

    def on_stream(self, stream: int) -> None:
        """Operations are called on this stream from now on."""
        if self.with_streams:
            self._stream = stream

    def wait(self, stream: int, on: int, until: int) -> None:
        """Records that one stream waits for another, as `Wait` describes."""
        if self.with_streams and stream != on and until:
            self.work.waits.append(Wait(len(self.work.calls), stream, on, until))

    def collective(self, name: str, whole_bytes: int, dtype: torch.dtype, ranks: Sequence[int]) -> None:
        """Records a collective of these ranks, if streams are recorded.

        Args:
            name: `"all-gather"`, `"reduce-scatter"`, `"all-reduce"` or `"all-to-all"`.
            whole_bytes: of the gathered tensor, or of the one that is reduced or exchanged.
        """
        size = len(ranks)
        if not self.with_streams or size < 2:
            return
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        on_node = sum(rank // per_node == ranks[0] // per_node for rank in ranks)
        sent = (size - 1) * whole_bytes * (2 if name == "all-reduce" else 1) // size
        self.add(
            Operation(name, "collective", str(dtype).removeprefix("torch."), 0, sent, ranks=size, on_node=on_node)
        )

    def _functional_collective(self, operation: str, args: tuple[Any, ...]) -> None:
        """Records a collective of `torch.distributed._functional_collectives`, as DTensor and ring attention use them,
        or a wait for it."""
        kind = operation.partition(".")[0]
        if kind == "wait_tensor":
            self.wait_for_exchanges()
        name = _FUNCTIONAL.get(kind)
        if name is None:
            return
        group = next(arg for arg in reversed(args) if isinstance(arg, str))
        resolve: Any = distributed.distributed_c10d.__dict__["_resolve_process_group"]
        ranks = distributed.get_process_group_ranks(resolve(group))
        whole_bytes = args[0].nbytes * (len(ranks) if name == "all-gather" else 1)
        computing = self._stream
        self.wait(EXCHANGES, computing, len(self.work.calls))
        self._stream = EXCHANGES
        self.collective(name, whole_bytes, args[0].dtype, ranks)
        self._stream = computing

    def wait_for_exchanges(self) -> None:
        """Records that the current stream waits for all functional collectives so far."""
        self.wait(self._stream, EXCHANGES, len(self.work.calls))

    def add(self, *operations: Operation) -> None:
        """Records operations that the caller has created."""
        self.work.calls += self._rows(operations, self._caller())

    def repeat(self, begin: int, times: float, name: str) -> None:
        """Records `times` untraced repetitions of the calls from `begin` on, as one operation."""
        rows = [self.work.operations[call] for call in self.work.calls[begin:]]
        flops, moved = (sum(getattr(row, field) for row in rows) for field in ("flops", "moved_bytes"))
        launches = max(1, round(times * sum(row.launches for row in rows)))
        dtype = rows[0].dtype if rows else ""
        self.add(Operation(name, "unknown", dtype, round(times * flops), round(times * moved), launches=launches))

    def end_phase(self, phase: Phase) -> None:
        """Assigns all calls since the last boundary to `phase`."""
        self.work.marks.append((len(self.work.calls), phase))

    def _caller(self) -> Caller:
        if self.in_compiled_code:
            return "compiled"
        in_engine = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        return "autograd" if in_engine else "python"

    def _rows(self, operations: Iterable[Operation], caller: Caller) -> tuple[int, ...]:
        return tuple(self._number(operation, caller) for operation in operations)

    def _number(self, operation: Operation, caller: Caller) -> int:
        if caller != "python" or self._stream:
            operation = replace(operation, called_by=caller, stream=self._stream)
        number = self._numbers.get(operation)
        if number is None:
            number = self._numbers[operation] = len(self.work.operations)
            self.work.operations.append(operation)
        return number


_active: list[WorkRecorder] = []  # the recorder of this process: each case has a separate process and one tracer


def activate(recorder: WorkRecorder | None) -> None:
    """Makes `recorder` the one that `launched` uses; None: it records nothing."""
    _active[:] = [recorder] if recorder is not None else []


def active_recorder() -> WorkRecorder | None:
    """The recorder of this process; None if no work is recorded."""
    return _active[0] if _active else None


@contextlib.contextmanager
def separate_recorder() -> Iterator[None]:
    """Makes the recorder of before active again at its end, whatever was activated within it."""
    before = _active[:]
    try:
        yield
    finally:
        _active[:] = before


def repetitions(name: str) -> Callable[[float], None]:
    """Starts a loop traced in part; call the result at its end with the ratio of untraced to traced turns."""
    if not _active:
        return lambda times: None
    recorder, begin = _active[0], len(_active[0].work.calls)
    return lambda times: recorder.repeat(begin, times, name) if times > 0 else None


@contextlib.contextmanager
def compiled_code() -> Iterator[None]:
    """Records the operations within it as called by compiled code, if work is recorded."""
    recorder = _active[0] if _active else None
    if recorder is None or recorder.in_compiled_code:
        yield
        return
    recorder.in_compiled_code = True
    try:
        yield
    finally:
        recorder.in_compiled_code = False


def launched(name: str, arguments: Iterable[Any], **fields: Any) -> None:
    """Records a kernel that would be launched outside the dispatcher, if work is recorded; not one whose tensors are
    all on another device."""
    if not _active:
        return
    device = _active[0].device_type
    tensors = list(plain_tensors_in(arguments))
    if not tensors or any(device_type(tensor) == device for tensor in tensors):
        _active[0].add(kernel_operation(name, tensors, device, **fields))
