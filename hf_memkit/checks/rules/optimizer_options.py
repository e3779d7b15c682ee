"""Optimizers, ignored options: arguments that the chosen optimizer does not receive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hf_memkit.catalog.library_versions import is_on
from hf_memkit.catalog.optimizers import Optimizer, find_optimizer, techniques_of
from hf_memkit.checks.rule import Match, any_job
from hf_memkit.checks.subject import Subject

_FILE = "transformers 5.23.0: trainer_optimizer.py"

_TRUE_IF_ANY: Final = ("kahan_sum", "decouple_lr")
_TAKEN_AS: Final = {"adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps"}
"""Trainer's argument → the optimizer's parameter that receives it (`hf_memkit.setup.build.trainer`)."""
_RATE_OF_SGD: Final = 0.01
"""A learning rate from here on was chosen for SGD: AdamW's are far below."""


UNSEEN: Final = "unless accelerate's own config turns on DeepSpeed or FSDP, which memkit cannot see here"
"""Both keep fp32 copies of 16-bit weights. For rules that assume the weights train in their own dtype."""


def named_optimizer(subject: Subject) -> str:
    """The value of `optim`; empty if it is not set."""
    value = subject.argument("optim")
    return "" if value is None else str(value)


def optimizer_row(subject: Subject) -> Optimizer:
    """The table's row for `optim`."""
    return find_optimizer(named_optimizer(subject))


def options(subject: Subject) -> dict[str, str]:
    """The readable options in `optim_args`, as Trainer reads them."""
    text = subject.argument("optim_args")
    parts = text.replace(" ", "").split(",") if isinstance(text, str) else []
    return {key: value for key, _, value in (part.partition("=") for part in parts if part.count("=") == 1)}


def rounds_stochastically(subject: Subject) -> bool:
    if subject.setting("optimizer.class"):
        return subject.setting("optimizer.bf16_stochastic_round") is True
    row = optimizer_row(subject)
    return row.rounding == "stochastic" and _switched_on(subject, row.rounding_option)


def keeps_small_updates(subject: Subject) -> bool:
    """Whether it rounds stochastically, compensates, or its authors tried it in 16 bits (`Optimizer.rounding`)."""
    if subject.setting("optimizer.class"):
        return rounds_stochastically(subject)
    row = optimizer_row(subject)
    return row.rounding != "nearest" and (not row.rounding_option or _switched_on(subject, row.rounding_option))


def _switched_on(subject: Subject, option: str) -> bool:
    return is_on(options(subject).get(option))


@any_job.warning(
    why="Trainer silently drops keys of optim_args that this optimizer does not read",
    fix="delete it; for options that no argument sets, give Trainer optimizer_cls_and_kwargs",
    source=f"{_FILE} 195-208, 246-293, 317-348, 413-428, 1393-1402 of trainer.py",
    techniques=techniques_of(lambda row: row.reads is not None),
)
def optimizer_options_ignored(subject: Subject) -> Iterator[Match]:
    optim = named_optimizer(subject)
    read = optimizer_row(subject).reads
    if not optim or read is None:
        return
    for key in options(subject):
        if key not in read:
            knows = f"reads only {', '.join(read)}" if read else "reads nothing of optim_args"
            why = f"Trainer silently drops {key}: {optim} {knows}"
            yield Match("optim_args", why=why, argument=True)


@any_job.error(
    why="Trainer cannot parse optim_args: it needs key=value pairs separated by commas, and fails only after loading "
    "the model",
    fix='write "key=value,key=value"',
    source=f"{_FILE} 65-73",
)
def optimizer_options_unreadable(subject: Subject) -> Iterator[Match]:
    text = subject.argument("optim_args")
    if isinstance(text, str) and text and any(part.count("=") != 1 for part in text.replace(" ", "").split(",")):
        yield Match("optim_args", text, argument=True)


@any_job.error(
    why='Trainer applies bool() to the text: "False" turns the option on',
    fix="delete the option: it is off by default",
    source=f"{_FILE} 537-545",
)
def optimizer_option_always_true(subject: Subject) -> Iterator[Match]:
    for key, value in options(subject).items():
        off = value.lower() in ("false", "0", "no", "none")
        if named_optimizer(subject) == "stable_adamw" and key in _TRUE_IF_ANY and off:
            yield Match("optim_args", argument=True)


@any_job.warning(
    why="the argument weight_decay takes precedence through Trainer's parameter groups; this option has no effect",
    fix="set the argument weight_decay",
    source=f"{_FILE} 317-348; trainer.py 1275-1288",
    techniques=techniques_of(lambda row: "weight_decay" in (row.reads or ())),
)
def optimizer_decay_overridden(subject: Subject) -> Iterator[Match]:
    if "weight_decay" in (optimizer_row(subject).reads or ()) and "weight_decay" in options(subject):
        yield Match("optim_args", argument=True)


