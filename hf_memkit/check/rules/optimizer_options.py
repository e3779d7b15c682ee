"""Arguments that the chosen optimizer never gets to see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hf_memkit.check.rule import Found, rule
from hf_memkit.check.subject import Subject

__all__ = ["READS", "named_optimizer", "options"]

_FILE = "transformers 5.23.0: trainer_optimizer.py"

_GALORE = ("rank", "update_proj_gap", "scale", "proj_type")
_APOLLO = (*_GALORE, "proj", "scale_type")
_ADEMAMIX = ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3")
_SCHEDULE_FREE = ("weight_lr_power", "r")
_ANY: Final = ("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit")
READS: Final[dict[str, tuple[str, ...]]] = {
    "adamw_anyprecision": ("use_kahan_summation", "momentum_dtype", "variance_dtype", "compensation_buffer_dtype"),
    "sgd": ("momentum", "dampening", "nesterov", "weight_decay"),
    "adagrad": ("lr_decay", "eps", "weight_decay"),
    "rmsprop": ("momentum", "alpha", "eps", "centered", "weight_decay"),
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise",
                     "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"), _GALORE),
    **dict.fromkeys(("apollo_adamw", "apollo_adamw_layerwise"), _APOLLO),
    "grokadamw": ("alpha_init", "lamb", "gamma", "grokking_signal_decay_rate", "gradient_clipping"),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), ("block_size", "bf16_stochastic_round")),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), _SCHEDULE_FREE),
    "stable_adamw": ("max_lr", "kahan_sum", "decouple_lr"),
    **dict.fromkeys(("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"), _ADEMAMIX),
}  # fmt: skip
"""What Trainer reads of `optim_args`, by value of `optim` (transformers 5.23.0: trainer_optimizer.py 195-560); nothing
for those that are not here."""

_TRUE_IF_ANY: Final = ("kahan_sum", "decouple_lr")
_OVERRIDDEN: Final = ("sgd", "adagrad", "rmsprop")
_WITHOUT_BETAS: Final = ("sgd", "adagrad", "adafactor", "rmsprop", "lomo", "adalomo")
_TAKEN_AS: Final = {"adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps"}
"""What a technique's own optimizer is given of them, where it takes it (`hf_memkit.train.optimizer`)."""
_LOW_RANK: Final = ("galore_", "apollo_")
_EIGHT_BIT_TORCHAO: Final = ("adamw_torch_4bit", "adamw_torch_8bit")
_RATE_OF_SGD: Final = 0.01
"""From here on a learning rate is one that was chosen for SGD: AdamW's are far below."""


def named_optimizer(subject: Subject) -> str:
    """The value of `optim`; empty if it is not set."""
    value = subject.argument("optim")
    return "" if value is None else str(getattr(value, "value", value))


def options(subject: Subject) -> dict[str, str]:
    """`optim_args` as Trainer reads it, without what it cannot read."""
    text = subject.argument("optim_args")
    parts = text.replace(" ", "").split(",") if isinstance(text, str) else []
    return {key: value for key, _, value in (part.partition("=") for part in parts if part.count("=") == 1)}


@rule(
    "optimizer-options-ignored",
    severity="warning",
    why="Trainer drops what this optimizer does not read of optim_args, silently",
    fix="delete it; what no argument can say, give Trainer with optimizer_cls_and_kwargs",
    source=f"{_FILE} 195-208, 246-293, 317-348, 413-428, 1393-1402 of trainer.py",
    needs_config=False,
    techniques=("adamw-fused", "adamw-foreach", "adamw-loop", "adafactor", "adamw-8bit", "lion-8bit", "sgd-momentum"),
)
def optimizer_options_ignored(subject: Subject) -> Iterator[Found]:
    optim = named_optimizer(subject)
    if not optim or optim in _ANY:
        return
    read = READS.get(optim, ())
    for key in options(subject):
        if key not in read:
            knows = f"it reads {', '.join(read)}" if read else "it reads nothing of optim_args"
            yield Found("optim_args", subject.argument("optim_args"), argument=True,
                        why=f"{key} does not reach {optim}: {knows}, and Trainer drops the rest silently")  # fmt: skip


