"""Offloading to RAM and NVMe: where it does not happen or goes elsewhere than the file says, and its buffers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit.checks.rule import Match, Rules, deepspeed
from hf_memkit.checks.subject import ABSENT, Subject
from hf_memkit.deepspeed.split import split, sub_groups
from hf_memkit.setup.techniques.registry import setting_of

_OPTIMIZER = "zero_optimization.offload_optimizer"
_PARAM = "zero_optimization.offload_param"

_FOR_NVME = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init")


@deepspeed.warning(
    why="below stage 3 DeepSpeed silently treats nvme as cpu: RAM holds everything, and nothing is written to disk",
    fix='set "stage": 3, or write "device": "cpu"',
    source="deepspeed 0.19.8: runtime/zero/stage_1_and_2.py 220-222",
)
def nvme_below_stage_3(subject: Subject) -> Iterator[Match]:
    if subject.zero.optimizer.device == "nvme" and subject.zero.stage in (1, 2):
        yield Match(f"{_OPTIMIZER}.device", "nvme")


@deepspeed.warning(
    why="DeepSpeed offloads parameters only at stage 3 and silently ignores this section at other stages",
    fix='set "stage": 3, or delete the section',
    source="deepspeed 0.19.8: runtime/engine.py 2659-2710, stages 1 and 2 are not given it",
)
def param_offload_below_stage_3(subject: Subject) -> Iterator[Match]:
    device = subject.at(f"{_PARAM}.device")
    if device in ("cpu", "nvme") and subject.zero.stage < 3:
        yield Match(f"{_PARAM}.device", device)


@deepspeed.warning(
    why="without ZeRO nothing is offloaded, but accelerate still replaces the optimizer with DeepSpeedCPUAdam",
    fix='set "stage" to 1, 2 or 3, or delete the section',
    source="deepspeed 0.19.8: runtime/engine.py 2294-2326; accelerate 1.15.0: accelerator.py 2373",
)
def offload_at_stage_0(subject: Subject) -> Iterator[Match]:
    if subject.zero.optimizer.device != "none" and subject.zero.stage == 0:
        yield Match(f"{_OPTIMIZER}.device", subject.zero.optimizer.device)


@deepspeed.warning(
    why='"device" defaults to "none": the section has no effect',
    fix='add "device": "cpu", or delete the section',
    source="deepspeed 0.19.8: runtime/zero/offload_config.py 24, 58",
)
def offload_without_device(subject: Subject) -> Iterator[Match]:
    for path in (_OPTIMIZER, _PARAM):
        section = subject.at(path)
        if isinstance(section, Mapping) and section and "device" not in section:
            yield Match(f"{path}.device")


@deepspeed.warning(
    why="DeepSpeed reads it only if the device is nvme",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/zero/stage3.py 839, runtime/swap_tensor/partitioned_param_swapper.py 80-125",
)
def nvme_key_without_nvme(subject: Subject) -> Iterator[Match]:
    for path in (_OPTIMIZER, _PARAM):
        device = subject.at(f"{path}.device")
        for name in _FOR_NVME:
            value = subject.at(f"{path}.{name}")
            if device in ("cpu", "none") and subject.has(f"{path}.{name}") and value not in (False, None, "none"):
                why = f"DeepSpeed reads it only if the device is nvme; the device is {device}"
                yield Match(f"{path}.{name}", value, why=why)


@deepspeed.error(
    why="DeepSpeed rejects a ratio below 1 except at stage 3",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/zero/config.py 394-400",
)
def ratio_refused(subject: Subject) -> Iterator[Match]:
    if subject.zero.optimizer.ratio < 1 and subject.zero.stage < 3:
        yield Match(f"{_OPTIMIZER}.ratio", subject.zero.optimizer.ratio)


@deepspeed.warning(
    why="only whole sub-groups stay on the GPU, int((1 - ratio) × their number) of them: here none",
    fix='lower "sub_group_size" to get more sub-groups, or delete the key',
    source="deepspeed 0.19.8: runtime/zero/stage3.py 1100-1108",
)
def ratio_no_effect(subject: Subject) -> Iterator[Match]:
    offload = subject.zero.optimizer
    if offload.ratio >= 1 or subject.zero.stage != 3 or subject.at(f"{_OPTIMIZER}.super_offload") is True:
        return
    path = f"{_OPTIMIZER}.ratio"
    if offload.device == "none":
        yield Match(path, offload.ratio, why="nothing is offloaded, so there is nothing to keep on the GPU")
        return
    if subject.model is not None:
        count = len(sub_groups(split(subject.model, subject.processes or 1), subject.zero.sub_group_elements))
        why = f"of {count} sub-groups"
    elif not subject.has("zero_optimization.sub_group_size"):
        # Trainer's optimizer has two parameter groups, with weight decay and without; the config's own has one.
        count = 1 if subject.has("optimizer") else 2
        why = f"the default sub_group_size of 1e9 elements makes {count} sub-groups of a model up to that size:"
    else:
        return
    if int((1 - offload.ratio) * count) < 1:
        yield Match(path, offload.ratio, why=f"{why} int((1 - {offload.ratio:g}) × {count}) = 0 stay on the GPU")


@deepspeed.warning(
    why="SuperOffload needs stage 3, an optimizer offloaded to the CPU, and a CUDA GPU",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/superoffload/superoffload_stage3.py 20-24, runtime/engine.py 2757",
)
def super_offload_unsupported(subject: Subject) -> Iterator[Match]:
    path = f"{_OPTIMIZER}.super_offload"
    if subject.at(path) is not True:
        return
    if subject.zero.stage != 3:
        yield Match(path, True, why=f"SuperOffload needs stage 3; at stage {subject.zero.stage} it has no effect")
    elif subject.zero.optimizer.device != "cpu":
        yield Match(path, True, why=f"SuperOffload needs the device cpu, not {subject.zero.optimizer.device}")
    elif subject.without_gpu:
        yield Match(path, True, why="SuperOffload fails with an assertion without a CUDA GPU", severity="error")


@deepspeed.warning(
    why="only SuperOffload reads it",
    fix='delete the key, or set "super_offload": true',
    source="deepspeed 0.19.8: runtime/superoffload/superoffload_stage3.py 54",
)
def cores_without_super_offload(subject: Subject) -> Iterator[Match]:
    path = f"{_OPTIMIZER}.cpuadam_cores_perc"
    if subject.has(path) and subject.at(f"{_OPTIMIZER}.super_offload") is not True:
        yield Match(path)


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
def nvme_path_missing(subject: Subject) -> Iterator[Match]:
    for path in [f"{part}.nvme_path" for part in _swapping(subject)]:
        if subject.at(path) in ("", None, "none", ABSENT):
            yield Match(path)


@deepspeed.error(
    why="DeepSpeed cannot write swap files there",
    fix="write another folder; `memkit doctor --nvme-path DIR` tests one",
    source="deepspeed 0.19.8: runtime/zero/stage3.py 840-841 (os.makedirs)",
)
def nvme_path_unusable(subject: Subject) -> Iterator[Match]:
    for part in _swapping(subject) if subject.here else ():
        path = subject.at(f"{part}.nvme_path")
        if not isinstance(path, str) or path in ("", "none"):
            continue
        folder = Path(path)
        if folder.exists() and not folder.is_dir():
            yield Match(f"{part}.nvme_path", path, why="it is a file, not a folder")
        elif not folder.exists():
            why = "the folder does not exist: DeepSpeed would create it on the disk that is mounted there"
            fix = "create the folder on the disk you mean"
            yield Match(f"{part}.nvme_path", path, why=why, fix=fix, severity="warning")
        elif not os.access(folder, os.W_OK | os.X_OK):
            yield Match(f"{part}.nvme_path", path, why="this user cannot write there")


@deepspeed.warning(
    why="only NVMe offloading reads this section, and nothing is offloaded to NVMe here",
    fix='delete it, or set a device to "nvme" at stage 3',
    source="deepspeed 0.19.8: runtime/swap_tensor/partitioned_param_swapper.py 91, runtime/engine.py 2787",
)
def aio_without_nvme(subject: Subject) -> Iterator[Match]:
    section = subject.at("aio")
    if isinstance(section, Mapping) and section and not _swapping(subject):
        yield Match("aio", section)


@deepspeed.error(
    why="GPUDirect Storage needs a CUDA GPU; DeepSpeed fails with an assertion",
    fix='write "use_gds": false',
    source="deepspeed 0.19.8: runtime/swap_tensor/aio_config.py 38",
)
def gds_without_gpu(subject: Subject) -> Iterator[Match]:
    if subject.at("aio.use_gds") is True and subject.without_gpu:
        yield Match("aio.use_gds", True)


@deepspeed.error(
    why=f"Adam's step needs {ADAM_BUFFERS} buffers at once, for weights, gradients and two moments",
    fix=f'write "buffer_count": {ADAM_BUFFERS} or more',
    source="deepspeed 0.19.8: runtime/swap_tensor/partitioned_optimizer_swapper.py 165",
)
def buffers_too_few(subject: Subject) -> Iterator[Match]:
    count = subject.zero.optimizer.buffer_count
    if subject.zero.swaps_optimizer and not subject.zero.optimizer.pipelined and count < ADAM_BUFFERS:
        yield Match(f"{_OPTIMIZER}.buffer_count", count)


@deepspeed.error(
    why='a pipeline also holds the sub-group that is read ahead or written back; DeepSpeed fails: "ran out of swap '
    'buffers"',
    fix="write a larger buffer_count, or switch the pipelines off",
    source="deepspeed 0.19.8: runtime/swap_tensor/pipelined_optimizer_swapper.py 219, 253",
)
def pipelined_buffers_too_few(subject: Subject) -> Iterator[Match]:
    read, write = (subject.at(f"{_OPTIMIZER}.pipeline_{way}") is True for way in ("read", "write"))
    enough = PIPELINED_BUFFERS.get((read, write), 0)
    if subject.zero.swaps_optimizer and subject.zero.optimizer.buffer_count < enough:
        fix = f'write "buffer_count": {enough} or more, or switch the pipelines off'
        yield Match(f"{_OPTIMIZER}.buffer_count", fix=fix)


@deepspeed.warning(
    why="no effect unless parameters are on NVMe too",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/zero/stage3.py 1126-1133",
)
def fast_init_no_effect(subject: Subject) -> Iterator[Match]:
    path = f"{_OPTIMIZER}.fast_init"
    if subject.zero.swaps_optimizer and subject.at(path) is True and not subject.zero.swaps_parameters:
        yield Match(path, True)


_TORCHAO: Final = ("cpu-offload-optimizer",)
_with_torchao: Final = Rules(techniques=_TORCHAO)
_TORCHAO_PART: Final = "trainer_parts.cpu_offload_optimizer"
_COPIED: Final = "torchao 0.18.0: optim/cpu_offload.py, backward_hook"


def _torchao_options(subject: Subject) -> Mapping[str, Any] | None:
    """The part's options; None if the setup does not use it."""
    value = subject.setting(_TORCHAO_PART)
    return value if isinstance(value, Mapping) else None


