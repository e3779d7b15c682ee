"""Changes that leave more RAM. In: a failed job. Out: a change, or None where it is on, refused or useless."""

from __future__ import annotations

from typing import Final

from hf_memkit.catalog.optimizers import find_optimizer
from hf_memkit.common.units import GIB
from hf_memkit.measuring.out_of_memory.change import Change
from hf_memkit.measuring.out_of_memory.failed_job import FailedJob, unless
from hf_memkit.measuring.out_of_memory.other_names import MAP_PROCESSES
from hf_memkit.measuring.out_of_memory.suggestions import PAGEABLE_BATCHES

# Data.

_ONE_ARRAY: Final = 16 * GIB
"""A single request from which the array itself is too large, whatever else is in RAM: half of a small machine's."""


def fewer_workers(failed: FailedJob) -> Change | None:
    if failed.trace.phase is None and (failed.message.requested_bytes or 0) >= _ONE_ARRAY:
        return None
    return failed.halved(
        "dataloader_num_workers",
        "each worker process holds its own copy of the data it loads, and prefetched batches",
        "loading may become too slow for the GPU; watch the step time",
        unknown="fewer", least=1,
    )  # fmt: skip


def no_workers(failed: FailedJob) -> Change | None:
    workers = failed.job.count("dataloader_num_workers")
    if workers == 0:
        return None
    return Change(
        "arguments.dataloader_num_workers", 0,
        "batches are then made in the training process, without /dev/shm",
        "the GPU waits for each batch",
        current=workers,
    )  # fmt: skip


_FEW: Final = 8
"""Processes of a `map` at most: each holds its rows and a copy of the tokenizer."""


def fewer_map_processes(failed: FailedJob) -> Change | None:
    return None if failed.recorded else failed.halved(
        failed.named(MAP_PROCESSES),
        "each process of datasets' map is a copy of this one with its own rows (scripts call num_proc "
        "preprocessing_num_workers or dataset_num_proc)",
        "slower preprocessing, once: the result is cached",
        unknown="fewer", otherwise="data.num_proc", most=_FEW,
    )  # fmt: skip


def smaller_map_batches(failed: FailedJob) -> Change | None:
    return None if failed.recorded else Change(
        "data.writer_batch_size", 100,
        "dataset.map keeps this many finished rows in RAM before it writes them (datasets: 1000 by default); with "
        "batched=True also batch_size rows",
        "more, smaller writes",
    )  # fmt: skip


def streamed_data(failed: FailedJob) -> Change | None:
    if failed.recorded or failed.argument("streaming"):
        return None
    return Change(
        "data.streaming", True,
        "load_dataset(…, streaming=True) reads and tokenizes rows as they are needed and keeps no table",
        "no length of the data set: set max_steps; no shuffling beyond a buffer",
    )  # fmt: skip


# Weights, states and checkpoints.


straight_to_gpu = unless(
    Change(
        "model.device_map", '{"": PartialState().process_index}',
        "from_pretrained then puts each shard on this process's GPU as it reads it, instead of the whole model in RAM",
        "the weights must fit on the GPU; not with DeepSpeed or FSDP",
    ),
    "device_map", uses=("DeepSpeed", "FSDP"),  # which refuse a device_map
)  # fmt: skip


def one_copy_of_weights(failed: FailedJob) -> Change | None:
    if failed.uses("ZeRO-3"):
        return Change(
            "model.from_pretrained", "after TrainingArguments",
            "ZeRO-3 splits the weights while they load only if TrainingArguments exists before from_pretrained; "
            "otherwise every process holds the whole model in RAM",
            "nothing",
        )  # fmt: skip
    if failed.uses("DeepSpeed"):
        return Change(
            "arguments.deepspeed", "zero3.json",
            "every process loads the whole model in RAM; `memkit ds copy zero3` splits the weights while they load",
            "more communication in each step",
        )  # fmt: skip
    return Change(
        "arguments.fsdp_config", {"cpu_ram_efficient_loading": True},
        "with several processes on the machine, each loads a copy of the weights; FSDP then loads one for all"
        + ("" if failed.uses("FSDP") else " (with fsdp: full_shard), or start fewer processes"),
        "nothing on a model that from_pretrained loads",
    )  # fmt: skip


