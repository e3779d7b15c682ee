"""The search: which candidates are traced, in which order, and which need not be.

First comes what `memkit predict` proposes, then each plain way with its largest and its smallest micro-batch, with and
without fused kernels; refinements follow, those of fast ways first. So a search that is stopped has the large steps.

Three rules save most of the traces. Memory grows with the micro-batch, so of each way to train the largest micro-batch
that fits is looked for, and what is larger is excluded by what was traced. Where weights, gradients and states alone
do not fit, no micro-batch does. And a choice that costs time pays only by the memory it frees: where everything fits
without it, it is tried no further.

In: the script's own setup, choices by slot, and a function that judges a candidate. Out: all that was judged, and what
was excluded, and by what.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from hf_memkit.plan.candidate import Alternative, Group, SetupCandidate
from hf_memkit.plan.choices import ROWS_COMPARED, micro_batches
from hf_memkit.plan.judgement import Judged
from hf_memkit.plan.time_limit import TimeLimit

AT_ONCE: Final = 2
"""Traces at a time."""

_MORE_TRACES: Final = 3
"""Beside the largest and the smallest micro-batch, to find the largest that fits in between."""

_OF_ACTIVATIONS: Final = (
    "loss", "loss with code", "attention", "checkpointing", "padding", "precision", "allocator", "evaluation",
)  # fmt: skip
"""Slots that change nothing of what is held when the optimizer steps."""

_SAME: Final = 0.99
"""Of the peak of the optimizer's step, which differs by a thousandth from one micro-batch to another."""

Ways = Mapping[str, Sequence[Alternative | None]]

_Wave = tuple[Callable[[tuple[Alternative, ...]], object], list[tuple[Alternative, ...]]]