@_with_torchao.error(
    why="gradients are on the host before Trainer clips them: the step would silently use them unclipped, so memkit "
    "refuses to start",
    fix=f"set max_grad_norm: 0; {_TORCHAO_PART}.max_grad_norm clips on the host",
    source=_COPIED,
)
def offload_clips_nothing(subject: Subject) -> Iterator[Match]:
    norm = subject.argument("max_grad_norm", 1.0)
    if _torchao_options(subject) is not None and norm:
        yield Match("max_grad_norm", norm, argument=True)


@_with_torchao.error(
    why="a gradient freed on the GPU cannot accumulate: the step would silently use only the last micro-batch's, so "
    "memkit refuses to start",
    fix="leave offload_gradients out, which turns it on only without accumulation; or set "
    "gradient_accumulation_steps: 1",
    source="torchao 0.18.0: optim/cpu_offload.py 37, 84-99",
)
def offload_drops_gradients(subject: Subject) -> Iterator[Match]:
    options = _torchao_options(subject)
    if options and options.get("offload_gradients") is True and subject.accumulation > 1:
        yield Match(f"{_TORCHAO_PART}.offload_gradients", True)


@_with_torchao.error(
    why="gradients are on the host before DistributedDataParallel averages them: each GPU would step with its own, "
    "and the copies of the model would silently diverge, so memkit refuses to start",
    fix="use zero2-offload",
    source=_COPIED,
)
def offload_on_several_cards(subject: Subject) -> Iterator[Match]:
    if _torchao_options(subject) is not None and subject.several:
        yield Match(_TORCHAO_PART)


@_with_torchao.error(
    why="the copy on the host has the weights' own 16 bits: AdamW's small updates are silently rounded away",
    fix=f"keep fp32 weights with {setting_of('bf16-autocast')}; or use zero2-offload, which keeps an fp32 master copy "
    "in RAM",
    source="torchao 0.18.0: optim/cpu_offload.py 113 (empty_like)",
)
def offload_rounds_updates(subject: Subject) -> Iterator[Match]:
    # PEFT keeps adapters in fp32.
    if _torchao_options(subject) is not None and subject.half_weights and not subject.adapter:
        yield Match("model.dtype")


@deepspeed.error(
    why="DeepSpeed moves tensors that torchao's optimizer has replaced with copies on the host, and fails",
    fix="use one of the two; zero2-offload offloads the optimizer without torchao",
    source="deepspeed 0.19.8: runtime/zero/stage_1_and_2.py 442; accelerate 1.15.0: utils/deepspeed.py 37",
    techniques=(*_TORCHAO, "zero2-offload", "zero3", "zero3-offload", "zero3-infinity"),
)
def offload_twice(subject: Subject) -> Iterator[Match]:
    if _torchao_options(subject) is not None:
        yield Match(_TORCHAO_PART)
