"""The cause of a message, computed from its sizes. In: an `OomMessage`. Out: a `Verdict`.

Before PyTorch raises this error, it releases every unused cached segment and retries (torch:
c10/cuda/CUDACachingAllocator.cpp, `release_cached_blocks`). The remaining cache lies in blocks between live tensors,
so reserved − allocated is what PyTorch could not release.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from hf_memkit.common.units import GIB, MIB
from hf_memkit.measuring.out_of_memory.change import Remedy
from hf_memkit.measuring.out_of_memory.conditions import smaller_batch
from hf_memkit.measuring.out_of_memory.device_tools import allocator_variable, tools_of
from hf_memkit.measuring.out_of_memory.known_messages import (
    AFTER_AN_ASSERTION,
    ANSWERS,
    VLLM_SHARE,
    Cause,
    wrong_index,
)
from hf_memkit.measuring.out_of_memory.message import OomMessage, Process, show
from hf_memkit.measuring.out_of_memory.run_view import RunView
from hf_memkit.measuring.out_of_memory.surroundings import Platform
from hf_memkit.setup.techniques.registry import CATALOGUE

_EXPANDABLE: Final = CATALOGUE["expandable-segments"]

OWN_CONTEXT: Final = 2 * GIB
"""What a process normally holds on a GPU outside PyTorch's allocator: the CUDA context and its kernels, 0.5 to 2 GiB
(stas00/ml-engineering: training/performance). More than that is more likely another process or library."""

_LEAST_CONTEXT: Final = 100 * MIB

_LEAST_SPLIT: Final = 20 * MIB
"""torch refuses a `max_split_size_mb` below it (torch: c10/core/AllocatorConfig.h: 20 MiB)."""

_XPU_ALLOCATION: Final = 4 * GIB
"""github.com/intel/intel-extension-for-pytorch/issues/846: 4.00 GiB fails on an empty GPU of 15.11 GiB."""

_NOTHING_LEFT: Final = 0.01
"""A share of the GPU. If a request would have left less, the GPU was full: torch prints two decimals, the driver gives
memory in pages of 2 MiB, and the message is written a moment later."""


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """A GPU as a message describes it: bytes, None if unknown."""

    message: OomMessage
    allocator_settings: str | None
    requested: int
    available: int
    own_overhead: int | None
    others: int | None
    unclaimed: int | None = None
    """Outside PyTorch's allocator where the message does not say how much of it is this process's."""

    @property
    def short(self) -> int:
        """What is missing even with the whole cache; negative if the cache is enough."""
        return self.requested - self.available - (self.message.cached_bytes or 0)

    @property
    def free(self) -> str:
        """`"1.03 GiB"`, or `"at most 1.22 GiB"`."""
        return f"{'at most ' if self.message.free_bytes is None else ''}{show(self.available)}"

    @property
    def balance(self) -> str:
        """`"1.00 GiB requested − 0.40 GiB free − 0.10 GiB cached = 0.50 GiB short."`"""
        if self.message.cached_bytes is None:
            return f"{show(self.requested)} was requested and {self.free} was free."
        if self.short > 0:
            least = "at least " if self.message.free_bytes is None else ""
            sums = f"{show(self.requested)} requested − {self.free} free − {show(self.message.cached_bytes)} cached"
            return f"{sums} = {least}{show(self.short)} short."
        sizes = f"{show(self.requested)} was requested; {self.free} was free"
        if self.available >= self.requested:
            return f"{sizes}."
        return f"{sizes} and {show(self.message.cached_bytes)} cached, but fragmented."


def _gpu(message: OomMessage, allocator_settings: str | None, requested: int, free: int) -> DeviceFigures:
    """The GPU of `message`, with `requested` bytes requested and `free` bytes free."""
    reserved, available = message.reserved_bytes, free
    if message.allowed_bytes is not None and reserved is not None:
        available = min(free, max(0, message.allowed_bytes - reserved))
    process, others = _processes(message)
    overhead = unclaimed = None
    if process is not None and reserved is not None:
        overhead = max(0, process - reserved)
        if message.capacity_bytes is not None:
            # In a container NVML may not list other processes; what they hold is missing from the total.
            others = max(others or 0, message.capacity_bytes - free - process)
    elif message.capacity_bytes is not None and reserved is not None and others is None:
        # The message lists no process: what is neither free nor PyTorch's is the context, libraries or others.
        unclaimed = max(0, message.capacity_bytes - free - reserved) if message.free_bytes is not None else None
    return DeviceFigures(message, allocator_settings, requested, available, overhead, others, unclaimed)


def _processes(message: OomMessage) -> tuple[int | None, int | None]:
    """What this process holds, and what the others hold together; None if the message does not say."""
    others = other_processes(message)
    held = sum(process.size_bytes or 0 for process in others)
    if _own_size(message) is not None:
        return message.process_bytes, held
    own = next((process for process in message.processes if process not in others), None)
    if own is not None:
        return own.size_bytes, held
    return None, held if others and all(process.size_bytes is not None for process in others) else None


def _own_size(message: OomMessage) -> int | None:
    """What the message says that this process holds. Less than PyTorch reserved is no size: in a container NVML
    does not see it all."""
    size, reserved = message.process_bytes, message.reserved_bytes
    return None if size is not None and reserved is not None and size < (1 - _NOTHING_LEFT) * reserved else size


def other_processes(message: OomMessage) -> tuple[Process, ...]:
    """The processes of the message without this one: in a container it has another ID there, and is the one that holds
    at least what PyTorch reserved."""
    if _own_size(message) is not None or message.reserved_bytes is None:
        return message.processes
    known = [process for process in message.processes if (process.size_bytes or 0) >= message.reserved_bytes]
    own = min(known, key=lambda process: process.size_bytes or 0, default=None)
    return tuple(process for process in message.processes if process is not own)


_NOTABLE: Final = 0.05
"""A share of the GPU below which nothing is called the cause: a few per cent are always cached between tensors, and a
desktop's few hundred MiB move the limit by less than one batch does. torch's own text says "if reserved but
unallocated memory is large", without a number."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause of an out-of-memory error, `why` (with the arithmetic), settings that help against it, frequent advice
    that does not (`no_help`), and the sizes used, in GiB, by name."""

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
        grows: False if the requested tensor does not depend on the batch.
        growing: True if it grows from request to request, as the kept predictions of an evaluation do.
        own: this job's process ID, if known: that one is not counted among the others on the GPU.
        torch: its version, if known.
        assertion: of a kernel that met a wrong index, if the log has one.
    """
    if message.variable is None:
        message = replace(message, variable=allocator_variable(message.device_type, torch) or None)
    others = tuple(process for process in message.processes if process.pid != own)
    if len(others) < len(message.processes):
        mine = next(process.size_bytes for process in message.processes if process.pid == own)
        message = replace(message, processes=others, process_bytes=message.process_bytes or mine)
    if message.form in ANSWERS:
        late = assertion is not None and message.form in AFTER_AN_ASSERTION
        cause, why, settings = wrong_index(assertion or "") if late else ANSWERS[message.form](message)
        return _made(cause, why, settings, message)
    if message.device_type == "mps":
        return _mps(message, watermark)
    verdict = _with_contexts(_device(message, allocator_settings, growing), message)
    requested, limit = message.requested_bytes or 0, message.usable_bytes
    if limit and requested > limit:
        return replace(verdict, why=f"{verdict.why} {_no_batch(requested, limit, samples, grows)}")
    return verdict


