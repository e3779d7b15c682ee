"""Values that TRL refuses or ignores: in its own arguments, alone or combined."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hf_memkit.catalog.former_arguments import trl_in_use
from hf_memkit.checks.rule import Match, any_job
from hf_memkit.checks.rules.trainer import DEFAULTS
from hf_memkit.checks.subject import Subject

_VALUES: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "packing_strategy": (("packing", "eval_packing"), ("bfd", "bfd_split", "wrapped")),
    "vllm_mode": (("use_vllm",), ("server", "colocate")),
}
"""Argument → (the switches of which one must be on for TRL to read it, the values that it takes)."""

_STILL_CONVERTED: Final = "bfd-requeue"  # trl 1.16.0: sft_config.py 336-343


def _classes(subject: Subject) -> list[str]:
    return trl_in_use({str(name) for name in subject.own_names})


def _number(subject: Subject, name: str) -> int | None:
    """The argument, or its default; None if it is no whole number above 0."""
    value: Any = subject.argument(name, DEFAULTS.get(name))
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


@any_job.error(
    why="TRL refuses this value, but only after loading the model",
    fix="write an allowed value",
    source="trl 1.16.0: data_utils.py 896-918, generation/vllm_generation.py 370",
)
def trl_value_not_allowed(subject: Subject) -> Iterator[Match]:
    for name, (switches, allowed) in _VALUES.items():
        value = subject.own_names.get(name)
        read = any(subject.on(switch) for switch in switches) and _classes(subject)
        if read and isinstance(value, str) and value not in (*allowed, _STILL_CONVERTED):
            yield Match(name, value, fix=f"write one of {', '.join(allowed)}", argument=True)


@any_job.error(
    why="GRPO and RLOO refuse a batch that does not hold whole groups of num_generations completions",
    fix="change num_generations, or the batch",
    source="trl 1.16.0: grpo_config.py 1095-1141, rloo_config.py 658-700",
)
def generations_split(subject: Subject) -> Iterator[Match]:
    group = _number(subject, "num_generations")
    if group is None or not {"GRPOConfig", "RLOOConfig"} & set(_classes(subject)):
        return
    if group < 2:
        why = "GRPO and RLOO need at least 2 completions of each prompt"
        yield Match("num_generations", group, why=why, fix="write 2 or more", argument=True)
        return
    whole = _number(subject, "generation_batch_size")
    if whole is None:
        steps = "steps_per_generation" if subject.argument("steps_per_generation") else "gradient_accumulation_steps"
        yield from _split(subject, "num_generations", ("per_device_train_batch_size", steps), group)
    elif whole % group:
        why = f"TRL refuses it: {whole} completions are no whole groups of num_generations={group}"
        yield Match("generation_batch_size", whole, why=why, fix=f"write a multiple of {group}", argument=True)
    if str(subject.argument("eval_strategy", "no")) in ("steps", "epoch"):
        evaluated = "num_generations_eval" if subject.argument("num_generations_eval") else "num_generations"
        name = "per_device_eval_batch_size"
        yield from _split(subject, name, (name,), _number(subject, evaluated) or group)


def _split(subject: Subject, key: str, factors: tuple[str, ...], group: int) -> Iterator[Match]:
    """A batch, the product of `factors` on each process, of no whole groups; a hint if the processes are unknown."""
    numbers = [_number(subject, name) for name in factors]
    micro_batch = math.prod(number or 0 for number in numbers)
    multiple = group // math.gcd(group, micro_batch)
    # TRL's command line hands num_processes on to `accelerate launch`.
    processes = subject.processes or _number(subject, "num_processes")
    if not micro_batch or (processes or 1) % multiple == 0:
        return
    batch = f"{' × '.join(factors)} = {micro_batch} on each process"
    if processes is None:
        why = f"TRL refuses groups of {group} with {batch}, unless the number of processes is a multiple of {multiple}"
        fix = f"start a multiple of {multiple} processes, or make the product a multiple of {group}"
        yield Match(key, why=why, fix=fix, argument=True, severity="hint")
    else:
        why = f"TRL refuses groups of {group} with {batch} and {processes} processes"
        fix = f"make the product with the number of processes a multiple of {group}"
        yield Match(key, why=why, fix=fix, argument=True)


@any_job.error(
    why="KTOTrainer refuses micro-batches of one sample, whose KL term would be the reward itself",
    fix="set per_device_train_batch_size to 2 or more, or loss_type: apo_zero_unpaired",
    source="trl 1.16.0: trainer/kto_trainer.py 844",
)
def kto_batch_of_one(subject: Subject) -> Iterator[Match]:
    kto = _classes(subject)[:1] == ["KTOConfig"] and subject.argument("loss_type", "kto") == "kto"
    if kto and _number(subject, "per_device_train_batch_size") == 1:
        yield Match("per_device_train_batch_size", 1, argument=True)


@any_job.warning(
    why="DPOTrainer ignores padding_free and pads: TRL has disabled it there for now",
    fix="delete the key",
    source="trl 1.16.0: trainer/dpo_trainer.py 732-739",
)
def padding_free_ignored(subject: Subject) -> Iterator[Match]:
    if subject.on("padding_free") and _classes(subject)[:1] == ["DPOConfig"]:
        yield Match("padding_free", True, argument=True)
