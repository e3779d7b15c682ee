"""Bytes that DDP and DeepSpeed move in one optimizer step: between GPUs, over PCIe, in RAM and to the disk.

Bytes of collectives are sent by one GPU in a ring of n (NVIDIA nccl-tests, doc/PERFORMANCE.md): all-reduce 2(n-1)/n of
the tensor; all-gather, reduce-scatter and each rank's part of a reduce (n-1)/n. tests/engine/test_traffic.py compares
them with the collectives of the real engine. One machine: nothing crosses a network.

ZeRO-Infinity reads and writes the bytes counted in its paper (Rajbhandari et al. 2021, arXiv 2104.07857, 4.1): 2 × 16
bytes a parameter of states and gradients in a step, 2 bytes of weights in each forward and backward; and 2 more where
the step writes the new weights.

Lines refer to deepspeed 0.19.8: runtime/zero/, unless a folder is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

from hf_memkit.catalog.models import ModelFacts
from hf_memkit.deepspeed.settings import ZeroSettings, section_of
from hf_memkit.deepspeed.split import split, sub_groups
from hf_memkit.deepspeed.stage_3 import is_swapped

Link = Literal["gpus", "pcie", "pageable", "ram", "read", "write"]
"""Path of a transfer: NVLink or PCIe between GPUs; PCIe with page-locked or other RAM; the machine's RAM; its disk."""

_STAGES_1_2: Final = "stage_1_and_2.py"
_STAGE_3: Final = "stage3.py"
_DDP_BUCKET: Final = 25 << 20
"""torch 2.13: nn/parallel/distributed.py, bucket_cap_mb."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One transfer of a step.

    Attributes:
        moved_bytes: bytes in one optimizer step: of one GPU on `gpus`, `pcie` and `pageable`, of the machine on the
            others.
    """

    name: str  # the data
    link: Link  # its path
    moved_bytes: float
    phase: Literal["forward", "backward", "optimizer"]  # when it is moved
    micro_batches: int  # number of micro-batches whose forward or backward it overlaps; 0: no overlap
    tail_bytes: float  # part that begins when no computation is left to overlap with
    source: str  # the lines that move it


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """All transfers of a step.

    Attributes:
        reads_ahead, writes_behind: states of the next sub-group are read, and those of the previous one written,
            during a sub-group's step (`pipeline_read`, `pipeline_write`).
    """

    rows: tuple[Traffic, ...] = ()  # the transfers
    _: KW_ONLY
    gpus: int = 1  # of all machines
    nodes: int = 1  # machines
    on_gpu: float = 1.0  # share of the whole optimizer step that one GPU computes
    reads_ahead: bool = False
    writes_behind: bool = False


