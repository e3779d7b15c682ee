"""The search: what it traces, what it excludes, and in which order. Memory and time follow a formula here, so that the
best setup is known; test_traces.py and tests/cli/test_plan.py use real traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from hf_memkit.common.units import GIB
from hf_memkit.plan.candidate import Candidate, Choice, without
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.search import Search
from hf_memkit.plan.time_limit import LIMIT_S, MOST_TIMES, TimeLimit
from tests.plan.made_plans import setup

CHECKPOINTING = Choice("checkpointing", "checkpointing", costs_time=True)
SECOND = Choice("checkpointing", "every 2nd", costs_time=True)
SMALL = Choice("small optimizer", "8-bit", {}, "nearly the same", "8 bits")
OFFLOAD = Choice("engine", "offload", engine="zero2-offload", costs_time=True)
BF16 = Choice("precision", "bf16", {}, "nearly the same", "bf16")
SEGMENTS = Choice("allocator", "segments", {"environment.PYTORCH_ALLOC_CONF": "expandable_segments:True"})
CHOICES: Mapping[str, list[Choice | None]] = {
    "checkpointing": [None, SECOND, CHECKPOINTING],
    "small optimizer": [None, SMALL],
    "engine": [None, OFFLOAD],
    "allocator": [None, SEGMENTS],
}


class Formula:
    """Judges candidates by a formula: they need `fixed` GiB and `row` GiB a sequence, times a factor for each choice.
    Smaller micro-batches and choices that cost time are slower. `unused`: GiB that the allocator reserves in addition,
    unless `SEGMENTS` is chosen. `calls`: names of the judged candidates."""

    def __init__(self, usable_gib: float, *, fixed: float = 10.0, row: float = 2.0, unused: float = 0.0) -> None:
        self.usable_gib, self.fixed, self.row, self.unused = usable_gib, fixed, row, unused
        self.calls: list[str] = []

    def __call__(self, candidate: Candidate) -> Judgement:
        self.calls.append(candidate.name)
        slots = {each.slot: each for each in candidate.choices}
        row = self.row * {None: 1.0, SECOND: 0.6, CHECKPOINTING: 0.2}[slots.get("checkpointing")]
        row *= 0.5 if "precision" in slots else 1
        fixed = self.fixed * (0.7 if "small optimizer" in slots else 1) * (0.3 if "engine" in slots else 1)
        needs = fixed + row * candidate.micro_batch_size
        seconds = (10.0 + 0.1 * candidate.accumulation) * (3 if "engine" in slots else 1)
        seconds *= {None: 1.0, SECOND: 1.15, CHECKPOINTING: 1.3}[slots.get("checkpointing")]
        made = setup(candidate.micro_batch_size, candidate.accumulation, needs, seconds)
        assert made.prediction is not None
        reserved = int((needs + (0 if "allocator" in slots else self.unused) - 0.5) * GIB)
        prediction = replace(
            made.prediction,
            capacity_bytes=int(self.usable_gib / 0.92 * GIB) + 1,
            peak_reserved_bytes=(reserved, reserved),
            verdict=None,
        )
        fits = prediction.total_bytes[1] <= self.usable_gib * GIB
        return replace(made, candidate=candidate, prediction=prediction, fits=fits, why="" if fits else "too large")


OWN = Candidate(8, 2)


def finished_search(judge: Formula, own: Candidate = OWN, **options: Any) -> Search:
    options = {"choices": CHOICES, "batch_effect": ("same result", ""), **options}
    search = Search(judge, own, **options)
    search.run()
    return search


def fastest(search: Search) -> Candidate:
    fitting = [each for each in search.judgements.values() if each.fits]
    return min(fitting, key=lambda each: (each.seconds or 0.0, len(each.candidate.choices))).candidate


@pytest.mark.parametrize(
    ("usable", "best"),
    [
        (50.0, "16 × 1"),  # all of it in one pass
        (27.0, "8 × 2"),
        (19.0, "4 × 4"),
        (14.5, "2 × 8"),
        (10.5, "1 × 16, 8-bit"),  # faster than what fits with the same result
    ],
)
def test_the_fastest_that_fits_is_among_what_is_traced(usable: float, best: str) -> None:
    """Would notice: a micro-batch that is given up too early; a combination that is not tried or wrongly excluded."""
    search = finished_search(Formula(usable))
    every = [
        judge(search.candidate(size, choices))
        for judge in (Formula(usable),)
        for size in (16, 8, 4, 2, 1)
        for choices in ((), (SECOND,), (CHECKPOINTING,), (SMALL,), (SECOND, SMALL), (CHECKPOINTING, SMALL))
    ]
    truth = min((each for each in every if each.fits), key=lambda each: each.seconds or 0.0)
    assert search.judgements[truth.candidate].fits and fastest(search).name == truth.candidate.name == best


def test_an_engine_with_room_recomputes_less() -> None:
    """Would notice: offloading with full checkpointing only, where without it the whole batch fits and is faster."""
    choices = {**CHOICES, "small optimizer": [None]}
    search = finished_search(Formula(38.0, fixed=60.0, row=1.0), choices=choices)
    assert fastest(search).choices == (OFFLOAD,) and fastest(search).micro_batch_size == 16


def test_a_micro_batch_that_is_another_training_says_nothing_about_memory() -> None:
    """Would notice: "nothing fits" where the smallest micro-batches train on other batches, which says nothing about
    memory, or where the script refuses the smallest."""

    class OtherBelowFour(Formula):
        def __call__(self, candidate: Candidate) -> Judgement:
            judgement = super().__call__(candidate)
            is_other = candidate.micro_batch_size < 4
            return replace(judgement, is_other=True, fits=False, why="other steps") if is_other else judgement

    search = finished_search(OtherBelowFour(12.0))
    assert search.judgements[search.candidate(4, (CHECKPOINTING,))].fits

    class OneRefused(Formula):
        def __call__(self, candidate: Candidate) -> Judgement:
            judgement = super().__call__(candidate)
            return Judgement(candidate, why="refused") if candidate.micro_batch_size == 1 else judgement

    search = finished_search(OneRefused(12.0))
    assert search.judgements[search.candidate(4, (CHECKPOINTING,))].fits


def test_another_precision_is_tried_where_8_bits_do_not_fit() -> None:
    """Would notice: bf16, which halves the activations, given up because 8-bit states were not enough."""
    choices = {"checkpointing": [None], "small optimizer": [None, SMALL], "precision": [None, BF16]}
    search = finished_search(Formula(17.5, fixed=10.0, row=12.0), choices=choices)
    assert fastest(search).choices == (BF16,)
    assert not any(BF16 in each.choices for each in search.excluded if Formula(17.5, fixed=10.0, row=12.0)(each).fits)
    both = finished_search(Formula(13.5, fixed=10.0, row=12.0), choices=choices)
    assert set(fastest(both).choices) == {SMALL, BF16}
    both_fit = finished_search(Formula(9.0, fixed=10.0, row=2.0), choices=choices)
    fitting = [set(each.candidate.choices) for each in both_fit.judgements.values() if each.fits]
    assert {SMALL} in fitting and {SMALL, BF16} in fitting, "bf16 alone does not fit; with 8 bits it is the faster one"


def test_a_refused_combination_excludes_nothing() -> None:
    """Would notice: all combinations given up because a rule or the script refuses the one that needs least memory."""

    class Refusing(Formula):
        def __call__(self, candidate: Candidate) -> Judgement:
            refused = CHECKPOINTING in candidate.choices
            return Judgement(candidate, why="refused") if refused else super().__call__(candidate)

    assert fastest(finished_search(Refusing(30.0), own=Candidate(16, 1))).choices in ((), (SECOND,), (SMALL,))


def test_a_method_is_combined_with_the_best_other_choices() -> None:
    """Would notice: LoRA without the fused optimizer or the precision of the setups that it is compared with; two
    optimizers in one setup."""
    fused = Choice("optimizer", "fused", {"arguments.optim": "adamw_torch_fused"})
    lora = Choice("method", "LoRA", {"adapter.r": 16}, "another method", code="model = …")
    lomo = Choice("method", "lomo", {"arguments.optim": "lomo"}, "another method")
    choices = {
        "checkpointing": [None],
        "optimizer": [fused],
        "precision": [None, BF16],
        "method": [None, lora, lomo],
    }
    search = finished_search(Formula(60.0), choices=choices)
    tried = {each.choices for each in search.judgements if each.micro_batch_size == 16}
    assert {(fused, lora), (fused, BF16, lora), (lomo,), (BF16, lomo)} <= tried
    assert not any(fused in choices and lomo in choices for choices in tried)


def test_an_excluded_candidate_does_not_fit_and_names_a_traced_one() -> None:
    """Would notice: an exclusion by a setup that needs more, or that was not traced."""
    judge = Formula(12.0)
    search = finished_search(judge)
    assert search.excluded and not set(search.excluded) & set(search.judgements)
    for candidate, by in search.excluded.items():
        assert by in judge.calls and not Formula(12.0)(candidate).fits
    assert len(judge.calls) == len(set(judge.calls)), "traced twice"


def test_another_number_of_sequences_than_the_script_s() -> None:
    """Would notice: a setup with the script's own batch among the candidates; a micro-batch that does not divide the
    requested number; the unchanged script not judged."""
    search = finished_search(Formula(14.0), Candidate(7, 1), per_gpu=12)
    sizes = {each.micro_batch_size: each.accumulation for each in search.judgements}
    assert sizes.pop(7) == 1 and len(sizes) > 2
    assert all(size * accumulation == 12 for size, accumulation in sizes.items())
    assert search.script_with_requested_batch() == Candidate(6, 2)
    assert (
        Search(Formula(14.0), OWN, CHOICES, ("same result", ""), per_gpu=24).script_with_requested_batch().name
        == "8 × 3"
    )


def test_half_the_micro_batch_of_the_fastest_with_the_same_result_is_tried() -> None:
    """Would notice: half the micro-batch tried only for faster setups, which have nearly the same result."""

    class Padded(Formula):
        def __call__(self, candidate: Candidate) -> Judgement:
            flat = any(each.slot == "padding" for each in candidate.choices)
            judgement = super().__call__(candidate)
            assert judgement.step_time is not None
            share = 0.5 if flat else 0.8 if candidate.micro_batch_size == 8 else 1.0
            low, middle, high = judgement.step_time.seconds
            time = replace(judgement.step_time, seconds=(share * low, share * middle, share * high))
            return replace(judgement, step_time=time)

    flat = Choice("padding", "padding-free", {}, "nearly the same", "no padding")
    choices = {"checkpointing": [None, CHECKPOINTING], "padding": [None, flat]}
    search = finished_search(Padded(80.0), choices=choices)
    assert search.judgements[search.candidate(16, (flat,))].fits and search.judgements[search.candidate(8, ())].fits
    names = {each.name for each in search.judgements}
    assert {"8 × 2", "16 × 1, checkpointing, padding-free"} <= names


def test_another_micro_batch_has_the_group_of_its_effect() -> None:
    """Would notice: a setup with other draws of dropout that competes as if it had the same result."""
    search = finished_search(Formula(19.0), batch_effect=("nearly the same", "dropout draws other numbers"))
    groups = {each.micro_batch_size: each.group for each in search.judgements if not each.choices}
    assert groups.pop(8) == "same result" and set(groups.values()) == {"nearly the same"}
    fixed = finished_search(Formula(19.0), batch_effect=("another method", "rows are compared"))
    assert {each.micro_batch_size for each in fixed.judgements} == {8}


def test_expandable_segments_are_tried_only_where_the_allocated_peak_fits() -> None:
    """Would notice: a trace with a setting that cannot help; a setup that only unused reserved memory excludes."""
    search = finished_search(Formula(28.0, unused=4.0))
    assert search.judgements[search.candidate(8, (SEGMENTS,))].fits
    tight = Formula(25.0, unused=4.0)
    finished_search(tight)
    assert "8 × 2, segments" not in tight.calls


FUSED = Choice("loss", "fused")


class Padded(Formula):
    """Rows of unequal length and a large vocabulary: a small micro-batch pads less, logits take most memory of a row,
    and a fused loss costs more with a smaller micro-batch. A judgement takes `trace_s` on `clock`."""

    def __init__(self, usable_gib: float, *, trace_s: float = 0.0, **formula: float) -> None:
        super().__init__(usable_gib, **formula)
        self.trace_s, self.now = trace_s, 0.0

    def __call__(self, candidate: Candidate) -> Judgement:
        self.calls.append(candidate.name)
        plain = Formula(self.usable_gib, fixed=self.fixed, row=self.row, unused=self.unused)
        judgement = plain(replace(candidate, choices=without(candidate.choices, "loss")))
        assert judgement.prediction is not None and judgement.step_time is not None
        fused, size = FUSED in candidate.choices, candidate.micro_batch_size
        reserved = judgement.prediction.peak_reserved_bytes[1] + int((0 if fused else 2.0 * size) * GIB)
        prediction = replace(judgement.prediction, peak_reserved_bytes=(reserved, reserved))
        factor = 0.5 + 0.05 * size + (1.2 / size if fused else 0.0)
        low, middle, high = judgement.step_time.seconds
        time = replace(judgement.step_time, seconds=(factor * low, factor * middle, factor * high))
        self.now += self.trace_s
        fits = prediction.total_bytes[1] <= self.usable_gib * GIB
        return replace(
            judgement, candidate=candidate, prediction=prediction, step_time=time, fits=fits,
            why="" if fits else "too large",
        )  # fmt: skip

    def clock(self) -> float:
        return self.now


WITH_FUSED = {"loss": [None, FUSED], **CHOICES}


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the order of traces the same every time."""
    monkeypatch.setattr("hf_memkit.plan.search.PARALLEL_TRACES", 1)