def _with_contexts(verdict: Verdict, message: OomMessage) -> Verdict:
    """The verdict, with what several small processes of one size on the GPU show: other ranks of the same job."""
    sizes = sorted(one.size_bytes or 0 for one in other_processes(message))
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


def _no_batch(requested: int, limit: int, samples: int | None, grows: bool) -> str:
    """Whether a smaller batch could make that tensor fit."""
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
    """The verdict with this job's values, and without settings that it has already, or that its system has not."""
    verdict = replace(verdict, settings=tuple(one for each in verdict.settings for one in _on(platform, each)))
    batch = job.count("per_device_train_batch_size")
    useless = {"arguments.per_device_train_batch_size"} if batch is not None and batch < 2 else set()
    change = smaller_batch(job)
    values = {change.key: f"{change.current} → {change.value}"} if change is not None else {}
    fitted = (replace(one, value=values.get(one.key, one.value)) for one in verdict.settings)
    return replace(verdict, settings=tuple(one for one in fitted if one.key not in useless))


def _on(platform: Platform | None, remedy: Remedy) -> tuple[Remedy, ...]:
    """The remedy on that system, if it exists there."""
    if platform == "macOS" and remedy.value.startswith("dmesg"):
        check = "log show --last 1h --predicate 'eventMessage contains \"jetsam\"'"
        return (replace(remedy, value=check, reason="shows whether RAM ran out"),)
    if platform in ("macOS", "Windows") and remedy.value.startswith(
        ("docker run --shm-size", "sudo sysctl", "ulimit")
    ):
        return ()
    linux_only = remedy.value.startswith(("dmesg", "expandable_segments:True"))
    return () if platform == "Windows" and linux_only else (remedy,)


