"""Memory, disk and buffers: less than the config needs, wrong sizes, and options of PyTorch's allocator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hf_memkit.catalog import fit
from hf_memkit.catalog.adapter_layers import adapter_tensors
from hf_memkit.catalog.hardware import Gpu
from hf_memkit.catalog.models import ModelFacts
from hf_memkit.catalog.optimizers import find_optimizer
from hf_memkit.checks.rule import Match, Severity, any_job, deepspeed
from hf_memkit.checks.rules.optimizer_options import named_optimizer
from hf_memkit.checks.subject import Subject
from hf_memkit.common.units import MIB, format_size
from hf_memkit.deepspeed.engine_ledger import zero_ledger
from hf_memkit.deepspeed.split import split
from hf_memkit.deepspeed.stage_3 import SWAP_BUFFERS
from hf_memkit.setup.ledger import Ledger, Row
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.allocator import VARIABLE, of_no_use, refused_by_torch
from hf_memkit.setup.techniques.setup_ledger import gradient_bytes, states_of

_ZERO = "zero_optimization"


def _ledger(subject: Subject) -> Ledger | None:
    """What DeepSpeed holds; None if the model or the machine is unknown."""
    if subject.model is None or subject.machine is None or subject.config is None:
        return None
    accumulation = subject.argument("gradient_accumulation_steps", 2) != 1
    return zero_ledger(
        subject.filled, subject.model, gpus=subject.gpus or 1, nodes=subject.nodes, accumulation=accumulation,
        adapters=adapter_tensors(subject.model, subject.adapter),
    )  # fmt: skip


def _largest(rows: list[Row]) -> str:
    """The three largest rows with their sizes."""
    rows = sorted(rows, key=lambda row: -row.size_bytes)[:3]
    return "; ".join(f"{row.term} {format_size(row.size_bytes)}" for row in rows)


_PARTIAL: Final = (
    "lora", "peft", "adapter", "quant", "4bit", "8bit", "load_in", "freez", "frozen", "trainable", "unsloth", "fsdp",
    "deepspeed", "parallel", "device_map", "model_init_kwargs",
)  # fmt: skip
"""Words in arguments of jobs that may train or keep only a part of the weights on the GPU."""


def _trains_everything(subject: Subject) -> bool:
    """Whether nothing in the arguments shows that a GPU has less than all weights, in 16 bits or more, to train."""
    given = subject.arguments
    if given is None or subject.pinned or subject.launcher is not None or subject.without_gpu:
        return False
    only_evaluates = subject.on("do_eval") or subject.on("do_predict")
    if not subject.argument("do_train", not only_evaluates):
        return False
    texts = [f"{name} {value}".lower() for name, value in given.items() if value and name != "optim"]
    return not any(word in text for text in texts for word in _PARTIAL)


def _least_bytes(subject: Subject, model: ModelFacts) -> int:
    """The least that weights, gradients and states of a training with these arguments take on the GPU.

    The script may load the weights in 16 bits, except with fp16, which needs fp32 weights. States that may leave the
    GPU, or whose formula is unknown, count as zero.
    """
    optim = named_optimizer(subject) or "adamw_torch_fused"
    dtype = "float32" if subject.on("fp16") or subject.argument("dtype") == "float32" else "bfloat16"
    setup = Setup("").put("model.dtype", dtype, "least").put("arguments.optim", optim, "least")
    row = find_optimizer(optim)
    adamw = find_optimizer("adamw_torch")
    known = row.states is not adamw.states or (row.algorithm == adamw.algorithm and not row.packages)
    known = known and not row.unpaged and not row.low_rank
    states = states_of(setup, model).total if known else 0
    return model.parameters * (4 if dtype == "float32" else 2) + gradient_bytes(setup, model)[0] + states


@any_job.error(
    why="weights, gradients, states and buffers alone need more than the GPU has",
    fix="use a higher stage or offload more; `memkit ds list` shows what each preset saves",
    source="hf_memkit/deepspeed/engine_ledger.py, whose rows name their lines of DeepSpeed; "
    "hf_memkit/setup/techniques/setup_ledger.py",
)
def card_too_small(subject: Subject) -> Iterator[Match]:
    gpu = subject.gpu
    if gpu is None or subject.model is None:
        return
    if subject.config is None:
        yield from _without_deepspeed(subject, subject.model, gpu)
        return
    ledger = _ledger(subject)
    if ledger is None:
        return
    needed = ledger.total_bytes("device")
    if fit.too_small(gpu, needed):
        rows = [row for row in ledger.rows if row.place == "device"]
        why = f"DeepSpeed alone needs {format_size(needed)}; {gpu.name} has {format_size(gpu.usable_bytes)} available"
        yield Match(f"{_ZERO}.stage", why=f"{why} (largest: {_largest(rows)})")


def _without_deepspeed(subject: Subject, model: ModelFacts, gpu: Gpu) -> Iterator[Match]:
    """The mistake of a job without DeepSpeed: from a setup's ledger, or from the arguments of a file. The script of a
    file may train an adapter that only its code names."""
    severity: Severity = "error"
    if subject.ledger.rows:
        needed = subject.ledger.total_bytes("device")
    elif subject.arguments_file and _trains_everything(subject):
        needed = _least_bytes(subject, model)
        severity = "warning"
    else:
        return
    if fit.too_small(gpu, needed):
        why = f"weights, gradients and optimizer states need at least {format_size(needed)}; {gpu.name} has "
        why += f"{format_size(gpu.usable_bytes)} available"
        fix = "train adapters, use an optimizer with smaller states, or offload; `memkit plan` finds what fits"
        optim = named_optimizer(subject) or "adamw_torch_fused"
        yield Match("optim", optim, why=why, fix=fix, argument=True, severity=severity)


@deepspeed.error(
    why="the offloaded parts need more RAM than the machine has; the kernel silently kills the process",
    fix="offload to NVMe, or offload less; without pin_memory DeepSpeed does not round blocks up to powers of two",
    source="hf_memkit/deepspeed/engine_ledger.py, whose rows name their lines of DeepSpeed",
)
def ram_too_small(subject: Subject) -> Iterator[Match]:
    ledger = _ledger(subject)
    if ledger is None or subject.machine is None:
        return
    rows = [row for row in ledger.rows if row.place in ("host", "pinned")]
    needed = ledger.total_bytes("host", "pinned")
    if needed > subject.machine.ram_bytes:
        part = "offload_optimizer" if subject.zero.optimizer.device != "none" else "offload_param"
        why = f"DeepSpeed needs {format_size(needed)} of RAM; the machine has {format_size(subject.machine.ram_bytes)}"
        fix = ""
        if subject.zero.swaps_optimizer:
            fix = "lower sub_group_size and buffer_count, whose buffers are in RAM; `memkit ds copy` computes both"
        yield Match(f"{_ZERO}.{part}.device", why=f"{why} (largest: {_largest(rows)})", fix=fix)


@deepspeed.error(
    why="DeepSpeed locks its swap buffers with mlock; above this machine's limit the process aborts",
    fix="run: ulimit -l unlimited (Docker: --ulimit memlock=-1), or lower buffer_count and the buffers",
    source="deepspeed 0.19.8: ops/csrc/pin_memory/page_alloc.cpp 24",
)
def memlock_too_small(subject: Subject) -> Iterator[Match]:
    ledger = _ledger(subject)
    limit = subject.machine.memlock_bytes if subject.machine else None
    if ledger is None or limit is None:
        return
    locked = sum(row.size_bytes for row in ledger.rows if row.term in SWAP_BUFFERS)
    if locked > limit:
        part = "offload_param" if subject.zero.swaps_parameters else "offload_optimizer"
        why = f"DeepSpeed locks swap buffers of {format_size(locked)} with mlock; the limit on this machine is"
        yield Match(f"{_ZERO}.{part}.buffer_count", why=f"{why} {limit / MIB:.0f} MiB")


@deepspeed.error(
    why="the swap files need more space than the disk has free",
    fix="free space, or write another folder",
    source="hf_memkit/deepspeed/engine_ledger.py, whose rows name their lines of DeepSpeed",
)
def disk_too_small(subject: Subject) -> Iterator[Match]:
    ledger = _ledger(subject)
    if ledger is None or subject.machine is None:
        return
    needed = ledger.total_bytes("disk")
    free = subject.machine.disk_free_bytes
    if needed > free:
        part = "offload_optimizer" if subject.zero.swaps_optimizer else "offload_param"
        why = f"the swap files need {format_size(needed)}; {format_size(free)} are free"
        yield Match(f"{_ZERO}.{part}.nvme_path", why=why)


BUCKET_SHARE: Final = 0.1
"""Share of the GPU above which gradient buckets count as a mistake. A judgement: ZeRO-R asks for a constant size,
"large enough to be efficient" (Rajbhandari et al. 2020, arXiv 1910.02054, 6.2); a tenth of any GPU is more."""

_SUB_GROUP_DEFAULT: Final = 1_000_000_000
"""deepspeed 0.19.8: runtime/zero/config.py 182."""

_BUCKET = "zero_optimization.reduce_bucket_size"
_SUB_GROUP = "zero_optimization.sub_group_size"
_BUFFER = "zero_optimization.offload_param.buffer_size"
_IN_RAM = "zero_optimization.offload_param.max_in_cpu"


def _bucket_bytes(subject: Subject) -> int:
    zero = subject.zero
    return zero.buckets * zero.element_bytes * zero.bucket_elements


@deepspeed.hint(
    why="the default of 5e8 elements takes 1 GB of GPU memory in 16 bits, 2 GB with overlap_comm at stages 1 and 2, "
    "for any size of the model",
    fix='write a number, such as "reduce_bucket_size": 50000000',
    source="deepspeed 0.19.8: runtime/zero/config.py 113, stage_1_and_2.py 966, stage3.py 782",
)
def bucket_default(subject: Subject) -> Iterator[Match]:
    taken = _bucket_bytes(subject)
    if not subject.has(_BUCKET) and taken:
        why = f"the default of 5e8 elements takes {format_size(taken)} of GPU memory, for any size of the model"
        large = subject.gpu is not None and taken > BUCKET_SHARE * subject.gpu.usable_bytes
        yield Match(_BUCKET, why=why, severity="warning" if large else None)


@deepspeed.warning(
    why=f"the gradient buckets take more than {BUCKET_SHARE:.0%} of the GPU's memory",
    fix="write a smaller number; `memkit ds copy` computes it",
    source="deepspeed 0.19.8: runtime/zero/stage_1_and_2.py 964-970, runtime/zero/stage3.py 781",
)
def bucket_against_card(subject: Subject) -> Iterator[Match]:
    gpu = subject.gpu
    taken = _bucket_bytes(subject)
    set_here = subject.has(_BUCKET) and subject.at(_BUCKET) != "auto"
    if gpu is not None and set_here and taken > BUCKET_SHARE * gpu.usable_bytes:
        twice = ", doubled by overlap_comm" if subject.zero.buckets > 1 else ""
        why = f"the buckets take {format_size(taken)} of {format_size(gpu.usable_bytes)} on {gpu.name}{twice}"
        yield Match(_BUCKET, why=why)


@deepspeed.warning(
    why="with NVMe each of the buffer_count page-locked buffers holds one sub-group at 4 bytes an element: 16 GB of "
    "RAM at the default of 1e9",
    fix='write a number, such as "sub_group_size": 100000000',
    source="deepspeed 0.19.8: runtime/zero/config.py 182, runtime/swap_tensor/optimizer_utils.py 178",
)
def sub_group_default(subject: Subject) -> Iterator[Match]:
    if not subject.zero.swaps_optimizer or subject.zero.sub_group_elements < _SUB_GROUP_DEFAULT:
        return
    if not subject.has(_SUB_GROUP) or subject.model is None:  # with a model its real buffers are weighed against RAM
        yield Match(_SUB_GROUP)


@deepspeed.error(
    why="a parameter's share does not fit into a swap buffer: DeepSpeed fails with \"More elements … than buffer "
    'size"',
    fix="write at least the share of the largest parameter; `memkit ds copy` computes it",
    source="deepspeed 0.19.8: runtime/swap_tensor/partitioned_param_swapper.py 357",
)
def buffer_too_small(subject: Subject) -> Iterator[Match]:
    if subject.model is None or not subject.zero.swaps_parameters:
        return
    largest = max(max(shares) for shares in split(subject.model, subject.processes or 1).shares)
    size = subject.zero.parameters.buffer_elements
    if size < largest:
        why = f"the largest parameter's share has {largest:,} elements: DeepSpeed fails with"
        why += ' "More elements … than buffer size"'
        yield Match(_BUFFER, why=why, fix=f"write at least {largest}")


@deepspeed.warning(
    why="the default max_in_cpu of 1e9 elements is more than a process has: everything stays in RAM, and the files "
    "on disk are written once and never used",
    fix='write "max_in_cpu": 0',
    source="deepspeed 0.19.8: runtime/zero/offload_config.py 39, runtime/zero/stage3.py 899",
)
def parameters_stay_in_ram(subject: Subject) -> Iterator[Match]:
    if not subject.zero.swaps_parameters or subject.model is None or subject.has(_IN_RAM):
        return
    share = -(-subject.model.parameters // (subject.processes or 1))
    if share <= subject.zero.parameters.max_in_cpu:
        why = f"the default keeps 1e9 elements in RAM, and a process has only {share:,}: the files are never used"
        yield Match(_IN_RAM, why=why)


_KEY = f"environment.{VARIABLE}"


@any_job.error(
    why="torch does not know the option, rejects its value, or cannot use it beside the others",
    fix="correct the option",
    source="pytorch: c10/core/AllocatorConfig.cpp, c10/cuda/CUDACachingAllocator.cpp (should_split, "
    "garbage_collect_cached_blocks); torch 2.13.0: include/c10/core/AllocatorConfig.h",
    techniques=("expandable-segments", "max-split-size", "garbage-collection-threshold"),
)
def allocator_options(subject: Subject) -> Iterator[Match]:
    value = subject.setting(_KEY)
    if value is None:
        return
    for name, why, fix in refused_by_torch(str(value)):
        yield Match(_KEY, value, why=f"{name}: {why}", fix=fix)
    for name, why, fix in of_no_use(str(value)):
        yield Match(_KEY, value, why=f"{name}: {why}", fix=fix, severity="warning")
