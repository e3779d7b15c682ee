"""Computes the cause of an out-of-memory message from its sizes.

Before PyTorch raises the error, it releases all unused cached segments and retries (torch:
c10/cuda/CUDACachingAllocator.cpp, `release_cached_blocks`). The rest of the cache, reserved − allocated, lies between
live tensors and cannot be released.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from hf_memkit.common.units import GIB, MIB
from hf_memkit.measuring.out_of_memory.change import Remedy
from hf_memkit.measuring.out_of_memory.conditions import smaller_batch
from hf_memkit.measuring.out_of_memory.device_tools import allocator_variable, tools_of
from hf_memkit.measuring.out_of_memory.known_messages import AFTER_AN_ASSERTION, KNOWN_CAUSES, Cause, wrong_index
from hf_memkit.measuring.out_of_memory.message import OomMessage, show
from hf_memkit.measuring.out_of_memory.remedies import (
    OWN_CONTEXT,
    for_fragmentation,
    for_size,
    free_the_gpu,
    smaller_libraries,
)
from hf_memkit.measuring.out_of_memory.run_view import RunView
from hf_memkit.measuring.out_of_memory.surroundings import Platform

_LEAST_CONTEXT: Final = 100 * MIB

_XPU_ALLOCATION: Final = 4 * GIB
"""github.com/intel/intel-extension-for-pytorch/issues/846: 4.00 GiB fails on an empty GPU of 15.11 GiB."""

_NOTHING_LEFT: Final = 0.01
"""If a request would have left less than this share of the GPU, the GPU was full: torch prints two decimals, the
driver allocates pages of 2 MiB, and the message is written a moment later."""

_NOTABLE: Final = 0.05
"""A smaller share of the GPU is never the cause: a few per cent are always cached between tensors, and a desktop takes
a few hundred MiB. torch's message only says "if reserved but unallocated memory is large"."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The GPU's memory when the error was raised, in bytes. None: unknown."""

    message: OomMessage
    allocator_settings: str | None
    requested: int
    available: int
    own_overhead: int | None
    others: int | None
    unattributed: int | None = None
    """Memory outside PyTorch's allocator, of this process or others: the message does not say."""

    @property
    def missing(self) -> int:
        """Requested − free − cached; negative if the cache is large enough."""
        return self.requested - self.available - (self.message.cached_bytes or 0)

    @property
    def free(self) -> str:
        """`"1.03 GiB"`, or `"at most 1.22 GiB"`."""
        return f"{'at most ' if self.message.free_bytes is None else ''}{show(self.available)}"

    @property
    def balance(self) -> str:
        """`"1.00 GiB requested − 0.40 GiB free − 0.10 GiB cached = 0.50 GiB short."`"""
        cached = self.message.cached_bytes
        sizes = f"{show(self.requested)} was requested; {self.free} was free"
        if cached is None or self.available >= self.requested:
            return f"{sizes}."
        if self.missing <= 0:
            return f"{sizes} and {show(cached)} cached, but fragmented."
        least = "at least " if self.message.free_bytes is None else ""
        sums = f"{show(self.requested)} requested − {self.free} free − {show(cached)} cached"
        return f"{sums} = {least}{show(self.missing)} short."


def _gpu_memory(message: OomMessage, allocator_settings: str | None, requested: int, free: int) -> GpuMemory:
    reserved, available = message.reserved_bytes, free
    if message.allowed_bytes is not None and reserved is not None:
        available = min(free, max(0, message.allowed_bytes - reserved))
    process, others = _process_sizes(message)
    overhead = unattributed = None
    if process is not None and reserved is not None:
        overhead = max(0, process - reserved)
        if message.capacity_bytes is not None:
            # In a container, NVML may not list the other processes.
            others = max(others or 0, message.capacity_bytes - free - process)
    elif message.capacity_bytes is not None and reserved is not None and others is None:
        # The message lists no process: the rest is the CUDA context, libraries or other processes.
        unattributed = max(0, message.capacity_bytes - free - reserved) if message.free_bytes is not None else None
    return GpuMemory(message, allocator_settings, requested, available, overhead, others, unattributed)