@rule(
    "optimizer-options-unreadable",
    severity="error",
    why="Trainer splits optim_args at commas and each part at one equals sign; it fails after the model is loaded",
    fix='write "key=value,key=value"',
    source=f"{_FILE} 65-73",
    needs_config=False,
)
def optimizer_options_unreadable(subject: Subject) -> Iterator[Found]:
    text = subject.argument("optim_args")
    if isinstance(text, str) and text and any(part.count("=") != 1 for part in text.replace(" ", "").split(",")):
        yield Found("optim_args", text, argument=True)


@rule(
    "optimizer-option-always-true",
    severity="error",
    why='Trainer takes bool() of the text: "False" switches it on',
    fix="leave the option out: it is off by default",
    source=f"{_FILE} 537-545",
    needs_config=False,
)
def optimizer_option_always_true(subject: Subject) -> Iterator[Found]:
    for key, value in options(subject).items():
        off = value.lower() in ("false", "0", "no", "none")
        if named_optimizer(subject) == "stable_adamw" and key in _TRUE_IF_ANY and off:
            yield Found("optim_args", subject.argument("optim_args"), argument=True)


@rule(
    "optimizer-decay-overridden",
    severity="warning",
    why="Trainer's parameter groups carry the argument weight_decay, which wins: this one has no effect",
    fix="set the argument weight_decay",
    source=f"{_FILE} 317-348; trainer.py 1275-1288",
    needs_config=False,
    techniques=("sgd-momentum",),
)
def optimizer_decay_overridden(subject: Subject) -> Iterator[Found]:
    if named_optimizer(subject) in _OVERRIDDEN and "weight_decay" in options(subject):
        yield Found("optim_args", subject.argument("optim_args"), argument=True)


@rule(
    "torchao-block-size",
    severity="error",
    why="Trainer passes the text on as it is, and torchao fails at the first step: an int modulo a str",
    fix="leave block_size out; technique adamw-8bit-stochastic or adamw-4bit-stochastic sets it",
    source=f"{_FILE} 470; torchao 0.18.0: optim/adam.py 78",
    needs_config=False,
    techniques=("adamw-8bit-stochastic", "adamw-4bit-stochastic"),
)
def torchao_block_size(subject: Subject) -> Iterator[Found]:
    if named_optimizer(subject) in _EIGHT_BIT_TORCHAO and "block_size" in options(subject):
        yield Found("optim_args", subject.argument("optim_args"), argument=True)


@rule(
    "adam-settings-ignored",
    severity="warning",
    why="this optimizer never sees it",
    fix="delete it; what the optimizer has instead goes into optim_args",
    source=f"{_FILE} 195-198, 317-348, 374-381, 402-410, 413-428; 261-262 for Lion",
    needs_config=False,
    techniques=(
        "sgd-momentum",
        "adafactor",
        "adafactor-stochastic",
        "lomo",
        "adalomo",
        "galore",
        "galore-layerwise",
        "lars",
    ),
)
def adam_settings_ignored(subject: Subject) -> Iterator[Found]:
    optim, takes = named_optimizer(subject), subject.setting("optimizer.takes")
    for key, default in (("adam_beta1", 0.9), ("adam_beta2", 0.999), ("adam_epsilon", 1e-8)):
        value = subject.argument(key, default)
        if value == default:
            continue
        if optim in _WITHOUT_BETAS or optim.startswith("galore_"):
            why = f"{optim} never sees it: Trainer hands it the learning rate and optim_args only"
        elif optim.startswith("apollo_"):
            why = f"{optim} applies it to the projected matrices only; all other parameters keep the library's default"
        elif "lion" in optim and key == "adam_epsilon":
            why = "Lion has no epsilon"
        elif takes is not None and _TAKEN_AS[key] not in takes:
            why = f"{str(subject.setting('optimizer.class')).rpartition(':')[2]} takes no {_TAKEN_AS[key]}"
        else:
            continue
        yield Found(key, value, why=why, argument=True)


