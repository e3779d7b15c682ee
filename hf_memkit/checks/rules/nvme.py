"""NVMe: where the swap files go, and what moves them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from hf_memkit.checks.rule import Found, deepspeed
from hf_memkit.checks.subject import ABSENT, Subject

_OPTIMIZER = "zero_optimization.offload_optimizer"
_PARAM = "zero_optimization.offload_param"

ADAM_BUFFERS: Final = 4
"""Weights, gradients and two moments of a sub-group are in RAM together."""

PIPELINED_BUFFERS: Final = {(True, False): 8, (False, True): 8, (True, True): 12}
"""Fewest buffers by (pipeline_read, pipeline_write): as many again for the sub-group that is read ahead, and for that
which is being written. Measured over three steps of Adam with several sub-groups."""


def _swapping(subject: Subject) -> list[str]:
    parts = (_OPTIMIZER, subject.zero.swaps_optimizer), (_PARAM, subject.zero.swaps_parameters)
    return [path for path, swaps in parts if swaps]


@deepspeed.error(
    why="the device is nvme but no folder is given: the engine fails when it builds the path",
    fix='add "nvme_path" with a folder on a local NVMe disk',
    source="deepspeed 0.19.8: runtime/zero/stage3.py 840, runtime/zero/partition_parameters.py 1229",
)
def nvme_path_missing(subject: Subject) -> Iterator[Found]:
    for path in [f"{part}.nvme_path" for part in _swapping(subject)]:
        if subject.at(path) in ("", None, "none", ABSENT):
            yield Found(path)


@deepspeed.error(
    why="DeepSpeed cannot write swap files there",
    fix="write another folder; `memkit doctor --nvme-path DIR` tests one",
    source="deepspeed 0.19.8: runtime/zero/stage3.py 840-841 (os.makedirs)",
)
def nvme_path_unusable(subject: Subject) -> Iterator[Found]:
    for part in _swapping(subject) if subject.here else ():
        path = subject.at(f"{part}.nvme_path")
        if not isinstance(path, str) or path in ("", "none"):
            continue
        folder = Path(path)
        if folder.exists() and not folder.is_dir():
            yield Found(f"{part}.nvme_path", path, why="it is a file, not a folder")
        elif not folder.exists():
            why = "the folder does not exist: DeepSpeed would create it on the disk that is mounted there"
            fix = "create the folder on the disk you mean"
            yield Found(f"{part}.nvme_path", path, why=why, fix=fix, severity="warning")
        elif not os.access(folder, os.W_OK | os.X_OK):
            yield Found(f"{part}.nvme_path", path, why="this user cannot write there")


@deepspeed.warning(
    why="only NVMe offloading reads this section, and nothing is offloaded to NVMe here",
    fix='delete it, or set a device to "nvme" at stage 3',
    source="deepspeed 0.19.8: runtime/swap_tensor/partitioned_param_swapper.py 91, runtime/engine.py 2787",
)
def aio_without_nvme(subject: Subject) -> Iterator[Found]:
    section = subject.at("aio")
    if isinstance(section, Mapping) and section and not _swapping(subject):
        yield Found("aio", section)


@deepspeed.error(
    why="GPUDirect Storage needs a CUDA GPU; DeepSpeed fails with an assertion",
    fix='write "use_gds": false',
    source="deepspeed 0.19.8: runtime/swap_tensor/aio_config.py 38",
)
def gds_without_gpu(subject: Subject) -> Iterator[Found]:
    if subject.at("aio.use_gds") is True and subject.without_gpu:
        yield Found("aio.use_gds", True)


@deepspeed.error(
    why=f"Adam's step needs {ADAM_BUFFERS} buffers at once, for weights, gradients and two moments",
    fix=f'write "buffer_count": {ADAM_BUFFERS} or more',
    source="deepspeed 0.19.8: runtime/swap_tensor/partitioned_optimizer_swapper.py 165",
)
def buffers_too_few(subject: Subject) -> Iterator[Found]:
    count = subject.zero.optimizer.buffer_count
    if subject.zero.swaps_optimizer and not subject.zero.optimizer.pipelined and count < ADAM_BUFFERS:
        yield Found(f"{_OPTIMIZER}.buffer_count", count)


@deepspeed.error(
    why='a pipeline also holds the sub-group that is read ahead or written back; DeepSpeed fails: "ran out of swap '
    'buffers"',
    fix="write a larger buffer_count, or switch the pipelines off",
    source="deepspeed 0.19.8: runtime/swap_tensor/pipelined_optimizer_swapper.py 219, 253",
)
def pipelined_buffers_too_few(subject: Subject) -> Iterator[Found]:
    read, write = (subject.at(f"{_OPTIMIZER}.pipeline_{way}") is True for way in ("read", "write"))
    enough = PIPELINED_BUFFERS.get((read, write), 0)
    if subject.zero.swaps_optimizer and subject.zero.optimizer.buffer_count < enough:
        fix = f'write "buffer_count": {enough} or more, or switch the pipelines off'
        yield Found(f"{_OPTIMIZER}.buffer_count", fix=fix)


@deepspeed.warning(
    why="no effect unless parameters are on NVMe too",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/zero/stage3.py 1126-1133",
)
def fast_init_no_effect(subject: Subject) -> Iterator[Found]:
    path = f"{_OPTIMIZER}.fast_init"
    if subject.zero.swaps_optimizer and subject.at(path) is True and not subject.zero.swaps_parameters:
        yield Found(path, True)