def _process_sizes(message: OomMessage) -> tuple[int | None, int | None]:
    """(bytes of this process, bytes of all others); None if unknown."""
    others = message.other_processes
    held = sum(process.size_bytes or 0 for process in others)
    if message.has_own_size:
        return message.process_bytes, held
    own = next((process for process in message.processes if process not in others), None)
    if own is not None:
        return own.size_bytes, held
    return None, held if others and all(process.size_bytes is not None for process in others) else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause of an out-of-memory error.

    Attributes:
        why: the reason, with the arithmetic.
        settings: what helps against this cause.
        no_help: frequent advice that does not help.
        figures: the sizes used, in GiB, by name.
    """

    cause: Cause
    why: str
    settings: tuple[Remedy, ...] = ()
    no_help: tuple[Remedy, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    message: OomMessage,
    *,
    allocator_settings: str | None = None,
    watermark: str | None = None,
    samples: int | None = None,
    grows: bool = True,
    growing: bool = False,
    own: int | None = None,
    torch: tuple[int, ...] = (),
    assertion: str | None = None,
) -> Verdict:
    """The cause of an out-of-memory message.

    Args:
        message: from `parse_message`.
        allocator_settings, watermark: values of `PYTORCH_ALLOC_CONF` and `PYTORCH_MPS_HIGH_WATERMARK_RATIO`, if known.
        samples: samples in the micro-batch, if known.
        grows: whether the requested tensor grows with the batch.
        growing: whether each request is larger than the one before, as with the predictions of an evaluation.
        own: process ID of this job, if known.
        torch: version of torch, if known.
        assertion: failed assertion about an index, if the log has one.
    """
    if message.variable is None:
        message = replace(message, variable=allocator_variable(message.device_type, torch) or None)
    others = tuple(process for process in message.processes if process.pid != own)
    if len(others) < len(message.processes):
        mine = next(process.size_bytes for process in message.processes if process.pid == own)
        message = replace(message, processes=others, process_bytes=message.process_bytes or mine)
    if message.form in KNOWN_CAUSES:
        known = KNOWN_CAUSES[message.form](message)
        if assertion is not None and message.form in AFTER_AN_ASSERTION:
            known = wrong_index(assertion)
        return _verdict(known.cause, known.why, known.settings, message)
    if message.device_type == "mps":
        return _mps(message, watermark)
    verdict = _add_other_ranks(_of_sizes(message, allocator_settings, growing), message)
    requested, limit = message.requested_bytes or 0, message.usable_bytes
    if limit and requested > limit:
        return replace(verdict, why=f"{verdict.why} {_largest_batch(requested, limit, samples, grows)}")
    return verdict


def _add_other_ranks(verdict: Verdict, message: OomMessage) -> Verdict:
    """Adds a note if several processes hold one CUDA context each: they are probably ranks of the same job."""
    sizes = sorted(one.size_bytes or 0 for one in message.other_processes)
    contexts = [size for size in sizes if _LEAST_CONTEXT <= size <= OWN_CONTEXT]
    alike = [size for size in contexts if size <= 1.1 * contexts[0]]
    if len(alike) < 2:
        return verdict
    why = (
        f"{len(alike)} other processes hold {show(alike[0])} to {show(alike[-1])} each, the size of a CUDA context: "
        "probably other ranks of this job, which used this GPU before they set their own."
    )
    module = tools_of(message.device_type).module
    device = Remedy(
        f"{module}.set_device", "int(os.environ['LOCAL_RANK'])",
        "before anything else uses the GPU; and torch.load with map_location='cpu'",
    )  # fmt: skip
    return replace(verdict, why=f"{verdict.why} {why}", settings=(device, *verdict.settings))


def _largest_batch(requested: int, limit: int, samples: int | None, grows: bool) -> str:
    """The largest batch with which the tensor fits on an empty GPU, in words."""
    if not grows:
        return "No batch size helps: the tensor does not depend on the batch."
    if samples is not None and requested > limit * samples:
        one = "the batch is one sample" if samples == 1 else f"one sample alone needs {show(requested / samples)}"
        return f"No batch size helps: {one}. Make the tensor itself smaller, or compute it in chunks."
    if samples is not None:
        most = int(samples * limit / requested)
        return f"On an empty GPU, the tensor fits for at most {most} of the {samples} samples."
    factor = -(-requested // limit)
    return (
        f"If your batch has fewer than {factor} samples, no batch size helps: make the tensor itself smaller, or "
        f"compute it in chunks. Reduce a larger batch at least {factor} times."
    )


def for_job(verdict: Verdict, job: RunView, platform: Platform | None = None) -> Verdict:
    """The verdict with this job's values, without settings that do nothing for the job or on its platform."""
    change = smaller_batch(job)
    samples = job.count("per_device_train_batch_size")
    settings = []
    for each in verdict.settings:
        remedy = _for_platform(each, platform)
        if remedy is None or (samples == 1 and remedy.key == "arguments.per_device_train_batch_size"):
            continue
        if change is not None and remedy.key == change.key:
            remedy = replace(remedy, value=f"{change.current} → {change.value}")
        settings.append(remedy)
    return replace(verdict, settings=tuple(settings))