def default_search(judge: Padded, own: Candidate) -> Search:
    return finished_search(judge, own, choices=WITH_FUSED, time_limit=TimeLimit(clock=judge.clock))


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("usable", [11.0, 13.0, 15.0, 18.0, 24.0, 40.0])
def test_predict_s_proposal_and_the_smallest_micro_batches_come_first(usable: float) -> None:
    """Would notice: a plan that is worse than the proposal of `memkit predict` for the same job, because the search
    was stopped before it reached that; fused kernels always chosen, though they may cost more than they save."""
    own = Candidate(8, 1)
    near = Search(Padded(usable), own, WITH_FUSED, ("same result", "")).nearest()
    assert near is not None
    judge = Padded(usable)
    finished_search(judge, own, choices=WITH_FUSED)
    refined = [at for at, name in enumerate(judge.calls) if name.split()[0] not in ("8", "1")]
    assert judge.calls.index(near.candidate.name) <= 14
    leanest = ("1 × 8, checkpointing", "1 × 8, fused, checkpointing")
    if refined:
        assert all(judge.calls.index(name) < min(refined) for name in leanest), judge.calls


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("usable", [11.0, 13.0, 15.0, 18.0, 24.0, 40.0])
@pytest.mark.parametrize("own", [Candidate(8, 1), Candidate(16, 2)])
def test_the_default_search_ends_near_the_best(usable: float, own: Candidate) -> None:
    """Would notice: a proposal that takes half as long again as that of a longer search. A busy machine judges eight
    setups in the default time."""
    judge = Padded(usable, trace_s=LIMIT_S / 8)
    default, full = default_search(judge, own), finished_search(Padded(usable), own, choices=WITH_FUSED)
    best = [search.judgements[fastest(search)].seconds or 0.0 for search in (default, full)]
    assert best[0] <= 1.15 * best[1], judge.calls
    assert judge.now <= MOST_TIMES * LIMIT_S + 2 * judge.trace_s


