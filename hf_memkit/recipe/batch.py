"""Batch arithmetic: micro-batch × accumulation × processes = sequences a step, exactly or not at all."""

from __future__ import annotations

from hf_memkit.errors import SettingError

__all__ = ["accumulation_for", "micro_batch_for"]


def accumulation_for(sequences_per_step: int, micro_batch_size: int, processes: int = 1) -> int:
    """How many micro-batches make up one optimizer step.

    >>> accumulation_for(32, 4)
    8

    Raises:
        SettingError: they do not divide; names the nearest micro-batches that do.
    """
    return _divide(sequences_per_step, micro_batch_size, processes, "per_device_train_batch_size")


def micro_batch_for(sequences_per_step: int, accumulation: int, processes: int = 1) -> int:
    """How many sequences go through the model at once.

    Raises:
        SettingError: they do not divide; names the nearest accumulations that do.
    """
    return _divide(sequences_per_step, accumulation, processes, "gradient_accumulation_steps")


def _divide(sequences: int, part: int, processes: int, name: str) -> int:
    if part >= 1 and sequences % (part * processes) == 0:
        return sequences // (part * processes)
    if sequences % processes:
        raise SettingError(f"{sequences} sequences a step cannot be shared by {processes} processes")
    share = sequences // processes
    choices = sorted((d for d in range(1, share + 1) if share % d == 0), key=lambda d: (abs(d - part), d))[:3]
    near = ", ".join(str(choice) for choice in sorted(choices))
    raise SettingError(
        f"{name}={part} does not divide {share} sequences a step and process; the nearest that do: {near}"
    )
