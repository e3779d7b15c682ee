"""Names of arguments: misspelt ones, those that the installed libraries no longer have, and unknown ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hf_memkit.catalog.argument_values import is_unknown, misspelt
from hf_memkit.catalog.former_arguments import ever_fields, former_arguments, trl_in_use
from hf_memkit.catalog.library_versions import accelerate_keys
from hf_memkit.checks.rule import Found, any_job
from hf_memkit.checks.subject import Subject

_PARSER: Final = "transformers 5.23.0: hf_argparser.py 382"

_OF_TRAINER: Final[Mapping[str, str]] = {
    "tokenizer": "Trainer's argument tokenizer is now processing_class: Trainer(processing_class=…) in the script"
}
"""Names that were never fields, and that Trainer itself took (transformers 5.23.0: trainer.py 380-395)."""


@any_job.error(
    why="neither TrainingArguments nor a config of TRL has this field, and one has nearly the same name",
    fix="write the field's name",
    source=_PARSER,
)
def misspelt_argument(subject: Subject) -> Iterator[Found]:
    """A hint if the field is TRL's and the file may not be: scripts have their own arguments."""
    names = {str(name): value for name, value in subject.own_names.items()}
    for name, value in names.items():
        if near := misspelt(name):
            sure = near[0] in ever_fields("transformers") or trl_in_use(names.keys())
            fix = f"write {' or '.join(map(repr, near))}"
            yield Found(name, value, fix=fix, argument=True, severity=None if sure else "hint")


def _former(subject: Subject, library: str) -> Iterator[Found]:
    given: Mapping[str, Any] = {} if subject.pinned else subject.arguments or {}
    for name, former in former_arguments(given).items():
        if former.library == library:
            yield Found(name, given[name], why=former.why, fix=former.fix, argument=True)


@any_job.error(
    why="the installed transformers no longer has this field of TrainingArguments",
    fix="write its successor",
    source=f"{_PARSER}; fields by version: scripts/argument_fields.py, from the published wheels",
    techniques=("compile", "length-grouped"),
)
def argument_of_transformers_4(subject: Subject) -> Iterator[Found]:
    yield from _former(subject, "transformers")


@any_job.error(
    why="the installed TRL no longer has this field",
    fix="write its successor",
    source="trl 1.16.0: scripts/utils.py 353-357; fields by version: scripts/argument_fields.py, from the published "
    "wheels",
)
def argument_of_older_trl(subject: Subject) -> Iterator[Found]:
    yield from _former(subject, "TRL")


@any_job.hint(
    why="neither TrainingArguments nor TRL's configs have this field; HfArgumentParser and TrlParser fail unless a "
    "dataclass of the script has it",
    fix="delete it, unless your script reads it",
    source=_PARSER,
)
def unknown_argument(subject: Subject) -> Iterator[Found]:
    """One problem a file: scripts have their own arguments."""
    former = former_arguments(subject.own_names)
    others = [str(name) for name in subject.own_names if name not in former]
    strange = [name for name in others if is_unknown(name) and not misspelt(name)]
    if "accelerate_config" in others or trl_in_use(set(others)):
        # `trl sft --config FILE` hands these on to `accelerate launch` (trl 1.16.0: cli/commands/training.py 52-64).
        strange = [name for name in strange if name not in accelerate_keys()]
    for name in [name for name in strange if name in _OF_TRAINER]:
        yield Found(name, fix=_OF_TRAINER[name], argument=True)
        strange.remove(name)
    if len(strange) > 1:
        why = f"neither TrainingArguments nor TRL's configs have these fields: {', '.join(strange)}"
        fix = "delete those that no dataclass of your script has: HfArgumentParser and TrlParser fail on them"
        yield Found(strange[0], why=why, fix=fix, argument=True)
    elif strange:
        yield Found(strange[0], argument=True)
