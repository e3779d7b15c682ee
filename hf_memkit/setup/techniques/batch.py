"""The global batch: micro-batch × accumulation × processes = sequences a step, exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

from hf_memkit.common.errors import InputError, SettingError
from hf_memkit.common.resources import documentation
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import technique

_OFFERED: Final = {
    "logits": 3, "attention": 2, "recomputation": 1, "larger than the GPU": 1, "one large tensor": 1, "anything": 1,
    "host/forward": 1,
}  # fmt: skip


@technique(
    "global-batch",
    saves="activations and logits halve; double gradient_accumulation_steps, so that a step sees the same samples",
    costs="more, smaller forward passes a step, slower if they leave the GPU idle; the same result up to rounding",
    not_when="the model has BatchNorm layers, or its loss is averaged over each micro-batch separately",
    settings={"arguments.per_device_train_batch_size": "half"},
    slows=True,
    frees={"activations": 0.5, "loss": 0.5},
    offered=_OFFERED,
)
def global_batch(setup: Setup) -> Setup:
    """Splits the batch exactly into micro-batches.

    Trainer divides the loss of each micro-batch by the labels of the whole optimizer step, so that the gradients are
    those of one large batch, also with unequal lengths and an incomplete last step (transformers 5.23.0: trainer.py,
    `_get_num_items_in_batch`). Sets the arguments that would break this too.
    """
    job = setup.resolved_for
    whole = job.micro_batch_size * job.accumulation * job.processes
    each = f" × {job.processes} processes" if job.processes > 1 else ""
    reason = f"{job.micro_batch_size} × {job.accumulation}{each} = {whole} sequences a step"
    setup = setup.put_all(
        "arguments",
        per_device_train_batch_size=(job.micro_batch_size, reason),
        gradient_accumulation_steps=(job.accumulation, reason),
        auto_find_batch_size=(False, "after an out-of-memory error it would train with another global batch"),
        average_tokens_across_devices=(True, "the mean is over the labels of all processes, not of each"),
    )
    return setup.with_notes(
        f"The learning rate belongs to the {whole} sequences a step: splitting them differently leaves it as it is. "
        f"For another global batch see {documentation('techniques/batch.md')}."
    )


def scaled_learning_rate(
    rate: float, batch: int, new_batch: int, rule: Literal["linear", "sqrt"]
) -> tuple[float, str]:
    """A learning rate for another global batch, and the reason.

    >>> scaled_learning_rate(1e-4, 32, 128, "sqrt")[0]
    0.0002

    Args:
        rate: learning rate for `batch`.
        batch, new_batch: sequences (or tokens) an optimizer step, all processes together.
        rule: "linear" for SGD with momentum, with warm-up (Goyal et al. 2017, arXiv 1706.02677, section 2.1); "sqrt"
            for Adam and its kin, where the gradient's scale cancels (Malladi et al. 2022, arXiv 2205.10287, section
            5; Krizhevsky 2014, arXiv 1404.5997, section 5 has it for SGD too).

    Raises:
        InputError: a rate or a batch that is not above 0, or another rule.
    """
    if not rate > 0 or batch < 1 or new_batch < 1:
        raise InputError(f"learning rate {rate} for batches of {batch} and {new_batch}: all three must be above 0")
    if rule not in ("linear", "sqrt"):
        raise InputError(f"learning-rate rule {rule!r}: give 'linear' (SGD) or 'sqrt' (Adam)")
    ratio = new_batch / batch
    factor = ratio if rule == "linear" else math.sqrt(ratio)
    source = "Goyal et al. 2017, arXiv 1706.02677" if rule == "linear" else "Malladi et al. 2022, arXiv 2205.10287"
    root = "" if rule == "linear" else "√"
    return rate * factor, f"{rate:g} × {root}({new_batch} / {batch}) ({source}): a starting point, not a guarantee"


def accumulation_for(sequences_per_step: int, micro_batch_size: int, processes: int = 1) -> int:
    """Micro-batches of an optimizer step in each process.

    >>> accumulation_for(32, 4, processes=2)
    4

    Raises:
        SettingError: they do not divide; names the nearest numbers that do.
    """
    return _divide(sequences_per_step, micro_batch_size, processes, "per_device_train_batch_size")


def micro_batch_for(sequences_per_step: int, accumulation: int, processes: int = 1) -> int:
    """Sequences of a micro-batch in each process; a SettingError as in `accumulation_for`."""
    return _divide(sequences_per_step, accumulation, processes, "gradient_accumulation_steps")


def micro_batches(sequences_per_step: int, processes: int = 1) -> list[int]:
    """All micro-batch sizes that divide one process's share of the batch, in rising order."""
    return _divisors(_share(sequences_per_step, processes))


class BatchSplit(NamedTuple):
    """Sequences of a micro-batch, micro-batches of an optimizer step in each process, and the reason."""

    micro_batch: int
    accumulation: int
    reason: str


def split_batch(
    sequences_per_step: int, micro_batch_size: int, processes: int, chosen: Mapping[str, Any]
) -> BatchSplit:
    """Splits the batch of an optimizer step. If the user sets the micro-batch or the accumulation, the other follows.

    Args:
        sequences_per_step: sequences of an optimizer step in all processes.
        micro_batch_size: maximum micro-batch if the user sets neither.
        processes: one a GPU.
        chosen: the user's values, by field of TrainingArguments.

    Raises:
        SettingError: the batch cannot be split exactly; names the nearest choices.
    """
    whole = sequences_per_step
    micro = chosen.get("per_device_train_batch_size")
    accumulation = chosen.get("gradient_accumulation_steps")
    each = f" × {processes} processes" if processes > 1 else ""
    lowered = ""
    if micro is not None and accumulation is not None:
        if micro * accumulation * processes != whole:
            raise SettingError(
                f"per_device_train_batch_size={micro} × gradient_accumulation_steps={accumulation}{each} is "
                f"{micro * accumulation * processes} sequences a step, but {whole} were requested. Set one "
                f"of them; memkit derives the other"
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
            why = "would be too many" if micro_batch_size > share else f"do not divide {share}"
            lowered = f"; {micro_batch_size} a GPU {why}"
    reason = f"{micro} × {accumulation}{each} = {whole} sequences a step, as asked for{lowered}"
    return BatchSplit(micro, accumulation, reason)


def _share(sequences: int, processes: int) -> int:
    """Sequences of an optimizer step in each process."""
    if sequences % processes == 0:
        return sequences // processes
    lower = sequences // processes * processes
    fitting_processes = _around(processes, _divisors(sequences))
    fitting_sequences = _around(sequences, (lower, lower + processes))
    raise SettingError(
        f"{sequences} sequences a step do not divide by {processes} processes. Use {fitting_processes} processes "
        f"(--gpus × --nodes), or {fitting_sequences} sequences a step"
    )


def _divide(sequences: int, part: int, processes: int, name: str) -> int:
    share = _share(sequences, processes)
    if part >= 1 and share % part == 0:
        return share // part
    what = f"{share} sequences a step" if processes == 1 else f"the {share} sequences of each process a step"
    nearest = sorted(_divisors(share), key=lambda divisor: (abs(divisor - part), divisor))[:3]
    raise SettingError(f"{name}={part} does not divide {what}. Use one of {', '.join(map(str, sorted(nearest)))}")


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _around(number: int, choices: Iterable[int]) -> str:
    """The nearest positive `choices` below and above `number`."""
    positive = sorted(choice for choice in choices if choice > 0)
    below = [choice for choice in positive if choice < number][-1:]
    above = [choice for choice in positive if choice > number][:1]
    return " or ".join(map(str, below + above))