@pytest.mark.usefixtures("one_at_a_time")
def test_the_default_search_takes_longer_only_while_it_improves() -> None:
    """Would notice: a search that ends at its default limit while it still improves, one that never ends, one that
    exceeds the limit of `--limit`."""
    improving = Padded(13.0, trace_s=LIMIT_S / 4)
    assert default_search(improving, Candidate(8, 1)).stopped and len(improving.calls) > 4
    in_vain = Padded(1.0, trace_s=LIMIT_S / 2)
    assert default_search(in_vain, Candidate(8, 1)).stopped and in_vain.now > 2 * LIMIT_S
    typed = Padded(13.0, trace_s=LIMIT_S / 4)
    finished_search(typed, Candidate(8, 1), choices=WITH_FUSED, time_limit=TimeLimit(LIMIT_S, typed.clock))
    assert typed.now <= LIMIT_S + typed.trace_s


@pytest.mark.usefixtures("one_at_a_time")
def test_a_stopped_search_excludes_only_what_a_trace_excludes() -> None:
    """Would notice: combinations excluded because the search did not reach their smallest micro-batch."""
    for limit in range(1, 12):
        judge = Padded(13.0, trace_s=1.0)
        limited = TimeLimit(float(limit), judge.clock)
        search = finished_search(judge, Candidate(8, 1), choices=WITH_FUSED, time_limit=limited)
        assert not any(Padded(13.0)(candidate).fits for candidate in search.excluded), limit


