"""Records what a traced training computes, call by call. The tracer tells it of each operation; kernels that don't
pass the dispatcher are told by `launched`, or stand in `NOT_TOLD` with the reason
(tests/prediction/test_work_recorder.py looks for those that do neither)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from hf_memkit.common.terms import Phase
from hf_memkit.prediction.child.tracer.fast_fakes import Known
from hf_memkit.prediction.child.tracer.operation_work import beside_dispatcher, operations_of
from hf_memkit.prediction.trace.work import Operation, Work

NOT_TOLD: Final[Mapping[str, str]] = {
    "prefetch_tensor": "bitsandbytes fetches paged states ahead; they stay on the GPU while there is room",
    "fill": "bitsandbytes fills new paged states, once",
    "stable_randn": "APOLLO's projection is drawn by torch.randn here, which passes the dispatcher",
    "is_pinned": "a question, no kernel",
    "pin_memory": "a copy within RAM, in another thread of a run",
    "record_stream": "no kernel",
}
"""What is replaced in this package, may run a kernel or a copy, and has no row; with the reason."""


class WorkRecorder:
    """Fills `work` with what is computed on one type of device."""

    def __init__(self, device_type: str) -> None:
        self.work = Work()
        self.device_type = device_type
        self._numbers: dict[Operation, int] = {}

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, known: Known | None
    ) -> None:
        """An operation has been called. `known`: what is remembered of it on such arguments; None: nothing is."""
        engine = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        if known is None:
            self.work.calls += self._rows(operations_of(func, args, kwargs, result, self.device_type), engine)
            return
        rows = known.engine_work if engine else known.work
        if rows is None:
            rows = self._rows(operations_of(func, args, kwargs, result, self.device_type), engine)
            if engine:
                known.engine_work = rows
            else:
                known.work = rows
        self.work.calls += rows

    def add(self, *operations: Operation) -> None:
        """Rows that the caller has made itself."""
        engine = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        self.work.calls += self._rows(operations, engine)

    def again(self, begin: int, times: float, name: str) -> None:
        """The calls from `begin` on come so many times more, which are not traced: one row for all of them."""
        rows = [self.work.operations[each] for each in self.work.calls[begin:]]
        flops, moved = (sum(getattr(each, field) for each in rows) for field in ("flops", "moved_bytes"))
        launches = max(1, round(times * sum(each.launches for each in rows)))
        dtype = rows[0].dtype if rows else ""
        self.add(Operation(name, "unknown", dtype, round(times * flops), round(times * moved), launches=launches))

    def ended(self, phase: Phase) -> None:
        """What has been called since the last boundary fell into `phase`."""
        self.work.marks.append((len(self.work.calls), phase))

    def _rows(self, operations: Iterable[Operation], engine: bool) -> tuple[int, ...]:
        return tuple(self._number(each, engine) for each in operations)

    def _number(self, operation: Operation, engine: bool) -> int:
        if engine:
            operation = replace(operation, from_autograd=True)
        number = self._numbers.get(operation)
        if number is None:
            number = self._numbers[operation] = len(self.work.operations)
            self.work.operations.append(operation)
        return number


_active: list[WorkRecorder] = []
"""The recorder of this process: a case has a process of its own, and one tracer."""


def activate(recorder: WorkRecorder) -> None:
    """Makes `recorder` the one that `launched` tells."""
    _active[:] = [recorder]


def turns(name: str) -> Callable[[float], None]:
    """A loop begins, of which only some turns are traced; what comes back is told, at its end, how often those come
    besides."""
    if not _active:
        return lambda times: None
    recorder, begin = _active[0], len(_active[0].work.calls)
    return lambda times: recorder.again(begin, times, name) if times > 0 else None


def launched(name: str, arguments: Iterable[Any], **fields: Any) -> None:
    """A kernel would run now that no dispatcher sees: its row, if work is recorded at all."""
    if _active:
        _active[0].add(beside_dispatcher(name, arguments, _active[0].device_type, **fields))
