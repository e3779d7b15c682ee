"""Trainer's arguments: names that no library has, refused values, and conflicts with DeepSpeed or the launcher."""

from __future__ import annotations

import enum
import importlib.util
import typing
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from hf_memkit.catalog.argument_values import is_unknown, misspelt
from hf_memkit.catalog.former_arguments import ever_fields, former_arguments, trl_in_use
from hf_memkit.catalog.library_versions import accelerate_keys, argument_types
from hf_memkit.catalog.optimizers import install_command
from hf_memkit.checks.rule import Match, any_job, deepspeed
from hf_memkit.checks.rules.fsdp import instead_in_fsdp_config
from hf_memkit.checks.rules.optimizer_options import named_optimizer, optimizer_row
from hf_memkit.checks.rules.scripts import is_for_trl
from hf_memkit.checks.subject import Subject

_PARSER: Final = "transformers 5.23.0: hf_argparser.py 382"

_OF_TRAINER: Final[Mapping[str, str]] = {
    "tokenizer": "Trainer's argument tokenizer is now processing_class: Trainer(processing_class=…) in the script",
}
"""Names that were never fields, and that Trainer itself took (transformers 5.23.0: trainer.py 380-395)."""


@any_job.error(
    why="neither TrainingArguments nor a config of TRL has this field, and one has nearly the same name",
    fix="write the field's name",
    source=_PARSER,
)
def misspelt_argument(subject: Subject) -> Iterator[Match]:
    """A hint if the field is TRL's and the file may not be: scripts have their own arguments."""
    names = {str(name): value for name, value in subject.own_names.items()}
    for name, value in names.items():
        if near := misspelt(name):
            sure = near[0] in ever_fields("transformers") or trl_in_use(names.keys())
            fix = f"write {' or '.join(map(repr, near))}"
            yield Match(name, value, fix=fix, argument=True, severity=None if sure else "hint")


def _former(subject: Subject, library: str) -> Iterator[Match]:
    given: Mapping[str, Any] = {} if subject.pinned else subject.arguments or {}
    for name, former in former_arguments(given).items():
        if former.library == library:
            yield Match(name, given[name], why=former.why, fix=former.fix, argument=True)


@any_job.error(
    why="the installed transformers no longer has this field of TrainingArguments",
    fix="write its successor",
    source=f"{_PARSER}; fields by version: scripts/argument_fields.py, from the published wheels",
    techniques=("compile", "length-grouped"),
)
def argument_of_transformers_4(subject: Subject) -> Iterator[Match]:
    yield from _former(subject, "transformers")


@any_job.error(
    why="the installed TRL no longer has this field",
    fix="write its successor",
    source="trl 1.16.0: scripts/utils.py 353-357; fields by version: scripts/argument_fields.py, from the published "
    "wheels",
)
def argument_of_older_trl(subject: Subject) -> Iterator[Match]:
    yield from _former(subject, "TRL")


@any_job.hint(
    why="neither TrainingArguments nor TRL's configs have this field; HfArgumentParser and TrlParser fail unless a "
    "dataclass of the script has it",
    fix="delete it, unless your script reads it",
    source=_PARSER,
)
def unknown_argument(subject: Subject) -> Iterator[Match]:
    """One problem a file: scripts have their own arguments."""
    former = former_arguments(subject.own_names)
    others = [str(name) for name in subject.own_names if name not in former]
    strange = [name for name in others if is_unknown(name) and not misspelt(name)]
    if "accelerate_config" in others or trl_in_use(set(others)):
        # `trl sft --config FILE` hands these on to `accelerate launch` (trl 1.16.0: cli/commands/training.py 52-64).
        strange = [name for name in strange if name not in accelerate_keys()]
    for name in [name for name in strange if name in _OF_TRAINER]:
        yield Match(name, fix=_OF_TRAINER[name], argument=True)
        strange.remove(name)
    for name in [name for name in strange if name.startswith("fsdp_") and not trl_in_use(set(others))]:
        fix = instead_in_fsdp_config(name.removeprefix("fsdp_"), subject.own_names[name])
        if fix:  # `trl` hands it on to the launcher
            yield Match(name, fix=f"set fsdp: true, and in fsdp_config {fix}", argument=True, severity="error")
            strange.remove(name)
    if len(strange) > 1:
        why = f"neither TrainingArguments nor TRL's configs have these fields: {', '.join(strange)}"
        fix = "delete those that no dataclass of your script has: HfArgumentParser and TrlParser fail on them"
        yield Match(strange[0], why=why, fix=fix, argument=True)
    elif strange:
        yield Match(strange[0], argument=True)


