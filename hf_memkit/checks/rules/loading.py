"""Loading weights and data."""

from __future__ import annotations

from collections.abc import Iterator

from hf_memkit.checks.rule import Match, any_job, deepspeed
from hf_memkit.checks.subject import Subject


@any_job.error(
    why="it needs workers: torch fails when training starts, after loading the model",
    fix="set dataloader_num_workers to 1 or more, or delete this",
    source="torch 2.13.0: utils/data/dataloader.py 314-321; transformers 5.23.0: training_args.py 1803-1807",
    techniques=("pinned-workers",),
)
def workers_missing(subject: Subject) -> Iterator[Match]:
    if subject.argument("dataloader_num_workers", 0) != 0:
        return
    if subject.on("dataloader_persistent_workers"):
        yield Match("dataloader_persistent_workers", True, argument=True)
    if (value := subject.argument("dataloader_prefetch_factor")) is not None:
        why = "prefetching needs workers: TrainingArguments fail"
        yield Match("dataloader_prefetch_factor", value, why=why, argument=True)


@any_job.warning(
    why="with use_cpu TrainingArguments set it to false: page-locked memory serves copies to a GPU",
    fix="delete one of the two",
    source="transformers 5.23.0: training_args.py 1689-1690",
    techniques=("pinned-workers",),
)
def pinning_without_card(subject: Subject) -> Iterator[Match]:
    if subject.on("dataloader_pin_memory") and subject.on("use_cpu"):
        yield Match("dataloader_pin_memory", True, argument=True)


@any_job.hint(
    why="transformers 5 ignores it: weights are always read tensor by tensor",
    fix="delete it",
    source="transformers 5.23.0: modeling_utils.py 4170-4172",
    techniques=("low-host-ram",),
)
def low_cpu_mem_usage_ignored(subject: Subject) -> Iterator[Match]:
    value = subject.argument("low_cpu_mem_usage")
    if value is None:
        return
    # Under ZeRO-3, which a launcher's own config can turn on, transformers rejects a device_map.
    one_gpu = subject.processes == 1 and not (subject.config and subject.zero.stage == 3)
    instead = '; `device_map="cuda"` in from_pretrained keeps the copy out of RAM (technique low-host-ram)'
    yield Match("low_cpu_mem_usage", value, fix=f"delete it{instead if one_gpu else ''}", argument=True)


@deepspeed.error(
    why="transformers rejects a device_map with ZeRO-3, where DeepSpeed splits the weights as it reads them",
    fix="leave out low-host-ram, or use stage 2",
    source="transformers 5.23.0: integrations/accelerate.py 135-137",
    techniques=("low-host-ram",),
)
def device_map_with_stage_3(subject: Subject) -> Iterator[Match]:
    if subject.zero.stage != 3:
        return
    if subject.has_setting("model.device_map"):
        yield Match("model.device_map")
    if subject.argument("device_map") is not None:
        yield Match("device_map", fix="delete device_map, or use stage 2", argument=True)
