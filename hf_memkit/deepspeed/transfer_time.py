"""What an optimizer step takes beside forward and backward: a row for each thing that is moved, and the optimizer.

The engine is taken out where a training is traced, so nothing of this is in the trace. Each row can be checked by
hand: `moved_bytes` over the GB/s that `rate` names is `in_all`; what the computation beside it does not hide is
`exposed`; the time of a step is that of its micro-batches and the exposed seconds. The bytes are those of
`traffic.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from hf_memkit.catalog.host_rates import HostRates
from hf_memkit.catalog.rates import GpuRates
from hf_memkit.common.units import GB
from hf_memkit.deepspeed.traffic import ADAM, STATES_READ, STATES_WRITTEN, Link, StepTraffic


@dataclass(frozen=True, slots=True)
class Seconds:
    """A range: the fastest, the likely, the slowest."""

    low: float
    middle: float
    high: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.low - other.low, self.middle - other.middle, self.high - other.high)

    def times(self, factor: float) -> Seconds:
        return Seconds(self.low * factor, self.middle * factor, self.high * factor)

    def least(self, other: Seconds) -> Seconds:
        return Seconds(min(self.low, other.low), min(self.middle, other.middle), min(self.high, other.high))

    def or_zero(self) -> Seconds:
        return Seconds(max(0.0, self.low), max(0.0, self.middle), max(0.0, self.high))


@dataclass(frozen=True, slots=True)
class TracedSeconds:
    """From the trace of one GPU that holds everything.

    Attributes:
        forward_s, backward_s: of one micro-batch; backward with what is recomputed in it.
        optimizer_s: of a step over all that is trained.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float


@dataclass(frozen=True, slots=True)
class CostRow:
    """
    Attributes:
        name: what is done.
        moved_bytes: see `Traffic`; 0: the optimizer on the GPU, which is traced, and hooks.
        exposed: seconds of a step that nothing hides; of collectives also their passes through the GPU's memory.
        in_all: seconds that it takes alone.
    """

    name: str
    moved_bytes: float
    exposed: Seconds
    in_all: Seconds


@dataclass(frozen=True, slots=True)
class StepCost:
    """One optimizer step on one machine."""

    rows: tuple[CostRow, ...]

    @property
    def exposed(self) -> Seconds:
        """What a step takes beside the forward and backward of its micro-batches."""
        return sum((row.exposed for row in self.rows), Seconds(0, 0, 0))


@dataclass(frozen=True, slots=True)
class _Shares:
    """What of a figure is reached: best, likely, worst."""

    best: float
    likely: float
    worst: float
    source: str


_NVLINK: Final = _Shares(
    0.88, 0.78, 0.5,
    "stas00/ml-engineering @ 744d01e: network/README.md: all-reduce of 8 A100 235 of 300 GB/s, copy between two H200 "
    "396 of 450; worst: assumed, for buckets of some MB",
)  # fmt: skip
_BETWEEN_OVER_PCIE: Final = _Shares(
    0.8, 0.6, 0.3,
    "docs.alayanew.com, NCCL-tests: all-reduce of 8 H100 PCIe 35 to 45 GB/s, where ml-engineering copies 55; worst: "
    "assumed, through RAM where GPUs cannot reach one another",
)  # fmt: skip
_PCIE: Final = _Shares(1.0, 0.9, 0.7, "the figure is as reached; likely and worst: assumed, for tensors one by one")
_PAGEABLE: Final = _Shares(
    0.5, 0.25, 0.16, "deepspeedai/DeepSpeed#5301: RAM that is not page-locked is up to six times slower; best: assumed"
)
_RAM: Final = _Shares(1.0, 0.8, 0.4, "benchmarks/cpu_adam.py, against the host's own copies; worst: assumed")
_DISK: Final = _Shares(1.0, 0.85, 0.6, "assumed: files of some MB, and writes beside reads")
_HIDES: Final = Seconds(1.0, 0.9, 0.5)
"""What of the computation beside it hides a transfer. Assumed: layers differ, and none waits for the next bucket."""

