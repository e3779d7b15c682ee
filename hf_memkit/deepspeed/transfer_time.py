"""Time of an optimizer step beyond forward and backward: transfers between GPUs, RAM and disk, and the optimizer.

A trace runs without the engine, so it contains none of this. Each row can be checked by hand: `total` is `moved_bytes`
over the link's GB/s, and `exposed` the part that no computation hides. A step takes the time of its micro-batches plus
the exposed seconds. The bytes come from `traffic.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from hf_memkit.catalog.host_rates import HostRates
from hf_memkit.catalog.rates import GpuRates
from hf_memkit.common.range import ZERO, Range
from hf_memkit.common.units import GB
from hf_memkit.deepspeed.traffic import ADAM, STATES_READ, STATES_WRITTEN, Link, StepTraffic


@dataclass(frozen=True, slots=True)
class TracedSeconds:
    """Times from the trace of one GPU that holds the whole training.

    Attributes:
        forward_s, backward_s: of one micro-batch; backward includes recomputation.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float  # of a step over all trained parameters


@dataclass(frozen=True, slots=True)
class CostRow:
    """One transfer or computation of a step."""

    name: str
    moved_bytes: float  # by one GPU, or by the machine in RAM and to the disk; 0 for the optimizer on the GPU
    exposed: Range  # seconds that nothing hides; for collectives they include the passes through the GPU's memory
    total: Range  # seconds without any overlap


@dataclass(frozen=True, slots=True)
class StepCost:
    """One optimizer step."""

    rows: tuple[CostRow, ...]

    @property
    def exposed(self) -> Range:
        """Time of a step beyond the forward and backward of its micro-batches."""
        return sum((row.exposed for row in self.rows), ZERO)


# Achieved share of a nominal rate, at the low, middle and high end of the time.
_NVLINK: Final = Range(0.88, 0.78, 0.5)
"""stas00/ml-engineering @ 744d01e: network/README.md: all-reduce of 8 A100 235 of 300 GB/s, copy between two H200 396
of 450; worst: assumed, for buckets of some MB."""

_BETWEEN_OVER_PCIE: Final = Range(0.8, 0.6, 0.3)
"""docs.alayanew.com, NCCL-tests: all-reduce of 8 H100 PCIe 35 to 45 GB/s, where ml-engineering copies 55; worst:
assumed, through RAM where GPUs cannot reach one another."""

_NETWORK: Final = Range(0.9, 0.75, 0.5)
"""NVIDIA/nccl-tests#232: 41 of 50 GB/s through a card of 400 Gbit/s; NVIDIA/nccl#495: 600 of 8 x 100 Gbit/s, which
NVIDIA calls a bit low; worst: NVIDIA/nccl#527: 30 of 50 GB/s between four machines of AWS."""

_CARDS_GB_PER_S: Final = ((400.0, 50.0), (300.0, 25.0), (0.0, 6.25))
"""NVLink's GB/s -> GB/s of the network for each GPU, as in NVIDIA's servers: eight cards of 400 Gbit/s beside H100 and
later (DGX H100 user guide), of 200 beside A100 (DGX A100 user guide), four of 100 beside eight V100 (DGX-1)."""

_CARD_WITHOUT_NVLINK: Final = 12.5
"""GB/s of a machine's network if its GPUs have no NVLink: one card of 100 Gbit/s; assumed."""


@dataclass(frozen=True, slots=True)
class _Latency:
    """Seconds that a collective takes however little it sends: to start, and for each step of the ring."""

    start_s: float
    nvlink_s: float
    pcie_s: float
    network_s: float
    speed: float  # share of the link's rate


_PROTOCOLS: Final = (_Latency(8.4e-6, 3.4e-6, 5.7e-6, 9.6e-6, 1.0), _Latency(3.6e-6, 0.47e-6, 1.0e-6, 2.7e-6, 0.25))
"""NCCL's rings for large and for small tensors (protocols Simple and LL), as NCCL itself estimates them to choose one
(NVIDIA/nccl@01afd20, src/graph/tuning.cc: `baseLat`, `hwLat`, `ncclTopoTuneModel`)."""

