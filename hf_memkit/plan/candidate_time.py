"""Estimates the time of a candidate: one optimizer step, and the whole training with its evaluations and saves.

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
from hf_memkit.catalog.rates import GpuRates
from hf_memkit.common.errors import MemkitError
from hf_memkit.common.range import Range
from hf_memkit.common.units import GB, GIB
from hf_memkit.common.user_files import user_path
from hf_memkit.deepspeed.traffic import (
    ADAM,
    StepTraffic,
    ddp_traffic,
    offloaded_fsdp_traffic,
    unmodelled_keys,
    zero_traffic,
)
from hf_memkit.deepspeed.transfer_time import (
    CollectiveSeconds,
    EngineHooks,
    TracedSeconds,
    collective_seconds,
    engine_hooks,
    hooks_of_shards,
    step_cost,
)
from hf_memkit.plan.judgement import Judgement
from hf_memkit.prediction.from_script import facts_from_sizes
from hf_memkit.prediction.time.compile_time import compile_seconds
from hf_memkit.prediction.time.step_time import StepTime, step_time
from hf_memkit.prediction.trace.work import EXCHANGES, Operation, Work
from hf_memkit.prediction.traced_training import RunLength, TracedTraining

_ADAM_BYTES: Final = 30
"""Bytes of GPU memory traffic per parameter in a fused Adam step: fp32 gradient (4 read), master weight and two
moments (4 read and 4 written each), 16-bit weight (2 written). deepspeed 0.19.8: ops/adam/fused_adam.py."""

_PAGED_BYTES: Final = 2
"""Bytes of optimizer states per parameter in bitsandbytes' 8-bit AdamW: two moments."""

_DESKTOP_CORES: Final = 16
_SERVER_CORES: Final = 64
"""CPU cores of a host other than this machine; assumed."""

_SERVER_GPUS: Final = ("A100", "H100", "H200", "B200", "GH200", "P100", "V100")
"""GPUs with HBM, which no desktop GPU has."""

_SAVE_S: Final = 1.0
"""Seconds of a save, on top of the time to write its bytes; assumed."""

_COMPILING_S_PER_WEIGHT: Final = 0.4
"""Seconds that torch.compile takes for a parameter of the model, if no trace has counted what it compiles:
Qwen3-8B with 399 of them takes 150 s (prediction/time/compile_time.py)."""