_PASSES: Final = Seconds(1, 3, 5)
"""Times that a collective's tensor goes through the GPU's memory, which no overlap hides: into a bucket, divided, read
and written by the ring, out of it. Counted in deepspeed 0.19.8: runtime/zero/stage_1_and_2.py 1456, 2367, 2380, 1541;
`benchmarks/published_two_gpus.py` compares with FSDP's published runs, which ask for the last of them or more."""

_ENGINE_S: Final = {2: (20e-6, 50e-6, 150e-6), 3: (100e-6, 250e-6, 800e-6)}
"""Of the host, for each tensor of parameters in a micro-batch: hooks that put gradients into buckets (stages up to 2),
and that gather and release weights in both passes (stage 3), all in Python (deepspeed 0.19.8: runtime/zero/
stage_1_and_2.py, `create_gradient_handling_hooks`; parameter_offload.py, `setup_zero_stage3_hooks`). Assumed, and why
small models are slow with an engine."""

_ENGINE_STEP_S: Final = (2e-3, 5e-3, 20e-3)
"""Of the host, for the engine's own step: overflow checks, norms and copies of each group; assumed."""


@dataclass(frozen=True, slots=True)
class EngineHooks:
    """What DeepSpeed's Python takes of the host: low, middle, high.

    Attributes:
        beside: in a micro-batch, while the GPU computes what was queued before.
        alone: in a micro-batch, while the GPU waits.
        of_step: in the optimizer's step.
    """

    beside: tuple[float, float, float] = (0.0, 0.0, 0.0)
    alone: tuple[float, float, float] = (0.0, 0.0, 0.0)
    of_step: tuple[float, float, float] = (0.0, 0.0, 0.0)


def engine_hooks(stage: int, trained: int, frozen: int = 0, *, gpus: int = 1) -> EngineHooks:
    """Of `trained` and `frozen` tensors of parameters. Stage 3 on several GPUs lets the host be only a few gathers
    ahead (deepspeed 0.19.8: runtime/zero/partitioned_param_coordinator.py, `__max_ongoing_fetch_events`), so that the
    GPU waits for it; one GPU gathers nothing."""
    tensors = trained + (frozen if stage == 3 else 0)
    low, middle, high = (tensors * each for each in _ENGINE_S[3 if stage == 3 else 2])
    if stage == 3 and gpus > 1:
        return EngineHooks(alone=(low, middle, high), of_step=_ENGINE_STEP_S)
    return EngineHooks(beside=(low, middle, high), of_step=_ENGINE_STEP_S)


_UNIT: Final = Seconds(0, 0.25e-3, 0.5e-3)
"""Of the host, for the hooks of one of FSDP's units in one pass. Measured on one core of an AMD EPYC that had other
work: 0.17 to 0.55 ms (torch 2.13; 16 small layers of Llama, alone and with LoRA, each matrix of which is a unit, with
and without reentrant checkpointing; a process group that sends nothing, on a CPU), where calls of CUDA and NCCL are
not in it. GPUs stand beside faster ones. The host is at most two gathers ahead of the GPU (torch 2.13:
distributed/fsdp/_limiter_utils.py), and small units give it no time to get there; at best all is hidden."""


