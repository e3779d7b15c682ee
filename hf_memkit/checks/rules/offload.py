"""Offloading: where it does not happen, or goes elsewhere than the file says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hf_memkit.checks.rule import Found, deepspeed
from hf_memkit.checks.subject import Subject
from hf_memkit.deepspeed.split import split, sub_groups

_OPTIMIZER = "zero_optimization.offload_optimizer"
_PARAM = "zero_optimization.offload_param"

_FOR_NVME = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init")


@deepspeed.warning(
    why="below stage 3 DeepSpeed silently treats nvme as cpu: RAM holds everything, and nothing is written to disk",
    fix='set "stage": 3, or write "device": "cpu"',
    source="deepspeed 0.19.8: runtime/zero/stage_1_and_2.py 220-222",
)
def nvme_below_stage_3(subject: Subject) -> Iterator[Found]:
    if subject.zero.optimizer.device == "nvme" and subject.zero.stage in (1, 2):
        yield Found(f"{_OPTIMIZER}.device", "nvme")


@deepspeed.warning(
    why="DeepSpeed offloads parameters only at stage 3 and silently ignores this section at other stages",
    fix='set "stage": 3, or delete the section',
    source="deepspeed 0.19.8: runtime/engine.py 2659-2710, stages 1 and 2 are not given it",
)
def param_offload_below_stage_3(subject: Subject) -> Iterator[Found]:
    device = subject.at(f"{_PARAM}.device")
    if device in ("cpu", "nvme") and subject.zero.stage < 3:
        yield Found(f"{_PARAM}.device", device)


@deepspeed.warning(
    why="without ZeRO nothing is offloaded, but accelerate still replaces the optimizer with DeepSpeedCPUAdam",
    fix='set "stage" to 1, 2 or 3, or delete the section',
    source="deepspeed 0.19.8: runtime/engine.py 2294-2326; accelerate 1.15.0: accelerator.py 2373",
)
def offload_at_stage_0(subject: Subject) -> Iterator[Found]:
    if subject.zero.optimizer.device != "none" and subject.zero.stage == 0:
        yield Found(f"{_OPTIMIZER}.device", subject.zero.optimizer.device)


@deepspeed.warning(
    why='"device" defaults to "none": the section has no effect',
    fix='add "device": "cpu", or delete the section',
    source="deepspeed 0.19.8: runtime/zero/offload_config.py 24, 58",
)
def offload_without_device(subject: Subject) -> Iterator[Found]:
    for path in (_OPTIMIZER, _PARAM):
        section = subject.at(path)
        if isinstance(section, Mapping) and section and "device" not in section:
            yield Found(f"{path}.device")


@deepspeed.warning(
    why="DeepSpeed reads it only if the device is nvme",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/zero/stage3.py 839, runtime/swap_tensor/partitioned_param_swapper.py 80-125",
)
def nvme_key_without_nvme(subject: Subject) -> Iterator[Found]:
    for path in (_OPTIMIZER, _PARAM):
        device = subject.at(f"{path}.device")
        for name in _FOR_NVME:
            value = subject.at(f"{path}.{name}")
            if device in ("cpu", "none") and subject.has(f"{path}.{name}") and value not in (False, None, "none"):
                why = f"DeepSpeed reads it only if the device is nvme; the device is {device}"
                yield Found(f"{path}.{name}", value, why=why)


@deepspeed.error(
    why="DeepSpeed rejects a ratio below 1 except at stage 3",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/zero/config.py 394-400",
)
def ratio_refused(subject: Subject) -> Iterator[Found]:
    if subject.zero.optimizer.ratio < 1 and subject.zero.stage < 3:
        yield Found(f"{_OPTIMIZER}.ratio", subject.zero.optimizer.ratio)


@deepspeed.warning(
    why="only whole sub-groups stay on the GPU, int((1 - ratio) × their number) of them: here none",
    fix='lower "sub_group_size" to get more sub-groups, or delete the key',
    source="deepspeed 0.19.8: runtime/zero/stage3.py 1100-1108",
)
def ratio_no_effect(subject: Subject) -> Iterator[Found]:
    offload = subject.zero.optimizer
    if offload.ratio >= 1 or subject.zero.stage != 3 or subject.at(f"{_OPTIMIZER}.super_offload") is True:
        return
    path = f"{_OPTIMIZER}.ratio"
    if offload.device == "none":
        yield Found(path, offload.ratio, why="nothing is offloaded, so there is nothing to keep on the GPU")
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
        yield Found(path, offload.ratio, why=f"{why} int((1 - {offload.ratio:g}) × {count}) = 0 stay on the GPU")


@deepspeed.warning(
    why="SuperOffload needs stage 3, an optimizer offloaded to the CPU, and a CUDA GPU",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/superoffload/superoffload_stage3.py 20-24, runtime/engine.py 2757",
)
def super_offload_unsupported(subject: Subject) -> Iterator[Found]:
    path = f"{_OPTIMIZER}.super_offload"
    if subject.at(path) is not True:
        return
    if subject.zero.stage != 3:
        yield Found(path, True, why=f"SuperOffload needs stage 3; at stage {subject.zero.stage} it has no effect")
    elif subject.zero.optimizer.device != "cpu":
        yield Found(path, True, why=f"SuperOffload needs the device cpu, not {subject.zero.optimizer.device}")
    elif subject.without_gpu:
        yield Found(path, True, why="SuperOffload fails with an assertion without a CUDA GPU", severity="error")


@deepspeed.warning(
    why="only SuperOffload reads it",
    fix='delete the key, or set "super_offload": true',
    source="deepspeed 0.19.8: runtime/superoffload/superoffload_stage3.py 54",
)
def cores_without_super_offload(subject: Subject) -> Iterator[Found]:
    path = f"{_OPTIMIZER}.cpuadam_cores_perc"
    if subject.has(path) and subject.at(f"{_OPTIMIZER}.super_offload") is not True:
        yield Found(path)