_NOTHING_GIVEN: Final = GivenHost()
_CPU_HINT: Final = "; another machine's: --host cores=32,ram-bandwidth=200GB/s"
_NO_DISK_SPEED: Final = "its disk (--host nvme-read=6GB/s,nvme-write=3GB/s gives its speed)"


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a GPU and its host, from which times are computed.

    Attributes:
        rates: of the GPU, or of the known GPU that is most like it; None if there is no such GPU.
        capability: compute capability of the GPU of `rates`.
        substitute_note: names the GPU of `rates`, if it is not the user's; empty otherwise.
        host: speeds of CPU, RAM and disk.
        warnings: why the disk could not be measured.
        given: the speeds that the user gave; `rates` and `host` contain them.
        disk_tried: whether `with_disk` was called.
    """

    rates: GpuRates | None
    capability: float
    substitute_note: str
    host: HostRates
    warnings: tuple[str, ...] = ()
    given: GivenHost = _NOTHING_GIVEN
    disk_tried: bool = False

    @classmethod
    def of(cls, machine: Machine, given: GivenHost | None = None) -> Speeds:
        """The speeds of a machine, overridden by those that the user gave."""
        gpu, given = machine.gpu, given or _NOTHING_GIVEN
        assert gpu is not None
        is_server = gpu.name.removeprefix("NVIDIA ").startswith(_SERVER_GPUS)
        cores = given.cores or (_SERVER_CORES if is_server else _DESKTOP_CORES)
        host = given.overridden_on(measured_host() if gpu.here else assumed_host(cores))
        rates = rates_of(gpu.name)
        if rates is not None and gpu.capability is not None:
            return cls(given.over_pcie(rates), gpu.capability, "", host, given=given)
        name = _most_similar_gpu(gpu)
        if name is None or (rates := rates_of(name)) is None:
            return cls(None, gpu.capability or 8.0, "", host, given=given)
        note = f"as on {name}: the speed of {gpu.name} is unknown; name the GPU (--gpu NAME)"
        rates = given.over_pcie(rates)
        return cls(rates, KNOWN_GPUS[name].capability, note, host, given=given)

    def with_disk(self) -> Speeds:
        """A copy with the measured speed of the folder that DeepSpeed may swap to. Measuring takes seconds and writes
        256 MiB, which it removes; it is omitted if the speed was given or the folder is not on this machine."""
        folder = self.given.nvme_path
        if self.disk_tried or self.host.knows_disk or folder is None or not user_path(folder).is_dir():
            return replace(self, disk_tried=True)
        try:
            read, write = _measured_disk(folder)
        except MemkitError as error:
            return replace(self, disk_tried=True, warnings=(*self.warnings, str(error)))
        host = self.host.with_disk(read, write, f"measured in {folder} on this machine")
        return replace(self, disk_tried=True, host=host)


@functools.cache
def _measured_disk(folder: str) -> tuple[float, float]:
    """(GB/s of reading, GB/s of writing); cached, because plans for several GPUs share the disk."""
    from hf_memkit.deepspeed.aio import measure

    disk = measure(folder, cpu=this_machine(folder).gpu is None)
    return disk.read_gb_s, disk.write_gb_s


def _most_similar_gpu(gpu: Gpu) -> str | None:
    """The name of the known GPU with the nearest memory size and the same support of bf16."""
    known = {
        name: size for name, size in KNOWN_GPUS.items() if rates_of(name) and (size.capability >= 8.0) == gpu.bf16
    }

    def distance(name: str) -> float:
        return abs((known[name].total_gib or known[name].box_gb) * GIB - gpu.capacity_bytes)

    return min(known, key=distance, default=None)


def with_times(
    judgement: Judgement, work: Work, training: TracedTraining, speeds: Speeds, *, gpus: int, nodes: int = 1
) -> Judgement:
    """A copy with step time, tokens and run time, as far as they are known.

    Args:
        work: the traced operations.
        gpus, nodes: GPUs of each machine, and machines.
    """
    if speeds.rates is None:
        return judgement
    facts, accumulation = training.facts, training.arguments.gradient_accumulation_steps
    kind = training.steps[0].kind  # typical batches come first; without them all are the worst
    span = next(step.calls for step in reversed(training.steps) if step.kind == kind)
    step = step_time(
        work, speeds.rates, capability=speeds.capability, span=span, micro_batches=accumulation,
        loader_workers=training.arguments.dataloader_num_workers or 0,
        hooks_s=_hooks_s(training, work, span, gpus * nodes),
        collective_s=functools.partial(_collective_seconds, speeds.rates, speeds.host, gpus),
    )  # fmt: skip

    tokens = facts.tokens.get(kind)
    if mean := facts.mean.get(kind):  # an average batch is longer or shorter than the traced one
        padded_ratio, token_ratio = mean
        step = _scaled(step, padded_ratio, accumulation)
        tokens = tokens and tokens * token_ratio
    forward_s = step.forward_s
    step = _with_transfers(step, judgement, training, speeds, gpus=gpus, nodes=nodes)
    step = _with_paging(step, judgement, training, speeds)
    given = filter(None, (speeds.substitute_note, speeds.given.describe()))
    return replace(
        judgement,
        step_time=replace(step, rests_on=(*given, *step.rests_on)),
        tokens=round(tokens * accumulation * (gpus * nodes // training.ranks_per_batch)) if tokens else None,
        run_seconds=_run_seconds(step, forward_s, judgement, training, speeds.host),
        compiling_s=compiling_s(training) if training.arguments.torch_compile else 0.0,
    )


def compiling_s(training: TracedTraining) -> float:
    """Seconds that torch.compile takes in the first steps of a run; an estimate if this training is not compiled."""
    if training.compilation is not None:
        return compile_seconds(training.compilation).middle
    return _COMPILING_S_PER_WEIGHT * compiled_parameters(training)


def compiled_parameters(training: TracedTraining) -> int:
    """Parameters in what torch.compile compiles: all of them; with FSDP2, whose hooks end a graph at each layer, those
    of one layer, because layers alike are compiled once. Parameters of different sizes are counted for that."""
    weights = training.facts.weights
    sizes = (*weights.trained, *weights.frozen)
    return len(set(sizes)) if training.fsdp is not None else len(sizes)


def _scaled(step: StepTime, ratio: float, micro_batches: int) -> StepTime:
    """The step with `ratio` times the tokens. The optimizer and gradient clipping (in backward) take the same time."""
    low, middle, high = (step.optimizer_s + ratio * max(0.0, each - step.optimizer_s) for each in step.seconds)
    clipping_s = step.by_phase.get("backward", 0.0) - micro_batches * step.backward_s
    constant = {"backward": max(0.0, clipping_s), "optimizer": math.inf}
    by_phase = {}
    for phase, seconds in step.by_phase.items():
        fixed = min(seconds, constant.get(phase, 0.0))
        by_phase[phase] = fixed + ratio * (seconds - fixed)
    return replace(
        step, seconds=Range(low, middle, high), by_phase=by_phase, forward_s=ratio * step.forward_s,
        backward_s=ratio * step.backward_s,
    )  # fmt: skip


def _with_paging(step: StepTime, judgement: Judgement, training: TracedTraining, speeds: Speeds) -> StepTime:
    """Adds the time in which CUDA moves the states of a paged 8-bit optimizer over PCIe, out and back: of those for
    which the GPU has no room; at the high end of the range, of all."""
    assert speeds.rates is not None
    if not str(training.arguments.optim).startswith("paged_"):
        return step
    states = _PAGED_BYTES * sum(training.facts.weights.trained)
    room = max(0, judgement.limit_bytes - judgement.needs_bytes)
    round_trip = 2 * states / (speeds.rates.pcie_gb_per_s.value * GB)
    moved = round_trip * max(0.0, 1 - room / max(1, states))
    basis = f"paged optimizer: {moved:.3g} s a step to move its states over PCIe"
    moved_s = Range(0.0, moved, 2 * round_trip)
    return replace(step, seconds=step.seconds + moved_s, rests_on=(*step.rests_on, basis))


def _with_transfers(
    step: StepTime, judgement: Judgement, training: TracedTraining, speeds: Speeds, *, gpus: int, nodes: int
) -> StepTime:
    """Adds the transfers between GPUs, host and disk, and the optimizer step of DeepSpeed's engine."""
    engine = training.engine
    if gpus * nodes == 1 and engine is None:
        return step
    assert speeds.rates is not None
    unknown = [*step.unknown, *(unmodelled_keys(engine.config) if engine is not None else ())]
    traffic = untraced_traffic(training, gpus, nodes)
    if traffic is None:
        return replace(step, unknown=(*unknown, "DeepSpeed with this JSON"))

    optimizer_s = step.optimizer_s
    low, middle, high = (seconds - optimizer_s for seconds in step.seconds)  # `step_cost` includes the optimizer
    if engine is not None:
        # The trace runs a stand-in for the engine's optimizer, without states.
        adam_bytes = _ADAM_BYTES * sum(training.facts.weights.trained)
        optimizer_s = adam_bytes / (speeds.rates.achievable_memory_gb_per_s.value * GB)
        hooks, accumulation = _engine_hooks(training, gpus * nodes), training.arguments.gradient_accumulation_steps
        low += accumulation * hooks.alone[0] + hooks.of_step[0]
        middle += accumulation * hooks.alone[1] + hooks.of_step[1]
        high += accumulation * hooks.alone[2] + hooks.of_step[2]
    traced = TracedSeconds(step.forward_s, step.backward_s, optimizer_s)
    cost = step_cost(traffic, traced, speeds.rates, speeds.host)
    seconds = Range(low, middle, high) + cost.exposed

    long = [row for row in cost.rows if row.exposed.middle > 0.01 * seconds.middle]
    basis = [f"{row.name}: {row.exposed.middle:.3g} s a step" for row in long]
    if any(row.name == ADAM for row in traffic.rows):
        is_given = speeds.given.cores is not None and speeds.given.ram_gb_per_s is not None
        basis.append(speeds.host.describe_cpu() + ("" if is_given else _CPU_HINT))
    read, written = (sum(row.moved_bytes for row in traffic.rows if row.link == link) for link in ("read", "write"))
    if read or written:
        basis.append(speeds.host.describe_disk(read, written))
        # If the script itself swaps, every setup does: an assumed disk speed ranks them as well.
        if not speeds.host.knows_disk and judgement.candidate.engine:
            unknown.append(_NO_DISK_SPEED)
    return replace(step, seconds=seconds, unknown=tuple(unknown), rests_on=(*step.rests_on, *basis))