@any_job.error(
    why="Trainer passes the value as text, and torchao fails at the first step (an int modulo a str)",
    fix="delete block_size; the techniques adamw-8bit-stochastic and adamw-4bit-stochastic set it",
    source=f"{_FILE} 470; torchao 0.18.0: optim/adam.py 78",
    techniques=techniques_of(lambda row: "torchao" in row.packages),
)
def torchao_block_size(subject: Subject) -> Iterator[Match]:
    if "torchao" in optimizer_row(subject).packages and "block_size" in options(subject):
        yield Match("optim_args", argument=True)


@any_job.warning(
    why="this optimizer does not receive it",
    fix="delete it; put options of this optimizer into optim_args",
    source=f"{_FILE} 195-198, 317-348, 374-381, 402-410, 413-428; 261-262 for Lion",
    techniques=techniques_of(lambda row: set(row.takes) != {"betas", "eps"}),
)
def adam_settings_ignored(subject: Subject) -> Iterator[Match]:
    optim = named_optimizer(subject)
    row = optimizer_row(subject)
    takes = subject.setting("optimizer.takes")
    for key, default in (("adam_beta1", 0.9), ("adam_beta2", 0.999), ("adam_epsilon", 1e-8)):
        value = subject.argument(key, default)
        if value == default:
            continue
        if not row.takes:
            why = f"{optim} does not receive it: Trainer passes only the learning rate and optim_args"
        elif row.low_rank:
            why = f"{optim} applies it only to the projected matrices; all other parameters keep the library's default"
        elif _TAKEN_AS[key] not in row.takes:
            why = f"{row.algorithm} has no {'epsilon' if key == 'adam_epsilon' else _TAKEN_AS[key]}"
        elif takes is not None and _TAKEN_AS[key] not in takes:
            why = f"{str(subject.setting('optimizer.class')).rpartition(':')[2]} has no {_TAKEN_AS[key]}"
        else:
            continue
        yield Match(key, value, why=why, argument=True)


@any_job.warning(
    why="Trainer builds this optimizer without parameter groups, which carry the weight decay: nothing decays",
    fix="set weight_decay: 0.0, or use another optimizer",
    source=f"{_FILE} 148-183 and 413-428 (params and model take the groups' place); trainer.py 1309-1318",
    techniques=techniques_of(lambda row: not row.takes_groups),
)
def weight_decay_ignored(subject: Subject) -> Iterator[Match]:
    value = subject.argument("weight_decay", 0.0)
    if value and not optimizer_row(subject).takes_groups:
        yield Match("weight_decay", value, argument=True)


@any_job.hint(
    why="Trainer's SGD has no momentum unless optim_args sets it",
    fix='set optim_args: "momentum=0.9", or "momentum=0" if you want none; a learning_rate of 0.01 or more also '
    "counts as your choice",
    source=f"{_FILE} 317-326; torch 2.13: optim/sgd.py, momentum=0",
    techniques=("sgd-momentum",),
)
def sgd_without_momentum(subject: Subject) -> Iterator[Match]:
    rate = subject.argument("learning_rate")
    intended = isinstance(rate, int | float) and rate >= _RATE_OF_SGD
    if named_optimizer(subject) == "sgd" and "momentum" not in options(subject) and not intended:
        yield Match("optim", "sgd", argument=True)


@any_job.hint(
    why="Trainer passes AdamW's betas to Lion, 0.9 and 0.999; the paper and the library use 0.9 and 0.99",
    fix="set adam_beta2: 0.99",
    source=f"{_FILE} 261-262; bitsandbytes 0.50.2: optim/lion.py, betas=(0.9, 0.99)",
    techniques=techniques_of(lambda row: row.algorithm == "Lion"),
)
def lion_betas(subject: Subject) -> Iterator[Match]:
    if optimizer_row(subject).algorithm == "Lion" and subject.argument("adam_beta2", 0.999) == 0.999:
        yield Match("optim", argument=True)


@any_job.warning(
    why="the optimizer class takes precedence: optim and optim_args have no effect",
    fix="delete it, or remove the technique that sets the class",
    source="transformers 5.23.0: trainer.py 1300-1303",
    techniques=techniques_of(lambda row: ":" in row.name),
)
def optimizer_ignored(subject: Subject) -> Iterator[Match]:
    for key in ("optim", "optim_args"):
        if subject.has_setting("optimizer.class") and subject.argument(key) is not None:
            yield Match(key, argument=True)


@any_job.warning(
    why="only GaLore and APOLLO read it: this optimizer trains everything at full rank",
    fix="delete it, or set optim: galore_adamw or apollo_adamw",
    source=f"{_FILE} 101-192, called by 351-410 only",
    techniques=techniques_of(lambda row: row.low_rank),
)
def targets_ignored(subject: Subject) -> Iterator[Match]:
    targets = subject.argument("optim_target_modules")
    reads = optimizer_row(subject).low_rank and not subject.has_setting("optimizer.class")
    if subject.arguments is not None and targets is not None and not reads:
        yield Match("optim_target_modules", targets, argument=True)
