"""ZeRO stages and ZenFlow: keys that have no effect or are rejected at this stage, and what ZenFlow needs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hf_memkit.checks.rule import Match, deepspeed
from hf_memkit.checks.subject import ABSENT, Subject
from hf_memkit.common.units import GIB, format_size
from hf_memkit.deepspeed.stages_1_2 import SHARED_BYTES

_ZERO = "zero_optimization"

_STAGE_3_ONLY = (
    "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save", "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "zero_hpz_partition_size",
    "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "leaf_module",
)  # fmt: skip
_STAGE_1_2_ONLY = (
    "allgather_bucket_size", "allgather_partitions", "use_multi_rank_bucket_allreduce", "round_robin_gradients",
    "parameter_alignment", "ignore_unused_parameters",
)  # fmt: skip
_WITHOUT_EFFECT = {"zero_hpz_partition_size": 1, "allgather_partitions": True, "use_multi_rank_bucket_allreduce": True,
                  "ignore_unused_parameters": True}  # fmt: skip


@deepspeed.warning(
    why="no effect at this ZeRO stage",
    fix="delete the key, or change the stage",
    source="deepspeed 0.19.8: runtime/engine.py 2653-2795, what each stage's optimizer is given",
)
def wrong_stage(subject: Subject) -> Iterator[Match]:
    stage = subject.zero.stage
    names = {1: _STAGE_3_ONLY, 2: _STAGE_3_ONLY, 3: _STAGE_1_2_ONLY}.get(stage, (*_STAGE_3_ONLY, *_STAGE_1_2_ONLY))
    for name in names:
        path = f"{_ZERO}.{name}"
        value = subject.at(path)
        # Switches that are off have no effect, nor have defaults.
        if value not in (ABSENT, False, None, "auto") and value != _WITHOUT_EFFECT.get(name, ...):
            where = "stage 3 reads" if name in _STAGE_3_ONLY else "stages 1 and 2 read"
            yield Match(path, why=f"no effect at stage {stage}: only {where} it")


@deepspeed.error(
    why="DeepSpeed rejects compute_grad_norm=false except at stages 1 and 2 without clipping, offload and ZenFlow",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/zero/config.py 390, runtime/zero/stage_1_and_2.py 212-218",
)
def gradient_norm_off(subject: Subject) -> Iterator[Match]:
    path = f"{_ZERO}.compute_grad_norm"
    if subject.at(path) is not False:
        return
    clipping = subject.at("gradient_clipping")
    if clipping == "auto":
        clipping = subject.argument("max_grad_norm", 1.0)
    if subject.zero.stage not in (1, 2):
        yield Match(path, False, why="DeepSpeed rejects compute_grad_norm=false except at stages 1 and 2")
    elif isinstance(clipping, int | float) and clipping > 0:
        yield Match(path, False, why=f"clipping to {clipping} needs the norm; DeepSpeed rejects the two together")
    elif subject.zero.optimizer.device != "none":
        yield Match(path, False, why="DeepSpeed rejects compute_grad_norm=false with offload_optimizer")
    elif subject.has(f"{_ZERO}.zenflow"):
        yield Match(path, False, why="DeepSpeed rejects compute_grad_norm=false with ZenFlow")


@deepspeed.warning(
    why="with offload_optimizer DeepSpeed silently sets it to true and allocates the bucket buffer",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/zero/stage_1_and_2.py 299-300",
)
def contiguous_forced(subject: Subject) -> Iterator[Match]:
    path = f"{_ZERO}.contiguous_gradients"
    if subject.at(path) is False and subject.zero.stage in (1, 2) and subject.zero.optimizer.device != "none":
        yield Match(path, False)


@deepspeed.error(
    why="DeepSpeed rejects it when the engine starts (since 0.5.9)",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/engine.py 2650",
)
def legacy_stage_1(subject: Subject) -> Iterator[Match]:
    if subject.at(f"{_ZERO}.legacy_stage1") is True:
        yield Match(f"{_ZERO}.legacy_stage1", True)


@deepspeed.warning(
    why="stage 3 no longer supports it: DeepSpeed warns and ignores it",
    fix='delete the key; its replacement is "checkpoint": {"load_universal": true}',
    source="deepspeed 0.19.8: runtime/zero/config.py 403-409",
)
def elastic_checkpoint(subject: Subject) -> Iterator[Match]:
    if subject.at(f"{_ZERO}.elastic_checkpoint") is True and subject.zero.stage == 3:
        yield Match(f"{_ZERO}.elastic_checkpoint", True)


@deepspeed.error(
    why="stages 1 and 2 fail with an assertion unless it is a multiple of 2",
    fix="write an even number",
    source="deepspeed 0.19.8: runtime/zero/stage_1_and_2.py 389",
)
def gather_bucket_odd(subject: Subject) -> Iterator[Match]:
    path = f"{_ZERO}.allgather_bucket_size"
    value = subject.at(path)
    if isinstance(value, int) and not isinstance(value, bool) and value % 2 and subject.zero.stage in (1, 2):
        yield Match(path, value)


@deepspeed.error(
    why="DeepSpeed rejects gradient_allreduce_op=sum at stage 3 and with ZenFlow",
    fix='delete the key: "mean" is the default',
    source="deepspeed 0.19.8: runtime/config.py 694-699",
)
def sum_at_stage_3(subject: Subject) -> Iterator[Match]:
    path = "gradient_allreduce_op"
    if str(subject.at(path)).lower() == "sum" and (subject.zero.stage == 3 or subject.has(f"{_ZERO}.zenflow")):
        yield Match(path)


@deepspeed.error(
    why="ZeRO++ quantises with CUDA kernels: without a GPU the engine does not start",
    fix="delete the key on this machine",
    source="deepspeed 0.19.8: runtime/zero/partition_parameters.py 883, accelerator/cpu_accelerator.py",
)
def quantized_without_gpu(subject: Subject) -> Iterator[Match]:
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if subject.at(f"{_ZERO}.{name}") is True and subject.without_gpu and subject.zero.stage == 3:
            yield Match(f"{_ZERO}.{name}", True)


@deepspeed.error(
    why="between machines DeepSpeed's kernel reads all gradients as fp16: other types silently become wrong gradients",
    fix="delete the key, or train in fp16",
    source="deepspeed 0.19.8: runtime/zero/stage3.py 1913-1929, runtime/comm/coalesced_collectives.py 57, "
    "ops/csrc/quantization/pt_binding.cpp 153",
)
def quantized_gradients_bf16(subject: Subject) -> Iterator[Match]:
    path = f"{_ZERO}.zero_quantized_gradients"
    dtype = subject.at("communication_data_type")  # deepspeed 0.19.8: runtime/engine.py 1719
    sent = dtype.lower() if isinstance(dtype, str) and dtype != "auto" else subject.computes_in
    if subject.at(path) is True and subject.zero.stage == 3 and sent not in (None, "fp16"):
        why = f"gradients are sent in {sent}, but between machines DeepSpeed's kernel reads them as fp16"
        yield Match(path, True, why=f"{why}: they are silently wrong")


@deepspeed.error(
    why="the processes must divide into groups of this size; DeepSpeed fails otherwise",
    fix="write the number of GPUs in one machine",
    source="deepspeed 0.19.8: utils/groups.py 941-945",
)
def secondary_partition_size(subject: Subject) -> Iterator[Match]:
    size, processes = subject.zero.secondary_partition, subject.processes or 0
    if 1 < size < processes and processes % size and subject.zero.stage == 3:
        why = f"{processes} processes do not divide into groups of {size}; DeepSpeed fails"
        yield Match(f"{_ZERO}.zero_hpz_partition_size", size, why=why)


_ZENFLOW = "zero_optimization.zenflow"

_SHARED_MEMORY: Final = Path("/dev/shm")
"""Where Linux keeps shared memory; a container has 64 MiB of it by default."""


def _uses_zenflow(subject: Subject) -> bool:
    return subject.at(_ZENFLOW) not in (ABSENT, None)


@deepspeed.error(
    why="ZenFlow needs an optimizer offloaded to the CPU; DeepSpeed rejects it otherwise",
    fix='add "offload_optimizer": {"device": "cpu"}',
    source="deepspeed 0.19.8: runtime/zenflow/zenflow_stage_1_and_2.py 115",
)
def zenflow_without_offload(subject: Subject) -> Iterator[Match]:
    if _uses_zenflow(subject) and subject.zero.optimizer.device != "cpu":
        yield Match(_ZENFLOW)


@deepspeed.error(
    why="ZenFlow reads its optimizer's parameters from the DeepSpeed config, and Trainer's optimizer leaves none "
    "there",
    fix='add "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", '
    '"weight_decay": "auto"}}',
    source="deepspeed 0.19.8: runtime/zenflow/zenflow_stage_1_and_2.py 81-84",
)
def zenflow_without_optimizer(subject: Subject) -> Iterator[Match]:
    if _uses_zenflow(subject) and not subject.has("optimizer.params"):
        yield Match("optimizer", None)


@deepspeed.warning(
    why="ZenFlow overrides gradient_accumulation_steps with its update_interval",
    fix='set gradient_accumulation_steps to 1; "update_interval" sets the accumulation',
    source="deepspeed 0.19.8: runtime/zenflow/engine.py 69",
)
def zenflow_accumulation(subject: Subject) -> Iterator[Match]:
    value = subject.at("gradient_accumulation_steps")
    asked = subject.argument("gradient_accumulation_steps", 1) if value == "auto" else value
    if _uses_zenflow(subject) and isinstance(asked, int) and asked > 1:
        yield Match("gradient_accumulation_steps", asked, argument=value == "auto")


@deepspeed.error(
    why="these intervals contradict each other; DeepSpeed fails",
    fix='set "select_strategy" to "step", and select_interval to a number of at least update_interval',
    source="deepspeed 0.19.8: runtime/zenflow/engine.py 35-63",
)
def zenflow_interval(subject: Subject) -> Iterator[Match]:
    if not _uses_zenflow(subject):
        return
    path = f"{_ZENFLOW}.select_interval"
    strategy = subject.at(f"{_ZENFLOW}.select_strategy")
    select = subject.at(path)
    update = subject.at(f"{_ZENFLOW}.update_interval")
    if strategy in (ABSENT, "auto") and isinstance(select, int):
        yield Match(path, select, why="with the strategy auto DeepSpeed rejects a number here")
    elif strategy in ("step", "epoch") and not isinstance(select, int):
        yield Match(path, why=f"the strategy {strategy} needs a number here")
    elif strategy == "step" and isinstance(update, int) and isinstance(select, int) and select < update:
        yield Match(path, select, why=f"it must be at least update_interval ({update}); DeepSpeed fails")


@deepspeed.error(
    why="offloading ZenFlow's states needs overlap_comm; DeepSpeed fails with an assertion",
    fix='set "overlap_comm": true',
    source="deepspeed 0.19.8: runtime/zenflow/zenflow_stage_1_and_2.py 75",
)
def zenflow_offload_without_overlap(subject: Subject) -> Iterator[Match]:
    overlap = subject.at("zero_optimization.overlap_comm")
    if (
        _uses_zenflow(subject)
        and subject.at(f"{_ZENFLOW}.offload") is True
        and overlap is not True
        and subject.zero.stage < 3
    ):
        yield Match("zero_optimization.overlap_comm")


@deepspeed.error(
    why=f"overlap_step needs {SHARED_BYTES} bytes a parameter in {_SHARED_MEMORY}, which has less free here: the "
    'first step fails with "unable to allocate shared memory"',
    fix='start the container with a larger docker run --shm-size, or write "overlap_step": false',
    source="deepspeed 0.19.8: runtime/zenflow/zenflow_utils.py 157-164",
)
def zenflow_shared_memory(subject: Subject) -> Iterator[Match]:
    path = f"{_ZENFLOW}.overlap_step"
    if subject.at(path) is not True or subject.model is None or not subject.here or not _SHARED_MEMORY.is_dir():
        return
    needed = -(-SHARED_BYTES * subject.model.parameters // subject.nodes)  # ZeRO splits it between all processes
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if needed > free:
        why = f"overlap_step needs {format_size(needed)} in {_SHARED_MEMORY}, which has {format_size(free)} free"
        fix = f'run: docker run --shm-size={math.ceil(needed / GIB)}g or more; or write "overlap_step": false'
        yield Match(path, True, why=f'{why}: the first step fails with "unable to allocate shared memory"', fix=fix)
