"""The batch and the sequence of a preset: exactly what was asked for, and as much at once as a trace shows to fit.

Memory grows almost linearly with the batch and, where no attention scores are kept, with the length. One small size is
traced, a second that follows from it, and a third that follows from both. Of these the largest that fits is taken.
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
"""A sequence that is solved for is a multiple of this: what tensor cores of an A100 like (NVIDIA, "Matrix
Multiplication Background User's Guide", 16-bit data: multiples of 64 elements)."""

LARGEST_BATCH: Final = 4096
LONGEST_SEQUENCE: Final = 1 << 20

MOST_TRACES: Final = 3

_SURE: Final = 0.96
"""What a size that is not traced yet may fill of the GPU: the allocator's share beside the tensors grows with them."""

_FROM_TRACES: Final[tuple[Category, ...]] = ("activations", "loss")
"""What the ledger has from traces alone."""

_PERHAPS: Final = 1.1
"""A size that is expected to need up to this share of the GPU is worth the trace that is left."""

Judge = Callable[[Setup], Prediction]


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


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest size that was traced and fits, else the smallest that was tried; `prediction`: of that size, None
    where nothing could be traced; `why` says what was traced."""

    size: int
    why: str
    prediction: Prediction | None

    def added_to(self, setup: Setup) -> Setup:
        """The setup with what the trace shows: what grows with the batch, and that it does not fit."""
        found = self.prediction
        if found is None:
            return setup
        how = f"{found.confidence.level}, at the peak"
        rows = [
            Row("device", name, "by a trace, at its peak", found.categories[name], how, found.peak_phase)
            for name in _FROM_TRACES
            if found.categories[name]
        ]
        setup = setup.with_rows(*rows)
        problem = f"is predicted {found.verdict}: {found.why}".replace("predicted does not", "predicted not to")
        return setup if fits(found, setup.resolved_for.machine) else setup.with_problems([problem])


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
    """The setup with the sizes that fit; a SettingError names the nearest choices where the batch does not come out
    exactly.

    Args:
        build: makes the setup of given sizes.
        job: model and machine; where one is not known, nothing is solved for.
        solves_for: what the preset makes as large as fits, if it is not given.
        global_batch_size: sequences an optimizer step, all processes together.
        own: the user's fields of TrainingArguments.
        judge: traces a setup; None: nothing is solved for.
    """
    length, why_length = job.sequence_length, "asked for"
    if sequence_length is None:
        why_length = "assumed: none was given" if job.model is not None else ""
    solved: Largest | None = None

    def largest(choices: Sequence[int], start: int, sizes: Callable[[int], Sizes]) -> Largest:
        assert judge is not None
        if gpu_shortage(build(sizes(choices[0])).ledger, job.machine):
            return Largest(choices[0], "the smallest: it cannot fit, whatever activations take", None)
        ask = judge
        return find_largest(choices, start, lambda size: ask(build(sizes(size))), job.machine)

    known = judge is not None and job.model is not None and job.machine.gpu is not None
    micro = int(own.get("per_device_train_batch_size", 0))
    accumulation = int(own.get("gradient_accumulation_steps", 0))
    if solves_for == "sequence" and sequence_length is None and known:
        longest = (job.model and job.model.maximum_length) or LONGEST_SEQUENCE
        lengths = range(SEQUENCE_MULTIPLE, longest + 1, SEQUENCE_MULTIPLE) or range(longest, longest + 1)
        start = max(each for each in lengths if each <= max(length, lengths[0]))
        solved = largest(lengths, start, lambda tokens: Sizes(micro or 1, accumulation or 1, tokens))
        length, why_length = solved.size, f"{solved.why}, {micro or 1} at a time"
    if solves_for == "sequence" and sequence_length is None and not micro and not accumulation:
        micro = 1 if job.model is not None and job.machine.gpu is not None else 0
    if global_batch_size is None:
        why_batch = "one sequence at a time, so that it can be long" if solves_for == "sequence" and micro else ""
        if solves_for == "batch" and known and not micro:
            choices = (*range(1, 8), *range(8, LARGEST_BATCH + 1, 8))
            solved = largest(choices, 1, lambda size: Sizes(size, accumulation or 1, length))
            micro, why_batch = solved.size, f"{solved.why}; from 8 on a multiple of 8, for tensor cores"
        sizes = Sizes(micro or job.micro_batch_size, accumulation or 1, length, why_batch, why_length)
    else:
        most = job.micro_batch_size
        if known and not micro and not accumulation:
            divisors, share = micro_batches(global_batch_size, job.processes), global_batch_size // job.processes
            solved = largest(divisors, divisors[0], lambda size: Sizes(size, share // size, length))
            most = solved.size
        chosen = {
            key: own[key] for key in ("per_device_train_batch_size", "gradient_accumulation_steps") if key in own
        }
        if solves_for == "sequence" and micro and not chosen:
            chosen = {"per_device_train_batch_size": micro}
        micro, accumulation, reason = split_batch(global_batch_size, most, job.processes, chosen)
        if solved is not None and not chosen:
            reason += f"; {solved.why}"
        sizes = Sizes(micro, accumulation, length, reason, why_length)
    setup = build(sizes)
    return setup if solved is None else solved.added_to(setup)


def find_largest(choices: Sequence[int], start: int, trace: Callable[[int], Prediction], machine: Machine) -> Largest:
    """The largest of `choices`, in rising order, that fits the machine's GPU, of at most three that `trace` predicts,
    the first of them `start`."""
    seen: dict[int, Prediction] = {}
    size: int | None = start
    failed = ""
    while size is not None and len(seen) < MOST_TRACES:
        try:
            seen[size] = trace(size)
        except InputError as error:
            failed = f"{size} is not predicted: {error}"
            break
        size = _next(choices, seen, machine)
    traced = [f"{size} {each.verdict}" for size, each in sorted(seen.items())]
    said = f"traced: {', '.join([*traced, *filter(None, [failed])])}"
    if not seen:
        return Largest(start, f"not known to fit ({failed})", None)
    fitting = [size for size in seen if fits(seen[size], machine)]
    best = max(fitting) if fitting else min(seen)
    why = "the largest that a trace shows to fit" if fitting else "the smallest that was tried, and it does not fit"
    return Largest(best, f"{why} ({said})", seen[best])


def fits(found: Prediction, machine: Machine) -> bool:
    """Whether the GPU has room; RAM and disk do not depend on the batch."""
    return found.judged(replace(machine, ram_bytes=sys.maxsize, disk_free_bytes=sys.maxsize)).verdict == "fits"


def _next(choices: Sequence[int], seen: Mapping[int, Prediction], machine: Machine) -> int | None:
    """The size to trace after those; None where nothing is to be gained."""
    above = max((size for size in seen if fits(seen[size], machine)), default=0)
    below = min((size for size in seen if size > above), default=0)
    between = [choice for choice in choices if above < choice and (not below or choice < below)]
    if not between:
        return None
    limit = seen[above or below].limit_bytes
    needed = {size: _needed(size, above, below, seen) for size in between}
    likely = max((size for size in between if needed[size] <= _SURE * limit), default=between[0])
    return likely if not above or needed[likely] <= _PERHAPS * limit else None


def _needed(size: int, above: int, below: int, seen: Mapping[int, Prediction]) -> float:
    """The most that a size is expected to take of the GPU. Between one that fits (`above`) and one that does not
    (`below`; 0: none) at most what a line says: the peak is the highest of several moments that grow linearly."""
    if above and below:
        low, high = (seen[each].total_bytes[1] for each in (above, below))
        return low + (high - low) * (size - above) / (below - above)
    traced = above or below
    found = seen[traced]
    held = sum(found.categories[name] for name in ("weights", "gradients", "optimizer"))
    before, forward = (found.phases.get(name, (held, None))[0] for name in ("data", "forward"))
    # While gradients fill the GPU, what the layers keep is below the peak, and only the forward pass shows it.
    grows = max(found.peak_allocated_bytes - held, forward - before) / traced
    kept = max(held, before) if found.peak_phase in ("forward", "backward") else before
    reserved = found.peak_reserved_bytes[1] / found.peak_allocated_bytes * (kept + grows * size)
    return reserved + found.outside_allocator_bytes
