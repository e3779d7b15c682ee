"""Time of an optimizer step on a GPU, computed from the operations of a trace (`work.py`).

```
host   op op op op ──────── op op op │waits        ── op op
GPU       ███ █████ ██ ████████ ██████████████████ │     ███ …
```

Python, or code that torch.compile generated, queues operations, and the GPU executes them in order. Two clocks are
simulated: the host's advances by the cost of queueing; the GPU's starts an operation when it is queued and the
previous one is finished. Where the host waits for the GPU (a value is read, a batch is copied), both clocks meet.

Work with streams, as FSDP2's, has a clock for each stream, and one for the links between GPUs:

```
all-gathers      ██████ layer 2 ██████ layer 1 │
compute          ─█████ layer 3 █████ layer 2 ███     waits for what is gathered
reduce-scatters                 ─██ layer 3 ███
```

An operation starts when its stream's previous one is finished and everything is that its stream waits for (events).
Collectives follow one another on the links, and take time from the computation beside them, as they read and write the
GPU's memory.

At most two micro-batches are traced: the first, before which there are no gradients, and one like all others; with
FSDP2 the first is like all but the last, which reduces gradients. Not included: tokenizing and decoding data,
evaluations, saves, logging to a server, and communication that is not in the trace, as DDP's and DeepSpeed's
(`hf_memkit/deepspeed/transfer_time.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hf_memkit.catalog.rates import GpuRates
from hf_memkit.common.range import ZERO, Range
from hf_memkit.common.terms import PHASES, Phase
from hf_memkit.deepspeed.transfer_time import CollectiveSeconds
from hf_memkit.prediction.time.operation_time import OperationSeconds, computes_as, product_tflops
from hf_memkit.prediction.trace.work import HOST, KINDS, Caller, Operation, Wait, Work

_CALL_S: Final[Mapping[Caller, Range]] = {
    "python": Range(10e-6, 28e-6, 46e-6),
    "autograd": Range(5e-6, 17e-6, 26e-6),
    "compiled": Range(6e-6, 10e-6, 16e-6),
}
"""To queue one operation.

python: including the modules and views around it. Measured on one core of an AMD EPYC under other load: 27 to 29 µs
(transformers 5.23, Llama, GPT-2 and LoRA of 4 tokens and 32 numbers, which that time includes computing on the CPU).
High: T5-large and Whisper in a virtual machine with an H200, where the host is the bottleneck (benchmarks/gpu.py).
Low: assumed, for a fast desktop.

autograd: 18 to 23 µs on that EPYC; low and high likewise.

