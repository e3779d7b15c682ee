"""Whether a training fits a machine: the one definition, for predictions, plans, recipes, rules and finished runs.

`most` is the maximum that the process takes of a GPU, and `least` the minimum in which the training completes:
PyTorch's allocator frees its cache and tries again before it fails. Both include what lies outside the allocator.
`room` is what the process may take: the GPU's memory, or less where `per_process_memory_fraction` limits it.

| verdict | when | what happens |
|---|---|---|
| does not fit | least + slack > room; or RAM or disk is too small | runs out of memory |
| fits | else, and most ≤ 92 % of room | completes and stays fast |
| tight | else | completes, but the allocator may free its cache and try again, which is slow |

A finished run is measured, so that it has no slack: it was tight above 92 %, or where the allocator tried again. Sums
of weights, gradients and states count no activations: they show that a training does not fit, never that it fits.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from hf_memkit.catalog.hardware import Gpu, Machine
from hf_memkit.common.units import MIB, format_gib

Verdict = Literal["fits", "tight", "does not fit"]
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)

Level = Literal["trace", "cpu trace"]
"""What a prediction was computed from: a trace on fake CUDA tensors, or on fake CPU tensors (with a CPU's kernels)."""

LEVELS: Final[tuple[Level, ...]] = get_args(Level)

FULL_SHARE: Final = 0.92
"""Of the GPU. Above it the allocator may free its cache and ask again, and steps become several times slower: runs of
OpenTau on 80 GiB GPUs lost a third of their speed at 97 %, torchtitan's fitting plan three quarters (OpenTau PR 273;
pytorch/torchtitan PR 4636). What stays free is more than the slack of a trace on any GPU of 6 GiB or more."""

LIMIT_NAME: Final = f"{100 * FULL_SHARE:.0f} % of the GPU"

SLACK_SHARE: Final[dict[Level, float]] = {"trace": 0.05, "cpu trace": 0.10}
"""By how much a prediction may be too low; a cpu trace lowers `FULL_SHARE` by as much as it exceeds a trace here.

* trace: 5 %, the worst error that is accepted of a predicted peak; what `CONTEXT_SLACK_BYTES` is fitted beside.
* cpu trace: other kernels, another attention, other autocast lists; assumed. torch accepts ±10 % for its own tracker
  of traced steps against CUDA (pytorch: test/distributed/_tools/test_mem_tracker.py, `delta=0.1`).
"""

CONTEXT_SLACK_BYTES: Final = 200 * MIB
"""The CUDA context is assumed at 500 MiB (`hardware.CONTEXT_BYTES`) and grows in training, as libraries load kernels
when they are first used. Of traces: the least multiple of 50 MiB with which 95 % of the fitting half's trainings are
covered, `fitted_slack_mib` in benchmarks/published_summary.py, which a test compares with this."""


def room_bytes(capacity_bytes: int, outside_allocator_bytes: int = 0, memory_fraction: float = 1.0) -> int:
    """What a process may take of a GPU whose allocator is limited to a share of it."""
    return min(capacity_bytes, outside_allocator_bytes + int(memory_fraction * capacity_bytes))


def full_share(level: Level = "trace") -> float:
    """The share of its room that a training may take to fit."""
    return FULL_SHARE - (SLACK_SHARE[level] - SLACK_SHARE["trace"])


def full_share_text(level: Level = "trace") -> str:
    """`"92 %"`."""
    return f"{100 * full_share(level):.0f} %"


def limit_bytes(room: int, level: Level = "trace") -> int:
    """The maximum that a training that fits takes."""
    return int(full_share(level) * room)


def slack_bytes(size_bytes: int, level: Level) -> int:
    """By how much the allocator may need more than this."""
    return round(SLACK_SHARE[level] * size_bytes) + CONTEXT_SLACK_BYTES


def slack_text(level: Level) -> str:
    """`"5 % and 200 MiB"`."""
    return f"{100 * SLACK_SHARE[level]:.0f} % and {CONTEXT_SLACK_BYTES // MIB} MiB"


def verdict(most_bytes: int, least_bytes: int, room: int, level: Level = "trace") -> Verdict:
    """The verdict on the GPU alone. `least_bytes` includes the slack."""
    if least_bytes > room:
        return "does not fit"
    return "fits" if most_bytes <= limit_bytes(room, level) else "tight"


def too_small(gpu: Gpu, needed_bytes: int) -> bool:
    """Whether weights and states alone need more than the GPU has."""
    return needed_bytes > gpu.usable_bytes


def host_shortages(machine: Machine, ram_bytes: int, disk_bytes: int, option: str = "") -> list[str]:
    """A line for each of RAM and disk of which the machine has too little. `option`: what names another RAM."""
    short = []
    if ram_bytes > machine.ram_bytes:
        has = f"the machine has {format_gib(machine.ram_bytes)}{option}"
        short.append(f"needs {format_gib(ram_bytes)} of RAM; {has}")
    if disk_bytes > machine.disk_free_bytes:
        has = f"{machine.disk_path} has {format_gib(machine.disk_free_bytes)} free"
        short.append(f"needs {format_gib(disk_bytes)} of disk; {has}")
    return short


def was_tight(peak_gib: float, room_gib: float, retries: int) -> bool:
    """Whether a run that completed was `tight`, as measured."""
    return retries > 0 or peak_gib > FULL_SHARE * room_gib