def _for_platform(remedy: Remedy, platform: Platform | None) -> Remedy | None:
    """The remedy as `platform` has it; None if it does not exist there."""
    if platform == "macOS" and remedy.value.startswith("dmesg"):
        check = "log show --last 1h --predicate 'eventMessage contains \"jetsam\"'"
        return replace(remedy, value=check, reason="shows whether RAM ran out")
    unavailable: tuple[str, ...] = ()
    if platform in ("macOS", "Windows"):
        unavailable = ("docker run --shm-size", "sudo sysctl", "ulimit")
    if platform == "Windows":
        unavailable += ("dmesg", "expandable_segments:True")
    return None if remedy.value.startswith(unavailable) else remedy


def _of_sizes(message: OomMessage, allocator_settings: str | None, growing: bool) -> Verdict:
    """The first rule that applies names the cause."""
    requested = message.requested_bytes
    free = _free_at_most(message)
    if (limited := _single_allocation(message)) is not None:
        return limited

    if requested is None or free is None:
        names = ("requested", "free", "allocated", "reserved")
        *first, last = (name for name in names if getattr(message, f"{name}_bytes") is None)
        sizes = f"{', '.join(first)} and {last} sizes" if first else f"{last} size"
        elsewhere = "The full message has all sizes, on the same line or the next."
        if requested is not None and message.reserved_bytes is not None and message.capacity_bytes is not None:
            elsewhere = (
                f"PyTorch had reserved {show(message.reserved_bytes)} of {show(message.capacity_bytes)}; another "
                "process or the driver may hold the rest."
            )
        return _verdict("unknown", f"The text does not give the {sizes}. {elsewhere}", (), message)

    gpu = _gpu_memory(message, allocator_settings, requested, free)
    for rule in (_too_large, _cap, _free_again, _fragmentation, _others, _overhead):
        verdict = None if growing and rule is _fragmentation else rule(gpu)
        if verdict is not None:
            return verdict
    return _size(gpu)


def _free_at_most(message: OomMessage) -> int | None:
    """The free memory; of a message without it (XPU), capacity − reserved, if that is less than the request."""
    requested, capacity, reserved = message.requested_bytes, message.capacity_bytes, message.reserved_bytes
    if message.free_bytes is not None or requested is None or capacity is None or reserved is None:
        return message.free_bytes
    return max(0, capacity - reserved) if reserved + requested > capacity else None


def _single_allocation(message: OomMessage) -> Verdict | None:
    """Intel's runtime refuses a single large allocation on many GPUs, even on an empty GPU."""
    requested, capacity, reserved = message.requested_bytes or 0, message.capacity_bytes or 0, message.reserved_bytes
    if message.device_type != "xpu" or message.free_bytes is not None or reserved is None:
        return None
    if requested < _XPU_ALLOCATION or requested + reserved > capacity:
        return None
    why = (
        f"{show(requested)} was requested, and PyTorch had reserved {show(reserved)} of {show(capacity)}. Intel's "
        f"runtime refuses a single allocation of {show(_XPU_ALLOCATION)} or more on many GPUs, even if more is free."
    )
    lift = Remedy("environment.UR_L0_ENABLE_RELAXED_ALLOCATION_LIMITS", "1", "allows larger ones")
    return _verdict("cap", why, (lift,), message)


