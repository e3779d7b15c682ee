"""One training, from its `run` record to its `end` record. In: callback events. Out: records in a file.

The callback makes one of these at each `on_train_begin` and calls it through the guard; any method here may raise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_memkit.memory import facts
from hf_memkit.memory.categories import categories_at_peak, state_summary, walk
from hf_memkit.memory.guard import Guard
from hf_memkit.memory.hooks import HookSet
from hf_memkit.memory.inputs import InputCounter
from hf_memkit.memory.peaks import STEP_PHASES, PeakWindow, raise_to
from hf_memkit.memory.phases import PhaseTracker
from hf_memkit.memory.readers import MemoryReader, ReaderGroup, readers_for_this_machine
from hf_memkit.memory.recompute import RecomputeCounter
from hf_memkit.memory.records import RecordWriter
from hf_memkit.terms import Phase

__all__ = ["RunRecorder"]

_WALKED_FIRST = 2
_WALK_EVERY = 50

_LOGGED = ("peak_allocated_gib", "peak_reserved_gib", "host_rss_gib")


class RunRecorder:
    """Records one training."""

    def __init__(
        self,
        folder: Path,
        args: Any,
        guard: Guard,
        *,
        phases: bool = True,
        readers: Sequence[MemoryReader] | None = None,
    ) -> None:
        self.writer = RecordWriter(folder / f"memory-rank{args.process_index}.jsonl")
        self.readers = ReaderGroup(readers_for_this_machine(args.device) if readers is None else readers)
        self.tracker = PhaseTracker(self._on_boundary, self._on_forward)
        self.recompute = RecomputeCounter(lambda: self.tracker.phase == "backward")
        self.hooks: HookSet | None = None
        self._args = args
        self._guard = guard
        self._window = PeakWindow(self.readers, reset=phases)
        self._inputs = InputCounter()
        self._capacity: dict[str, float] = {}
        self._highest: dict[str, float] = {}
        self._last_numbers: dict[str, float] = {}
        self._steps = 0
        self._walked: dict[str, int] = {}
        self._states_before: int | None = None
        self._clock_s = time.perf_counter()

    @property
    def superseded(self) -> bool:
        """Another recorder owns the model now: two callbacks in one Trainer, of which only the last may record."""
        return self.hooks is not None and self.hooks.removed

    def train_begin(self, state: Any, model: nn.Module, optimizer: Any, extra: Mapping[str, Any]) -> None:
        self.tracker.merge_optimizer = bool(self._guard.call("deepspeed", facts.is_deepspeed, self._args, optimizer))
        self._guard.call("hooks", self._attach, model)
        self._capacity = self.readers.capacity()
        self.tracker.train_begin()
        fields: dict[str, Any] = {"start_step": state.global_step}
        device = self.readers.device
        fields["versions"] = self._guard.call("versions", facts.versions)
        fields["hardware"] = {**(self._guard.call("hardware", facts.hardware, device) or {}), **self._capacity}
        fields["arguments"] = self._guard.call("arguments", facts.arguments_that_matter, self._args)
        fields |= self._guard.call("model facts", facts.model_facts, model) or {}
        fields |= self._guard.call("optimizer facts", facts.optimizer_facts, optimizer) or {}
        fields |= self._memory(("load",))
        self._write("run", {**fields, **extra})
        self._window.clear()
        self._restart_clock()

    def step_begin(self) -> None:
        self.tracker.step_begin()

    def substep_end(self) -> None:
        self.tracker.substep_end()

    def pre_optimizer_step(self, model: nn.Module, optimizer: Any) -> None:
        self.tracker.pre_optimizer_step()
        if self._steps == 0:  # optimizers make their states in their first step; after a resume they have them
            self._states_before = self._walk(model, optimizer).get("optimizer_device_bytes", 0)

    def optimizer_step(self, model: nn.Module, optimizer: Any) -> None:
        if self._steps < _WALKED_FIRST or self._steps % _WALK_EVERY == 0:
            self._walked = self._walk(model, optimizer)

    def step_end(self, state: Any) -> None:
        self.tracker.step_end()
        fields: dict[str, Any] = {
            "step": state.global_step,
            "step_time_ms": (time.perf_counter() - self._clock_s) * 1000,
            **self._inputs.fields(),
            **self._memory(STEP_PHASES),
        }
        if self.recompute.layers:
            fields["recomputed_layers"] = self.recompute.take()
        self._guard.call("categories", self._add_categories, fields)
        self._write("step", fields)
        self._last_numbers = {name: float(fields[name]) for name in _LOGGED if name in fields}
        self._steps += 1
        self._inputs = InputCounter()
        self._states_before = None
        self._window.clear()
        self._restart_clock()

    def log(self, state: Any, logs: dict[str, Any] | None) -> None:
        # Only the logs of training steps: Trainer makes a column of its model card of each key in an eval log.
        if logs is not None and "loss" in logs and state.is_world_process_zero:
            numbers = {f"memory/{name}": value for name, value in self._last_numbers.items()}
            logs.update(numbers)
            if state.log_history:
                state.log_history[-1].update(numbers)  # a copy made before this event; it goes to trainer_state.json
        self._restart_clock()

    def prediction_step(self) -> None:
        self.tracker.prediction_step()

    def evaluate(self, state: Any, metrics: Mapping[str, Any] | None) -> None:
        self.tracker.evaluate_end()
        plain = {name: _number(value) for name, value in (metrics or {}).items() if isinstance(value, Real)}
        self._write("evaluate", {"step": state.global_step, "metrics": plain, **self._memory(("evaluate",))})
        self._window.clear()
        self._restart_clock()

    def save(self, state: Any) -> None:
        self.tracker.save_end()
        name = f"checkpoint-{state.global_step}"  # transformers.trainer_utils.PREFIX_CHECKPOINT_DIR
        self._write("save", {"step": state.global_step, "checkpoint": name, **self._memory(("save",))})
        self._window.clear()
        self._restart_clock()

    def train_end(self, state: Any, optimizer: Any, status: str) -> None:
        fields: dict[str, Any] = {"status": status, "step": state.global_step, "steps": self._steps}
        if self.recompute.layers:
            fields["recomputed_layers"] = self.recompute.total
        fields |= self._guard.call("optimizer facts", facts.optimizer_facts, optimizer) or {}
        fields["optimizer_states"] = self._guard.call("optimizer states", state_summary, optimizer)
        fields["walked"] = self._walked
        fields |= self._highest
        fields["reader_errors"] = self.readers.errors
        fields["callback_errors"] = self._guard.count
        fields["callback_error_messages"] = list(self._guard.messages)
        if self.writer.lost:
            fields["lost_records"] = self.writer.lost
        self._write("end", fields)

    def close(self) -> None:
        """Takes the hooks off the model. Safe to repeat."""
        if self.hooks is not None:
            self.hooks.remove()

    def _attach(self, model: nn.Module) -> None:
        compiled = _is_compiled(self._args, model)
        self.hooks = HookSet(model, self._guard, compiled=compiled)
        if os.environ.get("ACCELERATE_DYNAMO_USE_FULLGRAPH", "").lower() in ("1", "true", "yes"):
            return  # a graph that must be whole has no place for a hook
        self.tracker.attach(model, self.hooks)
        if not compiled:  # a hook inside each layer would cut the compiled graph at each layer
            self.recompute.attach(model, self.hooks)

    def _on_boundary(self, ended: Phase) -> None:
        self._window.sample(ended)

    def _on_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._inputs.add(args, kwargs)

    def _memory(self, phases: tuple[Phase, ...]) -> dict[str, Any]:
        """The counters now and the peaks over `phases`; also raises the highest of the run."""
        numbers = self.readers.read()
        peaks = self._window.fields(phases)
        for name, value in {**numbers, **peaks}.items():
            if name in _LOGGED and isinstance(value, int | float):
                key = name if name.startswith("peak_") else f"peak_{name}"
                raise_to(self._highest, {key: value})
        return {**numbers, **peaks, **self._capacity}

    def _walk(self, model: nn.Module, optimizer: Any) -> dict[str, int]:
        return walk(model, optimizer, self.readers.device)

    def _add_categories(self, fields: dict[str, Any]) -> None:
        if "peak_allocated_gib" not in fields or not self._walked:
            return
        found = categories_at_peak(
            self._walked,
            fields["peak_allocated_gib"],
            peak_phase=self._window.highest_phase(STEP_PHASES),
            micro_batches=self._inputs.micro_batches,
            optimizer_bytes_before=self._states_before,
        )
        fields["categories"] = {f"{category}_gib": value for category, value in found.items()}

    def _restart_clock(self) -> None:
        """A step's time counts from here: it includes waiting for its data, and no log, evaluation or save."""
        self._clock_s = time.perf_counter()

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.writer.write(kind, {name: value for name, value in fields.items() if value is not None})


def _number(value: Real) -> int | float:
    return value if isinstance(value, int) else float(value)  # numpy's numbers become Python's


def _is_compiled(args: Any, model: nn.Module) -> bool:
    return (
        bool(getattr(args, "torch_compile", False))
        or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"
        or isinstance(model, torch._dynamo.OptimizedModule)
        or any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())
    )
