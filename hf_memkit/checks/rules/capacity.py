"""GPU memory, RAM, locked memory and disk: less than the config needs by formula."""

from __future__ import annotations

from collections.abc import Iterator

from hf_memkit.catalog import fit
from hf_memkit.catalog.adapter_layers import adapter_tensors
from hf_memkit.checks.rule import Found, deepspeed
from hf_memkit.checks.subject import Subject
from hf_memkit.common.units import MIB, format_size
from hf_memkit.deepspeed.engine_ledger import zero_ledger
from hf_memkit.deepspeed.stage_3 import SWAP_BUFFERS
from hf_memkit.setup.ledger import Ledger, Row

_ZERO = "zero_optimization"


def _ledger(subject: Subject) -> Ledger | None:
    if subject.model is None or subject.machine is None or subject.config is None:
        return None
    accumulation = subject.argument("gradient_accumulation_steps", 2) != 1
    return zero_ledger(
        subject.filled, subject.model, gpus=subject.gpus or 1, nodes=subject.nodes, accumulation=accumulation,
        adapters=adapter_tensors(subject.model, subject.adapter),
    )  # fmt: skip


def _largest(rows: list[Row]) -> str:
    rows = sorted(rows, key=lambda row: -row.size_bytes)[:3]
    return "; ".join(f"{row.term} {format_size(row.size_bytes)}" for row in rows)


@deepspeed.error(
    why="weights, gradients, states and buffers alone need more than the GPU has",
    fix="use a higher stage or offload more; `memkit ds list` shows what each preset saves",
    source="hf_memkit/deepspeed/engine_ledger.py, whose rows name their lines of DeepSpeed",
)
def card_too_small(subject: Subject) -> Iterator[Found]:
    ledger, gpu = _ledger(subject), subject.gpu
    if ledger is None or gpu is None:
        return
    needed = ledger.total_bytes("device")
    if fit.too_small(gpu, needed):
        rows = [row for row in ledger.rows if row.place == "device"]
        why = f"DeepSpeed alone needs {format_size(needed)}; {gpu.name} has {format_size(gpu.usable_bytes)} available"
        yield Found(f"{_ZERO}.stage", why=f"{why} (largest: {_largest(rows)})")


@deepspeed.error(
    why="the offloaded parts need more RAM than the machine has; the kernel silently kills the process",
    fix="offload to NVMe, or offload less; without pin_memory DeepSpeed does not round blocks up to powers of two",
    source="hf_memkit/deepspeed/engine_ledger.py, whose rows name their lines of DeepSpeed",
)
def ram_too_small(subject: Subject) -> Iterator[Found]:
    ledger = _ledger(subject)
    if ledger is None or subject.machine is None:
        return
    rows = [row for row in ledger.rows if row.place in ("host", "pinned")]
    needed = ledger.total_bytes("host", "pinned")
    if needed > subject.machine.ram_bytes:
        part = "offload_optimizer" if subject.zero.optimizer.device != "none" else "offload_param"
        why = f"DeepSpeed needs {format_size(needed)} of RAM; the machine has {format_size(subject.machine.ram_bytes)}"
        fix = "lower sub_group_size and buffer_count, whose buffers are in RAM; `memkit ds copy` computes both"
        fix = fix if subject.zero.swaps_optimizer else ""
        yield Found(f"{_ZERO}.{part}.device", why=f"{why} (largest: {_largest(rows)})", fix=fix)


@deepspeed.error(
    why="DeepSpeed locks its swap buffers with mlock; above this machine's limit the process aborts",
    fix="run: ulimit -l unlimited (Docker: --ulimit memlock=-1), or lower buffer_count and the buffers",
    source="deepspeed 0.19.8: ops/csrc/pin_memory/page_alloc.cpp 24",
)
def memlock_too_small(subject: Subject) -> Iterator[Found]:
    ledger = _ledger(subject)
    limit = subject.machine.memlock_bytes if subject.machine else None
    if ledger is None or limit is None:
        return
    locked = sum(row.size_bytes for row in ledger.rows if row.term in SWAP_BUFFERS)
    if locked > limit:
        part = "offload_param" if subject.zero.swaps_parameters else "offload_optimizer"
        why = f"DeepSpeed locks swap buffers of {format_size(locked)} with mlock; the limit on this machine is"
        yield Found(f"{_ZERO}.{part}.buffer_count", why=f"{why} {limit / MIB:.0f} MiB")


@deepspeed.error(
    why="the swap files need more space than the disk has free",
    fix="free space, or write another folder",
    source="hf_memkit/deepspeed/engine_ledger.py, whose rows name their lines of DeepSpeed",
)
def disk_too_small(subject: Subject) -> Iterator[Found]:
    ledger = _ledger(subject)
    if ledger is None or subject.machine is None:
        return
    needed, free = ledger.total_bytes("disk"), subject.machine.disk_free_bytes
    if needed > free:
        part = "offload_optimizer" if subject.zero.swaps_optimizer else "offload_param"
        why = f"the swap files need {format_size(needed)}; {format_size(free)} are free"
        yield Found(f"{_ZERO}.{part}.nvme_path", why=why)
