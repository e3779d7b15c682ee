"""Values that TrainingArguments refuse, alone or combined."""

from __future__ import annotations

import enum
import importlib.util
import typing
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, Final

from hf_memkit.catalog.library_versions import argument_types
from hf_memkit.catalog.optimizers import install_command
from hf_memkit.checks.rule import Found, any_job
from hf_memkit.checks.rules.optimizer_options import named_optimizer, optimizer_row
from hf_memkit.checks.rules.scripts import is_for_trl
from hf_memkit.checks.subject import Subject

_FILE: Final = "transformers 5.23.0: training_args.py"

_LOGGING_STEPS: Final = 500  # transformers 5.23.0: training_args.py, the default
_TRL_LOGGING_STEPS: Final = 10  # trl 1.16.0: trainer/base_config.py 56-57
_SAVE_STEPS: Final = 500  # transformers 5.23.0: training_args.py, the default

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
def value_not_allowed(subject: Subject) -> Iterator[Found]:
    for name, value in subject.own_names.items():
        allowed = _allowed(name)
        if not allowed or value is None or value in allowed:
            continue
        every, word = ", ".join(allowed), str(value)
        near = [_GONE_VALUES[word]] if word in _GONE_VALUES else get_close_matches(word, allowed, n=1)
        fix = f"write one of {every}"
        if value is False and "no" in allowed:
            fix = 'write "no" in quotes: YAML reads a bare no as false'
        elif near:
            fix = f'write "{near[0]}"' if len(allowed) > 8 else f'write "{near[0]}"; allowed are {every}'
        yield Found(name, value, fix=fix, argument=True)


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
def best_model_strategies(subject: Subject) -> Iterator[Found]:
    evaluates, saves = _strategy(subject, "eval_strategy", "no"), _strategy(subject, "save_strategy", "steps")
    if subject.on("load_best_model_at_end") and evaluates and saves and saves not in ("best", evaluates):
        shown = [f"{evaluates}{'' if subject.argument('eval_strategy') is not None else ' (the default)'}"]
        shown.append(f"{saves}{'' if subject.argument('save_strategy') is not None else ' (the default)'}")
        why = f"TrainingArguments refuse it: eval_strategy is {shown[0]}, and save_strategy is {shown[1]}"
        wanted = saves if saves != "no" else "steps, and save_strategy too"
        yield Found("load_best_model_at_end", True, why=why, fix=f"set eval_strategy: {wanted}", argument=True)


@any_job.error(
    why="TrainingArguments refuse load_best_model_at_end unless save_steps is a multiple of eval_steps",
    fix="set save_steps to eval_steps, or to a multiple of it",
    source=f"{_FILE} 1755-1774",
)
def best_model_steps(subject: Subject) -> Iterator[Found]:
    both = {_strategy(subject, "eval_strategy", "no"), _strategy(subject, "save_strategy", "steps")}
    saves, evaluates = _steps(subject, "save_steps"), _steps(subject, "eval_steps")
    numbers = all(isinstance(steps, int | float) and steps > 0 for steps in (saves, evaluates))
    if not subject.on("load_best_model_at_end") or both != {"steps"} or not numbers:
        return
    mixed = (saves < 1) != (evaluates < 1)
    if mixed or round(saves * 1_000_000) % round(evaluates * 1_000_000):
        why = f"TrainingArguments refuse it: save_steps {saves} is no multiple of eval_steps {evaluates}"
        yield Found("save_steps", saves, why=why, argument=True)


@any_job.error(
    why="TrainingArguments refuse this number of steps",
    fix="write a whole number of steps, or a share of the run below 1",
    source=f"{_FILE} 1725-1746, 1574-1583, 1800",
)
def steps_refused(subject: Subject) -> Iterator[Found]:
    for kind, default in (("logging", "steps"), ("eval", "no"), ("save", "steps")):
        name = f"{kind}_steps"
        value = _steps(subject, name)
        if _strategy(subject, f"{kind}_strategy", default) != "steps" or not isinstance(value, int | float):
            continue
        if value == 0 and kind == "logging":
            why = 'logging_strategy "steps" needs a number above 0'
            yield Found(name, value, why=why, fix='write a number above 0, or logging_strategy: "no"', argument=True)
        elif value > 1 and value != int(value):
            yield Found(name, value, argument=True)
    warmup, cache = subject.argument("warmup_steps"), subject.argument("torch_empty_cache_steps")
    if isinstance(warmup, int | float) and warmup < 0:
        yield Found("warmup_steps", warmup, fix="write 0 or more", argument=True)
    if cache is not None and not (isinstance(cache, int) and cache > 0):
        yield Found("torch_empty_cache_steps", cache, fix="write a whole number above 0, or delete it", argument=True)


@any_job.error(
    why="TrainingArguments refuse this schedule without evaluations, which it follows",
    fix="set eval_strategy: steps or epoch",
    source=f"{_FILE} 1790-1798",
)
def schedule_needs_evaluation(subject: Subject) -> Iterator[Found]:
    kind = str(subject.argument("lr_scheduler_type", ""))
    if kind in ("reduce_lr_on_plateau", "greedy") and _strategy(subject, "eval_strategy", "no") == "no":
        yield Found("lr_scheduler_type", kind, argument=True)


@any_job.error(
    why="the optimizer's package is not installed here: Trainer fails, but only after loading the model",
    fix="install the package",
    source="transformers 5.23.0: trainer_optimizer.py, each optimizer's own check",
)
def optimizer_not_installed(subject: Subject) -> Iterator[Found]:
    missing = [name for name in optimizer_row(subject).packages if importlib.util.find_spec(name) is None]
    if missing and subject.here and not subject.has("optimizer"):  # a section of the DeepSpeed config, which runs
        optim = named_optimizer(subject)
        why = (
            f"{optim} needs {missing[0]}, which is not installed here: Trainer fails, but only after loading the model"
        )
        fix = f"run: {install_command(missing[0])}"
        yield Found("optim", optim, why=why, fix=fix, argument=True)
