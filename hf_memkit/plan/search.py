"""Decides which candidates are traced, in which order, and which are excluded without a trace.

The search begins with the script's own setup and, if that does not fit, with the setup that `memkit predict` proposes.
Then it traces each plain combination of choices with its largest and its smallest micro-batch, with and without fused
kernels. Refinements follow, the fastest first. So a search that is stopped early has covered the large differences.

Three rules save most traces:

* Memory grows with the micro-batch. The search looks for the largest micro-batch of a combination that fits, and
  excludes all that are larger than one that does not fit.
* If weights, gradients and optimizer states alone do not fit, no micro-batch fits.
* A choice that costs time is only worth the memory that it frees. If everything fits without it, it is not refined.

In: the script's own setup, choices by slot, and a function that judges a candidate. Out: the judgements, and the
excluded candidates with the one that excludes each.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from hf_memkit.plan.candidate import Candidate, Choice, Combination, combine, uses_fsdp, without
from hf_memkit.plan.choices import ROWS_COMPARED, micro_batches
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.time_limit import TimeLimit
from hf_memkit.setup.techniques.registry import Group

PARALLEL_TRACES: Final = 2

_MAX_GUESSES: Final = 3
"""Micro-batches that are tried at most between the largest and the smallest one of a combination."""

_ACTIVATION_SLOTS: Final = (
    "loss", "loss with code", "attention", "checkpointing", "padding", "precision", "allocator", "evaluation",
)  # fmt: skip
"""Slots that do not change the memory held in the optimizer's step."""

_SAME_PEAK: Final = 0.99
"""The optimizer step's peak hardly depends on the micro-batch: differences of 0.1 % were seen. Another micro-batch is
assumed to need at least this share of it."""

ChoicesBySlot = Mapping[str, Sequence[Choice | None]]
"""Slot → its choices, from the fastest to the one with least memory; None is what the script does."""

_Wave = tuple[Callable[[Combination], object], list[Combination]]
"""A function that judges a combination, and combinations that it can judge in parallel."""