def _too_large(gpu: GpuMemory) -> Verdict | None:
    if gpu.message.usable_bytes is None or gpu.requested <= gpu.message.usable_bytes:
        return None
    whose = "this process may use" if gpu.message.allowed_bytes else "the GPU has"
    why = f"One tensor needs {show(gpu.requested)}; {whose} {show(gpu.message.usable_bytes)} in total."
    return _verdict("size", why, for_size(gpu.message, "the tensor alone is too large"), gpu)


def _cap(gpu: GpuMemory) -> Verdict | None:
    message = gpu.message
    allowed, free, reserved = message.allowed_bytes, message.free_bytes, message.reserved_bytes
    if allowed is None or free is None or reserved is None or reserved + gpu.requested <= allowed:
        return None
    if free < gpu.requested or gpu.missing <= 0:
        return None  # the GPU is full too, or the cache is large enough
    why = (
        f"The GPU has {show(free)} free, but this process may use at most {show(allowed)}: {show(reserved)} reserved "
        f"+ {show(gpu.requested)} requested is more."
    )
    fraction = f"{tools_of(message.device_type).module}.set_per_process_memory_fraction"
    lift = Remedy(fraction, "a larger fraction", "raises the limit")
    return _verdict("cap", why, (lift, *for_size(gpu.message, "the cap, not the GPU, is the limit")), gpu)


def _free_again(gpu: GpuMemory) -> Verdict | None:
    left = gpu.available - gpu.requested
    if left < _NOTHING_LEFT * (gpu.message.usable_bytes or left):
        return None
    why = (
        f"{show(gpu.requested)} was requested and {show(gpu.available)} was free a moment later, when the message "
        "was written. Another process may have released memory in between, or the driver had no contiguous block of "
        "that size."
    )
    if gpu.message.other_processes:
        return _verdict("another process", why, free_the_gpu(gpu.message), gpu)
    return _verdict("unknown", why, (), gpu)


def _fragmentation(gpu: GpuMemory) -> Verdict | None:
    message, cached = gpu.message, gpu.message.cached_bytes
    if cached is None or gpu.missing > 0 or cached < _NOTABLE * (message.usable_bytes or message.reserved_bytes or 0):
        return None
    pieces = (
        f"PyTorch's cache is fragmented: {show(message.reserved_bytes or 0)} reserved − "
        f"{show(message.allocated_bytes or 0)} allocated = {show(cached)} cached, in blocks between live tensors"
    )
    if cached >= gpu.requested:
        why = f"{pieces}. No free block is as large as {show(gpu.requested)}."
    else:
        enough = f"With what was free ({gpu.free}), this is enough for {show(gpu.requested)}"
        why = f"{pieces}. {enough} and would leave {show(-gpu.missing)}."
    return _verdict("fragmentation", why, for_fragmentation(message, gpu.allocator_settings), gpu)


def _others(gpu: GpuMemory) -> Verdict | None:
    message = gpu.message
    foreign = gpu.others if gpu.unattributed is None else max(0, gpu.unattributed - OWN_CONTEXT)
    if foreign is None or foreign < max(gpu.missing, _NOTABLE * (message.capacity_bytes or 0)):
        return None
    held = f"{show(gpu.others or 0)} of the GPU"
    hold = f"Other processes hold {held}" if message.processes else f"{held} is neither free nor this process's"
    if gpu.unattributed is not None:
        hold = (
            f"{show(gpu.unattributed)} of the GPU is outside PyTorch's allocator: in another process, or in libraries "
            "of this one, such as vLLM or JAX; the message does not tell which"
        )
    why = f"{hold}; without that, the request would have fit. {gpu.balance}"
    libraries = smaller_libraries(gpu.unattributed) if gpu.unattributed is not None else ()
    return _verdict("another process", why, (*free_the_gpu(message), *libraries), gpu)