_FILE: Final = "transformers 5.23.0: training_args.py"

_LOGGING_STEPS: Final = 500  # transformers 5.23.0: training_args.py, the default
_TRL_LOGGING_STEPS: Final = 10  # trl 1.16.0: trainer/base_config.py 56-57
_SAVE_STEPS: Final = 500  # transformers 5.23.0: training_args.py, the default

_LISTED: Final = 8
"""Most values that a fix lists beside the nearest one."""

_GONE_VALUES: Final = {
    "adamw_hf": "adamw_torch",  # transformers 4.49.0 has it last: trainer.py, get_optimizer_cls_and_kwargs
    "adamw_apex_fused": "adamw_torch_fused",  # transformers 4.57.6 has it last: training_args.py, OptimizerNames
}


def _allowed(name: str) -> list[str]:
    """The values of a field whose type is an enumeration; empty for another one."""
    kind: Any = argument_types().get(name)
    arms = typing.get_args(kind) or (kind,)
    return [str(one.value) for arm in arms if isinstance(arm, type) and issubclass(arm, enum.Enum) for one in arm]


@any_job.error(
    why="TrainingArguments do not accept this value",
    fix="write an allowed value",
    source=f"{_FILE} 1558-1563; the enumerations in training_args.py and trainer_utils.py",
)
def value_not_allowed(subject: Subject) -> Iterator[Match]:
    for name, value in subject.own_names.items():
        allowed = _allowed(name)
        if not allowed or value is None or value in allowed:
            continue
        word = str(value)
        near = [_GONE_VALUES[word]] if word in _GONE_VALUES else get_close_matches(word, allowed, n=1)
        if value is False and "no" in allowed:
            fix = 'write "no" in quotes: YAML reads a bare no as false'
        elif near and len(allowed) > _LISTED:
            fix = f'write "{near[0]}"'
        elif near:
            fix = f'write "{near[0]}"; allowed are {", ".join(allowed)}'
        else:
            fix = f"write one of {', '.join(allowed)}"
        yield Match(name, value, fix=fix, argument=True)
    for name, value in subject.own_names.items():
        if needed := _needed_number(argument_types().get(name), value):
            why = f"the field is {needed}; TrainingArguments keep the value, and Trainer fails or counts wrongly"
            yield Match(name, value, why=why, fix=f"write {needed}", argument=True)


def _needed_number(kind: Any, value: Any) -> str:
    """What a field of this type needs; empty if the value fits, or is a number in quotes, which has its own rule."""
    whole = kind in (int, int | None)
    if not whole and kind not in (float, float | None):
        return ""
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            template = "$" in value or "{" in value  # filled in by another tool
            wrong = not template
        else:
            wrong = whole and not number.is_integer()
    elif isinstance(value, float):
        wrong = whole and not value.is_integer()
    else:
        wrong = isinstance(value, list | dict)
    return ("a whole number" if whole else "a number") if wrong else ""


def _strategy(subject: Subject, name: str, default: str) -> str:
    """The value of a strategy; empty where it has a problem itself: a former name, or a value that is not allowed."""
    former = {"eval_strategy": "evaluation_strategy"}.get(name, "")
    value = str(subject.argument(name, default))
    return value if subject.argument(former) is None and value in _allowed(name) else ""


def _steps(subject: Subject, name: str) -> Any:
    """The steps between two logs, evaluations or checkpoints, as TrainingArguments fill them in."""
    if name == "eval_steps":
        return subject.argument(name) or _steps(subject, "logging_steps")
    if name == "save_steps":
        return subject.argument(name, _SAVE_STEPS)
    return subject.argument(name, _TRL_LOGGING_STEPS if is_for_trl(subject) else _LOGGING_STEPS)