def less_offload(failed: FailedJob) -> Change | None:
    """Offloaded states on NVMe. Not proposed where the arguments show no offload."""
    arguments_show_none = failed.job.arguments and not failed.uses("offload")
    if arguments_show_none and not (failed.uses("DeepSpeed") and isinstance(failed.argument("deepspeed"), str)):
        return None
    no_deepspeed = failed.platform == "Windows" or failed.message.form in ("windows-commit", "notebook")
    if failed.offloads_to_disk or failed.resumes or (no_deepspeed and not failed.uses("offload")):
        return None
    name = "zero3-infinity-optimizer"
    shown = failed.uses("offload")
    return Change(
        "arguments.deepspeed", f"{name}.json",
        ("" if shown else "if DeepSpeed offloads states to RAM: ")
        + f"`memkit ds copy {name} --nvme-path DIR` moves the optimizer's states from RAM to NVMe. `memkit ds check "
        "FILE --ram SIZE` prints the RAM that your config needs; where the GPUs have room, omit offload_optimizer",
        "each step reads and writes all states on the disk; needs local NVMe",
    )  # fmt: skip


FEWER_PROCESSES: Final = Change(
    "launch.processes", "fewer on this machine",
    "each process reads the whole checkpoint, weights and optimizer states, into RAM; with ZeRO or FSDP's "
    "SHARDED_STATE_DICT each reads its share",
    "fewer GPUs; with ZeRO or sharded checkpoints the number of GPUs must stay",
)  # fmt: skip


# Page-locked RAM.


def pageable_batches(failed: FailedJob) -> Change | None:
    return None if failed.argument("dataloader_pin_memory") is False else PAGEABLE_BATCHES


def pageable_states(failed: FailedJob) -> Change | None:
    if failed.job.arguments and not failed.uses("DeepSpeed"):
        return None
    return Change(
        "deepspeed.zero_optimization.offload_optimizer.pin_memory", False,
        "offloaded states then lie in pageable RAM; the same key is in offload_param",
        "transfers between RAM and GPU are slower",
    )  # fmt: skip


def torch_checkpointing(failed: FailedJob) -> Change | None:
    return None if not failed.uses("unsloth") else Change(
        "model.use_gradient_checkpointing", True,
        'instead of "unsloth", which moves the inputs of all layers to page-locked RAM',
        "these inputs stay on the GPU", current="unsloth",
    )  # fmt: skip


def more_for_wsl(failed: FailedJob) -> Change | None:
    if failed.platform not in (None, "WSL2"):
        return None
    return Change(
        "command", "memory=… in the [wsl2] section of %UserProfile%\\.wslconfig, then wsl --shutdown",
        "on WSL2 only: Linux gets half of the RAM by default, and CUDA may lock a part of that",
        "less RAM for Windows",
    )  # fmt: skip


def unpaged_states(failed: FailedJob) -> Change | None:
    if failed.resumes:
        return None
    row = find_optimizer(failed.job.optim)
    value = row.unpaged or "adamw_bnb_8bit"
    smaller = " (adamw_bnb_8bit: 2 bytes a parameter)" if row.unpaged and row.bits != 8 else ""
    return Change(
        "arguments.optim", value,
        f"its states lie in the GPU's own memory{smaller}",
        "the states must fit on the GPU",
        current=failed.job.optim or None,
    )  # fmt: skip


def more_ram(failed: FailedJob) -> Change | None:
    if failed.message.in_cgroup or failed.message.form == "kubernetes-node":
        return None  # the fix for that cause has it
    return Change(
        "command", "more RAM, or a larger memory limit",
        "for a limit: docker --memory, Slurm --mem, Kubernetes limits.memory",
        "RAM that others could use",
    )  # fmt: skip


# Disk.


def fewer_checkpoints(failed: FailedJob) -> Change | None:
    kept = failed.job.count("save_total_limit")
    if kept is not None and kept < 2:
        return None
    return Change(
        "arguments.save_total_limit", 1,
        "the Trainer then deletes older checkpoints (with load_best_model_at_end it keeps the best one too)",
        "no way back to them",
        current=kept,
    )  # fmt: skip


CACHE_ELSEWHERE: Final = Change(
    "environment.HF_HOME", "a folder on a larger disk",
    "models, data sets and tokenized rows are cached there (~/.cache/huggingface by default); TMPDIR is another place "
    "that fills",
    "they are downloaded again",
)  # fmt: skip
