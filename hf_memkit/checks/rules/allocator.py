"""PyTorch's allocator: the variable that sets it."""

from __future__ import annotations

from collections.abc import Iterator

from hf_memkit.checks.rule import Found, any_job
from hf_memkit.checks.subject import Subject
from hf_memkit.setup.techniques.allocator import VARIABLE, of_no_use, refused_by_torch

_KEY = f"environment.{VARIABLE}"


@any_job.error(
    why="torch does not know the option, rejects its value, or cannot use it beside the others",
    fix="correct the option",
    source="pytorch: c10/core/AllocatorConfig.cpp, c10/cuda/CUDACachingAllocator.cpp (should_split, "
    "garbage_collect_cached_blocks); torch 2.13.0: include/c10/core/AllocatorConfig.h",
    techniques=("expandable-segments", "max-split-size", "garbage-collection-threshold"),
)
def allocator_options(subject: Subject) -> Iterator[Found]:
    value = subject.setting(_KEY)
    if value is None:
        return
    for name, why, fix in refused_by_torch(str(value)):
        yield Found(_KEY, value, why=f"{name}: {why}", fix=fix)
    for name, why, fix in of_no_use(str(value)):
        yield Found(_KEY, value, why=f"{name}: {why}", fix=fix, severity="warning")
