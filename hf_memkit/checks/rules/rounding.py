"""Whether 16-bit weights are trained as they are, and whether the optimizer keeps what rounding them cuts off."""

from __future__ import annotations

from typing import Final

from hf_memkit.checks.rules.optimizer_options import optimizer_row, options
from hf_memkit.checks.rules.scripts import mixed_precision, trains_adapters
from hf_memkit.checks.subject import Subject

__all__ = ["UNSEEN", "keeps_small_updates", "rounds_stochastically", "trains_loaded_weights"]

_TRUE: Final = ("y", "yes", "t", "true", "on", "1")  # transformers 5.23.0: utils/generic.py, strtobool

UNSEEN: Final = "unless accelerate's own config switches on DeepSpeed or FSDP, which the file cannot show"
"""Both keep fp32 copies of 16-bit weights: to be said by rules that take the weights to be trained as they are."""


def trains_loaded_weights(subject: Subject) -> bool:
    """The loaded weights are trained in their own dtype: there are no adapters, no 4 or 8 bits, no fp32 copy.

    DeepSpeed keeps one, and accelerate makes trainable weights fp32 for FSDP where mixed precision is on (accelerate
    1.15.0: accelerator.py 1999-2037, utils/fsdp_utils.py 813-820).
    """
    quantised = subject.has_setting("model.quantization") or any(
        subject.argument(name) is True for name in ("load_in_4bit", "load_in_8bit")
    )
    deepspeed = subject.config is not None or bool(subject.argument("deepspeed"))
    made_wide = bool(subject.argument("fsdp")) and mixed_precision(subject)
    return not (trains_adapters(subject) or quantised or deepspeed or made_wide)


def rounds_stochastically(subject: Subject) -> bool:
    if subject.setting("optimizer.class"):
        return subject.setting("optimizer.bf16_stochastic_round") is True
    row = optimizer_row(subject)
    return row.rounding == "stochastic" and _switched_on(subject, row.rounding_option)


def keeps_small_updates(subject: Subject) -> bool:
    """The optimizer rounds stochastically, or compensates, or was tried in 16 bits by its authors
    (`Optimizer.rounding`)."""
    if subject.setting("optimizer.class"):
        return rounds_stochastically(subject)
    row = optimizer_row(subject)
    return row.rounding != "nearest" and (not row.rounding_option or _switched_on(subject, row.rounding_option))


def _switched_on(subject: Subject, option: str) -> bool:
    return options(subject).get(option, "").lower() in _TRUE