@dataclass(slots=True)
class Search:
    """
    Args:
        judge: what becomes of a candidate; called from several threads.
        own: the script's own setup.
        ways: choices by slot, from the fastest to the leanest; None is what the script does.
        batch: (group, in words): what another micro-batch does to the result.
        said: is told of each candidate that is judged.
        time_limit: how long it goes on.
        end: ends what is being judged; called from the main thread, after Ctrl-C.
        evaluations: for a micro-batch, what makes evaluations need less, the largest first.
        per_gpu: sequences of one GPU in an optimizer step, in the place of the script's; 0: those.

    Attributes:
        judged: what was traced, in order.
        excluded: what was not, with the candidate that excludes it.
        stopped: whether the limit, or Ctrl-C, ended it.
        stopped_by_hand: whether Ctrl-C did.
    """

    judge: Callable[[SetupCandidate], Judged]
    own: SetupCandidate
    ways: Ways
    batch: tuple[Group, str]
    said: Callable[[Judged], None] = lambda _: None
    time_limit: TimeLimit = field(default_factory=TimeLimit)
    end: Callable[[], None] = lambda: None
    evaluations: Callable[[int], Iterable[Alternative]] = lambda _: ()
    per_gpu: int = 0
    judged: dict[SetupCandidate, Judged] = field(default_factory=dict)
    excluded: dict[SetupCandidate, str] = field(default_factory=dict)
    stopped: bool = False
    stopped_by_hand: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Judges the script's own setup, then what `memkit predict` proposes, then plain ways to train, those that are
        nearly the same, and other methods."""
        self.time_limit.begin()
        try:
            own = self._judged(self.own)
            with self._threads() as pool:
                nearest = self._nearest(pool) if own is None or not own.fits else None
                for judged, ways in self._waves(nearest):
                    list(pool.map(judged, dict.fromkeys(ways)))
                    if self.stopped:  # what was not judged excludes nothing
                        return
                self._neighbours(pool)
                if not any(each.fits for each in self.judged.values()):
                    list(pool.map(self._smallest_of, _ends(self._slot("loss"))))
        except KeyboardInterrupt:
            self.stopped = self.stopped_by_hand = True

    def nearest(self) -> Judged | None:
        """The first that fits, with as few changes as can be: a smaller micro-batch, then what frees most, then 8-bit
        states or an engine beside it. The largest micro-batch of that."""
        self.time_limit.begin()
        with self._threads() as pool:
            if (choices := self._nearest(pool)) is None:
                return None
            self._largest_that_fits(choices)
        fitting = [each for each in self.judged.values() if each.fits and self._is(each, choices)]
        return max(fitting, key=lambda each: each.candidate.micro_batch_size)

    def _nearest(self, pool: ThreadPoolExecutor) -> tuple[Alternative, ...] | None:
        """The way to train of `nearest`, of which one micro-batch fits."""
        lean = self._lean()
        small = self._others("small optimizer")[:1]
        ways = [(), _way(lean[1]), _way(*lean), *(_way(lean[1], each) for each in small)]
        ways += [_way(*lean, each) for each in (*self._others("small optimizer"), *self._others("engine"))]
        ways = list(dict.fromkeys(ways))
        for begin in range(0, len(ways), AT_ONCE):
            wave = ways[begin : begin + AT_ONCE]
            list(pool.map(self._bounds, wave))
            if (first := next(filter(self._fits_with, wave), None)) is not None:
                return first
        return None

    @contextlib.contextmanager
    def _threads(self) -> Iterator[ThreadPoolExecutor]:
        """In which candidates are judged. What ends this ends what they wait for."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                yield pool
            except BaseException:
                self.stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                self.end()
                raise

    # ---- which ways to train ----

    def _slot(self, name: str) -> Sequence[Alternative | None]:
        return self.ways.get(name) or [None]

    def _others(self, name: str) -> list[Alternative]:
        """What the script does not do itself."""
        return [each for each in self._slot(name) if each is not None]

    def _lean(self) -> tuple[Alternative | None, Alternative | None]:
        """What frees most at little cost."""
        return self._slot("loss")[-1], self._slot("checkpointing")[-1]

    def _free(self) -> tuple[Alternative | None, ...]:
        """What costs nothing."""
        return self._slot("attention")[0], self._slot("optimizer")[0]

    def _waves(self, nearest: tuple[Alternative, ...] | None) -> Iterator[_Wave]:
        """Ways that can be judged beside one another, with what judges one; what comes first says whether the next is
        worth it. The leanest comes first: where that does not fit, nothing does that needs more. More micro-batches of
        `nearest` are tried before those of any other way."""
        losses, checkpointing = _ends(self._slot("loss")), self._slot("checkpointing")
        quickest, leanest = checkpointing[0], checkpointing[-1]
        free, small = self._free(), self._others("small optimizer")[:1]
        # Fused kernels may need more, and take longer, where the micro-batch is small.
        yield self._both_bounds, [_way(*free, loss, leanest) for loss in reversed(losses)]
        plain = self._that_may_fit(losses)
        yield self._both_bounds, [_way(*free, loss, quickest) for loss in reversed(plain)]
        if nearest is not None:
            yield self._largest_that_fits, [nearest]
        near: list[Alternative | None] = []
        if small and self._whole_batch_fits(_way(*free, losses[-1], leanest)):
            near = plain
        elif small:
            yield self._bounds, [_way(*free, loss, leanest, *small) for loss in reversed(losses)]
            near = self._that_may_fit(losses, *small)
        near = sorted(near, key=lambda loss: self._least_seconds(_way(*free, loss, quickest)))[:1]
        yield self._bounds, [_way(*free, loss, quickest, *small) for loss in near]
        refined = [_way(*free, loss, saved) for loss in plain for saved in (quickest, leanest)]
        refined += [_way(*free, loss, saved, *small) for loss in near for saved in (quickest, leanest)]
        refined.sort(key=self._least_seconds)
        yield self._largest_that_fits, refined
        if plain and not self._all_fit():
            loss = min(plain, key=lambda loss: self._least_seconds(_way(*free, loss, leanest)))
            yield self._largest_that_fits, [_way(*free, loss, saved) for saved in checkpointing[1:-1]]
        for ways in self._later_waves(fits=bool(plain)):
            yield self._largest_that_fits, ways

    def _that_may_fit(self, losses: Sequence[Alternative | None], *more: Alternative) -> list[Alternative | None]:
        """Losses with which the leanest checkpointing fits. Where it does not, nothing does that saves more."""
        checkpointing = self._slot("checkpointing")
        found = []
        for loss in losses:
            ways = [_way(*self._free(), loss, saved, *more) for saved in checkpointing]
            if self._cannot_fit(ways[-1]):
                self._exclude_ways(ways, ways[-1])
            else:
                found.append(loss)
        return found

    def _later_waves(self, *, fits: bool) -> Iterator[list[tuple[Alternative, ...]]]:
        """Ways that need other code, compute other numbers or swap. `fits`: whether something plain does."""
        losses, checkpointing, small = self._slot("loss"), self._slot("checkpointing"), self._others("small optimizer")
        precise, flat, engines = self._others("precision"), self._others("padding"), self._others("engine")
        free, lean, quick = self._free(), self._lean(), (losses[-1], checkpointing[0])
        chunked = [] if self._all_fit() else self._others("loss with code")
        yield [_way(*free, each, checkpointing[-1], *more) for each in chunked for more in ((), small[:1])]
        fitting = [each for each in chunked if self._fits_with(_way(*free, each, checkpointing[-1]))]
        yield [_way(*free, each, checkpointing[0]) for each in fitting]
        # Another precision may need less or more than states in 8 bits: neither excludes the other.
        yield [_way(*free, *saved, each) for each in precise for saved in (lean, quick)]
        lacking = [each for each in precise if not self._whole_batch_fits(_way(*free, *quick, each))]
        yield [_way(*free, *saved, *small[:1], each) for each in lacking for saved in (lean, quick)]
        if fits:
            yield [_way(*lean, each) for each in engines[:AT_ONCE]]
        else:
            yield [*(_way(*lean, each) for each in engines), *(_way(*free, *lean, each) for each in small[1:])]
        # It may need less or more than any of the above; each of its traces runs the script from its first line.
        yield [_way(*free, *saved, each) for each in flat for saved in (quick, lean)]
        lacking = [each for each in flat if not self._fits_with(_way(*free, *lean, each))]
        yield [_way(*free, *lean, *small[:1], each) for each in lacking]
        yield [
            _way(*free, losses[-1], saved, precision, each)
            for each in self._others("method") for precision in (None, *precise[-1:]) for saved in _ends(checkpointing)
        ]  # fmt: skip
        # With room left beside an engine that is worth it, less need be recomputed.
        if (engine := self._engine_to_refine()) is not None:
            yield [_way(losses[-1], saved, engine) for saved in checkpointing[:-1]]

    def _least_seconds(self, choices: tuple[Alternative, ...]) -> float:
        """The least of any micro-batch of it that was traced, also of one that does not fit: what a refinement may
        come to. States in fewer bits change little of it."""

        def plain(found: Sequence[Alternative]) -> list[Alternative]:
            return [each for each in found if each.slot not in ("allocator", "evaluation", "small optimizer")]

        traced = [each for each in self.judged.values() if plain(each.candidate.choices) == plain(choices)]
        return min((each.seconds for each in traced if each.is_priced and each.seconds), default=math.inf)

    def _engine_to_refine(self) -> Alternative | None:
        """That of the fastest setup with the same result, if it has one; None: it has none, or no time."""
        timed = [each for each in self.judged.values() if each.fits and each.is_priced and not each.candidate.code]
        same = [each for each in timed if each.candidate.group == "same result"]
        best = min(same, key=lambda each: each.seconds or 0.0, default=None)
        slots = {each.slot: each for each in best.candidate.choices} if best is not None else {}
        return slots.get("engine")

    def _fits_with(self, choices: tuple[Alternative, ...]) -> bool:
        return any(each.fits for each in self.judged.values() if self._is(each, choices))

    def _cannot_fit(self, choices: tuple[Alternative, ...]) -> bool:
        """Whether it was traced, and no micro-batch of it fits; one that a rule or the script refuses says nothing."""
        if self._states_too_large(choices) is not None:
            return True
        traced = [
            each
            for each in self.judged.values()
            if self._is(each, choices) and each.prediction is not None and not each.is_other
        ]
        return bool(traced) and not any(each.fits for each in traced)

    def _states_too_large(self, choices: tuple[Alternative, ...]) -> Judged | None:
        """One that was traced, with the same weights, gradients and states, of which these alone do not fit."""

        def held(found: Sequence[Alternative]) -> list[Alternative]:
            return [each for each in found if each.slot not in _OF_ACTIVATIONS]

        for each in list(self.judged.values()):
            found = each.prediction
            if found is None or each.is_other or held(each.candidate.choices) != held(choices):
                continue
            stepping, _ = found.phases.get("optimizer", (0, None))
            if _SAME * stepping + found.outside_allocator_bytes > each.limit_bytes > 0:
                return each
        return None

    def _whole_batch_fits(self, choices: tuple[Alternative, ...]) -> bool:
        found = [each for each in self.judged.values() if self._is(each, choices) and each.fits]
        return any(each.candidate.micro_batch_size == self._sizes()[0] for each in found)

    @staticmethod
    def _is(judged: Judged, choices: tuple[Alternative, ...]) -> bool:
        return judged.candidate.without("allocator", "evaluation") == choices

    def _exclude_ways(self, ways: Sequence[tuple[Alternative, ...]], leanest: tuple[Alternative, ...]) -> None:
        """What needs at least as much as a way that fits with no micro-batch."""
        judged = [
            each for each in self.judged.values() if self._is(each, leanest) and each.prediction and not each.is_other
        ]
        least = min(judged, key=lambda each: each.needs_bytes, default=self._states_too_large(leanest))
        if least is not None:
            for choices in ways:
                for size in self._sizes():
                    self._exclude(self.candidate(size, choices), least)

    def _all_fit(self) -> bool:
        """Whether the whole batch fits in one pass without anything that costs time."""
        sequences = self._sequences
        fitting = [each.candidate for each in self.judged.values() if each.fits]
        return any(
            each.micro_batch_size == sequences and not any(choice.costs_time for choice in each.choices)
            for each in fitting
        )

    # ---- of one way, the micro-batch ----

    @property
    def _sequences(self) -> int:
        """Of one GPU in an optimizer step."""
        return self.per_gpu or self.own.micro_batch_size * self.own.accumulation

    def with_its_batch(self) -> SetupCandidate:
        """The script as it stands but for the sequences of a step, in micro-batches as large as its own at most."""
        return self.candidate(max(size for size in self._sizes() if size <= self.own.micro_batch_size), ())

    def _sizes(self) -> list[int]:
        if self.batch[0] == "another method":
            return [self.own.micro_batch_size]
        return micro_batches(self._sequences)

    def candidate(self, size: int, choices: Sequence[Alternative]) -> SetupCandidate:
        """The same sequences an optimizer step, in micro-batches of this size."""
        group, said = self.batch if size != self.own.micro_batch_size else ("same result", "")
        return SetupCandidate(size, self._sequences // size, tuple(choices), group, said)

    def _bounds(self, choices: tuple[Alternative, ...]) -> tuple[Judged, Judged] | None:
        """Traces the largest micro-batch; if it does not fit, the smallest. Both, if the smallest alone fits; None:
        there is nothing to look for in between."""
        sizes = self._sizes()
        if (by := self._states_too_large(choices)) is not None:
            for size in sizes:
                self._exclude(self.candidate(size, choices), by)
            return None
        first = self._fitted(sizes[0], choices)
        if self._sizes() != sizes:  # it has turned out that there is only one
            return self._bounds(choices)
        if first is None or first.fits or first.prediction is None or first.lacks_host or len(sizes) == 1:
            return None
        smallest = len(sizes) - 1
        last = self._fitted(sizes[smallest], choices)
        # Another training, or one that the script refuses (batch normalisation of one row): neither tells what fits.
        while last is not None and (last.is_other or last.prediction is None) and smallest > 1:
            smallest -= 1
            last = self._fitted(sizes[smallest], choices)
        return (first, last) if last is not None and last.fits else None

    def _both_bounds(self, choices: tuple[Alternative, ...]) -> None:
        """Traces the largest micro-batch and the smallest, also if both fit: rows are padded less in the smallest, and
        fused kernels may cost more there than they save. Nothing is gained by it where memory suffices for all."""
        self._bounds(choices)
        if not self._all_fit() and self._states_too_large(choices) is None:
            self._fitted(self._sizes()[-1], choices)

    def _smallest_of(self, loss: Alternative | None) -> None:
        """Traces what needs least with this loss, where nothing fits: how much is missing is then known."""
        choices = _way(*self._free(), loss, self._slot("checkpointing")[-1], *self._others("small optimizer")[:1])
        for size in (self._sizes()[0], self._sizes()[-1]):
            self._fitted(size, choices)

    def _largest_that_fits(self, choices: tuple[Alternative, ...]) -> None:
        """Traces the bounds, then by halving what is between."""
        if (bounds := self._bounds(choices)) is None:
            return
        first, last = bounds
        sizes = self._sizes()
        fitting, too_large = sizes.index(last.candidate.micro_batch_size), 0
        needs = {0: first.needs_bytes, fitting: last.needs_bytes}
        for _ in range(_MORE_TRACES):
            if fitting - too_large < 2:
                return
            at = self._guess(sizes, needs, too_large, fitting, last.limit_bytes)
            found = self._fitted(sizes[at], choices)
            if found is None:
                return
            needs[at] = found.needs_bytes
            if found.fits:
                fitting = at
            else:
                too_large = at

    def _fitted(self, size: int, choices: tuple[Alternative, ...]) -> Judged | None:
        """This micro-batch; if it does not fit, with what may make it fit and leaves the training as it is. What does
        not fit excludes the larger ones."""
        found = self._judged(self.candidate(size, choices))
        if found is not None and not found.fits:
            found = self._with_segments(self._with_smaller_evaluation(found))
        if found is not None and not found.fits and found.prediction is not None and not found.is_other:
            for larger in self._sizes():
                if larger > size:
                    self._exclude(self.candidate(larger, choices), found)
        return found

    def _with_smaller_evaluation(self, judged: Judged) -> Judged:
        """With other evaluations, where they are what does not fit: training is the same."""
        candidate, found = judged.candidate, judged
        for smaller in self.evaluations(candidate.micro_batch_size):
            if found.fits or found.prediction is None or found.prediction.peak_phase != "evaluate":
                break
            other = self._judged(self.candidate(candidate.micro_batch_size, (*candidate.choices, smaller)))
            found = other if other is not None and other.prediction is not None else found
        return found

    def _with_segments(self, judged: Judged) -> Judged:
        """With another setting of the allocator, where it is what the allocator reserves beyond its need that does not
        fit: the trace is the same."""
        found = judged.prediction
        allocator = next((each for each in self.ways.get("allocator", []) if each is not None), None)
        if found is None or allocator is None or judged.lacks_host:
            return judged
        if found.peak_allocated_bytes + found.outside_allocator_bytes > judged.limit_bytes:
            return judged
        candidate = judged.candidate
        other = self._judged(self.candidate(candidate.micro_batch_size, (*candidate.choices, allocator)))
        return other if other is not None and other.fits else judged

    @staticmethod
    def _guess(sizes: Sequence[int], needs: Mapping[int, int], too_large: int, fitting: int, usable: int) -> int:
        """The largest micro-batch that fits, if memory grows by as much with each sequence."""
        large, small = sizes[too_large], sizes[fitting]
        a_sequence = (needs[too_large] - needs[fitting]) / (large - small)
        most = small + (usable - needs[fitting]) / max(a_sequence, 1.0)
        inside = range(too_large + 1, fitting)
        return next((at for at in inside if sizes[at] <= most), inside[-1])

    def _neighbours(self, pool: ThreadPoolExecutor) -> None:
        """Half the micro-batch of the fastest that fit, and of the fastest of the same result, as long as that is
        faster: rows are padded less, and products may divide better."""
        while not self.stopped:
            best = sorted(
                (each for each in self.judged.values() if each.fits and each.seconds),
                key=lambda each: each.seconds or 0.0,
            )
            same = [each for each in best if each.candidate.group == "same result"]
            asked = []
            for each in dict.fromkeys(found.candidate for found in (*best[:2], *same[:1])):
                smaller = [size for size in self._sizes() if size < each.micro_batch_size]
                if smaller:
                    asked.append(self.candidate(smaller[0], each.choices))
            if all(each in self.judged for each in asked):
                return
            list(pool.map(self._judged, asked))

    # ---- one candidate ----

    def _judged(self, candidate: SetupCandidate) -> Judged | None:
        """None: there is no time left."""
        if candidate in self.judged:
            return self.judged[candidate]
        if self.stopped or (candidate != self.own and not self.time_limit.has_time()):
            self.stopped = True
            return None
        began = self.time_limit.clock()
        found = self.judge(candidate)
        self.time_limit.add(found, self.time_limit.clock() - began)
        with self._lock:
            self.judged[candidate] = found
            self.excluded.pop(candidate, None)
            if found.is_other and found.why == ROWS_COMPARED:
                self.batch = ("another method", found.why)
        self.said(found)
        return found

    def _exclude(self, candidate: SetupCandidate, by: Judged) -> None:
        with self._lock:
            if candidate not in self.judged:
                self.excluded[candidate] = by.candidate.name


def _way(*choices: Alternative | None) -> tuple[Alternative, ...]:
    found = [each for each in choices if each is not None]
    slots = {each.slot: each for each in found}  # a later choice takes the place of an earlier one
    if "engine" in slots or any("arguments.optim" in each.settings for each in found if each.slot != "optimizer"):
        slots.pop("optimizer", None)
    if "padding" in slots:
        slots.pop("attention", None)  # it has its own
    return tuple(slots.values())


def _ends(choices: Sequence[Alternative | None]) -> list[Alternative | None]:
    return [choices[0]] if len(choices) == 1 else [choices[0], choices[-1]]