def step_cost(traffic: StepTraffic, traced: TracedSeconds, gpu: GpuRates, host: HostRates) -> StepCost:
    """Seconds of one optimizer step beside forward and backward.

    Args:
        traffic: of `ddp_traffic`, `fsdp_traffic` or `zero_traffic`; `StepTraffic()` for one GPU with neither.
        traced: seconds of the computation.
        gpu, host: rates. All GPUs of a machine move at the same time: over their own links, and over one RAM and
            one disk. DeepSpeedCPUAdam steps on the host, on all of its cores, or torch's fused AdamW, which is as
            fast there (benchmarks/cpu_adam.py).
    """
    per_gb = _seconds_per_gb(gpu, host)
    rows = []
    used: dict[tuple[str, Link], Seconds] = {}  # of one micro-batch's forward or backward, by what it hides
    for each in traffic.rows:
        rate = per_gb[each.link]
        in_all = rate.times(each.moved_bytes / GB)
        exposed = in_all
        if each.micro_batches:
            # One thread waits for a weight from the disk, and then copies it: the same computation hides both
            # (deepspeed 0.19.8: runtime/zero/partition_parameters.py 1707, 74).
            hides: Link = "pcie" if each.link == "read" else each.link
            before = used.get((each.phase, hides), Seconds(0, 0, 0))
            beside = traced.forward_s if each.phase == "forward" else traced.backward_s
            room = (_HIDES.times(beside) - before).times(each.micro_batches)
            hidden = (in_all - rate.times(each.tail_bytes / GB)).or_zero().least(room)
            used[each.phase, hides] = before + hidden.times(1 / each.micro_batches)
            exposed = in_all - hidden
        if each.link == "gpus":
            whole = each.moved_bytes / GB * traffic.gpus / (traffic.gpus - 1)
            exposed = exposed + _PASSES.times(whole / gpu.achievable_memory_gb_per_s.value)
        rows.append(CostRow(each.name, each.moved_bytes, exposed, in_all))
    if traffic.unit_passes:
        hooks = _UNIT.times(traffic.unit_passes)
        rows.append(CostRow("hooks of FSDP's units", 0, hooks, hooks))
    optimizer = Seconds(1, 1, 1).times(traced.optimizer_s * traffic.on_gpu)
    rows.append(CostRow("optimizer on the GPU", 0, optimizer, optimizer))
    return StepCost(_pipelined(rows, ahead=traffic.reads_ahead, behind=traffic.writes_behind))


def _seconds_per_gb(gpu: GpuRates, host: HostRates) -> dict[Link, Seconds]:
    pcie, nvlink = gpu.pcie_gb_per_s.value, gpu.nvlink_gb_per_s
    by_link: dict[Link, tuple[_Shares, float]] = {
        "gpus": (_BETWEEN_OVER_PCIE, pcie) if nvlink is None else (_NVLINK, nvlink.value),
        "pcie": (_PCIE, pcie),
        "pageable": (_PAGEABLE, pcie),
        "ram": (_RAM, min(host.ram_gb_per_s.value, host.cores * host.core_gb_per_s.value)),
        "read": (_DISK, host.nvme_read_gb_per_s.value),
        "write": (_DISK, host.nvme_write_gb_per_s.value),
    }
    return {
        link: Seconds(*(1 / (gb_per_s * share) for share in (shares.best, shares.likely, shares.worst)))
        for link, (shares, gb_per_s) in by_link.items()
    }


def _pipelined(rows: Sequence[CostRow], *, ahead: bool, behind: bool) -> tuple[CostRow, ...]:
    """`pipeline_read` reads the next sub-group while one steps, `pipeline_write` writes the one before it (deepspeed
    0.19.8: runtime/swap_tensor/pipelined_optimizer_swapper.py 107-160). The first read and the last write, which
    nothing hides, are left out: they matter where sub-groups are few."""
    by_name = {row.name: row for row in rows}
    if STATES_READ not in by_name or not (ahead or behind):
        return tuple(rows)
    read, adam, write = (by_name[name].in_all for name in (STATES_READ, ADAM, STATES_WRITTEN))
    changed = dict(by_name)
    if ahead:
        busy = adam if behind else adam + write
        changed[STATES_READ] = replace(by_name[STATES_READ], exposed=(read - busy).or_zero())
    if behind:
        busy = adam + changed[STATES_READ].exposed
        changed[STATES_WRITTEN] = replace(by_name[STATES_WRITTEN], exposed=(write - busy).or_zero())
    return tuple(changed[row.name] for row in rows)