def _device(message: OomMessage, allocator_settings: str | None, growing: bool) -> Verdict:
    requested, free = message.requested_bytes, _most_free(message)
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
        return _made("unknown", f"The text does not give the {sizes}. {elsewhere}", (), message)
    gpu = _gpu(message, allocator_settings, requested, free)
    rules = (_too_large, _cap, _fits, *(() if growing else (_fragmentation,)), _others, _overhead)
    return next((verdict for rule in rules if (verdict := rule(gpu)) is not None), None) or _size(gpu)


def _most_free(message: OomMessage) -> int | None:
    """What was free. Where the message does not say, as torch's for XPU: what can have been, if that is too little."""
    requested, capacity, reserved = message.requested_bytes, message.capacity_bytes, message.reserved_bytes
    if message.free_bytes is not None or requested is None or capacity is None or reserved is None:
        return message.free_bytes
    return max(0, capacity - reserved) if reserved + requested > capacity else None


def _single_allocation(message: OomMessage) -> Verdict | None:
    """Intel's runtime refuses one large allocation, however much is free; torch for XPU does not print what is."""
    requested, capacity, reserved = message.requested_bytes or 0, message.capacity_bytes or 0, message.reserved_bytes
    if message.device_type != "xpu" or message.free_bytes is not None or reserved is None:
        return None
    if requested < _XPU_ALLOCATION or requested + reserved > capacity:
        return None
    why = (
        f"{show(requested)} was requested, and PyTorch had reserved {show(reserved)} of {show(capacity)}. Intel's "
        f"runtime refuses a single allocation of {show(_XPU_ALLOCATION)} or more on many GPUs, whatever is free."
    )
    lift = Remedy("environment.UR_L0_ENABLE_RELAXED_ALLOCATION_LIMITS", "1", "allows larger ones")
    return _made("cap", why, (lift,), message)


def _too_large(gpu: DeviceFigures) -> Verdict | None:
    if gpu.message.usable_bytes is None or gpu.requested <= gpu.message.usable_bytes:
        return None
    whose = "this process may use" if gpu.message.allowed_bytes else "the GPU has"
    why = f"One tensor needs {show(gpu.requested)}; {whose} {show(gpu.message.usable_bytes)} in total."
    return _verdict("size", why, gpu, _for_size(gpu.message, "the tensor alone is too large"))


