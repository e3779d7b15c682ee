"""Products, copies, attention and launches in the sizes of typical steps, timed: what `--calibrate` runs in a process
of its own. In: the device. Out: of each kind of work what was computed, and how long it took. torch only.

What is computed is recorded as a plan's traces record it (`operations_of`), so that measured and predicted seconds are
of the same rows.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memkit.prediction.child.operation_work import operations_of
from hf_memkit.prediction.work import Operation, Work

_LIMIT_S: Final = 45.0
"""After which no other probe is begun."""

_PROBE_S: Final = 0.3
"""For which one is repeated, at least; as long again to warm up, so that the GPU's clock is that of a long run."""

_REPEATS: Final = 5
_LARGE: Final = (4096, 4096, 2048, 32, 2**27)
_SMALL: Final = (256, 512, 128, 4, 2**22)
"""Rows and width of products, length and heads of attention, elements of sums: of a GPU; of a CPU, for tests."""


@dataclass(frozen=True, slots=True)
class Probe:
    """
    Attributes:
        kind: a kind of operation, or `"host"`: small operations, which the GPU does faster than they are queued.
        name: what it is, for people.
        run: does it once.
    """

    kind: str
    name: str
    run: Callable[[], Any]


def probes(device: str) -> Iterator[Probe]:
    """What is measured, made when it is its turn."""
    on_gpu = device != "cpu"
    rows, width, length, heads, elements = _LARGE if on_gpu else _SMALL
    dtype = torch.float32
    if on_gpu:
        dtype = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float16
    for name, columns, inner in (
        ("attention projections", width, width),
        ("MLP up", 4 * width, width),
        ("MLP down", width, 4 * width),
    ):
        left = torch.randn(rows, inner, device=device, dtype=dtype)
        right = torch.randn(columns, inner, device=device, dtype=dtype)
        yield Probe(
            "matmul", f"{name}, {rows} × {columns} × {inner}", functools.partial(torch.matmul, left, right.t())
        )
    values = torch.randn(elements, device=device, dtype=dtype)
    yield Probe("memory", f"a sum of {elements} elements", functools.partial(torch.add, values, values.clone()))
    table = values.view(-1, width)
    yield Probe("memory", f"softmax of rows of {width}", functools.partial(torch.softmax, table, -1))
    if on_gpu:
        yield Probe("attention", f"causal, {length} tokens, forward and backward", _attention(heads, length, dtype))
        pinned = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(2**28, dtype=torch.uint8, device=device)
        yield Probe("transfer", "256 MiB from page-locked RAM", functools.partial(target.copy_, pinned, True))
    yield Probe("host", "small modules, forward and backward", _small_modules(device))


def _attention(heads: int, length: int, dtype: torch.dtype) -> Callable[[], Any]:
    shape = (4, heads, length, 128)
    query, key, value = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))

    def attend() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), query)  # no sums in `.grad`, as `backward` makes them

    return attend


def _small_modules(device: str) -> Callable[[], Any]:
    block = _Block().to(device)
    trained = list(block.parameters())
    some = torch.randn(8, 32, device=device)

    def step() -> None:
        torch.autograd.grad(block(some).sum(), trained)

    return step


class _Block(torch.nn.Module):
    """Modules as in a transformer's layers, so small that queueing them takes longest."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(32), torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)
            )
            for _ in range(24)
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            states = states + layer(states)
        return states


def measure(device: str, limit_s: float = _LIMIT_S) -> list[dict[str, Any]]:
    """Of each probe `{"kind", "name", "work", "seconds"}`: `work` as `Work.to_json` has it, median seconds."""
    until = time.monotonic() + limit_s
    found = []
    for probe in probes(device):
        if time.monotonic() > until:
            break
        work = recorded(probe.run, device)
        seconds = _timed(probe.run, device)
        found.append({"kind": probe.kind, "name": probe.name, "work": work.to_json(), "seconds": seconds})
    return found


def recorded(run: Callable[[], Any], device: str) -> Work:
    """What is computed in one run."""
    mode = _Recorder(device)
    with mode:
        run()
    _wait(device)
    return mode.work


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work, self._device = Work(), device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        engine = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        for each in operations_of(func, args, kwargs, result, self._device):
            values = {name: getattr(each, name) for name in Operation.__slots__}
            self.work.calls.append(len(self.work.operations))
            self.work.operations.append(Operation(**{**values, "from_autograd": engine}))
        return result


def _timed(run: Callable[[], Any], device: str) -> float:
    """Seconds of one run: so many are queued that the wait at the end does not count."""
    run()
    _wait(device)
    begin = time.perf_counter()
    run()
    _wait(device)
    once = max(time.perf_counter() - begin, 1e-6)
    times = max(3, int(_PROBE_S / _REPEATS / once))
    found = []
    for _ in range(2 * _REPEATS):
        begin = time.perf_counter()
        for _ in range(times):
            run()
        _wait(device)
        found.append((time.perf_counter() - begin) / times)
    return statistics.median(found[_REPEATS:])


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(sys.argv[1])))