def _overhead(gpu: GpuMemory) -> Verdict | None:
    if gpu.own_overhead is None or gpu.own_overhead <= OWN_CONTEXT:
        return None
    if gpu.own_overhead - OWN_CONTEXT < max(gpu.missing, _NOTABLE * (gpu.message.capacity_bytes or 0)):
        return None
    why = (
        f"This process holds {show(gpu.own_overhead)} outside PyTorch's allocator: the CUDA context (0.5 to 2 GiB) "
        "and libraries with their own allocations, such as NCCL, bitsandbytes' paged states, vLLM or another "
        f"framework. {gpu.balance}"
    )
    outside = "the memory is outside PyTorch's allocator"
    helps = smaller_libraries(gpu.own_overhead)
    return _verdict("context and libraries", why, (*helps, *for_size(gpu.message, outside)), gpu)


def _size(gpu: GpuMemory) -> Verdict:
    if gpu.missing > 0:
        why = f"The job needs more memory than is available. {gpu.balance}"
        return _verdict("size", why, for_size(gpu.message, "fragmentation is not the cause"), gpu)
    why = (
        f"The GPU is full. {gpu.balance} That is within what the message rounds and the driver keeps: the job needs "
        "less memory."
    )
    if gpu.message.cached_bytes is not None and gpu.available < gpu.requested:
        left = f"Even if the cache were one block, only {show(-gpu.missing)} would remain, and the next request"
        why = f"The GPU is nearly full. {gpu.balance} {left} would fail: the job needs less memory."
    return _verdict("size", why, for_size(gpu.message, "they would serve this request but not the next"), gpu)


def _mps(message: OomMessage, watermark: str | None) -> Verdict:
    requested, allowed = message.requested_bytes, message.allowed_bytes
    held = (message.allocated_bytes or 0) + (message.other_bytes or 0)
    if requested is None or message.allocated_bytes is None:
        return _verdict("unknown", "The text has no sizes.", (), message)
    if allowed is None or held + requested <= allowed:
        why = f"PyTorch and Metal hold {show(held)}, and Metal had no single block of another {show(requested)}."
        return _verdict("unknown", why, (), message)
    why = (
        f"{show(message.allocated_bytes)} in tensors + {show(message.other_bytes or 0)} in other Metal buffers + "
        f"{show(requested)} requested exceeds PyTorch's limit of {show(allowed)}"
        f"{', 1.7 times what Metal recommends for this Mac' if watermark is None else ''}."
    )
    unlimited = watermark is not None and float(watermark) == 0
    reason = (
        "set in this log, but the limit was in force: the setting did not reach the process. It must be in the "
        "environment before Python imports torch"
        if unlimited
        else "removes the limit, but macOS then swaps and may stop responding; a smaller batch is better"
    )
    lift = Remedy("environment.PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.0", reason, helps=not unlimited)
    return _verdict("cap", why, (lift,), message)


def _verdict(cause: Cause, why: str, settings: tuple[Remedy, ...], source: GpuMemory | OomMessage) -> Verdict:
    """The verdict with the sizes of `source`, its settings split into those that help and those that do not."""
    more: dict[str, int | None] = {}
    message = source if isinstance(source, OomMessage) else source.message
    if isinstance(source, GpuMemory):
        outside = source.own_overhead if source.unattributed is None else source.unattributed
        short = max(source.missing, 0) or None
        more = {"short": short, "outside_allocator": outside, "other_processes": source.others}
    names = ("requested", "free", "capacity", "allowed", "allocated", "reserved", "cached", "process", "resident")
    sizes = {name: getattr(message, f"{name}_bytes") for name in names} | more
    figures = {f"{name}_gib": size / GIB for name, size in sizes.items() if size is not None}
    helping = tuple(setting for setting in settings if setting.helps)
    return Verdict(cause, why, helping, tuple(setting for setting in settings if not setting.helps), figures)
