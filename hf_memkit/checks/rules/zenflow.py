"""ZenFlow: its requirements, and its effects."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hf_memkit.checks.rule import Finding, deepspeed
from hf_memkit.checks.subject import ABSENT, Subject
from hf_memkit.common.units import GIB, format_size
from hf_memkit.deepspeed.stages_1_2 import SHARED_BYTES

_ZENFLOW = "zero_optimization.zenflow"

_SHARED_MEMORY: Final = Path("/dev/shm")
"""Where Linux keeps shared memory; a container has 64 MiB of it by default."""


def _on(subject: Subject) -> bool:
    return subject.at(_ZENFLOW) not in (ABSENT, None)


@deepspeed.error(
    why="ZenFlow needs an optimizer offloaded to the CPU; DeepSpeed rejects it otherwise",
    fix='add "offload_optimizer": {"device": "cpu"}',
    source="deepspeed 0.19.8: runtime/zenflow/zenflow_stage_1_and_2.py 115",
)
def zenflow_without_offload(subject: Subject) -> Iterator[Finding]:
    if _on(subject) and subject.zero.optimizer.device != "cpu":
        yield Finding(_ZENFLOW)


@deepspeed.error(
    why="ZenFlow reads its optimizer's parameters from the DeepSpeed config, and Trainer's optimizer leaves none "
    "there",
    fix='add "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", '
    '"weight_decay": "auto"}}',
    source="deepspeed 0.19.8: runtime/zenflow/zenflow_stage_1_and_2.py 81-84",
)
def zenflow_without_optimizer(subject: Subject) -> Iterator[Finding]:
    if _on(subject) and not subject.has("optimizer.params"):
        yield Finding("optimizer", None)


@deepspeed.warning(
    why="ZenFlow overrides gradient_accumulation_steps with its update_interval",
    fix='set gradient_accumulation_steps to 1; "update_interval" sets the accumulation',
    source="deepspeed 0.19.8: runtime/zenflow/engine.py 69",
)
def zenflow_accumulation(subject: Subject) -> Iterator[Finding]:
    value = subject.at("gradient_accumulation_steps")
    asked = subject.argument("gradient_accumulation_steps", 1) if value == "auto" else value
    if _on(subject) and isinstance(asked, int) and asked > 1:
        yield Finding("gradient_accumulation_steps", asked, argument=value == "auto")


@deepspeed.error(
    why="these intervals contradict each other; DeepSpeed fails",
    fix='set "select_strategy" to "step", and select_interval to a number of at least update_interval',
    source="deepspeed 0.19.8: runtime/zenflow/engine.py 35-63",
)
def zenflow_interval(subject: Subject) -> Iterator[Finding]:
    if not _on(subject):
        return
    path = f"{_ZENFLOW}.select_interval"
    strategy = subject.at(f"{_ZENFLOW}.select_strategy")
    select = subject.at(path)
    update = subject.at(f"{_ZENFLOW}.update_interval")
    if strategy in (ABSENT, "auto") and isinstance(select, int):
        yield Finding(path, select, why="with the strategy auto DeepSpeed rejects a number here")
    elif strategy in ("step", "epoch") and not isinstance(select, int):
        yield Finding(path, why=f"the strategy {strategy} needs a number here")
    elif strategy == "step" and isinstance(update, int) and isinstance(select, int) and select < update:
        yield Finding(path, select, why=f"it must be at least update_interval ({update}); DeepSpeed fails")


@deepspeed.error(
    why="offloading ZenFlow's states needs overlap_comm; DeepSpeed fails with an assertion",
    fix='set "overlap_comm": true',
    source="deepspeed 0.19.8: runtime/zenflow/zenflow_stage_1_and_2.py 75",
)
def zenflow_offload_without_overlap(subject: Subject) -> Iterator[Finding]:
    overlap = subject.at("zero_optimization.overlap_comm")
    if _on(subject) and subject.at(f"{_ZENFLOW}.offload") is True and overlap is not True and subject.zero.stage < 3:
        yield Finding("zero_optimization.overlap_comm")


@deepspeed.error(
    why=f"overlap_step needs {SHARED_BYTES} bytes a parameter in {_SHARED_MEMORY}, which has less free here: the "
    'first step fails with "unable to allocate shared memory"',
    fix='start the container with a larger docker run --shm-size, or write "overlap_step": false',
    source="deepspeed 0.19.8: runtime/zenflow/zenflow_utils.py 157-164",
)
def zenflow_shared_memory(subject: Subject) -> Iterator[Finding]:
    path = f"{_ZENFLOW}.overlap_step"
    if subject.at(path) is not True or subject.model is None or not subject.here or not _SHARED_MEMORY.is_dir():
        return
    needed = -(-SHARED_BYTES * subject.model.parameters // subject.nodes)  # ZeRO splits it between all processes
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if needed > free:
        why = f"overlap_step needs {format_size(needed)} in {_SHARED_MEMORY}, which has {format_size(free)} free"
        fix = f'run: docker run --shm-size={math.ceil(needed / GIB)}g or more; or write "overlap_step": false'
        yield Finding(path, True, why=f'{why}: the first step fails with "unable to allocate shared memory"', fix=fix)
