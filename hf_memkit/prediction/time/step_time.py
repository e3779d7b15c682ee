"""How long an optimizer step takes on a GPU, from what a trace says is computed (`work.py`).

```
host   op op op op ──────── op op op │waits        ── op op
GPU       ███ █████ ██ ████████ ██████████████████ │     ███ …
```

In eager mode Python queues one operation after another, and the GPU works them off. Two clocks are followed: the
host's, which moves on by what queueing costs, and the GPU's, which begins an operation when it is queued and the one
before is done. Where the host waits for the GPU (a value is read, a batch is copied), both clocks meet.

Traced are at most two micro-batches: the first, before which there are no gradients, and one like all others. Not in
it: tokenising and decoding of data, evaluations, saves, logging to a server, and on several GPUs what they send one
another (`hf_memkit/deepspeed/transfer_time.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hf_memkit.catalog.rates import GpuRates
from hf_memkit.common.terms import PHASES, Phase
from hf_memkit.prediction.time.operation_time import OperationSeconds, computes_as, product_tflops
from hf_memkit.prediction.trace.work import KINDS, Operation, Work

Range = tuple[float, float, float]
"""Low, middle, high."""

_PYTHON_S: Final[Range] = (10e-6, 28e-6, 46e-6)
"""To queue one operation from Python, the modules and views around it included. Measured on one core of an AMD EPYC
that had other work: 27 to 29 µs (transformers 5.23, Llama, GPT-2 and LoRA of 4 tokens and 32 numbers, computed on the
CPU in that time, too). The high end: T5-large and Whisper in a virtual machine with an H200, where the host alone
decides (benchmarks/gpu.py). The low end: assumed, for a fast desktop."""

_ENGINE_S: Final[Range] = (5e-6, 17e-6, 26e-6)
"""To queue one operation from autograd's engine, which is C++: 18 to 23 µs on that EPYC; the ends as above."""

_LAUNCH_S: Final = 4e-6
"""Each further kernel of one operation, `cudaLaunchKernel` alone; assumed."""

_MICRO_BATCH_S: Final[Range] = (0.5e-3, 1.5e-3, 5e-3)
"""Of the host, before a micro-batch: Trainer's own loop and callbacks; assumed."""

_LOADER_S_PER_BYTE: Final[Range] = (12e-9, 18e-9, 30e-9)
"""Of a batch of tokens, put together from lists in the process that trains, as Trainer does unless it is given
`dataloader_num_workers`; the GPU has nothing to do then, because accelerate reads a batch right after it has copied
the one before (1.15: data_loader.py, `DataLoaderShard.__iter__`). Measured on an AMD EPYC: 100 to 230 ns a number of
8 bytes with transformers' three collators for text, 350 ns a token (datasets 5.2, rows of 210 to 4096 tokens)."""

_STACKED_S_PER_BYTE: Final[Range] = (0.2e-9, 0.35e-9, 0.7e-9)
"""Of a batch of images or sound, which lie in RAM as tensors: stacked, then copied into pinned memory. Measured beside
an H200: 13 ms for 64 images (ViT). What decoding them takes is not in it."""

_OPTIMIZER_S: Final[Range] = (1e-3, 3e-3, 10e-3)
"""Of the host, beside the operations of the optimizer's step: lists of all parameters put together, for clipping too,
and the schedule; assumed."""

_RATES: Final[Range] = (1.06, 0.98, 0.85)
"""What a GPU reaches in a step of the rates in the table: those are of one GPU of its kind, cooled in its way, and of
one large product or copy after the other, alone. The middle was fitted on half of the measured trainings
(benchmarks/plan_speed.py, `halves`); the ends are uneven, because measured steps are."""

_UNKNOWN: Final[Range] = (0.0, 1.0, 10.0)
"""How often the time of its bytes an operation may take that nobody has a formula for."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Of one optimizer step, seconds: low, middle, high; and of the middle:

    Attributes:
        by_phase: adds up to it.
        forward_s, backward_s: of one micro-batch, on average.
        optimizer_s: clipping, which phase backward has in it, and the optimizer's step.
        by_kind: in which the GPU computes, by kind of operation.
        bound_by_launches: share in which the GPU waits for the host.
        unknown: names of operations whose time is not known, most calls first.
        rests_on: what was assumed, a sentence each.
    """

    seconds: Range
    by_phase: Mapping[Phase, float]
    forward_s: float
    backward_s: float
    optimizer_s: float
    by_kind: Mapping[str, float]
    bound_by_launches: float
    unknown: tuple[str, ...]
    rests_on: tuple[str, ...]