def ddp_traffic(model: ModelFacts, *, gpus: int, gradient_bytes: int, nodes: int = 1) -> StepTraffic:
    """`DistributedDataParallel`: all-reduce in the backward of the last micro-batch; `no_sync` before it (transformers
    5.23: trainer.py 1897). `gpus`: of each machine; `gradient_bytes`: of one element, 4 for fp32 weights under
    autocast."""
    gpus *= nodes
    sent = 2 * (gpus - 1) / gpus * gradient_bytes
    tail = last_bucket(model, _DDP_BUCKET // gradient_bytes)
    source = "torch 2.13: nn/parallel/distributed.py: buckets of 25 MiB, reduced as they fill"
    row = Traffic("all-reduce of gradients", "gpus", sent * model.parameters, "backward", 1, sent * tail, source)
    return StepTraffic(nonempty(row), gpus=gpus, nodes=nodes)


def offloaded_fsdp_traffic(model: ModelFacts, *, share: float, state_bytes: int) -> StepTraffic:
    """What FSDP2 with `cpu_offload` does on the host in a step; its other transfers are in the trace.

    Args:
        share: of the trained parameters that one machine steps; above 1 if it has several replicas.
        state_bytes: of one element of a weight, a gradient or a moment: AdamW reads four of them and writes three.
    """
    source = "torch 2.13: optim/adamw.py, fused on the CPU"
    return StepTraffic((_in_ram(ADAM, 7 * state_bytes * model.parameters * share, source),), on_gpu=0.0)


def last_bucket(model: ModelFacts, bucket_elements: int) -> int:
    """Elements of the bucket that is reduced after backward ends. Gradients arrive in reverse module order, and one
    that no longer fits starts another bucket (stage_1_and_2.py 1422, stage3.py 1587)."""
    filled = 0
    for size in reversed(model.sizes):
        filled = size if filled + size > bucket_elements else filled + size
    return filled


def zero_traffic(
    config: Mapping[str, Any],
    model: ModelFacts,
    frozen: ModelFacts | None = None,
    *,
    gpus: int = 1,
    nodes: int = 1,
    accumulation: int = 1,
    recomputes: bool = False,
) -> StepTraffic | None:
    """DeepSpeed's transfers on `gpus` GPUs of each machine, in a step of `accumulation` micro-batches.

    Args:
        config: a DeepSpeed JSON.
        model: the trained parameters.
        frozen: the frozen model below adapters.
        recomputes: whether activation checkpointing is on.

    Returns:
        The transfers; None if the config has keys that are not modelled (`unmodelled_keys`), or swaps to the disks of
        several machines.
    """
    if unmodelled_keys(config):
        return None
    settings = ZeroSettings.from_config(config, model.width)
    if nodes > 1 and (settings.swaps_parameters or settings.swaps_optimizer):
        return None
    zero = section_of(config, "zero_optimization")
    overlap = zero.get("overlap_comm")
    job = _Job(
        settings, zero, model, frozen, gpus * nodes, nodes, accumulation, recomputes,
        overlaps=overlap is True or (overlap is not False and settings.stage == 3),
        sent_bytes=_SENT_BYTES.get(str(config.get("communication_data_type")), settings.element_bytes),
        clips=bool(config.get("gradient_clipping")),
        fp16=section_of(config, "fp16").get("enabled") is True,
    )  # fmt: skip
    rows = nonempty(*(_stage_3(job) if settings.stage == 3 else _stages_1_2(job)))
    of_machine = sum(row.moved_bytes for row in rows if row.name == ADAM) / _adam_bytes(settings)
    on_host = nodes * of_machine / model.parameters
    offload = section_of(zero, "offload_optimizer")
    return StepTraffic(
        rows,
        gpus=job.gpus,
        nodes=nodes,
        on_gpu=max(0.0, 1 - on_host) / (job.gpus if settings.stage else 1),
        reads_ahead=offload.get("pipeline_read") is True,
        writes_behind=offload.get("pipeline_write") is True,
    )


def unmodelled_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of a config that change the transfers and have no formula here."""
    zero = section_of(config, "zero_optimization")
    names = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights", "zenflow")
    keys = [name for name in names if zero.get(name)]
    if ZeroSettings.from_config(config).secondary_partition > 1:
        keys.append("zero_hpz_partition_size")
    if section_of(zero, "offload_optimizer").get("super_offload") is True:
        keys.append("super_offload")
    if str(section_of(config, "optimizer").get("type")).lower().startswith(("onebit", "zeroone")):
        keys.append("optimizer.type")
    if section_of(config, "compile").get("deepcompile") is True:
        keys.append("compile.deepcompile")
    return tuple(keys)


_SENT_BYTES: Final = {"fp32": 4, "fp16": 2, "bf16": 2}
"""`communication_data_type` (deepspeed 0.19.8: runtime/config.py, get_communication_data_type)."""


@dataclass(frozen=True, slots=True)
class _Job:
    settings: ZeroSettings
    zero: Mapping[str, Any]
    model: ModelFacts
    frozen: ModelFacts | None
    gpus: int  # of all machines
    nodes: int
    accumulation: int
    recomputes: bool
    overlaps: bool
    sent_bytes: int
    clips: bool
    fp16: bool

    @property
    def part(self) -> float:
        return (self.gpus - 1) / self.gpus

    @property
    def on_disk(self) -> float:
        """Share of the weights that `max_in_cpu` does not keep in RAM."""
        return 1 - min(1.0, self.settings.parameters.max_in_cpu / split(self.model, self.gpus).share)

    @property
    def overlapped(self) -> int:
        """Micro-batches that hide their own transfers."""
        return self.accumulation if self.overlaps else 0


def nonempty(*rows: Traffic) -> tuple[Traffic, ...]:
    return tuple(row for row in rows if row.moved_bytes)


def _stages_1_2(job: _Job) -> list[Traffic]:
    settings, model = job.settings, job.model
    flat = split(model, job.gpus)
    # Stage 1 with fp32 accumulators is BF16_Optimizer, which reduces after backward (runtime/engine.py 2305).
    after = settings.stage == 0 or (
        settings.stage == 1
        and settings.accumulator_bytes > settings.element_bytes
        and settings.optimizer.device == "none"
    )
    reductions = job.accumulation if settings.stage == 2 else 1
    hidden = 0 if after or not job.overlaps else reductions
    to_owner = job.zero.get("use_multi_rank_bucket_allreduce") is False and job.zero.get("reduce_scatter") is not False
    sent = (1 if to_owner and settings.stage else 2) * job.part * job.sent_bytes
    tail = last_bucket(model, settings.bucket_elements)
    rows = [
        Traffic(
            "reduce of gradients to their owners" if to_owner and settings.stage else "all-reduce of gradients",
            "gpus", reductions * sent * model.parameters, "backward", hidden, reductions * sent * tail,
            f"{_STAGES_1_2} 1590, 2384; stage 2 in every micro-batch, 0 and 1 in the last (runtime/engine.py 3084)",
        ),
    ]  # fmt: skip
    if settings.stage:
        gathered = job.part * settings.element_bytes * sum(flat.flat_groups)
        source = f"{_STAGES_1_2} 3155: after the step, group by group"
        rows.append(Traffic("all-gather of weights", "gpus", gathered, "optimizer", 0, 0, source))
    if settings.optimizer.device == "none" or not settings.stage:
        return rows
    share, element, master = sum(flat.flat_shares), settings.element_bytes, settings.master_bytes
    rows += _gradients_to_ram(
        job,
        # A lone micro-batch accumulates nothing (2161); else each writes to RAM, and all but the first read from it.
        (0 if job.accumulation == 1 else (2 * job.accumulation - 1) * element * share),
        master * share,
        f"{_STAGES_1_2} 1809, 1888",
    )
    link: Link = "pcie" if settings.optimizer.pin_memory else "pageable"
    rows.append(Traffic("weights to the GPU", link, element * share, "optimizer", 0, 0, f"{_STAGES_1_2} 3097"))
    machine = job.gpus // job.nodes * share
    if job.clips or job.fp16:
        rows.append(_in_ram("gradients scaled on the host", 2 * master * machine, f"{_STAGES_1_2} 3216"))
    return [
        *rows,
        _adam(settings, machine),
        _in_ram("weights cast on the host", (master + element) * machine, f"{_STAGES_1_2} 3096"),
    ]


def _in_ram(name: str, moved_bytes: float, source: str) -> Traffic:
    return Traffic(name, "ram", moved_bytes, "optimizer", 0, 0, source)


def _adam_bytes(settings: ZeroSettings) -> int:
    """Bytes a parameter: weight and moments are read and written, the gradient is read; 28 in fp32."""
    return 3 * settings.master_bytes + 4 * settings.moment_bytes


def _adam(settings: ZeroSettings, elements: int) -> Traffic:
    return _in_ram(ADAM, _adam_bytes(settings) * elements, "deepspeed 0.19.8: ops/csrc/includes/cpu_adam.h 174-210")


ADAM: Final = "Adam on the host"


def _gradients_to_ram(job: _Job, accumulated: float, final: float, source: str) -> list[Traffic]:
    """Transfers of gradients on the reductions' stream, hidden like them if RAM is page-locked: a copy to other RAM
    blocks the launching process (CUDA runtime API, "API synchronization behavior")."""
    pinned = job.settings.optimizer.pin_memory
    link: Link = "pcie" if pinned else "pageable"
    hidden = job.overlapped if pinned else 0
    return [
        Traffic("gradients accumulated in RAM", link, accumulated, "backward", hidden, 0, source),
        Traffic("gradients to RAM", link, final, "backward", min(1, hidden), 0, f"{source}: in the master's type"),
    ]


def _stage_3(job: _Job) -> list[Traffic]:
    settings, models = job.settings, [job.model] + ([job.frozen] if job.frozen else [])
    persistent = sum(size for item in models for size in item.sizes if size <= settings.persistent_elements)
    elements = sum(item.parameters for item in models) - persistent
    # A weight is kept if it is used again within `stage3_max_reuse_distance` elements; elements after it count twice,
    # with recomputation three times (partitioned_param_coordinator.py 653). Otherwise a tied weight is fetched for
    # each use, in backward only without prefetching: weights that a prefetch skips are not released (647).
    distance = job.zero.get("stage3_max_reuse_distance", job.zero.get("max_reuse_distance"))
    distance = distance if isinstance(distance, int | float) else 1_000_000_000
    kept = min(elements, distance // (3 if job.recomputes else 2))
    tied = sum(item.tied for item in models) if distance < elements else 0
    fetched = {"forward": elements + tied, "backward": elements - kept + (0 if settings.prefetch_elements else tied)}
    rows: list[Traffic] = []
    for phase in ("forward", "backward"):
        rows += _fetch_weights(job, phase, job.accumulation * settings.element_bytes * fetched[phase])
    # Without `reduce_scatter`, gradients that fit into a bucket are all-reduced.
    scatters = job.zero.get("reduce_scatter") is not False
    fits = 0 if scatters else sum(size for size in job.model.sizes if size <= settings.bucket_elements)
    tail = last_bucket(job.model, settings.bucket_elements)
    sent = job.accumulation * job.part * job.sent_bytes
    source = f"{_STAGE_3} 1673, 1931: every micro-batch"
    rows += [
        Traffic("reduce-scatter of gradients", "gpus", sent * (job.model.parameters - fits), "backward",
                job.overlapped, sent * tail if scatters else 0, source),
        Traffic("all-reduce of gradients", "gpus", 2 * sent * fits, "backward", job.overlapped,
                0 if scatters else 2 * sent * tail, source),
    ]  # fmt: skip
    small = job.part * settings.element_bytes * persistent
    rows.append(Traffic("all-gather of small weights", "gpus", small, "optimizer", 0, 0, f"{_STAGE_3} 2841"))
    if settings.optimizer.device != "none":
        rows += _stage_3_on_host(job)
    return rows


def _fetch_weights(job: _Job, phase: Literal["forward", "backward"], size: float) -> list[Traffic]:
    """Transfers of weights on demand: from disk to RAM, its share from RAM to each GPU, from there to the others."""
    settings = job.settings
    ahead = min(
        size, job.accumulation * settings.element_bytes * max(settings.prefetch_elements, job.model.largest_parameter)
    )
    hidden = 0 if settings.sequential else job.overlapped
    coordinator = "partitioned_param_coordinator.py 569"
    rows = [Traffic(f"all-gather of weights, {phase}", "gpus", job.part * size, phase, hidden, 0, coordinator)]
    if settings.parameters.device == "none":
        return rows
    rows.append(
        Traffic(f"weights to the GPU, {phase}", "pcie", size / job.gpus, phase, job.overlapped, ahead / job.gpus,
                "partition_parameters.py 1369: one share each"),
    )  # fmt: skip
    if settings.swaps_parameters:
        rows.append(
            Traffic(f"weights from disk, {phase}", "read", job.on_disk * size, phase, job.overlapped, 0,
                    "partitioned_param_coordinator.py 667; runtime/swap_tensor/partitioned_param_swapper.py"),
        )  # fmt: skip
    return rows


def _stage_3_on_host(job: _Job) -> list[Traffic]:
    settings = job.settings
    parts = split(job.model, job.gpus)
    element, master, accumulator = settings.element_bytes, settings.master_bytes, settings.accumulator_bytes
    groups = [sum(parts.shares[g][i] for g, i in group) for group in sub_groups(parts, settings.sub_group_elements)]
    kept = 0 if settings.swaps_optimizer else int((1 - settings.optimizer.ratio) * len(groups))
    offloaded = groups[kept:]
    share = sum(offloaded)
    on_disk = sum(size for size in offloaded if settings.swaps_optimizer and is_swapped(settings, master * size))
    # Each partition is copied to RAM and back, or fetched, added to, and copied back (2024-2039).
    accumulated = 2 * job.accumulation * accumulator * parts.share
    rows = _gradients_to_ram(job, accumulated, master * share, f"{_STAGE_3} 2024, 1455")
    machine = job.gpus // job.nodes * share
    if job.fp16:
        # isinf writes absolute values, then a byte for each comparison; isnan a byte for each comparison.
        checked = (4 * accumulator + 4) * job.gpus // job.nodes * parts.share
        rows.append(_in_ram("gradients checked on the host", checked, f"{_STAGE_3} 2816, 3005: isinf and isnan"))
    rows += [
        _in_ram("gradients scaled on the host", 2 * master * machine, f"{_STAGE_3} 2988"),
        _adam(settings, machine),
        _in_ram("weights cast on the host", (master + element) * machine, f"{_STAGE_3} 2856"),
    ]
    if settings.parameters.device == "none":
        # Cast in RAM that is not page-locked, then copied (torch 2.13: aten/src/ATen/native/cuda/Copy.cu).
        rows.append(Traffic("weights to the GPU", "pageable", element * share, "optimizer", 0, 0, f"{_STAGE_3} 2857"))
    if settings.swaps_parameters:
        rows.append(
            Traffic("weights to disk", "write", job.on_disk * element * machine, "optimizer", 0, 0,
                    "runtime/swap_tensor/partitioned_param_swapper.py 398")
        )  # fmt: skip
    if on_disk:
        states, swapped = master + 2 * settings.moment_bytes, job.gpus * on_disk
        source = "runtime/swap_tensor/partitioned_optimizer_swapper.py"
        rows += [
            Traffic("gradients to disk", "write", master * swapped, "backward", 1, 0,
                    f"{_STAGE_3} 1459; runtime/swap_tensor/async_swapper.py: buffers are written as they fill"),
            Traffic(STATES_READ, "read", (states + master) * swapped, "optimizer", 0, 0, source),
            Traffic(STATES_WRITTEN, "write", states * swapped, "optimizer", 0, 0, source),
        ]  # fmt: skip
    return rows


STATES_READ: Final = "optimizer states from disk"
STATES_WRITTEN: Final = "optimizer states to disk"