def _cap(gpu: DeviceFigures) -> Verdict | None:
    message = gpu.message
    allowed, free, reserved = message.allowed_bytes, message.free_bytes, message.reserved_bytes
    if allowed is None or free is None or reserved is None or reserved + gpu.requested <= allowed:
        return None
    if free < gpu.requested or gpu.short <= 0:
        return None  # the GPU is full too, or the cache would be enough
    why = (
        f"The GPU has {show(free)} free, but this process may use at most {show(allowed)}: {show(reserved)} reserved "
        f"+ {show(gpu.requested)} requested is more."
    )
    fraction = f"{tools_of(message.device_type).module}.set_per_process_memory_fraction"
    lift = Remedy(fraction, "a larger fraction", "raises the limit")
    return _verdict("cap", why, gpu, (lift, *_for_size(gpu.message, "the cap, not the GPU, is the limit")))


def _fits(gpu: DeviceFigures) -> Verdict | None:
    left = gpu.available - gpu.requested
    if left < _NOTHING_LEFT * (gpu.message.usable_bytes or left):
        return None
    why = (
        f"{show(gpu.requested)} was requested and {show(gpu.available)} was free a moment later, when the message "
        "was written. Another process may have released memory in between, or the driver had no contiguous block of "
        "that size."
    )
    if other_processes(gpu.message):
        return _verdict("another process", why, gpu, _free_the_gpu(gpu.message))
    return _verdict("unknown", why, gpu, ())


def _fragmentation(gpu: DeviceFigures) -> Verdict | None:
    message, cached = gpu.message, gpu.message.cached_bytes
    if cached is None or gpu.short > 0 or cached < _NOTABLE * (message.usable_bytes or message.reserved_bytes or 0):
        return None
    pieces = (
        f"PyTorch's cache is fragmented: {show(message.reserved_bytes or 0)} reserved − "
        f"{show(message.allocated_bytes or 0)} allocated = {show(cached)} cached, in blocks between live tensors"
    )
    if cached >= gpu.requested:
        why = f"{pieces}. No free block is as large as {show(gpu.requested)}."
    else:
        enough = f"With what was free ({gpu.free}), this is enough for {show(gpu.requested)}"
        why = f"{pieces}. {enough} and would leave {show(-gpu.short)}."
    return _verdict("fragmentation", why, gpu, _for_fragmentation(message, gpu.allocator_settings))


def _others(gpu: DeviceFigures) -> Verdict | None:
    message = gpu.message
    foreign = gpu.others if gpu.unclaimed is None else max(0, gpu.unclaimed - OWN_CONTEXT)
    if foreign is None or foreign < max(gpu.short, _NOTABLE * (message.capacity_bytes or 0)):
        return None
    held = f"{show(gpu.others or 0)} of the GPU"
    hold = f"Other processes hold {held}" if message.processes else f"{held} is neither free nor this process's"
    if gpu.unclaimed is not None:
        hold = (
            f"{show(gpu.unclaimed)} of the GPU is outside PyTorch's allocator: in another process, or in libraries of "
            "this one, such as vLLM or JAX; the message does not tell which"
        )
    why = f"{hold}; without that, the request would have fit. {gpu.balance}"
    libraries = _libraries(gpu.unclaimed) if gpu.unclaimed is not None else ()
    return _verdict("another process", why, gpu, (*_free_the_gpu(message), *libraries))


def _overhead(gpu: DeviceFigures) -> Verdict | None:
    if gpu.own_overhead is None or gpu.own_overhead <= OWN_CONTEXT:
        return None
    if gpu.own_overhead - OWN_CONTEXT < max(gpu.short, _NOTABLE * (gpu.message.capacity_bytes or 0)):
        return None
    why = (
        f"This process holds {show(gpu.own_overhead)} outside PyTorch's allocator: the CUDA context (0.5 to 2 GiB) "
        "and libraries with their own allocations, such as NCCL, bitsandbytes' paged states, vLLM or another "
        f"framework. {gpu.balance}"
    )
    outside = "the memory is outside PyTorch's allocator"
    helps = _libraries(gpu.own_overhead)
    return _verdict("context and libraries", why, gpu, (*helps, *_for_size(gpu.message, outside)))