@dataclass(slots=True)
class _Part:
    """A micro-batch, numbered, or the optimizer's part of a step (-1): at its end the host waits for the GPU.
    `host_s`: of the host, before the first call; `stretches`: phases with their calls; `times`: how often the part
    comes."""

    number: int
    host_s: Range
    stretches: list[tuple[Phase, Sequence[int]]]
    times: int = 1


def step_time(
    work: Work,
    rates: GpuRates,
    *,
    capability: float,
    span: tuple[int, int] | None = None,
    micro_batches: int = 1,
    loader_workers: int = 0,
    hooks_s: Range = (0.0, 0.0, 0.0),
    host: float = 1.0,
) -> StepTime:
    """The time of one optimizer step.

    Args:
        work: what a traced training computes.
        rates: of the GPU (`gpu_rates.RATES`); the trace may be of another one, if that has the same kernels.
        capability: the GPU's compute capability, such as 8.0.
        span: the step's calls: (first, one past the last); None: the last step of `work`.
        micro_batches: of the step, as it is trained.
        loader_workers: `dataloader_num_workers`; with any, batches are put together beside the training.
        hooks_s: of the host in each micro-batch, beside the operations: hooks of an engine that is not traced.
        host: by how much longer the host takes than computed here.

    Raises:
        ValueError: no such step, or fewer than one micro-batch.
    """
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches}: a step has at least one")
    steps = [span] if span else work.steps()
    if not steps:
        raise ValueError("no optimizer step was recorded")
    seconds = OperationSeconds(rates, capability)
    parts = _parts(work, steps[-1], micro_batches)
    if not loader_workers:
        _batches_are_put_together(work, parts)
    durations = [seconds.of(each) for each in work.operations]
    low, likely, high = (_Clocks(work, durations, variant, host, hooks_s[variant]) for variant in range(3))
    for clocks in (low, likely, high):
        for part in parts:
            clocks.run(part)
    middle = likely.seconds
    counts: Counter[int] = Counter()
    for part in parts:
        for _, calls in part.stretches:
            for call, count in Counter(calls).items():
                counts[call] += part.times * count
    by_kind = dict.fromkeys(KINDS, 0.0)
    unknown: Counter[str] = Counter()
    for call, count in counts.items():
        operation = work.operations[call]
        by_kind[operation.kind] += count * durations[call] / _RATES[1]
        if operation.kind == "unknown":
            unknown[operation.name] += count
    return StepTime(
        seconds=(min(low.seconds, middle), middle, max(middle, high.seconds)),
        by_phase={phase: likely.by_phase[phase] for phase in PHASES if phase in likely.by_phase},
        forward_s=likely.of_micro_batches.get("forward", 0.0) / micro_batches,
        backward_s=likely.of_micro_batches.get("backward", 0.0) / micro_batches,
        optimizer_s=likely.of_optimizer,
        by_kind={kind: seconds for kind, seconds in by_kind.items() if seconds},
        bound_by_launches=likely.idle / middle if middle else 0.0,
        unknown=tuple(name for name, _ in unknown.most_common()),
        rests_on=tuple(_rests_on([work.operations[call] for call in counts], rates, likely, unknown)),
    )


_CLIPS: Final = ("aten._foreach_norm", "aten.linalg_vector_norm")
"""With these the gradients' norm begins, after the last backward pass and in its phase."""


def _parts(work: Work, span: tuple[int, int], micro_batches: int) -> list[_Part]:
    """The step as its micro-batches and the optimizer's part. A micro-batch begins with what comes after a backward
    pass, or with the step; gradients are clipped at the end of phase backward, once."""
    parts: list[_Part] = []
    before: Phase | None = None
    for start, end, phase in work.spans():
        begin, stop = max(start, span[0]), min(end, span[1])
        if begin >= stop:
            continue
        calls = work.calls[begin:stop]
        if not parts or (parts[-1].number >= 0 and before == "backward" and phase not in ("backward", "optimizer")):
            parts.append(_Part(len(parts), _MICRO_BATCH_S, []))
        elif phase == "optimizer" and parts[-1].number >= 0:
            parts.append(_Part(-1, _OPTIMIZER_S, []))
        parts[-1].stretches.append((phase, calls))
        before = phase
    _clipping_comes_once(work, parts)
    traced = sum(part.number >= 0 for part in parts)
    for part in parts:
        if part.number >= 0:
            last = part.number == traced - 1
            part.times = max(0, micro_batches - part.number) if last else int(part.number < micro_batches)
    return parts


