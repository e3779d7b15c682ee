"""A training on a simulated GPU. In: a job and a plan for each of its steps. Out: the step records it would write.

What is simulated is what decides memory: a transformer's weights, gradients and optimizer states, activations that
follow the shape of each batch, logits, the caching allocator under them, and a GPU on which the CUDA context and
other processes lie too. Records hold the fields of `StepRecord` and nothing else; what only the simulator knows
(bytes leaked, bytes of others) goes into `Hidden`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.diagnosis.simulated_allocator import SimulatedAllocator
from benchmarks.diagnosis.simulated_job import GROUPS, Hidden, Job, Plan, Shape
from hf_memkit.prediction.allocator import OutOfDeviceMemory
from hf_memkit.prediction.allocator_blocks import Block
from hf_memkit.units import GIB

_NVML_EVERY_S = 0.5
_CLOSELY_FIRST, _CLOSELY_EVERY = 3, 10


class _Process:
    """One process of the job: loads, trains, and goes when it is killed."""

    def __init__(self, job: Job, plan: Plan, rng: random.Random, hidden: Hidden, start: int, clock_s: float) -> None:
        self.job, self.plan, self.rng, self.hidden = job, plan, rng, hidden
        self.clock_s = clock_s
        self.outside = int(rng.uniform(0.28, 0.62) * GIB)
        self.others = plan.others[max(start, 1) - 1] if plan.others is not None else 0
        self.allocator = SimulatedAllocator(self._limit, expandable=job.expandable)
        self.leaked = self.highest = 0
        self.nvml_read_s = -1.0
        self.states: list[Block] = []
        self.known: dict[tuple[Shape, ...], tuple[tuple[int, ...], dict[str, Any], int]] = {}
        self.rss_gib = rng.uniform(1.5, 4.0)
        for _ in range(GROUPS * 3):
            self.allocator.allocate(job.weights // (GROUPS * 3), "weights")
        if start and job.optimizer:  # a resume loads the states beside a copy of them
            copy = self.allocator.allocate(job.optimizer // 4, "other")
            self._make_states()
            self.allocator.release(copy)
        self.first_step = start + 1

    def _limit(self) -> int:
        return self.job.capacity - self.outside - self.others

    def _make_states(self) -> None:
        self.states = [
            self.allocator.allocate(self.job.optimizer // (GROUPS * 2), "optimizer") for _ in range(GROUPS * 2)
        ]

    def step(self, step: int) -> dict[str, Any]:
        job, plan, allocator = self.job, self.plan, self.allocator
        shapes = plan.shapes[step - 1]
        self.others = plan.others[step - 1] if plan.others is not None else 0
        self.outside += plan.context.get(step, 0)
        since = step - self.first_step
        allocator.watching = since < _CLOSELY_FIRST or step % _CLOSELY_EVERY == 0
        kept = plan.keeps.get(step, 0)
        before, retries = allocator.signature, allocator.retries
        known = None if kept or allocator.watching else self.known.get(shapes)
        if known is not None and known[0] == before:
            fields, peak = dict(known[1]), known[2]
        else:
            fields = {"phases": self._train(shapes, kept)}
            peak = max(round(phase["peak_allocated_gib"] * GIB) for phase in fields["phases"].values())
            if allocator.signature == before and allocator.retries == retries:
                self.known[shapes] = (before, fields, peak)
        self.highest = max(self.highest, peak)
        tokens = sum(samples * length for samples, length in shapes)
        step_ms = (30 + tokens * job.token_us / 1000) * self.rng.lognormvariate(0, 0.05)
        self.clock_s += step_ms / 1000
        record = self._record(step, step_ms, fields)
        hidden = self.hidden
        hidden.leaked.append(self.leaked)
        hidden.others.append(self.others)
        hidden.peak.append(peak)
        hidden.reserved.append(allocator.reserved)
        hidden.outside.append(self.outside)
        hidden.highest.append(self.highest)
        hidden.measured.append("device_used_gib" in record)
        return record

    def after(self, step: int) -> None:
        """The evaluation and the save that follow a step; their own records are not given to a diagnosis."""
        shape = self.plan.evaluations.get(step)
        if shape is not None:
            blocks = []
            for _ in range(3):
                logits = self.allocator.allocate(shape[0] * shape[1] * self.job.vocabulary * 4, "loss")
                working = self.allocator.allocate(self.job.working(shape), "activations")
                self.allocator.release(working)
                blocks.append(self.allocator.allocate(shape[0] * shape[1] * self.job.vocabulary, "other"))
                self.allocator.release(logits)
            for block in blocks:
                self.allocator.release(block)
            self.highest = max(self.highest, self.allocator.peak_allocated)
            self.clock_s += self.rng.uniform(2, 20)
        if step in self.plan.saves:
            self.clock_s += self.rng.uniform(1, 8)

    def _train(self, shapes: Sequence[Shape], kept: int) -> dict[str, dict[str, float]]:
        job, allocator = self.job, self.allocator
        take, drop = allocator.allocate, allocator.release
        phases: dict[str, dict[str, float]] = {}
        self.categories: dict[str, int] = {}
        self.peak = 0
        if job.empty_cache_steps and (self.clock_steps() % job.empty_cache_steps == 0):
            allocator.release_cached()
        allocator.reset_peak()
        inputs = [take(samples * length * 24, "other") for samples, length in shapes]
        self._end_phase("data", phases)
        gradients: list[Block] = []
        for shape in shapes:
            saved: list[Block] = []
            working = job.working(shape)
            attention, rest = job.saved(shape)
            for _ in range(GROUPS):
                saved.append(take(attention, "activations"))
                temporary = take(working, "activations")
                if rest:
                    saved.append(take(rest, "activations"))
                drop(temporary)
            if kept:  # in the midst of the activations, as a user's `outputs.append(…)` does
                take(kept, "other")
                self.leaked += kept if self.plan.leaks else 0
                kept = 0
            logits = shape[0] * shape[1] * job.vocabulary
            loss = [take(logits * 2, "loss"), take(logits * 4, "loss")]
            self._end_phase("forward", phases)
            loss.append(take(logits * 4, "loss"))
            for block in loss:
                drop(block)
            for group in range(GROUPS):
                temporary = take(working, "activations")
                if len(gradients) <= group and job.gradients:
                    gradients.append(take(job.gradients // GROUPS, "gradients"))
                drop(saved.pop())
                if rest:
                    drop(saved.pop())
                drop(temporary)
            self._end_phase("backward", phases)
        if job.optimizer and not self.states:
            self._make_states()
        if job.foreach and job.gradients:
            drop(take(job.gradients, "other"))
        self._end_phase("optimizer", phases)
        for block in (*gradients, *inputs):
            drop(block)
        return phases

    def clock_steps(self) -> int:
        return len(self.hidden.peak) + 1

    def _end_phase(self, name: str, phases: dict[str, dict[str, float]]) -> None:
        allocator = self.allocator
        phase = phases.setdefault(name, {"peak_allocated_gib": 0.0, "peak_reserved_gib": 0.0})
        phase["peak_allocated_gib"] = max(phase["peak_allocated_gib"], allocator.peak_allocated / GIB)
        phase["peak_reserved_gib"] = max(phase["peak_reserved_gib"], allocator.peak_reserved / GIB)
        if allocator.watching and allocator.peak_allocated > self.peak:
            self.peak, self.categories = allocator.peak_allocated, allocator.at_peak
        allocator.reset_peak()

    def _record(self, step: int, step_ms: float, fields: dict[str, Any]) -> dict[str, Any]:
        job, allocator, shapes = self.job, self.allocator, self.plan.shapes[step - 1]
        floor = allocator.allocated + int(self.rng.random() * self.plan.prefetched)
        phases = fields["phases"].values()
        epoch = min(2.5 * step / len(self.plan.shapes), 1.0)
        rss_gib = self.rss_gib + self.plan.rss_growth_gib * epoch + self.rng.uniform(0, 0.05)
        record: dict[str, Any] = {
            "schema": 1,
            "kind": "step",
            "time": 1.7e9 + self.clock_s,
            "step": step,
            "steps": 1,
            "step_time_ms": round(step_ms, 3),
            "samples": sum(samples for samples, _ in shapes),
            "tokens": sum(samples * length for samples, length in shapes),
            "longest_sequence": max(length for _, length in shapes),
            "micro_batches": len(shapes),
            "allocated_gib": floor / GIB,
            "reserved_gib": allocator.reserved / GIB,
            "fragmentation_gib": max(allocator.reserved - floor, 0) / GIB,
            "peak_allocated_gib": max(phase["peak_allocated_gib"] for phase in phases),
            "peak_reserved_gib": max(phase["peak_reserved_gib"] for phase in phases),
            "capacity_gib": job.capacity / GIB,
            "alloc_retries": allocator.retries,
            "allocator_ooms": 0,
            "host_rss_gib": rss_gib,
            "host_available_gib": job.ram_gib - rss_gib,
            "phases": fields["phases"],
        }
        if job.nvml != "none" and (self.nvml_read_s < 0 or self.clock_s - self.nvml_read_s >= _NVML_EVERY_S):
            self.nvml_read_s = self.clock_s
            record["device_used_gib"] = (allocator.reserved + self.outside + self.others) / GIB
            if job.nvml == "all":
                record["outside_allocator_gib"] = self.outside / GIB
        if allocator.watching:
            known = {name: size / GIB for name, size in self.categories.items() if name != "other"}
            rest = record["peak_allocated_gib"] - sum(known.values())
            record["categories"] = {f"{name}_gib": size for name, size in known.items()} | {"other_gib": max(rest, 0)}
            held = {"weights_gib": job.weights / GIB, "optimizer_gib": job.optimizer / GIB}
            record["held"] = {"device": {name: size for name, size in held.items() if size}}
        return record


def simulate(job: Job, plan: Plan, rng: random.Random) -> tuple[list[dict[str, Any]], Hidden]:
    """The step records of a run, the last one of each step, and what they do not say.

    Where the GPU is full the run ends with the step before. `Hidden` has an entry for each record.
    """
    hidden = Hidden()
    records: list[dict[str, Any]] = []
    clock_s = 0.0
    parts = [(0, len(plan.shapes))]
    if plan.resume is not None:
        killed, checkpoint = plan.resume
        parts = [(0, killed), (checkpoint, len(plan.shapes))]
    for start, last in parts:
        del records[start:]  # steps that are repeated: the last record counts
        for values in vars(hidden).values():
            del values[start:]
        try:
            process = _Process(job, plan, rng, hidden, start, clock_s)
            for step in range(start + 1, last + 1):
                records.append(process.step(step))
                process.after(step)
        except OutOfDeviceMemory:
            break
        clock_s = process.clock_s + rng.uniform(30, 3000)
    return records, hidden
