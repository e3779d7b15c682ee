"""Trainer's arguments that cannot go with DeepSpeed, or with the launcher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_memkit.argument_values import misspelt
from hf_memkit.checks.rule import Found, rule
from hf_memkit.checks.subject import Subject


@rule(
    "config-not-found",
    severity="error",
    why="there is no such file; Trainer looks for it from the folder that the job is started in",
    fix="write the path of a DeepSpeed JSON; `memkit ds copy NAME` makes one",
    source="accelerate 1.15.0: utils/deepspeed.py 141-158",
    needs_config=False,
)
def config_not_found(subject: Subject) -> Iterator[Found]:
    value = subject.argument("deepspeed")
    if not isinstance(value, str) or value.lstrip().startswith("{") or not value:
        return
    beside = Path(subject.arguments_file).parent / value
    if not Path(value).exists() and not beside.exists():
        yield Found("deepspeed", value, argument=True)


@rule(
    "batch-search-at-stage-3",
    severity="error",
    why="Trainer refuses auto_find_batch_size at stage 3",
    fix="set it to false, or take stage 2",
    source="transformers 5.23.0: trainer.py 898-906",
)
def batch_search_at_stage_3(subject: Subject) -> Iterator[Found]:
    if subject.argument("auto_find_batch_size") is True and subject.zero.stage == 3:
        yield Found("auto_find_batch_size", True, argument=True)


@rule(
    "fsdp-and-deepspeed",
    severity="error",
    why="Trainer refuses FSDP together with DeepSpeed",
    fix="delete one of the two",
    source="transformers 5.23.0: trainer.py 472-476",
)
def fsdp_and_deepspeed(subject: Subject) -> Iterator[Found]:
    if subject.argument("fsdp"):
        yield Found("fsdp", subject.argument("fsdp"), argument=True)


@rule(
    "local-rank-ignored",
    severity="warning",
    why="a launcher gives every process its own LOCAL_RANK; nothing reads this value",
    fix="delete the key, and start with torchrun or the DeepSpeed launcher",
    source="transformers 5.23.0: training_args.py 1508, read by no one",
    needs_config=False,
)
def local_rank_ignored(subject: Subject) -> Iterator[Found]:
    value = subject.argument("local_rank", -1)
    if value != -1:
        yield Found("local_rank", value, argument=True)


@rule(
    "misspelt-argument",
    severity="error",
    why="neither TrainingArguments nor a config of TRL has such a field, and one has nearly the same name",
    fix="write the field's name",
    source="transformers 5.23.0: hf_argparser.py 382",
    needs_config=False,
)
def misspelt_argument(subject: Subject) -> Iterator[Found]:
    for name, value in (subject.arguments or {}).items() if subject.arguments_file else ():
        if field := misspelt(str(name)):
            yield Found(name, value, fix=f"write {field!r}", argument=True)


@rule(
    "text-for-number",
    severity="error",
    why="TrainingArguments keeps the text, and the first comparison fails, after the model is loaded",
    fix="write a number; YAML takes 1e-4 for text, and 1.0e-4 for a number",
    source="transformers 5.23.0: training_args.py, which converts no float; PyYAML's resolver of 1.1 floats",
    needs_config=False,
)
def text_for_number(subject: Subject) -> Iterator[Found]:
    known = _fields(subject)
    for name, value in (subject.arguments or {}).items():
        if isinstance(value, str) and known.get(name) in (float, int) and _is_number(value):
            yield Found(name, value, argument=True)


@rule(
    "text-for-truth",
    severity="error",
    why='transformers keeps the text, and any text counts as true: even "false" switches it on',
    fix="write true or false without quotes",
    source="transformers 5.23.0: hf_argparser.py parse_dict, which converts nothing; training_args.py",
    needs_config=False,
)
def text_for_truth(subject: Subject) -> Iterator[Found]:
    known = _fields(subject)
    for name, value in (subject.arguments or {}).items():
        if isinstance(value, str) and known.get(name) in (bool, bool | None):
            yield Found(name, value, argument=True)


def _fields(subject: Subject) -> Mapping[str, Any]:
    """Fields of TrainingArguments with their types. Only for a file: a setup's were checked when it was made."""
    if not subject.arguments_file:
        return {}
    from hf_memkit.compat import argument_types

    return argument_types()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