def _batches_are_put_together(work: Work, parts: list[_Part]) -> None:
    """Adds the loader's time: of what is copied to the GPU."""
    for part in parts:
        for call in (call for _, calls in part.stretches for call in calls):
            operation = work.operations[call]
            if operation.kind == "transfer":
                of_a_byte = _LOADER_S_PER_BYTE if operation.dtype == "int64" else _STACKED_S_PER_BYTE
                low, middle, high = (
                    own + operation.moved_bytes * each for own, each in zip(part.host_s, of_a_byte, strict=True)
                )
                part.host_s = (low, middle, high)


def _clipping_comes_once(work: Work, parts: list[_Part]) -> None:
    """Moves it from the last micro-batch to the optimizer's part."""
    if len(parts) < 2 or parts[-1].number >= 0 or not parts[-2].stretches:
        return
    phase, calls = parts[-2].stretches[-1]
    for at, call in enumerate(calls):
        operation = work.operations[call]
        if not operation.from_autograd and operation.name.startswith(_CLIPS):
            parts[-2].stretches[-1] = (phase, calls[:at])
            parts[-1].stretches.insert(0, (phase, calls[at:]))
            return


class _Clocks:
    """The host's clock and the GPU's over the parts of a step: of a variant (0 the fastest that is likely, 1 the
    middle, 2 the slowest), from seconds on the GPU of each operation. `hooks_s`: of the host in a micro-batch, spread
    over its operations.

    Attributes:
        by_phase: seconds of the parts so far.
        of_micro_batches: those of micro-batches, by phase; of_optimizer: those of the optimizer's part.
        idle: those in which the GPU waited for the host.
    """

    def __init__(
        self, work: Work, durations: Sequence[float], variant: int, host_factor: float, hooks_s: float
    ) -> None:
        self.by_phase: dict[Phase, float] = {}
        self.of_micro_batches: dict[Phase, float] = {}
        self.of_optimizer = 0.0
        self.idle = 0.0
        self._variant = variant
        self._host_factor = host_factor
        self._hooks_s = host_factor * hooks_s
        self._waits = [each.waits for each in work.operations]
        self._seconds = [
            duration / _RATES[variant] * (_UNKNOWN[variant] if each.kind == "unknown" else 1.0)
            for each, duration in zip(work.operations, durations, strict=True)
        ]
        self._queueing = [
            host_factor * ((_ENGINE_S if each.from_autograd else _PYTHON_S)[variant] + _LAUNCH_S * (each.launches - 1))
            for each in work.operations
        ]

    @property
    def seconds(self) -> float:
        return sum(self.by_phase.values())

    def run(self, part: _Part) -> None:
        """Adds a part."""
        seconds, queueing, waits = self._seconds, self._queueing, self._waits
        host = idle = self._host_factor * part.host_s[self._variant]
        gpu = host
        calls_in_all = sum(len(calls) for _, calls in part.stretches)
        hooks = self._hooks_s / calls_in_all if calls_in_all and part.number >= 0 else 0.0
        for number, (phase, calls) in enumerate(part.stretches):
            begin = gpu if number else 0.0
            for call in calls:
                host += queueing[call] + hooks
                if host > gpu:
                    idle += host - gpu
                    gpu = host
                gpu += seconds[call]
                if waits[call]:
                    host = gpu
            taken = (gpu - begin) * part.times
            self.by_phase[phase] = self.by_phase.get(phase, 0.0) + taken
            if part.number < 0:
                self.of_optimizer += taken
            else:
                self.of_micro_batches[phase] = self.of_micro_batches.get(phase, 0.0) + taken
        self.idle += idle * part.times


def _rests_on(
    operations: Sequence[Operation], rates: GpuRates, likely: _Clocks, unknown: Mapping[str, int]
) -> Iterator[str]:
    """What was assumed, a sentence each."""
    for dtype in sorted({each.dtype for each in operations if each.kind in ("matmul", "attention") and each.dtype}):
        of = computes_as(dtype, rates)
        figure, tflops = rates.achievable_tflops[of], product_tflops(dtype, rates)
        if of == dtype:
            how = "measured" if figure.measured else "computed"
            yield f"{dtype}: {tflops:g} TFLOPS ({how}: {figure.source})"
        else:
            yield f"{dtype}: this GPU has no units for it and computes as in {of}, at {tflops:g} TFLOPS"
    memory = rates.achievable_memory_gb_per_s
    yield f"memory: {memory.value:g} GB/s ({memory.source})"
    if likely.seconds and likely.idle > _BOUND * likely.seconds:
        yield f"{likely.idle / likely.seconds:.0%} of the step the GPU waits for Python: it depends on the CPU"
    if unknown:
        yield f"no formula for the time of {', '.join(unknown)}: assumed from 0 to 10 times that of the bytes it moves"


_BOUND: Final = 0.05
"""Share of the step that is worth saying."""