@dataclass(slots=True)
class Search:
    """Searches the combinations, with each micro-batch, for the fastest that fit.

    Args:
        judge: predicts memory and time of a candidate; called from several threads.
        own: the script's own setup.
        choices: what each slot can be set to.
        batch_effect: how another micro-batch changes the result, such as ("nearly the same", "dropout draws other
            numbers"); the search replaces it if a trace shows that rows of a batch are compared.
        on_judged: called with each judgement.
        time_limit: decides whether another candidate may start.
        cancel: ends the judging in progress; called from the main thread after Ctrl-C or another exception.
        smaller_evaluations: for a micro-batch, choices that make evaluations need less memory, the largest first.
        per_gpu: requested sequences per GPU in an optimizer step; 0: as many as the script's.

    Attributes:
        judgements: of all candidates that were judged, in order.
        excluded: candidate → name of the judged candidate that excludes it.
        stopped: whether the time limit or Ctrl-C ended the search.
        stopped_by_hand: whether Ctrl-C ended it.
    """

    judge: Callable[[Candidate], Judgement]
    own: Candidate
    choices: ChoicesBySlot
    batch_effect: tuple[Group, str]
    on_judged: Callable[[Judgement], None] = lambda _: None
    time_limit: TimeLimit = field(default_factory=TimeLimit)
    cancel: Callable[[], None] = lambda: None
    smaller_evaluations: Callable[[int], Iterable[Choice]] = lambda _: ()
    per_gpu: int = 0
    judgements: dict[Candidate, Judgement] = field(default_factory=dict)
    excluded: dict[Candidate, str] = field(default_factory=dict)
    stopped: bool = False
    stopped_by_hand: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Judges the script's own setup, that of `memkit predict` and others, until none is left or time is over."""
        self.time_limit.begin()
        try:
            own = self._judge_once(self.own)
            with self._threads() as pool:
                nearest = self._nearest_choices(pool) if own is None or not own.fits else None
                for judge, combinations in self._waves(nearest):
                    list(pool.map(judge, dict.fromkeys(combinations)))
                    if self.stopped:  # an unfinished wave excludes nothing
                        return
                self._halve_fastest(pool)
                if not self._fitting():
                    list(pool.map(self._judge_leanest, _first_and_last(self._choices_of("loss"))))
        except KeyboardInterrupt:
            self.stopped = self.stopped_by_hand = True

    def nearest(self) -> Judgement | None:
        """The setup that fits with the fewest changes: a smaller micro-batch, then checkpointing and a fused loss, and
        last 8-bit states or an engine. It has the largest micro-batch that fits. None if nothing fits."""
        self.time_limit.begin()
        with self._threads() as pool:
            if (combination := self._nearest_choices(pool)) is None:
                return None
            self._find_largest(combination)
        fitting = [each for each in self._judged_with(combination) if each.fits]
        return max(fitting, key=lambda each: each.candidate.micro_batch_size)

    def _nearest_choices(self, pool: ThreadPoolExecutor) -> Combination | None:
        """The combination of choices of `nearest`, with which at least the smallest micro-batch fits."""
        lean, small = self._lean(), self._changes_of("small optimizer")
        combinations = [(), combine(lean[1]), combine(*lean), *(combine(lean[1], choice) for choice in small[:1])]
        sharding = [choice for choice in self._changes_of("sharding") if choice.costs_time]
        combinations += [combine(*lean, choice) for choice in (*small, *sharding, *self._changes_of("engine"))]
        combinations = list(dict.fromkeys(combinations))
        for begin in range(0, len(combinations), PARALLEL_TRACES):
            wave = combinations[begin : begin + PARALLEL_TRACES]
            list(pool.map(self._judge_bounds, wave))
            if (first := next(filter(self._fits_with, wave), None)) is not None:
                return first
        return None

    @contextlib.contextmanager
    def _threads(self) -> Iterator[ThreadPoolExecutor]:
        """A pool in which candidates are judged. An exception cancels what its threads wait for."""
        with ThreadPoolExecutor(PARALLEL_TRACES) as pool:
            try:
                yield pool
            except BaseException:
                self.stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                self.cancel()
                raise

    # ---- combinations of choices ----

    def _choices_of(self, slot: str) -> Sequence[Choice | None]:
        return self.choices.get(slot) or [None]

    def _changes_of(self, slot: str) -> list[Choice]:
        """The choices that differ from the script."""
        return [choice for choice in self._choices_of(slot) if choice is not None]

    def _lean(self) -> tuple[Choice | None, Choice | None]:
        """The loss and the checkpointing that free most memory; they cost little."""
        return self._choices_of("loss")[-1], self._choices_of("checkpointing")[-1]

    def _costless(self) -> tuple[Choice | None, ...]:
        """The attention and the optimizer that make steps faster and cost nothing."""
        return self._choices_of("attention")[0], self._choices_of("optimizer")[0]

    def _waves(self, nearest: Combination | None) -> Iterator[_Wave]:
        """Combinations to judge, in waves: the results of one wave decide whether the next is worth tracing. The first
        two waves begin with the combination that needs least memory: if it does not fit, none that needs more does.
        `nearest`, if given, is refined before all others."""
        losses = _first_and_last(self._choices_of("loss"))
        checkpointing = self._choices_of("checkpointing")
        quickest, leanest = checkpointing[0], checkpointing[-1]
        free = self._costless()
        small = self._changes_of("small optimizer")[:1]

        # With a small micro-batch, fused kernels may need more memory and time than plain ones.
        yield self._judge_both_bounds, [combine(*free, loss, leanest) for loss in reversed(losses)]
        plain = self._possible_losses(losses)
        yield self._judge_both_bounds, [combine(*free, loss, quickest) for loss in reversed(plain)]
        if nearest is not None:
            yield self._find_largest, [nearest]

        # 8-bit states, with the loss whose steps are the fastest.
        near: list[Choice | None] = []
        if small and self._largest_size_fits(combine(*free, losses[-1], leanest)):
            near = plain
        elif small:
            yield self._judge_bounds, [combine(*free, loss, leanest, *small) for loss in reversed(losses)]
            near = self._possible_losses(losses, *small)
        near = sorted(near, key=lambda loss: self._least_seconds(combine(*free, loss, quickest)))[:1]
        yield self._judge_bounds, [combine(*free, loss, quickest, *small) for loss in near]

        refined = [combine(*free, loss, saved) for loss in plain for saved in (quickest, leanest)]
        refined += [combine(*free, loss, saved, *small) for loss in near for saved in (quickest, leanest)]
        refined.sort(key=self._least_seconds)
        yield self._find_largest, refined

        if plain and not self._whole_batch_fits_without_cost():
            loss = min(plain, key=lambda loss: self._least_seconds(combine(*free, loss, leanest)))
            yield self._find_largest, [combine(*free, loss, saved) for saved in checkpointing[1:-1]]
        for combinations in self._later_waves(may_fit=bool(plain)):
            yield self._find_largest, combinations

    def _possible_losses(self, losses: Sequence[Choice | None], *more: Choice) -> list[Choice | None]:
        """The losses that may fit. For the others, excludes every checkpointing: even the full one does not fit."""
        fitting = []
        for loss in losses:
            checkpointing = self._choices_of("checkpointing")
            combinations = [combine(*self._costless(), loss, saved, *more) for saved in checkpointing]
            if self._cannot_fit(combinations[-1]):
                self._exclude_combinations(combinations, combinations[-1])
            else:
                fitting.append(loss)
        return fitting

    def _later_waves(self, *, may_fit: bool) -> Iterator[list[Combination]]:
        """Combinations that need other code, another precision, an engine or another method. `may_fit`: whether no
        trace has shown that every plain combination is too large."""
        losses, checkpointing = self._choices_of("loss"), self._choices_of("checkpointing")
        free, lean = self._costless(), self._lean()
        quick = losses[-1], checkpointing[0]
        small = self._changes_of("small optimizer")

        chunked = [] if self._whole_batch_fits_without_cost() else self._changes_of("loss with code")
        yield [combine(*free, loss, checkpointing[-1], *more) for loss in chunked for more in ((), small[:1])]
        fitting = [loss for loss in chunked if self._fits_with(combine(*free, loss, checkpointing[-1]))]
        yield [combine(*free, loss, checkpointing[0]) for loss in fitting]

        # Another precision may need less or more than 8-bit states: neither excludes the other.
        precise = self._changes_of("precision")
        yield [combine(*free, *saved, precision) for precision in precise for saved in (lean, quick)]
        lacking = [each for each in precise if not self._largest_size_fits(combine(*free, *quick, each))]
        yield [combine(*free, *saved, *small[:1], precision) for precision in lacking for saved in (lean, quick)]

        sharding, fits = self._changes_of("sharding"), self._whole_batch_fits_without_cost()
        tried = [choice for choice in sharding if not (fits and choice.costs_time)]
        yield [combine(*free, losses[-1], saved, choice) for choice in tried for saved in (quick[1], lean[1])]
        with_engine = [combine(*lean, engine) for engine in self._changes_of("engine")]
        if may_fit:
            fsdp = [*filter(uses_fsdp, with_engine[PARALLEL_TRACES:])]
            yield [*with_engine[:PARALLEL_TRACES], *fsdp[:1]]
            yield [each for each in fsdp[1:] if not self._largest_size_fits(fsdp[0])]
        else:
            yield [*with_engine, *(combine(*free, *lean, optimizer) for optimizer in small[1:])]

        # Without padding a step may need less or more than all above. Its traces are slow: each runs the whole script.
        flat = self._changes_of("padding")
        yield [combine(*free, *saved, padding) for padding in flat for saved in (quick, lean)]
        lacking = [padding for padding in flat if not self._fits_with(combine(*free, *lean, padding))]
        yield [combine(*free, *lean, *small[:1], padding) for padding in lacking]

        yield [
            combine(*free, losses[0 if sharding else -1], saved, precision, method)  # FSDP2's adapters exclude Liger
            for method in self._changes_of("method")
            for precision in (None, *precise[-1:])
            for saved in _first_and_last(checkpointing)
        ]
        # The best engine may leave room to recompute less.
        if (engine := self._engine_of_fastest()) is not None:
            yield [combine(losses[-1], saved, engine) for saved in checkpointing[:-1]]

    def _least_seconds(self, combination: Combination) -> float:
        """The shortest step among the traced candidates with this combination, fitting or not: an estimate for its
        refinements. An 8-bit optimizer hardly changes it, so it is ignored."""
        ignored = ("allocator", "evaluation", "small optimizer")
        plain = without(combination, *ignored)
        traced = [each for each in self._results() if without(each.candidate.choices, *ignored) == plain]
        return min((each.seconds for each in traced if each.is_priced and each.seconds), default=math.inf)

    def _engine_of_fastest(self) -> Choice | None:
        """The engine of the fastest setup with the same result; None if that has no engine or no time."""
        timed = [each for each in self._fitting() if each.is_priced and not each.candidate.code]
        same = [each for each in timed if each.candidate.group == "same result"]
        best = min(same, key=lambda each: each.seconds or 0.0, default=None)
        combination = best.candidate.choices if best is not None else ()
        return next((choice for choice in combination if choice.slot == "engine"), None)

    def _results(self) -> list[Judgement]:
        """A copy of the judgements: other threads add to them."""
        return list(self.judgements.values())

    def _fitting(self) -> list[Judgement]:
        return [each for each in self._results() if each.fits]

    def _judged_with(self, combination: Combination) -> list[Judgement]:
        """The judgements of this combination, with any micro-batch, allocator setting and evaluation batch."""
        results = self._results()
        return [each for each in results if without(each.candidate.choices, "allocator", "evaluation") == combination]

    def _traced_with(self, combination: Combination) -> list[Judgement]:
        """The judgements of this combination that say something about memory: not refused, not another training."""
        return [each for each in self._judged_with(combination) if each.prediction is not None and not each.is_other]

    def _fits_with(self, combination: Combination) -> bool:
        return any(each.fits for each in self._judged_with(combination))

    def _cannot_fit(self, combination: Combination) -> bool:
        """Whether this combination was traced, and no micro-batch fits."""
        if self._states_too_large(combination) is not None:
            return True
        traced = self._traced_with(combination)
        return bool(traced) and not any(each.fits for each in traced)

    def _states_too_large(self, combination: Combination) -> Judgement | None:
        """A traced candidate with the same weights, gradients and optimizer states, if these alone do not fit."""
        states = without(combination, *_ACTIVATION_SLOTS)
        for judgement in self._results():
            prediction = judgement.prediction
            if prediction is None or judgement.is_other:
                continue
            if without(judgement.candidate.choices, *_ACTIVATION_SLOTS) != states:
                continue
            step_peak, _ = prediction.phases.get("optimizer", (0, None))
            if _SAME_PEAK * step_peak + prediction.outside_allocator_bytes > judgement.limit_bytes > 0:
                return judgement
        return None

    def _largest_size_fits(self, combination: Combination) -> bool:
        """Whether the largest micro-batch that may be tried fits with this combination."""
        largest = self._sizes()[0]
        return any(each.fits and each.candidate.micro_batch_size == largest for each in self._judged_with(combination))

    def _exclude_combinations(self, combinations: Sequence[Combination], leanest: Combination) -> None:
        """Excludes combinations that need at least as much memory as `leanest`, of which no micro-batch fits."""
        traced = self._traced_with(leanest)
        least = min(traced, key=lambda each: each.needs_bytes, default=self._states_too_large(leanest))
        if least is not None:
            for combination in combinations:
                for size in self._sizes():
                    self._exclude(self.candidate(size, combination), least)

    def _whole_batch_fits_without_cost(self) -> bool:
        """Whether all sequences of an optimizer step fit in one micro-batch, without any choice that costs time."""
        whole = [each.candidate for each in self._fitting() if each.candidate.micro_batch_size == self._sequences]
        return any(not any(choice.costs_time for choice in candidate.choices) for candidate in whole)

    # ---- micro-batches of one combination ----

    @property
    def _sequences(self) -> int:
        """Sequences per GPU in an optimizer step."""
        return self.per_gpu or self.own.micro_batch_size * self.own.accumulation

    def script_with_requested_batch(self) -> Candidate:
        """The script with the requested sequences per step, in micro-batches no larger than the script's."""
        return self.candidate(max(size for size in self._sizes() if size <= self.own.micro_batch_size), ())

    def _sizes(self) -> list[int]:
        """The micro-batches that may be tried, the largest first."""
        if self.batch_effect[0] == "another method":
            return [self.own.micro_batch_size]
        return micro_batches(self._sequences)

    def candidate(self, size: int, combination: Sequence[Choice]) -> Candidate:
        """The candidate with this micro-batch and the same sequences per optimizer step as all others."""
        group, phrase = self.batch_effect if size != self.own.micro_batch_size else ("same result", "")
        return Candidate(size, self._sequences // size, tuple(combination), group, phrase)

    def _judge_bounds(self, combination: Combination) -> tuple[Judgement, Judgement] | None:
        """Judges the largest micro-batch and, if it does not fit, the smallest. Returns both if only the smallest
        fits, else None: there is nothing to find between them."""
        sizes = self._sizes()
        if (proof := self._states_too_large(combination)) is not None:
            for size in sizes:
                self._exclude(self.candidate(size, combination), proof)
            return None
        first = self._judge_with_fallbacks(sizes[0], combination)
        if self._sizes() != sizes:  # the trace showed that another micro-batch is another method
            return self._judge_bounds(combination)
        if first is None or first.fits or first.prediction is None or first.lacks_host or len(sizes) == 1:
            return None
        smallest = len(sizes) - 1
        last = self._judge_with_fallbacks(sizes[smallest], combination)
        # Another training, or one that the script refuses (batch normalisation of one row), says nothing about memory.
        while last is not None and (last.is_other or last.prediction is None) and smallest > 1:
            smallest -= 1
            last = self._judge_with_fallbacks(sizes[smallest], combination)
        return (first, last) if last is not None and last.fits else None

    def _judge_both_bounds(self, combination: Combination) -> None:
        """Judges the largest and the smallest micro-batch, even if the largest fits: the smallest pads rows less, and
        fused kernels may cost more there than they save. Omits it where memory suffices for everything."""
        self._judge_bounds(combination)
        if not self._whole_batch_fits_without_cost() and self._states_too_large(combination) is None:
            self._judge_with_fallbacks(self._sizes()[-1], combination)

    def _judge_leanest(self, loss: Choice | None) -> None:
        """Judges the combination that needs least memory with this loss, at the largest and the smallest micro-batch.
        Used if nothing fits, to show how much memory is missing."""
        small, checkpointing = self._changes_of("small optimizer")[:1], self._choices_of("checkpointing")[-1]
        combination = combine(*self._costless(), loss, checkpointing, *small)
        for size in (self._sizes()[0], self._sizes()[-1]):
            self._judge_with_fallbacks(size, combination)

    def _find_largest(self, combination: Combination) -> None:
        """Looks for the largest micro-batch that fits, between the largest and the smallest one."""
        if (bounds := self._judge_bounds(combination)) is None:
            return
        largest, smallest = bounds
        sizes = self._sizes()
        fitting, too_large = sizes.index(smallest.candidate.micro_batch_size), 0  # indices of `sizes`
        needs = {0: largest.needs_bytes, fitting: smallest.needs_bytes}
        for _ in range(_MAX_GUESSES):
            if fitting - too_large < 2:
                return
            at = self._guess(sizes, needs, too_large, fitting, smallest.limit_bytes)
            judgement = self._judge_with_fallbacks(sizes[at], combination)
            if judgement is None:
                return
            needs[at] = judgement.needs_bytes
            if judgement.fits:
                fitting = at
            else:
                too_large = at

    def _judge_with_fallbacks(self, size: int, combination: Combination) -> Judgement | None:
        """Judges this micro-batch. If it does not fit, tries smaller evaluations and another allocator setting, which
        leave the training as it is; if it still does not fit, excludes larger ones. None if the time is over."""
        judgement = self._judge_once(self.candidate(size, combination))
        if judgement is not None and not judgement.fits:
            judgement = self.with_segments(self._with_smaller_evaluation(judgement))
        if judgement is not None and not judgement.fits and judgement.prediction and not judgement.is_other:
            for larger in self._sizes():
                if larger > size:
                    self._exclude(self.candidate(larger, combination), judgement)
        return judgement

    def _with_smaller_evaluation(self, judgement: Judgement) -> Judgement:
        """The candidate with smaller evaluation batches, if the peak is in an evaluation."""
        candidate, smallest = judgement.candidate, judgement
        for evaluation in self.smaller_evaluations(candidate.micro_batch_size):
            if smallest.fits or smallest.prediction is None or smallest.prediction.peak_phase != "evaluate":
                break
            other = self._judge_once(self.candidate(candidate.micro_batch_size, (*candidate.choices, evaluation)))
            smallest = other if other is not None and other.prediction is not None else smallest
        return smallest

    def with_segments(self, judgement: Judgement) -> Judgement:
        """The candidate with expandable segments, if they make it fit: they save what is reserved beyond its peak."""
        prediction = judgement.prediction
        allocator = next(iter(self._changes_of("allocator")), None)
        if prediction is None or allocator is None or judgement.lacks_host:
            return judgement
        if prediction.peak_allocated_bytes + prediction.outside_allocator_bytes > judgement.limit_bytes:
            return judgement
        candidate = judgement.candidate
        other = self._judge_once(self.candidate(candidate.micro_batch_size, (*candidate.choices, allocator)))
        return other if other is not None and other.fits else judgement

    @staticmethod
    def _guess(sizes: Sequence[int], needs: Mapping[int, int], too_large: int, fitting: int, usable: int) -> int:
        """Index of the largest micro-batch that fits if memory grows linearly; else of the smallest in between."""
        large, small = sizes[too_large], sizes[fitting]
        per_sequence = (needs[too_large] - needs[fitting]) / (large - small)
        largest = small + (usable - needs[fitting]) / max(per_sequence, 1.0)
        between = range(too_large + 1, fitting)
        return next((at for at in between if sizes[at] <= largest), between[-1])

    def _halve_fastest(self, pool: ThreadPoolExecutor) -> None:
        """Judges the next smaller micro-batch of the two fastest setups and of the fastest with the same result, until
        nothing new comes first: smaller ones pad rows less, and their shapes may suit the kernels better."""
        while not self.stopped:
            timed = [each for each in self._fitting() if each.seconds]
            fastest = sorted(timed, key=lambda each: each.seconds or 0.0)
            same = [each for each in fastest if each.candidate.group == "same result"]
            halves = []
            for candidate in dict.fromkeys(each.candidate for each in (*fastest[:2], *same[:1])):
                smaller = [size for size in self._sizes() if size < candidate.micro_batch_size]
                if smaller:
                    halves.append(self.candidate(smaller[0], candidate.choices))
            if all(candidate in self.judgements for candidate in halves):
                return
            list(pool.map(self._judge_once, halves))

    # ---- one candidate ----

    def _judge_once(self, candidate: Candidate) -> Judgement | None:
        """The judgement of a candidate, which is made only once; None if the time is over."""
        if candidate in self.judgements:
            return self.judgements[candidate]
        if self.stopped or (candidate != self.own and not self.time_limit.has_time()):
            self.stopped = True
            return None
        began = self.time_limit.clock()
        judgement = self.judge(candidate)
        self.time_limit.add(judgement, self.time_limit.clock() - began)
        with self._lock:
            self.judgements[candidate] = judgement
            self.excluded.pop(candidate, None)
            if judgement.is_other and judgement.why == ROWS_COMPARED:
                self.batch_effect = ("another method", judgement.why)
        self.on_judged(judgement)
        return judgement

    def _exclude(self, candidate: Candidate, by: Judgement) -> None:
        with self._lock:
            if candidate not in self.judgements:
                self.excluded[candidate] = by.candidate.name


def _first_and_last(choices: Sequence[Choice | None]) -> list[Choice | None]:
    return [choices[0]] if len(choices) == 1 else [choices[0], choices[-1]]
