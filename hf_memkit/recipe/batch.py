"""Batch arithmetic: micro-batch × accumulation × processes = sequences a step, exactly or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hf_memkit.errors import SettingError

__all__ = ["accumulation_for", "micro_batch_for", "split_batch"]


def accumulation_for(sequences_per_step: int, micro_batch_size: int, processes: int = 1) -> int:
    """How many micro-batches make up one optimizer step in each process.

    >>> accumulation_for(32, 4)
    8
    >>> accumulation_for(32, 4, processes=2)
    4

    Raises:
        SettingError: they do not divide; names the nearest micro-batches, or numbers of processes, that do.
    """
    return _divide(sequences_per_step, micro_batch_size, processes, "per_device_train_batch_size")


def micro_batch_for(sequences_per_step: int, accumulation: int, processes: int = 1) -> int:
    """How many sequences go through the model at once in each process.

    Raises:
        SettingError: they do not divide; names the nearest accumulations, or numbers of processes, that do.
    """
    return _divide(sequences_per_step, accumulation, processes, "gradient_accumulation_steps")


def split_batch(
    sequences_per_step: int, micro_batch_size: int, processes: int, chosen: Mapping[str, Any]
) -> tuple[int, int, str]:
    """(micro-batch, accumulation, reason). Whichever of the two the user sets, the other makes up for it.

    Args:
        sequences_per_step: what an optimizer step reads, all processes together.
        micro_batch_size: the variant's; where a process has fewer sequences, the nearest smaller one that divides.
        processes: one card each.
        chosen: what the user set, by field of TrainingArguments.

    Raises:
        SettingError: the batch does not come out exactly; names the nearest choices.
    """
    whole = sequences_per_step
    micro = chosen.get("per_device_train_batch_size")
    accumulation = chosen.get("gradient_accumulation_steps")
    lowered = ""
    if micro is not None and accumulation is not None:
        if micro * accumulation * processes != whole:
            each = f" × {processes} processes" if processes > 1 else ""
            raise SettingError(
                f"per_device_train_batch_size={micro} × gradient_accumulation_steps={accumulation}{each} is "
                f"{micro * accumulation * processes} sequences a step, and the recipe asks for {whole}; set one of "
                f"them, and the other follows"
            )
    elif accumulation is not None:
        micro = micro_batch_for(whole, accumulation, processes)
    elif micro is not None:
        accumulation = accumulation_for(whole, micro, processes)
    else:
        share = _share(whole, processes)
        micro = max(d for d in _divisors(share) if d <= micro_batch_size)
        accumulation = share // micro
        if micro != micro_batch_size:
            lowered = f"; the variant's {micro_batch_size} a card would be too many"
    each = f" × {processes} processes" if processes > 1 else ""
    return (
        micro,
        accumulation,
        f"{micro} × {accumulation}{each} = {whole} sequences a step, as the recipe asks{lowered}",
    )


def _share(sequences: int, processes: int) -> int:
    """Sequences a step and process.

    Raises:
        SettingError: they do not divide; names the nearest numbers of processes that do.
    """
    if sequences % processes:
        raise SettingError(
            f"{sequences} sequences a step cannot be shared by {processes} processes; the nearest numbers that can: "
            f"{_nearest(processes, _divisors(sequences))} (--gpus × --nodes)"
        )
    return sequences // processes


def _divide(sequences: int, part: int, processes: int, name: str) -> int:
    share = _share(sequences, processes)
    if part >= 1 and share % part == 0:
        return share // part
    what = f"{share} sequences a step" if processes == 1 else f"the {share} sequences of each process a step"
    raise SettingError(
        f"{name}={part} does not divide {what}; the nearest that do: {_nearest(part, _divisors(share))}"
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _nearest(number: int, choices: Iterable[int]) -> str:
    near = sorted(choices, key=lambda choice: (abs(choice - number), choice))[:3]
    return ", ".join(str(choice) for choice in sorted(near))