_PCIE: Final = Range(1.0, 0.9, 0.7)  # the figure is as reached; likely and worst: assumed, for tensors one by one
_PAGEABLE: Final = Range(0.5, 0.25, 0.16)
"""deepspeedai/DeepSpeed#5301: RAM that is not page-locked is up to six times slower; best: assumed."""

_RAM: Final = Range(1.0, 0.8, 0.4)  # benchmarks/cpu_adam.py, against the host's own copies; worst: assumed
_DISK: Final = Range(1.0, 0.85, 0.6)  # assumed: files of some MB, and writes beside reads
_HIDES: Final = Range(1.0, 0.9, 0.5)
"""Share of concurrent computation that hides a transfer. Assumed: layers differ, none waits for the next bucket."""

_PASSES: Final = Range(1, 3, 5)
"""Passes of a collective's tensor through the GPU's memory, which no overlap hides: into a bucket, divided, read and
written by the ring, out of it. Counted in deepspeed 0.19.8: runtime/zero/stage_1_and_2.py 1456, 2367, 2380, 1541;
FSDP's published runs need the maximum or more (`benchmarks/published_two_gpus.py`)."""

_RING_PASSES: Final = Range(1, 2, 3)
"""The same for a collective whose copies into and out of a bucket are in the trace, as FSDP2's: the ring reads and
writes what it sends, and a reduction reads once more. They slow the computation beside them."""

_UNIT_S: Final = Range(0.25e-3, 0.5e-3, 0.9e-3)
"""Host time of FSDP2's hooks around one gather, in addition to the operations of the trace. Measured on one core of an
AMD EPYC, with a process group that sends nothing: 0.50 ms forward and 0.59 ms backward (torch 2.13; 16 small layers of
Llama, each a unit; without about nine operations of 7 us); low and high: assumed, for other processors."""

_PRODUCT_S: Final = Range(0.07e-3, 0.14e-3, 0.25e-3)
"""Host time of DTensor around one matrix product of tensor parallelism, in addition to the operations of the trace.
Measured on one core of an AMD EPYC, with a process group that sends nothing: 0.16 ms forward, and 0.25 ms backward for
two products (torch 2.13; 16 small layers of Llama); low and high: assumed, for other processors."""

_ENGINE_S: Final = {2: Range(20e-6, 50e-6, 150e-6), 3: Range(100e-6, 250e-6, 800e-6)}
"""Host time for each parameter tensor in a micro-batch: Python hooks that put gradients into buckets (stages up to 2),
and that gather and release weights in both passes (stage 3; deepspeed 0.19.8: runtime/zero/stage_1_and_2.py,
`create_gradient_handling_hooks`; parameter_offload.py, `setup_zero_stage3_hooks`). Assumed; slows small models."""

_ENGINE_STEP_S: Final = Range(2e-3, 5e-3, 20e-3)
"""Host time of the engine's step: overflow checks, norms and copies of each group; assumed."""


@dataclass(frozen=True, slots=True)
class EngineHooks:
    """Host seconds of DeepSpeed's Python code."""

    beside: Range = ZERO  # in a micro-batch, while the GPU executes queued work
    alone: Range = ZERO  # in a micro-batch, while the GPU waits
    of_step: Range = ZERO  # in the optimizer's step


def engine_hooks(stage: int, trained: int, frozen: int = 0, *, gpus: int = 1) -> EngineHooks:
    """Host time for `trained` and `frozen` parameter tensors. With stage 3 on several GPUs the host is at most a few
    gathers ahead (deepspeed 0.19.8: runtime/zero/partitioned_param_coordinator.py, `__max_ongoing_fetch_events`), so
    the GPU waits for it; one GPU gathers nothing."""
    tensors = trained + (frozen if stage == 3 else 0)
    hooks_s = _ENGINE_S[3 if stage == 3 else 2].times(tensors)
    if stage == 3 and gpus > 1:
        return EngineHooks(alone=hooks_s, of_step=_ENGINE_STEP_S)
    return EngineHooks(beside=hooks_s, of_step=_ENGINE_STEP_S)