compiled: inductor's launcher takes 6.8 µs for a kernel without arguments and 9.1 µs for one with 19, on a GB200
(meta-pytorch/tritonbench#1017); middle and high also allocate the result, assumed. To enter a graph takes 33 to 44 µs
there, twice a micro-batch, which `_MICRO_BATCH_S` covers.
"""

_LAUNCH_S: Final = 4e-6  # each additional kernel of an operation, `cudaLaunchKernel` alone; assumed

_MICRO_BATCH_S: Final = Range(0.5e-3, 1.5e-3, 5e-3)
"""Host time before a micro-batch: Trainer's loop and callbacks; assumed."""

_LOADER_S_PER_BYTE: Final = Range(12e-9, 18e-9, 30e-9)
"""To collate a batch of tokens from lists in the training process, as Trainer does without `dataloader_num_workers`.
The GPU is idle then, because accelerate reads a batch right after it has copied the previous one (1.15:
data_loader.py, `DataLoaderShard.__iter__`). Measured on an AMD EPYC: 100 to 230 ns per number of 8 bytes with
transformers' three collators for text, 350 ns a token (datasets 5.2, rows of 210 to 4096 tokens)."""

_STACKED_S_PER_BYTE: Final = Range(0.2e-9, 0.35e-9, 0.7e-9)
"""To stack a batch of images or sound, which are tensors in RAM, and copy it to pinned memory; without decoding.
Measured with an H200: 13 ms for 64 images (ViT)."""

_OPTIMIZER_S: Final = Range(1e-3, 3e-3, 10e-3)
"""Host time of the optimizer's step in addition to its operations: building lists of all parameters, also for
clipping, and the schedule; assumed."""

_RATES: Final = Range(1.06, 0.98, 0.85)
"""Share of the table's rates that a GPU reaches in a step: the table has one GPU of its kind, cooled in its way, with
one large product or copy after the other. The middle is fitted to half of the measured trainings
(benchmarks/plan_speed.py, `halves`); low and high are asymmetric, as measured steps are."""

_UNKNOWN: Final = Range(0.0, 1.0, 10.0)
"""Bounds for operations without a formula, in multiples of the time of their bytes."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of one optimizer step."""

    seconds: Range  # the other attributes belong to the middle
    by_phase: Mapping[Phase, float]  # adds up to it
    forward_s: float  # average of one micro-batch
    backward_s: float  # average of one micro-batch
    optimizer_s: float  # clipping (part of phase backward) and the optimizer's step
    by_kind: Mapping[str, float]  # computing time of the GPU, by kind of operation
    bound_by_launches: float  # share of the step in which the GPU waits for the host
    unknown: tuple[str, ...]  # names of operations without a formula, most calls first
    rests_on: tuple[str, ...]  # assumptions, a sentence each
    exposed_s: float = 0.0  # in which computation waits for collectives of the trace, or copies on other streams


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Calls of one phase; `begin` is the index of the first in `Work.calls`."""

    phase: Phase
    begin: int
    calls: Sequence[int]


@dataclass(slots=True)
class _Part:
    """A numbered micro-batch, or the optimizer's part of a step (number -1); the host waits for the GPU at its end."""

    number: int
    host_s: Range  # before the first call
    stretches: list[_Stretch]
    times: int = 1  # how often it is repeated

    def calls(self) -> list[int]:
        return [call for stretch in self.stretches for call in stretch.calls]


def step_time(
    work: Work,
    rates: GpuRates,
    *,
    capability: float,
    span: tuple[int, int] | None = None,
    micro_batches: int = 1,
    loader_workers: int = 0,
    hooks_s: Range = ZERO,
    host: float = 1.0,
    collective_s: Callable[[Operation], CollectiveSeconds] = lambda operation: CollectiveSeconds(ZERO, ZERO),
) -> StepTime:
    """The time of one optimizer step. Raises ValueError if there is no step, or fewer than one micro-batch.

    Args:
        rates: of the GPU (`gpu_rates.RATES`); the trace may come from another one with the same kernels.
        capability: compute capability of the GPU, such as 8.0.
        span: calls of the step: (first, one past the last). Default: the last step of `work`.
        loader_workers: `dataloader_num_workers`; with any, batches are collated in parallel to the training.
        hooks_s: host time per micro-batch for hooks of an engine that is not traced.
        host: factor by which the host is slower than computed here.
        collective_s: seconds of a collective. Default: communication takes no time.
    """
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches}: a step has at least one")
    steps = [span] if span else work.steps()
    if not steps:
        raise ValueError("no optimizer step was recorded")
    seconds = OperationSeconds(rates, capability)
    parts = _parts(work, steps[-1], micro_batches)
    if not loader_workers:
        _add_collating(work, parts)
    collectives = {
        index: collective_s(operation)
        for index, operation in enumerate(work.operations)
        if operation.kind == "collective"
    }
    durations = [
        collectives[index].on_links if index in collectives else _computing(seconds.of(operation), operation)
        for index, operation in enumerate(work.operations)
    ]
    stolen = {index: collective.in_memory for index, collective in collectives.items()}
    low, likely, high = (_Clocks(work, durations, stolen, variant, host, hooks_s[variant]) for variant in range(3))
    for clocks in (low, likely, high):
        for part in parts:
            clocks.run(part)
    middle = likely.seconds
    counts = Counter[int]()  # of each call in the whole step
    for part in parts:
        for call in part.calls():
            counts[call] += part.times
    by_kind = dict.fromkeys(KINDS, 0.0)
    unknown = Counter[str]()
    for call, count in counts.items():
        operation = work.operations[call]
        by_kind[operation.kind] += count * durations[call].middle
        if operation.kind == "unknown":
            unknown[operation.name] += count
    return StepTime(
        seconds=Range(min(low.seconds, middle), middle, max(middle, high.seconds)),
        by_phase={phase: likely.by_phase[phase] for phase in PHASES if phase in likely.by_phase},
        forward_s=likely.of_micro_batches.get("forward", 0.0) / micro_batches,
        backward_s=likely.of_micro_batches.get("backward", 0.0) / micro_batches,
        optimizer_s=likely.of_optimizer,
        by_kind={kind: seconds for kind, seconds in by_kind.items() if seconds},
        bound_by_launches=likely.idle / middle if middle else 0.0,
        unknown=tuple(name for name, _ in unknown.most_common()),
        rests_on=tuple(_rests_on([work.operations[call] for call in counts], rates, likely, unknown)),
        exposed_s=likely.exposed,
    )


_CLIPPING: Final = ("aten._foreach_norm", "aten.linalg_vector_norm")
"""First operations of gradient clipping, after the last backward pass and in its phase."""