@rule(
    "weight-decay-ignored",
    severity="warning",
    why="this optimizer is built without Trainer's parameter groups, which carry the weight decay: nothing decays",
    fix="set weight_decay: 0.0, or take another optimizer",
    source=f"{_FILE} 148-183 and 413-428 (params and model take the groups' place); trainer.py 1309-1318",
    needs_config=False,
    techniques=("lomo", "adalomo", "galore", "galore-layerwise", "apollo", "apollo-layerwise"),
)
def weight_decay_ignored(subject: Subject) -> Iterator[Found]:
    optim, value = named_optimizer(subject), subject.argument("weight_decay", 0.0)
    if value and (optim in ("lomo", "adalomo") or optim.startswith(_LOW_RANK)):
        yield Found("weight_decay", value, argument=True)


@rule(
    "sgd-without-momentum",
    severity="hint",
    why="Trainer's SGD has no momentum unless optim_args says so",
    fix='set optim_args: "momentum=0.9", or "momentum=0" to say that none is meant; a learning_rate of 0.01 or more '
    "is taken to say so too",
    source=f"{_FILE} 317-326; torch 2.13: optim/sgd.py, momentum=0",
    needs_config=False,
    techniques=("sgd-momentum",),
)
def sgd_without_momentum(subject: Subject) -> Iterator[Found]:
    rate = subject.argument("learning_rate")
    meant = isinstance(rate, int | float) and rate >= _RATE_OF_SGD
    if named_optimizer(subject) == "sgd" and "momentum" not in options(subject) and not meant:
        yield Found("optim", "sgd", argument=True)


@rule(
    "lion-betas",
    severity="hint",
    why="Trainer gives Lion AdamW's betas, 0.9 and 0.999; the paper's, and the library's default, are 0.9 and 0.99",
    fix="set adam_beta2: 0.99",
    source=f"{_FILE} 261-262; bitsandbytes 0.50.2: optim/lion.py, betas=(0.9, 0.99)",
    needs_config=False,
    techniques=("lion-8bit",),
)
def lion_betas(subject: Subject) -> Iterator[Found]:
    if "lion" in named_optimizer(subject) and subject.argument("adam_beta2", 0.999) == 0.999:
        yield Found("optim", named_optimizer(subject), argument=True)


@rule(
    "optimizer-ignored",
    severity="warning",
    why="Trainer is given an optimizer class, which wins: optim and optim_args have no effect",
    fix="delete optim, or take the technique out that brings the class",
    source="transformers 5.23.0: trainer.py 1300-1303",
    needs_config=False,
    techniques=("adamw-loop", "adamw-8bit-stochastic", "adamw-4bit-stochastic", "lars", "lamb"),
)
def optimizer_ignored(subject: Subject) -> Iterator[Found]:
    for key in ("optim", "optim_args"):
        if subject.has_setting("optimizer.class") and subject.argument(key) is not None:
            yield Found(key, subject.argument(key), argument=True)


@rule(
    "targets-ignored",
    severity="warning",
    why="only GaLore and APOLLO read it: this optimizer trains everything in full rank",
    fix="delete it, or set optim: galore_adamw or apollo_adamw",
    source=f"{_FILE} 101-192, called by 351-410 only",
    needs_config=False,
    techniques=("galore", "apollo"),
)
def targets_ignored(subject: Subject) -> Iterator[Found]:
    targets = subject.argument("optim_target_modules")
    optim = named_optimizer(subject)
    known = subject.arguments is not None
    if known and targets is not None and (not optim.startswith(_LOW_RANK) or subject.has_setting("optimizer.class")):
        yield Found("optim_target_modules", targets, argument=True)