def hooks_of_shards(gathers: float, products: float) -> Range:
    """Host time in a micro-batch, while the GPU executes queued work: of FSDP2's hooks around so many gathers, and of
    DTensor around so many products of tensor parallelism."""
    return _UNIT_S.times(gathers) + _PRODUCT_S.times(products)


def step_cost(traffic: StepTraffic, traced: TracedSeconds, gpu: GpuRates, host: HostRates) -> StepCost:
    """Seconds of one optimizer step beyond forward and backward.

    Args:
        traffic: from `ddp_traffic` or `zero_traffic`; `StepTraffic()` for one GPU without them.
        traced: seconds of the computation.
        gpu, host: rates. All GPUs of a machine transfer at once, over their own links, one RAM and one disk. On the
            host DeepSpeedCPUAdam uses all cores, or torch's fused AdamW, which is as fast there
            (benchmarks/cpu_adam.py).
    """
    per_gb = _seconds_per_gb(gpu, host)
    if traffic.nodes > 1:
        each = traffic.gpus // traffic.nodes
        per_gb["gpus"] = _ring_seconds_per_gb(gpu, host, machines=traffic.nodes, on_node=each, node_gpus=each)
    rows = []
    occupied: dict[tuple[str, Link], Range] = {}  # seconds of one micro-batch's computation that hide a transfer
    for transfer in traffic.rows:
        rate = per_gb[transfer.link]
        total = rate.times(transfer.moved_bytes / GB)
        exposed = total
        if transfer.micro_batches:
            # One thread waits for a weight from the disk, and then copies it: the same computation hides both
            # (deepspeed 0.19.8: runtime/zero/partition_parameters.py 1707, 74).
            hides: Link = "pcie" if transfer.link == "read" else transfer.link
            earlier = occupied.get((transfer.phase, hides), ZERO)
            computation = traced.forward_s if transfer.phase == "forward" else traced.backward_s
            available = (_HIDES.times(computation) - earlier).times(transfer.micro_batches)
            hidden = (total - rate.times(transfer.tail_bytes / GB)).nonnegative().minimum(available)
            occupied[transfer.phase, hides] = earlier + hidden.times(1 / transfer.micro_batches)
            exposed = total - hidden
        if transfer.link == "gpus":
            tensor_gb = transfer.moved_bytes / GB * traffic.gpus / (traffic.gpus - 1)
            exposed = exposed + _PASSES.times(tensor_gb / gpu.achievable_memory_gb_per_s.value)
        rows.append(CostRow(transfer.name, transfer.moved_bytes, exposed, total))
    optimizer = Range(1, 1, 1).times(traced.optimizer_s * traffic.on_gpu)
    rows.append(CostRow("optimizer on the GPU", 0, optimizer, optimizer))
    return StepCost(_pipelined(rows, ahead=traffic.reads_ahead, behind=traffic.writes_behind))


@dataclass(frozen=True, slots=True)
class CollectiveSeconds:
    """Seconds of one collective."""

    on_links: Range  # until it is finished, alone on its links
    in_memory: Range  # that it takes from the computation beside it: passes through the GPU's memory