def _parts(work: Work, span: tuple[int, int], micro_batches: int) -> list[_Part]:
    """Splits the step into micro-batches, which begin with it or after a backward pass, and the optimizer's part."""
    parts: list[_Part] = []
    before: Phase | None = None
    for start, end, phase in work.spans():
        begin, stop = max(start, span[0]), min(end, span[1])
        gathers_to_save = phase == "save" and bool(work.waits)  # FSDP2, after the last step
        steps_on_cpu = phase == "optimizer" and begin == stop and bool(work.waits and parts)  # FSDP2 with offload
        if gathers_to_save or (begin >= stop and not steps_on_cpu):
            continue
        stretch = _Stretch(phase, begin, work.calls[begin:stop])
        if not parts or (parts[-1].number >= 0 and before == "backward" and phase not in ("backward", "optimizer")):
            parts.append(_Part(len(parts), _MICRO_BATCH_S, []))
        elif phase == "optimizer" and parts[-1].number >= 0:
            parts.append(_Part(-1, _OPTIMIZER_S, []))
        parts[-1].stretches.append(stretch)
        before = phase
    # Gradient clipping, which happens once a step, moves from the last micro-batch to the optimizer's part.
    if len(parts) > 1 and parts[-1].number < 0 and parts[-2].stretches:
        last = parts[-2].stretches[-1]
        for index, call in enumerate(last.calls):
            operation = work.operations[call]
            if operation.called_by == "python" and operation.name.startswith(_CLIPPING):
                parts[-2].stretches[-1] = replace(last, calls=last.calls[:index])
                parts[-1].stretches.insert(0, _Stretch(last.phase, last.begin + index, last.calls[index:]))
                break
    traced = sum(part.number >= 0 for part in parts)
    # Only the last micro-batch of FSDP2 reduces gradients, without `sync_each_batch`.
    reduces_last = traced > 1 and _collectives(work, parts[traced - 1]) > _collectives(work, parts[0])
    for part in parts:
        if part.number < 0:
            continue
        is_last = part.number == traced - 1
        if reduces_last:
            part.times = 1 if is_last else micro_batches - 1
        else:
            part.times = max(0, micro_batches - part.number) if is_last else int(part.number < micro_batches)
    return parts


def _collectives(work: Work, part: _Part) -> int:
    """Number of collectives of a part."""
    return sum(work.operations[call].kind == "collective" for call in part.calls())


def _computing(seconds: float, operation: Operation) -> Range:
    """Seconds of an operation that the GPU computes, from those at the table's rates."""
    low, middle, high = (seconds / share for share in _RATES)
    if operation.kind == "unknown":
        return Range(low * _UNKNOWN.low, middle * _UNKNOWN.middle, high * _UNKNOWN.high)
    return Range(low, middle, high)


def _add_collating(work: Work, parts: list[_Part]) -> None:
    """Adds the time to collate the batches that are copied to the GPU. FSDP2 also copies shards from RAM, later."""
    for part in parts:
        for call in part.calls():
            operation = work.operations[call]
            if operation.kind == "transfer" and operation.stream == 0:  # FSDP2 copies offloaded shards on others
                s_per_byte = _LOADER_S_PER_BYTE if operation.dtype == "int64" else _STACKED_S_PER_BYTE
                part.host_s += s_per_byte.times(operation.moved_bytes)


