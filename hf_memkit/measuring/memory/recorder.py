"""Records of one training, from `run` to `end`, made from callback events."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, cast

from torch import nn

from hf_memkit.common.terms import Phase
from hf_memkit.measuring.memory import facts
from hf_memkit.measuring.memory.compilation import CompileWatch
from hf_memkit.measuring.memory.error_barrier import ErrorBarrier, describe
from hf_memkit.measuring.memory.hooks import HookSet, is_compiled, needs_whole_graph
from hf_memkit.measuring.memory.inputs import InputCounter
from hf_memkit.measuring.memory.modules import module_rows
from hf_memkit.measuring.memory.optimizer_state import innermost, optimizer_chain, state_summary
from hf_memkit.measuring.memory.peak_sampler import PeakSampler
from hf_memkit.measuring.memory.phases import PhaseTracker
from hf_memkit.measuring.memory.readers import readers_for_this_machine
from hf_memkit.measuring.memory.readers.base import MemoryReader, ReaderGroup
from hf_memkit.measuring.memory.readers.host import SwapReader
from hf_memkit.measuring.memory.recompute import RecomputeCounter
from hf_memkit.measuring.memory.records import RecordWriter
from hf_memkit.measuring.memory.windows import STEP_PHASES, LogNumbers, PeakWindow, StepWindow, update_maxima
from hf_memkit.measuring.record_types import Compiled, EndRecord, Measured, OomRecord, Status, StepRecord

_HIGHEST = {"peak_allocated_gib": "peak_allocated_gib", "peak_reserved_gib": "peak_reserved_gib",
            "host_rss_gib": "peak_host_rss_gib"}  # fmt: skip
"""Fields whose maximum over the run goes into the `end` record → their names there."""


class RunRecorder:
    """Records one training. Any method may raise: the callback calls it through the barrier."""

    def __init__(
        self, folder: Path, args: Any, barrier: ErrorBarrier, *, phases: bool = True, log_everything: bool = False,
        readers: Sequence[MemoryReader] | None = None,
    ) -> None:  # fmt: skip
        self.writer = RecordWriter(folder / f"memory-rank{args.process_index}.jsonl")
        swap_folders = barrier.call("swap folders", facts.swap_folders, args) or ()
        all_readers = list(readers_for_this_machine(args.device) if readers is None else readers)
        if swap_folders and readers is None:
            all_readers.append(SwapReader(swap_folders, args.process_index))
        self.readers = ReaderGroup(all_readers)
        self.tracker = PhaseTracker(self._on_boundary, self._on_forward)
        self.recompute = RecomputeCounter(self.tracker)
        self.hooks: HookSet | None = None
        self._args = args
        self._barrier = barrier
        self._phases = phases
        self._sees_forward = True
        self._swap_folders = swap_folders
        self._window = PeakWindow(self.readers, reset=phases)
        self._sampler: PeakSampler | None = None
        self._inputs = InputCounter()
        self._compile = barrier.call("compilation", CompileWatch)
        self._records = StepWindow()
        self._capacity: dict[str, float] = {}
        self._highest: dict[str, float] = {}
        self._log = LogNumbers(everything=log_everything)
        self._steps = 0
        self._state: Any = None
        self._optimizer: weakref.ref[Any] | None = None
        self._ended = False
        self._clock_s = time.perf_counter()

    @property
    def superseded(self) -> bool:
        """Whether `close` or a later recorder removed the hooks: of two callbacks in one Trainer, the last records."""
        return self.hooks is not None and self.hooks.removed

    def train_begin(self, state: Any, model: nn.Module, optimizer: Any, extra: Mapping[str, Any]) -> None:
        self._state = state
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else None
        self.tracker.merge_optimizer = bool(self._barrier.call("deepspeed", facts.is_deepspeed, self._args, optimizer))
        device = self.readers.device
        self._sampler = PeakSampler(
            model, device, self._window.sample, self.tracker.on_backward, rank=self._args.process_index,
            swap_folders=self._swap_folders,
        )  # fmt: skip
        self._barrier.call("hooks", self._attach, model, optimizer)
        self._capacity = {name: round(value, 10) for name, value in self.readers.capacity().items()}
        self.tracker.train_begin()

        fields: dict[str, Any] = {"start_step": state.global_step}
        fields |= self._barrier.call("process", facts.process_facts, self._args) or {}
        fields["versions"] = self._barrier.call("versions", facts.versions)
        fields["hardware"] = {**(self._barrier.call("hardware", facts.hardware, device) or {}), **self._capacity}
        fields["arguments"] = self._barrier.call("arguments", facts.memory_arguments, self._args)
        fields |= self._barrier.call("model facts", facts.model_facts, model) or {}
        if classes := self._barrier.call("optimizer facts", optimizer_chain, optimizer):
            fields["optimizer_classes"] = classes
        fields |= self._memory(("load",), fresh=True)
        self._write("run", {**fields, **extra})

        rows = self._barrier.call("modules", module_rows, model, device)
        if rows:
            self._write("modules", {"rows": rows})
        self._barrier.call("walk", self._sampler.begin, optimizer, phases=self._phases)
        self._window.clear()
        self._restart_clock()

    def substep_end(self) -> None:
        self.tracker.substep_end()
        if self._sampler is not None:
            self._sampler.timeline.end_micro_batch()

    def optimizer_step(self, optimizer: Any) -> None:
        if self._sampler is not None:
            self._sampler.after_optimizer_step(optimizer)

    def step_end(self, state: Any) -> None:
        self.tracker.step_end()
        fields: StepRecord = {
            "step": state.global_step,
            "step_time_ms": round((time.perf_counter() - self._clock_s) * 1000, 3),
            **self._inputs.fields(),
            **self._memory(STEP_PHASES),
        }
        if self.recompute.layers:
            fields["recomputed_layers"] = self.recompute.take()
        fields = {**fields, **self._compiled(since_last=True)}
        if self._sampler is not None:
            peak_gib = fields.get("peak_allocated_gib")
            fields.update(self._barrier.call("categories", self._sampler.fields, peak_gib) or {})
        self._log.step(fields)
        for record in self._records.add(self._steps, fields):
            self.writer.write("step", record)
        self._steps += 1
        self._inputs = InputCounter()
        self._window.clear()
        if self._sampler is not None:
            self._sampler.begin_step(self._steps)
            self.recompute.follow(watched=self._sampler.timeline.watched)
        self._restart_clock()

    def log_numbers(self) -> dict[str, float]:
        """Take the numbers for a dashboard, without the prefix `memory/`: the maxima over the steps since they were
        last taken. Restarts the clock of a step, so that logging does not count."""
        self._restart_clock()
        return self._log.take()

    def evaluate(self, state: Any, metrics: Mapping[str, Any] | None) -> None:
        self.tracker.evaluate_end()
        numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, Real)}
        # numpy's numbers become Python's.
        plain = {name: value if isinstance(value, int) else float(value) for name, value in numbers.items()}
        self._between_steps("evaluate", {"step": state.global_step, "metrics": plain})

    def save(self, state: Any) -> None:
        self.tracker.save_end()
        name = f"checkpoint-{state.global_step}"  # transformers.trainer_utils.PREFIX_CHECKPOINT_DIR
        self._between_steps("save", {"step": state.global_step, "checkpoint": name})

    def oom_fields(self) -> OomRecord:
        """Fields of an `oom` record, while the exception is handled. Writes pending records first."""
        self._flush()
        mark = self.readers.mark()
        phase = self.tracker.phase
        fields: OomRecord = {"phase": phase}
        if self._state is not None:
            fields["step"] = self._state.global_step + (phase not in ("evaluate", "save"))
        if phase in ("forward", "backward", "optimizer"):
            fields.update(self._inputs.last())
        counters: Measured = self._barrier.call("oom counters", self._memory, STEP_PHASES, fresh=True) or {}
        fields = {**fields, **counters, **self._compiled()}
        optimizer = self._optimizer() if self._optimizer is not None else None
        if self._sampler is not None:
            fields.update(self._barrier.call("oom categories", self._sampler.at, optimizer, mark) or {})
        return fields

    def end(self, status: Status, error: BaseException | None = None) -> None:
        """Write the `end` record, once: `finished`, `interrupted` or `failed`. Later calls do nothing."""
        if self._ended:
            return
        self._ended = True
        self._flush()
        fields: EndRecord = {"status": status}
        if (step := getattr(self._state, "global_step", None)) is not None:
            fields["step"] = step
        fields["steps"] = self._steps
        if error is not None:
            fields["error_type"] = type(error).__name__
            fields["error"] = describe(error)
        if self.recompute.layers:
            fields["recomputed_layers"] = self.recompute.total
        optimizer = self._optimizer() if self._optimizer is not None else None
        if classes := self._barrier.call("optimizer facts", optimizer_chain, optimizer):
            fields["optimizer_classes"] = classes
        if (states := self._barrier.call("optimizer states", state_summary, optimizer)) is not None:
            fields["optimizer_states"] = states
        fields = {**fields, **cast(EndRecord, self._highest), **self._compiled()}
        fields["reader_errors"] = self.readers.errors
        fields["callback_errors"] = self._barrier.count
        fields["callback_error_messages"] = list(self._barrier.messages)
        self._write("end", fields)

    def close(self) -> None:
        """Remove the hooks and, if they were there, write pending records. Safe to repeat."""
        if self.hooks is not None and not self.hooks.removed:
            self.hooks.remove()
            self._flush()
            self._window.sample(self.tracker.phase)  # so that the next training does not start with this peak
        self._sampler = None
        self.recompute.close()
        self.writer.close()

    def _attach(self, model: nn.Module, optimizer: Any) -> None:
        compiled = is_compiled(self._args, model)
        self.hooks = HookSet(model, self._barrier, compiled=compiled)
        inner = innermost(optimizer)
        if self.tracker.merge_optimizer and hasattr(inner, "register_step_pre_hook"):
            self.hooks.before_step(inner, self.tracker.engine_step)
        if needs_whole_graph(model):
            self._sees_forward = False
            return
        self.tracker.attach(model, self.hooks)
        if not compiled and self._sampler is not None:  # a hook inside the model would cut the compiled graph
            last_layer = self.recompute.attach(model, self.hooks)
            if self.readers.device is not None:
                self._sampler.attach(model, last_layer, self.hooks)
                self.recompute.on_layer = self._sampler.layer

    def _on_boundary(self, ended: Phase) -> None:
        mark = self._window.sample(ended)
        if self._sampler is not None:
            self._sampler.boundary(self.tracker.phase, mark)

    def _on_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        size = self._inputs.add(args, kwargs)
        if self._sampler is not None:
            self._sampler.forward(size)
            self.recompute.follow(watched=self._sampler.timeline.watched)
            self._inputs.micro_batches = self._sampler.timeline.micro_batch

    def _memory(self, phases: tuple[Phase, ...], *, fresh: bool = False) -> Measured:
        """Current counters and the peaks over `phases`; also updates the maxima of the run."""
        # Ten decimals, a tenth of a byte, make lines a third shorter.
        numbers: dict[str, Any] = {name: round(value, 10) for name, value in self.readers.read(fresh=fresh).items()}
        numbers |= self._window.fields(phases)
        if not self._sees_forward and phases is STEP_PHASES:
            numbers.pop("phases", None)  # forward and backward would count as `data`
        numbers |= self._capacity
        update_maxima(self._highest, {highest: numbers[name] for name, highest in _HIGHEST.items() if name in numbers})
        return cast(Measured, numbers)

    def _compiled(self, *, since_last: bool = False) -> Compiled:
        """What torch.compile did; `since_last`: empty if it did nothing since the last record."""
        if self._compile is None:
            return {}
        read = self._compile.news if since_last else self._compile.totals
        return self._barrier.call("compilation", read) or {}

    def _between_steps(self, kind: Phase, fields: dict[str, Any]) -> None:
        """Record an evaluation or a save that has ended."""
        self._flush()
        self._write(kind, {**fields, **self._memory((kind,)), **self._compiled(since_last=True)})
        self._window.clear()
        self._restart_clock()

    def _flush(self) -> None:
        for record in self._records.flush():
            self.writer.write("step", record)

    def _restart_clock(self) -> None:
        """Start the time of a step: it includes waiting for data, but no log, evaluation or save."""
        self._clock_s = time.perf_counter()

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.writer.write(kind, {name: value for name, value in fields.items() if value is not None})
