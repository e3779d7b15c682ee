"""Trainer's arguments: conflicts with DeepSpeed or with the launcher, and values of the wrong type."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_memkit.catalog.former_arguments import trl_in_use
from hf_memkit.catalog.library_versions import argument_types
from hf_memkit.checks.rule import Found, any_job, deepspeed
from hf_memkit.checks.subject import Subject


@any_job.error(
    why="the file does not exist; Trainer looks for it from the folder where the job starts",
    fix="write the path of a DeepSpeed JSON; `memkit ds copy NAME` writes one",
    source="accelerate 1.15.0: utils/deepspeed.py 141-158",
)
def config_not_found(subject: Subject) -> Iterator[Found]:
    value = subject.argument("deepspeed")
    if isinstance(value, str) and value and not value.lstrip().startswith("{"):
        relative_to_file = Path(subject.arguments_file).parent / value
        if not Path(value).exists() and not relative_to_file.exists():
            yield Found("deepspeed", value, argument=True)


@deepspeed.error(
    why="Trainer rejects auto_find_batch_size at stage 3",
    fix="set it to false, or use stage 2",
    source="transformers 5.23.0: trainer.py 898-906",
)
def batch_search_at_stage_3(subject: Subject) -> Iterator[Found]:
    if subject.on("auto_find_batch_size") and subject.zero.stage == 3:
        yield Found("auto_find_batch_size", True, argument=True)


@deepspeed.error(
    why="Trainer rejects FSDP together with DeepSpeed",
    fix="delete one of the two",
    source="transformers 5.23.0: trainer.py 472-476",
)
def fsdp_and_deepspeed(subject: Subject) -> Iterator[Found]:
    if subject.argument("fsdp"):
        yield Found("fsdp", argument=True)


@any_job.warning(
    why="the launcher sets LOCAL_RANK for each process; nothing reads this value",
    fix="delete the key, and start with torchrun or the DeepSpeed launcher",
    source="transformers 5.23.0: training_args.py 1508, read by no one",
)
def local_rank_ignored(subject: Subject) -> Iterator[Found]:
    value = subject.argument("local_rank", -1)
    if value != -1:
        yield Found("local_rank", value, argument=True)


@any_job.error(
    why="TrainingArguments keep the text, and the first comparison fails, but only after loading the model; only "
    "TRL's parser converts it",
    fix="write a number; YAML reads 1e-4 as text and 1.0e-4 as a number",
    source="transformers 5.23.0: training_args.py, which converts no float; PyYAML's resolver of 1.1 floats",
)
def text_for_number(subject: Subject) -> Iterator[Found]:
    for name, value in _texts(subject, float, int):
        try:
            float(value)
        except ValueError:
            continue
        yield Found(name, value, argument=True)


@any_job.error(
    why='transformers keeps the text, and any text counts as true: even "false" switches it on',
    fix="write true or false without quotes",
    source="transformers 5.23.0: hf_argparser.py parse_dict, which converts nothing; training_args.py",
)
def text_for_truth(subject: Subject) -> Iterator[Found]:
    for name, value in _texts(subject, bool, bool | None):
        yield Found(name, value, argument=True)


def _texts(subject: Subject, *types: Any) -> Iterator[tuple[str, str]]:
    """Arguments that are texts, and should be of one of `types`. Only of a file: a setup's were checked when it was
    made. TRL's parser converts them (trl 1.16.0: scripts/utils.py 371-381, argparse)."""
    given = subject.arguments if subject.arguments_file else None
    for name, value in (given or {}).items() if not trl_in_use(set(map(str, given or {}))) else ():
        if isinstance(value, str) and argument_types().get(name) in types:
            yield name, value