_NCCL_MOST: Final = 4 * GIB
"""What NCCL's buffers hardly exceed: 4 MiB for each of up to 32 channels and each peer (NCCL: NCCL_BUFFSIZE)."""


def _libraries(outside: int) -> tuple[Remedy, ...]:
    """What makes libraries beside PyTorch hold less, if they hold this much."""
    vllm = Remedy(
        VLLM_SHARE, "smaller",
        "if vLLM runs in this process: it reserves this share of the GPU (trl: vllm_gpu_memory_utilization)",
    )  # fmt: skip
    jax = Remedy(
        "environment.XLA_PYTHON_CLIENT_PREALLOCATE", "false",
        "if JAX runs in this process: it reserves 75 % of the GPU (TensorFlow: TF_FORCE_GPU_ALLOW_GROWTH=true)",
    )  # fmt: skip
    buffers = "with several GPUs: shrinks the buffer of each NCCL channel (default 4 MiB)"
    nccl = Remedy("environment.NCCL_BUFFSIZE", "1048576", buffers)
    return (vllm, jax) if outside > OWN_CONTEXT + _NCCL_MOST else (nccl, vllm)


def _size(gpu: DeviceFigures) -> Verdict:
    if gpu.short > 0:
        why = f"The job needs more memory than is available. {gpu.balance}"
        return _verdict("size", why, gpu, _for_size(gpu.message, "fragmentation is not the cause"))
    why = (
        f"The GPU is full. {gpu.balance} That is within what the message rounds and the driver keeps: the job needs "
        "less memory."
    )
    if gpu.message.cached_bytes is not None and gpu.available < gpu.requested:
        left = f"Even if the cache were one block, only {show(-gpu.short)} would remain, and the next request"
        why = f"The GPU is nearly full. {gpu.balance} {left} would fail: the job needs less memory."
    return _verdict("size", why, gpu, _for_size(gpu.message, "they would serve this request but not the next"))


def _mps(message: OomMessage, watermark: str | None) -> Verdict:
    requested, allowed = message.requested_bytes, message.allowed_bytes
    held = (message.allocated_bytes or 0) + (message.other_bytes or 0)
    if requested is None or message.allocated_bytes is None:
        return _made("unknown", "The text has no sizes.", (), message)
    if allowed is None or held + requested <= allowed:
        why = f"PyTorch and Metal hold {show(held)}, and Metal had no single block of another {show(requested)}."
        return _made("unknown", why, (), message)
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
    return _made("cap", why, (lift,), message)


def _free_the_gpu(message: OomMessage) -> tuple[Remedy, ...]:
    who = ", ".join(str(process.pid) for process in other_processes(message)[:5])
    ids = f" ({'processes' if ',' in who else 'process'} {who})" if who else ""
    tools = tools_of(message.device_type)
    return (
        Remedy(
            "command", tools.processes,
            f"lists the processes on the GPU{ids}. First check that none belongs to this job: another rank or worker, "
            "or this process itself, which has another ID in a container. Then wait, or use another GPU",
        ),
        Remedy(
            f"environment.{tools.choice}", "an idle GPU",
            "also if several ranks of this job share one GPU: each must set its device before it loads a model",
        ),
        *_for_size(message, "the memory belongs to another process"),
    )  # fmt: skip


def _verdict(cause: Cause, why: str, gpu: DeviceFigures, settings: tuple[Remedy, ...]) -> Verdict:
    outside = gpu.own_overhead if gpu.unclaimed is None else gpu.unclaimed
    return _made(
        cause, why, settings, gpu.message, short=max(gpu.short, 0) or None, outside_allocator=outside,
        other_processes=gpu.others,
    )  # fmt: skip


def _made(cause: Cause, why: str, settings: tuple[Remedy, ...], message: OomMessage, **more: int | None) -> Verdict:
    """The verdict with the sizes of the message, and `more` of them."""
    names = ("requested", "free", "capacity", "allowed", "allocated", "reserved", "cached", "process", "resident")
    sizes = {name: getattr(message, f"{name}_bytes") for name in names} | more
    figures = {f"{name}_gib": size / GIB for name, size in sizes.items() if size is not None}
    helping = tuple(setting for setting in settings if setting.helps)
    return Verdict(cause, why, helping, tuple(setting for setting in settings if not setting.helps), figures)


