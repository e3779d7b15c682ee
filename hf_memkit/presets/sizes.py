"""The batch and the sequence of a preset: exactly what was asked for, and as much at once as the ledger says fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from hf_memkit.job import Job
from hf_memkit.setup import Setup
from hf_memkit.techniques.batch import micro_batches, split_batch

SEQUENCE_MULTIPLE: Final = 64
"""A sequence that is solved for is a multiple of this: what tensor cores of an A100 like (NVIDIA, "Matrix
Multiplication Background User's Guide", 16-bit data: multiples of 64 elements)."""

LARGEST_BATCH: Final = 4096
LONGEST_SEQUENCE: Final = 1 << 20

_NOTHING_FITS: Final = "the smallest possible, which does not fit by formula"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sequences in a forward pass, micro-batches in a step, tokens in a sequence; and why, where they are put."""

    micro_batch: int
    accumulation: int
    sequence_length: int
    batch_reason: str = ""
    length_reason: str = ""

    def put(self, setup: Setup) -> Setup:
        if self.batch_reason:
            setup = setup.put("arguments.per_device_train_batch_size", self.micro_batch, self.batch_reason)
            setup = setup.put("arguments.gradient_accumulation_steps", self.accumulation, self.batch_reason)
            if "arguments.per_device_eval_batch_size" not in setup:
                why = "evaluation then needs no more memory than training"
                setup = setup.put("arguments.per_device_eval_batch_size", self.micro_batch, why)
        if self.length_reason:
            setup = setup.put("data.sequence_length", self.sequence_length, self.length_reason)
        return setup


def solve(
    build: Callable[[Sizes], Setup],
    job: Job,
    *,
    solves_for: Literal["micro-batch", "batch", "sequence"],
    global_batch_size: int | None,
    sequence_length: int | None,
    own: Mapping[str, Any],
) -> Setup:
    """The setup with the sizes that fit.

    Args:
        build: makes the setup of given sizes.
        job: model and machine; where one is not known, nothing is solved for.
        solves_for: what the preset makes as large as fits, if it is not given.
        global_batch_size: sequences an optimizer step, all processes together.
        sequence_length: what was asked for.
        own: the user's fields of TrainingArguments.

    Raises:
        SettingError: the batch does not come out exactly; names the nearest choices.
    """
    length, why_length = job.sequence_length, "asked for"
    if sequence_length is None:
        why_length = "assumed: none was given" if job.model is not None else ""
    known = job.model is not None and job.machine.gpu is not None

    def fits(sizes: Sizes) -> bool:
        setup, gpu = build(sizes), job.machine.gpu
        return gpu is not None and setup.ledger.total_bytes("device") <= gpu.usable_bytes

    micro = int(own.get("per_device_train_batch_size", 0))
    accumulation = int(own.get("gradient_accumulation_steps", 0))
    if solves_for == "sequence" and sequence_length is None and known:
        longest = (job.model and job.model.maximum_length) or LONGEST_SEQUENCE
        choices = range(SEQUENCE_MULTIPLE, longest + 1, SEQUENCE_MULTIPLE) or range(longest, longest + 1)
        length, fitting = largest(choices, lambda tokens: fits(Sizes(micro or 1, accumulation or 1, tokens)))
        why_length = f"the longest multiple of {SEQUENCE_MULTIPLE} that fits by formula, {micro or 1} at a time"
        why_length = why_length if fitting else _NOTHING_FITS
        if not micro and not accumulation:
            micro = 1
    if global_batch_size is None:
        return build(_without_global(job, fits, solves_for, micro, accumulation, length, why_length, known=known))
    most, why_largest = job.micro_batch_size, ""
    if known and not micro and not accumulation:
        divisors = micro_batches(global_batch_size, job.processes)
        most, fitting = largest(
            divisors, lambda size: fits(Sizes(size, global_batch_size // size // job.processes, length))
        )
        why_largest = "the largest micro-batch that fits by formula" if fitting else _NOTHING_FITS
    chosen = {key: own[key] for key in ("per_device_train_batch_size", "gradient_accumulation_steps") if key in own}
    if solves_for == "sequence" and micro and not chosen:
        chosen = {"per_device_train_batch_size": micro}
    micro, accumulation, reason = split_batch(global_batch_size, most, job.processes, chosen)
    if why_largest and not chosen:
        reason += f"; {why_largest}"
    return build(Sizes(micro, accumulation, length, reason, why_length))


def _without_global(
    job: Job,
    fits: Callable[[Sizes], bool],
    solves_for: str,
    micro: int,
    accumulation: int,
    length: int,
    why_length: str,
    *,
    known: bool,
) -> Sizes:
    """The sizes where no global batch is asked for: the user's own, what fits, or Trainer's defaults."""
    if solves_for == "batch" and known and not micro:
        choices = (*range(1, 8), *range(8, LARGEST_BATCH + 1, 8))
        micro, fitting = largest(choices, lambda size: fits(Sizes(size, accumulation or 1, length)))
        reason = "the largest micro-batch that fits by formula (from 8 on a multiple of 8, for tensor cores)"
        reason = reason if fitting else _NOTHING_FITS
        return Sizes(micro, accumulation or 1, length, reason, why_length)
    reason = "one sequence at a time, so that it can be long" if solves_for == "sequence" and micro else ""
    return Sizes(micro or job.micro_batch_size, accumulation or 1, length, reason, why_length)


def largest(choices: Iterable[int], fits: Callable[[int], bool]) -> tuple[int, bool]:
    """(the largest of `choices`, in rising order, that fits, or else the smallest; whether it fits)."""
    numbers = list(choices)
    low, high = 0, len(numbers) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(numbers[middle]) else (low, middle - 1)
    return numbers[low], low > 0 or fits(numbers[0])