class States(Formula):
    """The optimizer's step needs `fixed` GiB with every micro-batch."""

    def __call__(self, candidate: Candidate) -> Judgement:
        judgement = super().__call__(candidate)
        slots = {each.slot for each in candidate.choices}
        stepping = self.fixed * (0.7 if "small optimizer" in slots else 1) * (0.3 if "engine" in slots else 1)
        assert judgement.prediction is not None
        prediction = replace(judgement.prediction, phases={"optimizer": (int(stepping * GIB), None)})
        return replace(judgement, prediction=prediction)


def test_states_that_do_not_fit_exclude_all_their_micro_batches() -> None:
    """Would notice: every micro-batch and checkpointing of an optimizer whose states are too large traced before a
    setup that fits; "nothing fits" with a setup that is far from the smallest."""
    judge = States(30.0, fixed=40.0)
    search = finished_search(judge)
    plain = [name for name in judge.calls if "8-bit" not in name and "offload" not in name]
    assert plain == ["8 × 2"] and search.judgements[search.candidate(4, (CHECKPOINTING, SMALL))].fits
    assert all(not States(30.0, fixed=40.0)(candidate).fits for candidate in search.excluded)
    in_vain = finished_search(States(5.0, fixed=40.0))
    assert not any(each.fits for each in in_vain.judgements.values()) and not in_vain.stopped
    assert in_vain.candidate(1, (CHECKPOINTING, SMALL)) in in_vain.judgements, "how much is missing is known"