# Settings of PyTorch's allocator: which help against a message, and which do not.


def split_size_mb(requested_bytes: int) -> int | None:
    """The `max_split_size_mb` for this request: the power of two at or below it; None below what torch accepts.

    PyTorch then splits no block of that size, so that a free one can serve the request or be released (torch:
    c10/cuda/CUDACachingAllocator.cpp, `should_split`, `get_free_block`, `release_available_cached_blocks`).
    """
    value = 1 << ((requested_bytes // MIB).bit_length() - 1) if requested_bytes >= MIB else 0
    return value if value * MIB > _LEAST_SPLIT else None


def _for_fragmentation(message: OomMessage, in_use: str | None) -> tuple[Remedy, ...]:
    """What to set against fragmentation. `in_use`: the settings of that run, if known."""
    key, requested = f"environment.{message.variable}", message.requested_bytes or 0
    on = _EXPANDABLE.settings[_EXPANDABLE.key]
    if message.variable is None:
        return _empty_cache(message)
    if in_use is not None and "expandable_segments:true" in in_use.lower().replace(" ", ""):
        why = (
            "already on: the cached pages still hold live tensors. Fewer tensor shapes (pad_to_multiple_of, packing) "
            "or a smaller batch help"
        )
        # max_split_size_mb makes things worse beside it.
        return Remedy(key, on, why, helps=False), *_empty_cache(message)
    if message.device_type == "xpu":
        known = "if this torch supports it on XPU; otherwise use fewer tensor shapes (pad_to_multiple_of, packing)"
        return Remedy(key, on, known), *_empty_cache(message)
    value = split_size_mb(requested)
    if value is None:
        why = f"torch accepts no value below {_LEAST_SPLIT // MIB}, and the request is {show(requested)}"
        cut = Remedy(key, "max_split_size_mb", why, helps=False)
    else:
        why = (
            "use this instead where expandable segments are unavailable; do not combine them. PyTorch then splits no "
            f"block of {value} MiB or more, so that a freed one can serve {show(requested)}"
        )
        cut = Remedy(key, f"max_split_size_mb:{value}", why)
    return Remedy(key, on, _why_expandable(message)), cut, *_empty_cache(message)


def _for_size(message: OomMessage, why: str) -> tuple[Remedy, ...]:
    """Why allocator settings do not help if the cause is not fragmentation."""
    if message.reserved_bytes is None or message.variable is None or message.device_type == "xpu":
        return _empty_cache(message)
    why = f"{why}; PyTorch has {show(message.cached_bytes or 0)} cached"
    settings = "expandable_segments, max_split_size_mb"
    return Remedy(f"environment.{message.variable}", settings, why, helps=False), *_empty_cache(message)


def _empty_cache(message: OomMessage) -> tuple[Remedy, ...]:
    module = tools_of(message.device_type).module
    why = "PyTorch already released every unused segment and retried before it raised this error"
    return (Remedy(f"{module}.empty_cache()", "", why, helps=False),) if module and module != "torch.mps" else ()


def _why_expandable(message: OomMessage) -> str:
    why = _EXPANDABLE.saves
    if message.device_type == "rocm":
        warns = "warns `expandable_segments not supported on this platform` and ignores it"
        return f"{why}. A ROCm build without it {warns}"
    if message.device_type in ("npu", "mlu", "musa"):
        return f"{why}. Needs a driver and a version of the device's torch plugin that have it"
    if message.reserved_bytes is None or not message.process_bytes:
        return f"{why}. Needs Linux and torch 2.1 or later (check your version); not on Windows, WSL2 or Jetson"
    return f"{why}. Linux only; on WSL2 and Jetson the driver may refuse it"