@any_job.error(
    why="TrainingArguments refuse load_best_model_at_end unless evaluations and checkpoints come together",
    fix="set eval_strategy to the value of save_strategy",
    source=f"{_FILE} 1748-1754",
)
def best_model_strategies(subject: Subject) -> Iterator[Match]:
    evaluates = _strategy(subject, "eval_strategy", "no")
    saves = _strategy(subject, "save_strategy", "steps")
    if subject.on("load_best_model_at_end") and evaluates and saves and saves not in ("best", evaluates):
        of_evaluations = "" if subject.argument("eval_strategy") is not None else " (the default)"
        of_checkpoints = "" if subject.argument("save_strategy") is not None else " (the default)"
        both = f"eval_strategy is {evaluates}{of_evaluations}, and save_strategy is {saves}{of_checkpoints}"
        wanted = saves if saves != "no" else "steps, and save_strategy too"
        why = f"TrainingArguments refuse it: {both}"
        yield Match("load_best_model_at_end", True, why=why, fix=f"set eval_strategy: {wanted}", argument=True)


@any_job.error(
    why="TrainingArguments refuse load_best_model_at_end unless save_steps is a multiple of eval_steps",
    fix="set save_steps to eval_steps, or to a multiple of it",
    source=f"{_FILE} 1755-1774",
)
def best_model_steps(subject: Subject) -> Iterator[Match]:
    both = {_strategy(subject, "eval_strategy", "no"), _strategy(subject, "save_strategy", "steps")}
    saves = _steps(subject, "save_steps")
    evaluates = _steps(subject, "eval_steps")
    numbers = all(isinstance(steps, int | float) and steps > 0 for steps in (saves, evaluates))
    if not subject.on("load_best_model_at_end") or both != {"steps"} or not numbers:
        return
    mixed = (saves < 1) != (evaluates < 1)
    if mixed or round(saves * 1_000_000) % round(evaluates * 1_000_000):
        why = f"TrainingArguments refuse it: save_steps {saves} is no multiple of eval_steps {evaluates}"
        yield Match("save_steps", saves, why=why, argument=True)


@any_job.error(
    why="TrainingArguments refuse this number of steps",
    fix="write a whole number of steps, or a share of the run below 1",
    source=f"{_FILE} 1725-1746, 1574-1583, 1800",
)
def steps_refused(subject: Subject) -> Iterator[Match]:
    for kind, default in (("logging", "steps"), ("eval", "no"), ("save", "steps")):
        name = f"{kind}_steps"
        value = _steps(subject, name)
        if _strategy(subject, f"{kind}_strategy", default) != "steps" or not isinstance(value, int | float):
            continue
        if value == 0 and kind == "logging":
            why = 'logging_strategy "steps" needs a number above 0'
            yield Match(name, value, why=why, fix='write a number above 0, or logging_strategy: "no"', argument=True)
        elif value > 1 and value != int(value):
            yield Match(name, value, argument=True)

    warmup = subject.argument("warmup_steps")
    if isinstance(warmup, int | float) and warmup < 0:
        yield Match("warmup_steps", warmup, fix="write 0 or more", argument=True)
    cache = subject.argument("torch_empty_cache_steps")
    if cache is not None and not (isinstance(cache, int) and cache > 0):
        yield Match("torch_empty_cache_steps", cache, fix="write a whole number above 0, or delete it", argument=True)


@any_job.error(
    why="TrainingArguments refuse this schedule without evaluations, which it follows",
    fix="set eval_strategy: steps or epoch",
    source=f"{_FILE} 1790-1798",
)
def schedule_needs_evaluation(subject: Subject) -> Iterator[Match]:
    kind = str(subject.argument("lr_scheduler_type", ""))
    if kind in ("reduce_lr_on_plateau", "greedy") and _strategy(subject, "eval_strategy", "no") == "no":
        yield Match("lr_scheduler_type", kind, argument=True)