def collective_seconds(
    sent_bytes: float, gpu: GpuRates, host: HostRates, *, ranks: int, on_node: int, node_gpus: int,
    is_all_reduce: bool = False,
) -> CollectiveSeconds:  # fmt: skip
    """Seconds of one collective, as a ring of all ranks.

    Between machines, the ring is as fast as the slower of two links: the one between GPUs, and the network, on which
    a machine sends through the cards of all its GPUs in the group.

    Args:
        sent_bytes: of one rank: (n-1)/n of the whole tensor, twice that for an all-reduce.
        ranks: of the group.
        on_node: ranks of the group on one machine.
        node_gpus: GPUs of one machine that train; they share its network.
    """
    rounds = 2 if is_all_reduce else 1
    machines = -(-ranks // on_node)
    per_gb = _ring_seconds_per_gb(gpu, host, machines=machines, on_node=on_node, node_gpus=node_gpus)
    times = []
    for protocol in _PROTOCOLS:
        step_s = protocol.pcie_s if gpu.nvlink_gb_per_s is None else protocol.nvlink_s
        between = rounds * (machines - 1)
        latency_s = protocol.start_s + (rounds * (ranks - 1) - between) * step_s + between * protocol.network_s
        times.append(per_gb.times(sent_bytes / GB / protocol.speed) + Range(latency_s, latency_s, latency_s))
    simple, small = times
    memory = _RING_PASSES.times(sent_bytes / GB / gpu.achievable_memory_gb_per_s.value)
    return CollectiveSeconds(simple.minimum(small), memory)


def _ring_seconds_per_gb(gpu: GpuRates, host: HostRates, *, machines: int, on_node: int, node_gpus: int) -> Range:
    """Seconds for each GB that a GPU sends in a ring, in which the slowest link decides."""
    within = ZERO if on_node == 1 else _seconds_per_gb(gpu, host)["gpus"]
    if machines == 1:
        return within
    cards_gb_per_s = _network_gb_per_s(gpu, host, node_gpus) * on_node / node_gpus
    network = Range(*(1 / (cards_gb_per_s * share) for share in _NETWORK))
    return Range(*map(max, within, network))


def _network_gb_per_s(gpu: GpuRates, host: HostRates, node_gpus: int) -> float:
    """GB/s of one machine's network."""
    if host.network_gb_per_s is not None:
        return host.network_gb_per_s.value
    if gpu.nvlink_gb_per_s is None:
        return _CARD_WITHOUT_NVLINK
    return node_gpus * next(rate for nvlink, rate in _CARDS_GB_PER_S if gpu.nvlink_gb_per_s.value >= nvlink)


def _seconds_per_gb(gpu: GpuRates, host: HostRates) -> dict[Link, Range]:
    pcie, nvlink = gpu.pcie_gb_per_s.value, gpu.nvlink_gb_per_s
    by_link: dict[Link, tuple[Range, float]] = {
        "gpus": (_BETWEEN_OVER_PCIE, pcie) if nvlink is None else (_NVLINK, nvlink.value),
        "pcie": (_PCIE, pcie),
        "pageable": (_PAGEABLE, pcie),
        "ram": (_RAM, min(host.ram_gb_per_s.value, host.cores * host.core_gb_per_s.value)),
        "read": (_DISK, host.nvme_read_gb_per_s.value),
        "write": (_DISK, host.nvme_write_gb_per_s.value),
    }
    return {link: Range(*(1 / (gb_per_s * share) for share in shares)) for link, (shares, gb_per_s) in by_link.items()}


def _pipelined(rows: Sequence[CostRow], *, ahead: bool, behind: bool) -> tuple[CostRow, ...]:
    """Overlap reads and writes of sub-groups with the step.

    `pipeline_read` reads the next sub-group during a step, `pipeline_write` writes the previous one (deepspeed 0.19.8:
    runtime/swap_tensor/pipelined_optimizer_swapper.py 107-160). The first read and the last write, which nothing
    hides, are ignored: they matter only with few sub-groups.
    """
    by_name = {row.name: row for row in rows}
    if STATES_READ not in by_name or not (ahead or behind):
        return tuple(rows)
    read, adam, write = (by_name[name].total for name in (STATES_READ, ADAM, STATES_WRITTEN))
    changed = dict(by_name)
    if ahead:
        busy = adam if behind else adam + write
        changed[STATES_READ] = replace(by_name[STATES_READ], exposed=(read - busy).nonnegative())
    if behind:
        busy = adam + changed[STATES_READ].exposed
        changed[STATES_WRITTEN] = replace(by_name[STATES_WRITTEN], exposed=(write - busy).nonnegative())
    return tuple(changed[row.name] for row in rows)
