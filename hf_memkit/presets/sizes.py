"""Batch and sequence length of a preset: exactly as requested, or else as large as traces show to fit.

Memory grows almost linearly with the batch and, without stored attention scores, with the length. A small size is
traced, a second one extrapolated from it, and a third from both; the largest that fits is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from hf_memkit.catalog.hardware import Machine
from hf_memkit.common.errors import InputError
from hf_memkit.common.terms import Category
from hf_memkit.prediction import Prediction
from hf_memkit.setup.job import Job, gpu_shortage
from hf_memkit.setup.ledger import Row
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.batch import micro_batches, split_batch

SEQUENCE_MULTIPLE: Final = 64
"""A computed sequence length is a multiple of this, as tensor cores of an A100 prefer (NVIDIA, "Matrix Multiplication
Background User's Guide", 16-bit data: multiples of 64 elements)."""

LARGEST_BATCH: Final = 4096  # sequences; assumed
LONGEST_SEQUENCE: Final = 1 << 20  # tokens; assumed, for models without a maximum

MOST_TRACES: Final = 3  # to find one size; assumed: a trace takes seconds

_UNTRACED_SHARE: Final = 0.96
"""Maximum share of the GPU for a size that is not traced yet: the allocator's overhead grows with its tensors."""

_TRACED_CATEGORIES: Final[tuple[Category, ...]] = ("activations", "loss")
"""Categories that the ledger gets from traces only."""

_WORTH_A_TRACE: Final = 1.1
"""Maximum share of the GPU at which a size is still worth the last trace."""

Judge = Callable[[Setup], Prediction]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sequences a forward pass, micro-batches a step, tokens a sequence; those with a reason become settings."""

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


@dataclass(frozen=True, slots=True)
class LargestSize:
    """The largest traced size that fits, else the smallest tried.

    Attributes:
        size: the size.
        why: the traces.
        prediction: of that size; None if nothing could be traced.
    """

    size: int
    why: str
    prediction: Prediction | None

    def added_to(self, setup: Setup) -> Setup:
        """The setup with results of the trace: memory that grows with the batch, and a problem if it does not fit."""
        prediction = self.prediction
        if prediction is None:
            return setup
        how = f"{prediction.confidence.level}, at the peak"
        rows = [
            Row("device", name, "by a trace, at its peak", prediction.categories[name], how, prediction.peak_phase)
            for name in _TRACED_CATEGORIES
            if prediction.categories[name]
        ]
        setup = setup.with_rows(*rows)
        if fits(prediction, setup.resolved_for.machine):
            return setup
        predicted = f"predicted {prediction.verdict}".replace("predicted does not", "predicted not to")
        return setup.with_problems([f"is {predicted}: {prediction.why}"])


def solve(
    build: Callable[[Sizes], Setup],
    job: Job,
    *,
    solves_for: Literal["micro-batch", "batch", "sequence"],
    global_batch_size: int | None,
    sequence_length: int | None,
    own: Mapping[str, Any],
    judge: Judge | None,
) -> Setup:
    """The setup with the sizes that fit.

    Args:
        build: makes the setup of given sizes.
        job: model and machine; nothing is computed if one is unknown.
        solves_for: size that the preset makes as large as fits, if it is not given.
        global_batch_size: sequences in an optimizer step of all processes; None: not requested.
        sequence_length: tokens; None: not requested.
        own: the user's fields of TrainingArguments.
        judge: traces a setup; None: nothing is computed.

    Raises:
        SettingError: the batch cannot be exact; names the nearest choices.
    """
    length = job.sequence_length
    why_length = "asked for"
    if sequence_length is None:
        why_length = "assumed: none was given" if job.model is not None else ""
    solved: LargestSize | None = None

    def largest(choices: Sequence[int], start: int, sizes: Callable[[int], Sizes]) -> LargestSize:
        assert judge is not None
        if gpu_shortage(build(sizes(choices[0])).ledger, job.machine):
            return LargestSize(choices[0], "the smallest: it cannot fit, even without activations", None)
        ask = judge
        return find_largest(choices, start, lambda size: ask(build(sizes(size))), job.machine)

    is_known = judge is not None and job.model is not None and job.machine.gpu is not None
    micro = int(own.get("per_device_train_batch_size", 0))
    accumulation = int(own.get("gradient_accumulation_steps", 0))
    if solves_for == "sequence" and sequence_length is None and is_known:
        longest = (job.model and job.model.maximum_length) or LONGEST_SEQUENCE
        lengths = range(SEQUENCE_MULTIPLE, longest + 1, SEQUENCE_MULTIPLE) or range(longest, longest + 1)
        start = max(choice for choice in lengths if choice <= max(length, lengths[0]))
        solved = largest(lengths, start, lambda tokens: Sizes(micro or 1, accumulation or 1, tokens))
        length = solved.size
        why_length = f"{solved.why}, {micro or 1} at a time"
    if solves_for == "sequence" and sequence_length is None and not micro and not accumulation:
        micro = 1 if job.model is not None and job.machine.gpu is not None else 0

    if global_batch_size is None:
        why_batch = "one sequence at a time, so that it can be long" if solves_for == "sequence" and micro else ""
        if solves_for == "batch" and is_known and not micro:
            choices = (*range(1, 8), *range(8, LARGEST_BATCH + 1, 8))
            solved = largest(choices, 1, lambda size: Sizes(size, accumulation or 1, length))
            micro = solved.size
            why_batch = f"{solved.why}; from 8 on a multiple of 8, for tensor cores"
        sizes = Sizes(micro or job.micro_batch_size, accumulation or 1, length, why_batch, why_length)
    else:
        micro_limit = job.micro_batch_size
        if is_known and not micro and not accumulation:
            divisors = micro_batches(global_batch_size, job.processes)
            share = global_batch_size // job.processes
            solved = largest(divisors, divisors[0], lambda size: Sizes(size, share // size, length))
            micro_limit = solved.size
        keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
        chosen = {key: own[key] for key in keys if key in own}
        if solves_for == "sequence" and micro and not chosen:
            chosen = {"per_device_train_batch_size": micro}
        split = split_batch(global_batch_size, micro_limit, job.processes, chosen)
        reason = split.reason
        if solved is not None and not chosen:
            reason += f"; {solved.why}"
        sizes = Sizes(split.micro_batch, split.accumulation, length, reason, why_length)

    setup = build(sizes)
    return setup if solved is None else solved.added_to(setup)


def find_largest(
    choices: Sequence[int], start: int, trace: Callable[[int], Prediction], machine: Machine
) -> LargestSize:
    """The largest of `choices` (rising) that fits the GPU, by at most three traces, the first of size `start`."""
    predictions: dict[int, Prediction] = {}
    size: int | None = start
    failed = ""
    while size is not None and len(predictions) < MOST_TRACES:
        try:
            predictions[size] = trace(size)
        except InputError as error:
            failed = f"{size} is not predicted: {error}"
            break
        size = _next_size(choices, predictions, machine)
    if not predictions:
        return LargestSize(start, f"not known to fit ({failed})", None)

    traced = [f"{size} {prediction.verdict}" for size, prediction in sorted(predictions.items())]
    if failed:
        traced.append(failed)
    fitting = [size for size in predictions if fits(predictions[size], machine)]
    best = max(fitting) if fitting else min(predictions)
    why = "the largest that a trace shows to fit" if fitting else "the smallest that was tried, and it does not fit"
    return LargestSize(best, f"{why} (traced: {', '.join(traced)})", predictions[best])


def fits(prediction: Prediction, machine: Machine) -> bool:
    """Whether the GPU has room; RAM and disk do not depend on the batch."""
    unlimited = replace(machine, ram_bytes=sys.maxsize, disk_free_bytes=sys.maxsize)
    return prediction.with_verdict(unlimited).verdict == "fits"


def _next_size(choices: Sequence[int], predictions: Mapping[int, Prediction], machine: Machine) -> int | None:
    """The next size to trace; None if another trace cannot improve the result."""
    above = max((size for size in predictions if fits(predictions[size], machine)), default=0)
    below = min((size for size in predictions if size > above), default=0)
    between = [choice for choice in choices if above < choice and (not below or choice < below)]
    if not between:
        return None
    limit = predictions[above or below].limit_bytes
    needed = {size: _expected_bytes(size, above, below, predictions) for size in between}
    likely = max((size for size in between if needed[size] <= _UNTRACED_SHARE * limit), default=between[0])
    return likely if not above or needed[likely] <= _WORTH_A_TRACE * limit else None


def _expected_bytes(size: int, above: int, below: int, predictions: Mapping[int, Prediction]) -> float:
    """Expected maximum bytes of the GPU for a size.

    Between the largest traced size that fits (`above`; 0: none) and the smallest that does not (`below`; 0: none),
    linear interpolation is an upper bound: the peak is the maximum of several moments that grow linearly.
    """
    if above and below:
        low, high = (predictions[traced_size].total_bytes[1] for traced_size in (above, below))
        return low + (high - low) * (size - above) / (below - above)
    traced = above or below
    prediction = predictions[traced]
    held = sum(prediction.categories[name] for name in ("weights", "gradients", "optimizer"))
    before = prediction.phases.get("data", (held, None))[0]
    forward = prediction.phases.get("forward", (held, None))[0]
    # While gradients fill the GPU, the layers' activations are below the peak, and only forward shows them.
    grows = max(prediction.peak_allocated_bytes - held, forward - before) / traced
    kept = max(held, before) if prediction.peak_phase in ("forward", "backward") else before
    reserved = prediction.peak_reserved_bytes[1] / prediction.peak_allocated_bytes * (kept + grows * size)
    return reserved + prediction.outside_allocator_bytes