@any_job.error(
    why="the optimizer's package is not installed here: Trainer fails, but only after loading the model",
    fix="install the package",
    source="transformers 5.23.0: trainer_optimizer.py, each optimizer's own check",
)
def optimizer_not_installed(subject: Subject) -> Iterator[Match]:
    missing = [name for name in optimizer_row(subject).packages if importlib.util.find_spec(name) is None]
    if missing and subject.here and not subject.has("optimizer"):  # a section of the DeepSpeed config, which runs
        optim = named_optimizer(subject)
        why = (
            f"{optim} needs {missing[0]}, which is not installed here: Trainer fails, but only after loading the model"
        )
        fix = f"run: {install_command(missing[0])}"
        yield Match("optim", optim, why=why, fix=fix, argument=True)


@any_job.error(
    why="the file does not exist; Trainer looks for it from the folder where the job starts",
    fix="write the path of a DeepSpeed JSON; `memkit ds copy NAME` writes one",
    source="accelerate 1.15.0: utils/deepspeed.py 141-158; transformers 5.23.0: training_args.py 2781-2783",
)
def config_not_found(subject: Subject) -> Iterator[Match]:
    for name in ("deepspeed", "fsdp_config") if subject.argument("fsdp") else ("deepspeed",):
        value = subject.argument(name)
        if isinstance(value, str) and value and not value.lstrip().startswith("{"):
            relative_to_file = Path(subject.arguments_file).parent / value
            if not _exists(Path(value)) and not _exists(relative_to_file):
                fix = "" if name == "deepspeed" else "write the path of a JSON with FSDP's settings"
                yield Match(name, value, fix=fix, argument=True)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no path, such as a name that is too long
        return False


@deepspeed.error(
    why="Trainer rejects auto_find_batch_size at stage 3",
    fix="set it to false, or use stage 2",
    source="transformers 5.23.0: trainer.py 898-906",
)
def batch_search_at_stage_3(subject: Subject) -> Iterator[Match]:
    if subject.on("auto_find_batch_size") and subject.zero.stage == 3:
        yield Match("auto_find_batch_size", True, argument=True)


@deepspeed.error(
    why="Trainer rejects FSDP together with DeepSpeed",
    fix="delete one of the two",
    source="transformers 5.23.0: trainer.py 472-476",
    techniques=("fsdp2", "fsdp2-offload"),
)
def fsdp_and_deepspeed(subject: Subject) -> Iterator[Match]:
    if subject.argument("fsdp"):
        yield Match("fsdp", argument=True)


@any_job.warning(
    why="the launcher sets LOCAL_RANK for each process; nothing reads this value",
    fix="delete the key, and start with torchrun or the DeepSpeed launcher",
    source="transformers 5.23.0: training_args.py 1508, read by no one",
)
def local_rank_ignored(subject: Subject) -> Iterator[Match]:
    value = subject.argument("local_rank", -1)
    if value != -1:
        yield Match("local_rank", value, argument=True)


@any_job.error(
    why="TrainingArguments keep the text, and the first comparison fails, but only after loading the model; only "
    "TRL's parser converts it",
    fix="write a number; YAML reads 1e-4 as text and 1.0e-4 as a number",
    source="transformers 5.23.0: training_args.py, which converts no float; PyYAML's resolver of 1.1 floats",
)
def text_for_number(subject: Subject) -> Iterator[Match]:
    for name, value in _texts(subject, float, int):
        try:
            float(value)
        except ValueError:
            continue
        yield Match(name, value, argument=True)


@any_job.error(
    why='transformers keeps the text, and any text counts as true: even "false" switches it on',
    fix="write true or false without quotes",
    source="transformers 5.23.0: hf_argparser.py parse_dict, which converts nothing; training_args.py",
)
def text_for_truth(subject: Subject) -> Iterator[Match]:
    for name, value in _texts(subject, bool, bool | None):
        yield Match(name, value, argument=True)


def _texts(subject: Subject, *types: Any) -> Iterator[tuple[str, str]]:
    """Arguments that are texts, and should be of one of `types`. Only of a file: a setup's were checked when it was
    made. TRL's parser converts them (trl 1.16.0: scripts/utils.py 371-381, argparse)."""
    given = subject.arguments if subject.arguments_file else None
    for name, value in (given or {}).items() if not trl_in_use(set(map(str, given or {}))) else ():
        if isinstance(value, str) and argument_types().get(name) in types:
            yield name, value