def _hooks_s(training: TracedTraining, work: Work, span: tuple[int, int], gpus: int) -> Range:
    """Host time per micro-batch of hooks that run while the GPU is busy."""
    if not training.sharded:
        return _engine_hooks(training, gpus).beside
    gathers = products = micro_batches = 0
    for begin, end, phase in work.spans():
        if span[0] <= begin < span[1] and phase in ("forward", "backward"):
            called = [work.operations[call] for call in work.calls[begin:end]]
            gathers += sum(each.name == "all-gather" and each.stream != EXCHANGES for each in called)
            if "tp_size" in training.parallel_sizes:
                products += sum(each.kind == "matmul" for each in called)
            micro_batches += phase == "backward"
    micro_batches = max(1, micro_batches)
    return hooks_of_shards(gathers / micro_batches, products / micro_batches)


def _collective_seconds(rates: GpuRates, host: HostRates, node_gpus: int, operation: Operation) -> CollectiveSeconds:
    """Seconds of a traced collective."""
    return collective_seconds(
        operation.moved_bytes, rates, host, ranks=operation.ranks, on_node=operation.on_node, node_gpus=node_gpus,
        is_all_reduce=operation.name == "all-reduce",
    )  # fmt: skip


def untraced_traffic(training: TracedTraining, gpus: int, nodes: int) -> StepTraffic | None:
    """The transfers of a step between GPUs, host and disk that the trace does not have; None if those of the DeepSpeed
    config are unknown."""
    arguments, weights = training.arguments, training.facts.weights
    model = facts_from_sizes([(size, True) for size in weights.trained or [0]])
    if training.fsdp is not None and training.fsdp.cpu_offload:
        share = training.parallel_sizes.get("dp_replicate_size", 1) / nodes
        return offloaded_fsdp_traffic(model, share=share, state_bytes=weights.gradient_bytes)
    if training.sharded:
        return StepTraffic()
    if training.engine is None:
        return ddp_traffic(model, gpus=gpus, nodes=nodes, gradient_bytes=weights.gradient_bytes)
    frozen = facts_from_sizes([(size, True) for size in weights.frozen]) if weights.frozen else None
    return zero_traffic(
        training.engine.config, model, frozen, gpus=gpus, nodes=nodes,
        accumulation=arguments.gradient_accumulation_steps,
        recomputes=bool(arguments.activation_checkpointing),
    )  # fmt: skip


