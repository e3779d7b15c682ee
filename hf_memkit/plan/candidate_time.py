"""What a candidate takes in time: one optimizer step, and the whole training with its evaluations and saves.

```
trace ─> step_time (prediction/): what the GPU computes ──┬─> seconds of a step ─┬─> seconds of the run
JSON of DeepSpeed, number of GPUs ─> step_cost (deepspeed/) ───┘   tokens per second  └─> with a price: its cost
```
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Final

from hf_memkit.catalog.gpu_rates import rates_of
from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
from hf_memkit.catalog.hardware import Gpu, Machine, this_machine
from hf_memkit.catalog.host_rates import GivenHost, HostRates, assumed_host, measured_host
from hf_memkit.catalog.models import ModelFacts
from hf_memkit.catalog.rates import GpuRates
from hf_memkit.common.errors import MemkitError
from hf_memkit.common.units import GB, GIB
from hf_memkit.common.user_files import user_path
from hf_memkit.deepspeed.traffic import ADAM, StepTraffic, ddp_traffic, unmodelled_keys, zero_traffic
from hf_memkit.deepspeed.transfer_time import EngineHooks, TracedSeconds, engine_hooks, step_cost
from hf_memkit.plan.judgement import Judged
from hf_memkit.prediction.from_script import shapes
from hf_memkit.prediction.time.step_time import StepTime, step_time
from hf_memkit.prediction.trace.work import Work
from hf_memkit.prediction.traced_training import RunLength, TracedTraining, Weights

Range = tuple[float, float, float]

_ADAM_BYTES: Final = 30
"""Bytes of the GPU's memory that a fused step of Adam over master weights moves for each parameter: gradient (4 read),
master weight and two moments (4 read and 4 written each), the 16-bit weight (2 written). deepspeed 0.19.8:
ops/adam/fused_adam.py, on fp32 gradients."""

_PAGED_BYTES: Final = 2
"""Of a parameter's states in bitsandbytes' 8-bit AdamW: two moments."""

_DESKTOP_CORES: Final = 16
_SERVER_CORES: Final = 64
"""Of a host that is not here; assumed."""

_SAVE_S: Final = 1.0
"""Of a save, beside its bytes; assumed."""

_NOTHING_GIVEN: Final = GivenHost()
_SAY_CPU: Final = "; another machine's: --host cores=32,ram-bandwidth=200GB/s"
_DISK: Final = "its disk (--host nvme-read=6GB/s,nvme-write=3GB/s gives its speed)"


@dataclass(frozen=True, slots=True)
class Pricing:
    """What prices are computed with.

    Attributes:
        rates: of the GPU, or of the one that stands for it; None: of neither is anything known.
        capability: of that GPU.
        stands_for: what is to be said where it is another one than the user's; empty: it is that one.
        host: rates of RAM and disk.
        warnings: why the disk was not measured.
        given: what the user says of the machine; `rates` and `host` have it.
        looked_at_disk: whether it was tried to measure the disk.
    """

    rates: GpuRates | None
    capability: float
    stands_for: str
    host: HostRates
    warnings: tuple[str, ...] = ()
    given: GivenHost = _NOTHING_GIVEN
    looked_at_disk: bool = False

    @classmethod
    def of(cls, machine: Machine, given: GivenHost | None = None) -> Pricing:
        """For a machine with this GPU, and what the user says of it."""
        gpu, given = machine.gpu, given or _NOTHING_GIVEN
        assert gpu is not None
        cores = given.cores or (_SERVER_CORES if _in_servers(gpu) else _DESKTOP_CORES)
        host = given.overridden_on(measured_host() if gpu.here else assumed_host(cores))
        rates = rates_of(gpu.name)
        if rates is not None and gpu.capability is not None:
            return cls(given.over_pcie(rates), gpu.capability, "", host, given=given)
        name = _like(gpu)
        if name is None or (rates := rates_of(name)) is None:
            return cls(None, gpu.capability or 8.0, "", host, given=given)
        said = f"times are those of {name}: the speed of {gpu.name} is unknown; name the GPU (--gpu NAME)"
        rates = given.over_pcie(rates)
        return cls(rates, KNOWN_GPUS[name].capability, said, host, given=given)

    def with_disk(self) -> Pricing:
        """With what `memkit doctor` measures of the folder that is swapped to, if it is here and its rates are not
        given: some seconds, and 256 MiB that are written and removed."""
        folder = self.given.nvme_path
        if self.looked_at_disk or self.host.knows_disk or folder is None or not user_path(folder).is_dir():
            return replace(self, looked_at_disk=True)
        try:
            read, write = _measured_disk(folder)
        except MemkitError as error:
            return replace(self, looked_at_disk=True, warnings=(*self.warnings, str(error)))
        host = self.host.with_disk(read, write, f"measured in {folder} on this machine")
        return replace(self, looked_at_disk=True, host=host)


@functools.cache
def _measured_disk(folder: str) -> tuple[float, float]:
    """(GB/s read, GB/s written), as `aio.measure` gives them; once for several GPUs."""
    from hf_memkit.deepspeed.aio import measure

    found = measure(folder, cpu=this_machine(folder).gpu is None)
    return found.read_gb_s, found.write_gb_s


def _in_servers(gpu: Gpu) -> bool:
    """Whether it is one with HBM, which no desktop has; "A100 80GB", "H200", "B200" …"""
    return gpu.name.removeprefix("NVIDIA ").startswith(("A100", "H100", "H200", "B200", "GH200", "P100", "V100"))


def _like(gpu: Gpu) -> str | None:
    """The named GPU whose memory is nearest, of those that compute in bf16 where this one does."""
    known = {
        name: each for name, each in KNOWN_GPUS.items() if rates_of(name) and (each.capability >= 8.0) == gpu.bf16
    }

    def distance(name: str) -> float:
        return abs((known[name].total_gib or known[name].box_gb) * GIB - gpu.capacity_bytes)

    return min(known, key=distance, default=None)


def priced(judged: Judged, work: Work, training: TracedTraining, pricing: Pricing, *, gpus: int) -> Judged:
    """The same candidate, with its time where that is known: `work` is what its trace computes."""
    if pricing.rates is None:
        return judged
    facts, accumulation = training.facts, training.arguments.gradient_accumulation_steps
    kind = "usual" if any(each.kind == "usual" for each in training.steps) else "worst"
    span = next(each.calls for each in reversed(training.steps) if each.kind == kind)
    try:
        step = step_time(
            work, pricing.rates, capability=pricing.capability, span=span, micro_batches=accumulation,
            loader_workers=training.arguments.dataloader_num_workers or 0,
            hooks_s=_engine_hooks(training, gpus).beside,
        )  # fmt: skip
    except ValueError:
        return judged
    tokens = facts.tokens.get(kind)
    if mean := facts.mean.get(kind):  # steps of a run are as long as its batches on average
        share, of_tokens = mean
        step, tokens = _times(step, share, accumulation), tokens and tokens * of_tokens
    forward_s = step.forward_s
    step = _with_others(step, judged, training, pricing, gpus=gpus)
    step = _with_paging(step, judged, training, pricing)
    if said := pricing.given.describe():
        step = replace(step, rests_on=(said, *step.rests_on))
    if pricing.stands_for:
        step = replace(step, rests_on=(pricing.stands_for, *step.rests_on))
    return replace(
        judged,
        step_time=step,
        tokens=round(tokens * accumulation * gpus) if tokens else None,
        run_seconds=_run(step, forward_s, judged, training, pricing.host),
    )


def _times(step: StepTime, share: float, micro_batches: int) -> StepTime:
    """A step whose batches have so many times the tokens; its optimizer takes as long, and so does the clipping, which
    phase backward has in it."""
    low, middle, high = (step.optimizer_s + share * max(0.0, each - step.optimizer_s) for each in step.seconds)
    stays = {"backward": step.by_phase.get("backward", 0.0) - micro_batches * step.backward_s, "optimizer": math.inf}
    by_phase = {
        phase: least + share * (each - least)
        for phase, each in step.by_phase.items()
        for least in (min(each, max(0.0, stays.get(phase, 0.0))),)
    }
    return replace(
        step, seconds=(low, middle, high), by_phase=by_phase, forward_s=share * step.forward_s,
        backward_s=share * step.backward_s,
    )  # fmt: skip


def _with_paging(step: StepTime, judged: Judged, training: TracedTraining, pricing: Pricing) -> StepTime:
    """With what CUDA moves of a paged optimizer's states, of two moments in 8 bits: nothing where the GPU has room for
    all of them, in and out of it where it has none."""
    assert pricing.rates is not None
    if not str(training.arguments.optim).startswith("paged_"):
        return step
    states = _PAGED_BYTES * sum(training.facts.weights.trained)
    room = max(0, judged.usable_bytes - judged.needs_bytes)
    there_and_back = 2 * states / (pricing.rates.pcie_gb_per_s.value * GB)
    moved = there_and_back * max(0.0, 1 - room / max(1, states))
    low, middle, high = step.seconds
    said = f"paged optimizer: {moved:.3g} s a step to move its states over PCIe"
    return replace(step, seconds=(low, middle + moved, high + 2 * there_and_back), rests_on=(*step.rests_on, said))


def _with_others(step: StepTime, judged: Judged, training: TracedTraining, pricing: Pricing, *, gpus: int) -> StepTime:
    """With what passes between GPUs, host and disk."""
    engine, accumulation = training.engine, training.arguments.gradient_accumulation_steps
    weights = training.facts.weights
    if gpus == 1 and engine is None:
        return step
    assert pricing.rates is not None
    unknown, optimizer_s = step.unknown, step.optimizer_s
    model, frozen = _models(weights)
    rest = [each - optimizer_s for each in step.seconds]  # the optimizer's is in the costs
    if engine is None:
        traffic: StepTraffic | None = ddp_traffic(model, gpus=gpus, gradient_bytes=weights.gradient_bytes)
    else:
        config = engine.config
        traffic = zero_traffic(
            config, model, frozen, gpus=gpus, accumulation=accumulation,
            recomputes=bool(training.arguments.activation_checkpointing),
        )  # fmt: skip
        unknown = (*unknown, *unmodelled_keys(config))
        # The engine is not traced, and what is in its place has no states.
        optimizer_s = _ADAM_BYTES * model.parameters / (pricing.rates.achievable_memory_gb_per_s.value * GB)
    if traffic is None:
        return replace(step, unknown=(*unknown, "DeepSpeed with this JSON"))
    if engine is not None:
        hooks = _engine_hooks(training, gpus)
        rest = [
            seconds + accumulation * alone + a_step
            for seconds, alone, a_step in zip(rest, hooks.alone, hooks.of_step, strict=True)
        ]
    traced = TracedSeconds(step.forward_s, step.backward_s, optimizer_s)
    cost = step_cost(traffic, traced, pricing.rates, pricing.host)
    beside = cost.exposed
    seconds = (rest[0] + beside.low, rest[1] + beside.middle, rest[2] + beside.high)
    long = [row for row in cost.rows if row.exposed.middle > 0.01 * seconds[1]]
    rows = [f"{row.name}: {row.exposed.middle:.3g} s a step" for row in long]
    if any(row.name == ADAM for row in traffic.rows):
        given = pricing.given.cores is not None and pricing.given.ram_gb_per_s is not None
        rows.append(pricing.host.describe_cpu() + ("" if given else _SAY_CPU))
    read, written = (sum(row.moved_bytes for row in traffic.rows if row.link == link) for link in ("read", "write"))
    if read or written:
        rows.append(pricing.host.describe_disk(read, written))
        # What the script swaps itself it swaps in every setup: an assumed disk ranks these as well.
        if not pricing.host.knows_disk and any(each.engine for each in judged.candidate.choices):
            unknown = (*unknown, _DISK)
    return replace(step, seconds=seconds, unknown=unknown, rests_on=(*step.rests_on, *rows))


def _engine_hooks(training: TracedTraining, gpus: int) -> EngineHooks:
    if training.engine is None:
        return EngineHooks()
    weights = training.facts.weights
    return engine_hooks(training.engine.stage, len(weights.trained), len(weights.frozen), gpus=gpus)


def _models(weights: Weights) -> tuple[ModelFacts, ModelFacts | None]:
    return (
        shapes([(size, True) for size in weights.trained or [0]]),
        shapes([(size, True) for size in weights.frozen]) if weights.frozen else None,
    )


def _run(step: StepTime, forward_s: float, judged: Judged, training: TracedTraining, host: HostRates) -> Range | None:
    """The whole training: steps, evaluations at the speed of a forward pass, saves at that of the disk."""
    arguments, length = training.arguments, training.facts.length
    if length.steps is None:
        return None
    rows = (arguments.per_device_eval_batch_size or 1) / (arguments.per_device_train_batch_size or 1)
    evaluation_s = length.evaluation_batches * rows * forward_s
    evaluations = _how_often(arguments.eval_strategy, arguments.eval_steps, length)
    if evaluations and length.generates:
        return None  # how many tokens an evaluation generates, only its run shows
    states = judged.prediction.categories["optimizer"] if judged.prediction is not None else 0
    save_s = _SAVE_S + (training.facts.saved_bytes + states) / (host.nvme_write_gb_per_s.value * GB)
    saves = _how_often(arguments.save_strategy, arguments.save_steps, length)
    rest = evaluations * evaluation_s + saves * save_s
    low, middle, high = (length.steps * each + rest for each in step.seconds)
    return low, middle, high


def _how_often(strategy: str | None, every: float | None, length: RunLength) -> int:
    """How often it is evaluated, or saved."""
    steps = length.steps or 0
    an_epoch = length.steps_an_epoch or steps
    if strategy == "epoch":
        return math.ceil(steps / an_epoch)
    if strategy == "steps" and every:
        return int(steps // (every if every >= 1 else max(1, math.ceil(every * steps))))
    return 0