def test_too_little_ram_ends_the_search_of_a_micro_batch() -> None:
    """Would notice: smaller micro-batches and other allocator settings traced where RAM does not suffice."""

    class Host(Formula):
        def __call__(self, candidate: Candidate) -> Judgement:
            judgement = super().__call__(candidate)
            if "engine" not in {each.slot for each in candidate.choices}:
                return judgement
            assert judgement.prediction is not None
            prediction = replace(judgement.prediction, verdict="does not fit", why="it needs 90 GiB of RAM")
            return replace(judgement, prediction=prediction, fits=False, why=prediction.why)

    judge = Host(12.0)
    finished_search(judge)
    assert [name for name in judge.calls if "offload" in name] == ["16 × 1, checkpointing, offload"]


def test_ctrl_c_keeps_the_judgements() -> None:
    """Would notice: judgements lost with the exception."""

    def interrupt(judgement: Judgement) -> None:
        if not judgement.candidate.choices and judgement.candidate.micro_batch_size == 16:
            raise KeyboardInterrupt

    search = finished_search(Formula(30.0), on_judged=interrupt)
    assert search.stopped_by_hand and fastest(search)


@pytest.mark.parametrize(
    ("usable", "nearest"),
    [(27.0, "8 × 2"), (19.0, "4 × 4"), (11.0, "2 × 8, checkpointing"), (8.0, "2 × 8, checkpointing, 8-bit")],
)
def test_the_nearest_that_fits_changes_least(usable: float, nearest: str) -> None:
    """Would notice: checkpointing where a smaller micro-batch suffices; no proposal where 8-bit states suffice."""
    best = Search(Formula(usable), Candidate(16, 1), CHOICES, ("same result", "")).nearest()
    assert best is not None and best.fits and best.candidate.name == nearest
    assert Search(Formula(1.0), Candidate(16, 1), CHOICES, ("same result", "")).nearest() is None