class _Clocks:
    """Simulates the clocks of host and GPU over the parts of a step, in seconds.

    Args:
        durations: of each operation on the GPU.
        stolen: seconds that a collective takes from the computation beside it, by the index of its operation.
        variant: 0: low, 1: middle, 2: high.
        hooks_s: per micro-batch, spread over its operations.
    """

    def __init__(
        self,
        work: Work,
        durations: Sequence[Range],
        stolen: Mapping[int, Range],
        variant: int,
        host_factor: float,
        hooks_s: float,
    ) -> None:
        self.by_phase: dict[Phase, float] = {}
        self.of_micro_batches: dict[Phase, float] = {}
        self.of_optimizer = 0.0
        self.idle = 0.0  # the GPU waits for the host
        self.exposed = 0.0  # the GPU's default stream waits for another one
        self._work = work
        self._waits_at: dict[int, list[Wait]] = {}
        for wait in work.waits:
            self._waits_at.setdefault(wait.call, []).append(wait)
        self._variant = variant
        self._host_factor = host_factor
        self._hooks_s = host_factor * hooks_s
        self._waits = [operation.waits for operation in work.operations]
        self._seconds = [duration[variant] for duration in durations]
        self._stolen = {index: seconds[variant] for index, seconds in stolen.items()}
        self._queueing = [
            host_factor * (_CALL_S[operation.called_by][variant] + _LAUNCH_S * (operation.launches - 1))
            for operation in work.operations
        ]

    @property
    def seconds(self) -> float:
        return sum(self.by_phase.values())

    def run(self, part: _Part) -> None:
        """Adds a part to the clocks."""
        if self._waits_at:
            self._run_streams(part)
            return
        seconds, queueing, waits = self._seconds, self._queueing, self._waits  # looked up once for all calls
        host = idle = self._host_factor * part.host_s[self._variant]
        gpu = host
        hooks = 0.0  # seconds per call
        if part.number >= 0:
            hooks = self._hooks_s / max(1, len(part.calls()))
        for number, stretch in enumerate(part.stretches):
            begin = gpu if number else 0.0
            for call in stretch.calls:
                host += queueing[call] + hooks
                if host > gpu:
                    idle += host - gpu
                    gpu = host
                gpu += seconds[call]
                if waits[call]:
                    host = gpu
            self._add(part, stretch.phase, gpu - begin)
        self.idle += idle * part.times

    def _add(self, part: _Part, phase: Phase, seconds: float) -> None:
        """Adds seconds of a part to its phase."""
        taken = seconds * part.times
        self.by_phase[phase] = self.by_phase.get(phase, 0.0) + taken
        if part.number < 0:
            self.of_optimizer += taken
        else:
            self.of_micro_batches[phase] = self.of_micro_batches.get(phase, 0.0) + taken

    def _run_streams(self, part: _Part) -> None:
        """Adds a part whose operations run on several streams."""
        host = idle = self._host_factor * part.host_s[self._variant]
        clocks: dict[int, float] = {0: host}  # stream -> when its last operation is finished
        ends: dict[int, list[tuple[int, float]]] = {}  # stream -> (call, when it is finished), in order
        links = 0.0  # when the last collective is finished
        stolen = 0.0  # by collectives, from the next operation of the default stream
        exposed = 0.0
        hooks = self._hooks_s / max(1, len(part.calls())) if part.number >= 0 else 0.0

        begin = 0.0
        for stretch in part.stretches:
            for index, call in enumerate(stretch.calls, stretch.begin):
                for wait in self._waits_at.get(index, ()):
                    done = _finished(ends.get(wait.on, ()), wait.until)
                    if wait.stream == HOST:
                        host = max(host, done)
                        continue
                    before = clocks.get(wait.stream, 0.0)
                    clocks[wait.stream] = max(before, done)
                    if wait.stream == 0:
                        exposed += max(0.0, done - max(before, host))

                operation = self._work.operations[call]
                stream = operation.stream
                host += self._queueing[call] + hooks
                start = clocks.get(stream, 0.0)
                seconds = self._seconds[call]
                if stream == 0:
                    idle += max(0.0, host - start)
                    seconds, stolen = seconds + stolen, 0.0
                start = max(start, host)
                if operation.kind == "collective":
                    start = max(start, links)
                    links = start + seconds
                    stolen += self._stolen[call]
                clocks[stream] = start + seconds
                ends.setdefault(stream, []).append((index, clocks[stream]))
                if self._waits[call]:
                    host = clocks[stream]

            end = max(begin, clocks[0])
            if stretch is part.stretches[-1]:
                end = max(clocks.values())
                exposed += end - clocks[0]
            self._add(part, stretch.phase, end - begin)
            begin = end
        self.idle += idle * part.times
        self.exposed += exposed * part.times


def _finished(ends: Sequence[tuple[int, float]], until: int) -> float:
    """When a stream has finished its calls before the index `until`; 0 if it has none in this part."""
    for index, end in reversed(ends):
        if index < until:
            return end
    return 0.0


def _rests_on(
    operations: Sequence[Operation], rates: GpuRates, likely: _Clocks, unknown: Mapping[str, int]
) -> Iterator[str]:
    """The assumptions, a sentence each."""
    for dtype in sorted({o.dtype for o in operations if o.kind in ("matmul", "attention") and o.dtype}):
        used = computes_as(dtype, rates)
        figure, tflops = rates.achievable_tflops[used], product_tflops(dtype, rates)
        if used == dtype:
            how = "measured" if figure.measured else "computed"
            yield f"{dtype}: {tflops:g} TFLOPS ({how}: {figure.source})"
        else:
            yield f"{dtype}: this GPU has no units for it and computes as in {used}, at {tflops:g} TFLOPS"
    memory = rates.achievable_memory_gb_per_s
    yield f"memory: {memory.value:g} GB/s ({memory.source})"
    if any(operation.called_by == "compiled" for operation in operations):
        yield "kernels that torch.compile generates: the bytes that they move, at that speed"
    if likely.seconds and likely.idle > _REPORTED_IDLE_SHARE * likely.seconds:
        yield f"{likely.idle / likely.seconds:.0%} of the step the GPU waits for Python: it depends on the CPU"
    if any(operation.kind == "collective" for operation in operations):
        yield f"communication that no computation hides: {likely.exposed:.3g} s a step"
    if unknown:
        yield f"no formula for the time of {', '.join(unknown)}: assumed from 0 to 10 times that of the bytes it moves"


_REPORTED_IDLE_SHARE: Final = 0.05
