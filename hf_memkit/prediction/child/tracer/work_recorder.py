"""Records the operations of a traced training, call by call.

The tracer records each operation; kernels outside the dispatcher are recorded by `launched`, or listed in
`NOT_COUNTED` with the reason (tests/prediction/test_work_recorder.py finds kernels with neither).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from hf_memkit.common.terms import Phase
from hf_memkit.prediction.child.tracer.fast_fakes import CacheEntry
from hf_memkit.prediction.child.tracer.operation_work import kernel_operation, operations_of
from hf_memkit.prediction.trace.work import Operation, Work

NOT_COUNTED: Final[Mapping[str, str]] = {
    "prefetch_tensor": "bitsandbytes fetches paged states ahead; they stay on the GPU while there is room",
    "fill": "bitsandbytes fills new paged states, once",
    "stable_randn": "APOLLO's projection is drawn by torch.randn here, which passes the dispatcher",
    "is_pinned": "a query, no kernel",
    "pin_memory": "a copy within RAM, in another thread of a run",
    "record_stream": "no kernel",
}
"""Functions that this package replaces, which may run a kernel or a copy, and are not recorded → the reason."""


class WorkRecorder:
    """Fills `work` with the operations on one type of device."""

    def __init__(self, device_type: str) -> None:
        self.work = Work()
        self.device_type = device_type
        self._numbers: dict[Operation, int] = {}

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, entry: CacheEntry | None
    ) -> None:
        """Records a call of an operation. `entry`: its cache entry for such arguments, if any."""
        engine = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        if entry is None:
            self.work.calls += self._rows(operations_of(func, args, kwargs, result, self.device_type), engine)
            return
        rows = entry.engine_work if engine else entry.work
        if rows is None:
            rows = self._rows(operations_of(func, args, kwargs, result, self.device_type), engine)
            if engine:
                entry.engine_work = rows
            else:
                entry.work = rows
        self.work.calls += rows

    def add(self, *operations: Operation) -> None:
        """Records operations that the caller has created."""
        engine = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        self.work.calls += self._rows(operations, engine)

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

    def _rows(self, operations: Iterable[Operation], engine: bool) -> tuple[int, ...]:
        return tuple(self._number(operation, engine) for operation in operations)

    def _number(self, operation: Operation, engine: bool) -> int:
        if engine:
            operation = replace(operation, from_autograd=True)
        number = self._numbers.get(operation)
        if number is None:
            number = self._numbers[operation] = len(self.work.operations)
            self.work.operations.append(operation)
        return number


_active: list[WorkRecorder] = []  # the recorder of this process: each case has a separate process and one tracer


def activate(recorder: WorkRecorder) -> None:
    """Makes `recorder` the one that `launched` uses."""
    _active[:] = [recorder]


def repetitions(name: str) -> Callable[[float], None]:
    """Starts a loop traced in part; call the result at its end with the ratio of untraced to traced turns."""
    if not _active:
        return lambda times: None
    recorder, begin = _active[0], len(_active[0].work.calls)
    return lambda times: recorder.repeat(begin, times, name) if times > 0 else None


def launched(name: str, arguments: Iterable[Any], **fields: Any) -> None:
    """Records a kernel that would be launched outside the dispatcher, if work is recorded."""
    if _active:
        _active[0].add(kernel_operation(name, arguments, _active[0].device_type, **fields))