def _engine_hooks(training: TracedTraining, gpus: int) -> EngineHooks:
    if training.engine is None:
        return EngineHooks()
    weights = training.facts.weights
    return engine_hooks(training.engine.stage, len(weights.trained), len(weights.frozen), gpus=gpus)


def _run_seconds(
    step: StepTime, forward_s: float, judgement: Judgement, training: TracedTraining, host: HostRates
) -> Range | None:
    """Seconds of the whole training: compiling, its steps, evaluations at the speed of a forward pass, and saves at
    the speed of the disk. None if the number of steps is unknown or an evaluation generates text."""
    arguments, length = training.arguments, training.facts.length
    if length.steps is None:
        return None
    rows = (arguments.per_device_eval_batch_size or 1) / (arguments.per_device_train_batch_size or 1)
    evaluation_s = length.evaluation_batches * rows * forward_s
    evaluations = _count(arguments.eval_strategy, arguments.eval_steps, length)
    if evaluations and length.generates:
        return None  # the number of generated tokens is unknown
    states = judgement.prediction.categories["optimizer"] if judgement.prediction is not None else 0
    save_s = _SAVE_S + (training.facts.saved_bytes + states) / (host.nvme_write_gb_per_s.value * GB)
    saves = _count(arguments.save_strategy, arguments.save_steps, length)
    rest = evaluations * evaluation_s + saves * save_s
    if arguments.torch_compile:
        rest += compiling_s(training)
    low, middle, high = (length.steps * s + rest for s in step.seconds)
    return Range(low, middle, high)


def _count(strategy: str | None, every: float | None, length: RunLength) -> int:
    """The number of evaluations or saves of a run with this strategy and interval."""
    steps = length.steps or 0
    if strategy == "epoch":
        return math.ceil(steps / (length.steps_an_epoch or steps))
    if strategy == "steps" and every:
        return int(steps // (every if every >= 1 else max(1, math.ceil(every * steps))))
    return 0
