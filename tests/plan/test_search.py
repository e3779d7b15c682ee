"""The search: what it traces, what it need not, and what comes first. Memory and time follow a formula here, so that
what is best is known; real traces are in test_traces.py and tests/cli/test_plan.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from hf_memkit.common.units import GIB
from hf_memkit.plan.candidate import Alternative, SetupCandidate
from hf_memkit.plan.judgement import Judged
from hf_memkit.plan.search import Search
from hf_memkit.plan.time_limit import LIMIT_S, MOST_TIMES, TimeLimit
from tests.plan.made_plans import setup

CHECKPOINTING = Alternative("checkpointing", "checkpointing", costs_time=True)
SECOND = Alternative("checkpointing", "every 2nd", costs_time=True)
SMALL = Alternative("small optimizer", "8-bit", {}, "nearly the same", "8 bits")
OFFLOAD = Alternative("engine", "offload", engine="zero2-offload", costs_time=True)
BF16 = Alternative("precision", "bf16", {}, "nearly the same", "bf16")
SEGMENTS = Alternative("allocator", "segments", {"environment.PYTORCH_ALLOC_CONF": "expandable_segments:True"})
WAYS: Mapping[str, list[Alternative | None]] = {
    "checkpointing": [None, SECOND, CHECKPOINTING],
    "small optimizer": [None, SMALL],
    "engine": [None, OFFLOAD],
    "allocator": [None, SEGMENTS],
}


class Formula:
    """GiB: `fixed`, and `row` a sequence; less with what frees memory. Slower with what costs time, and with smaller
    micro-batches. What the allocator reserves beyond that, `segments` saves."""

    def __init__(self, usable_gib: float, *, fixed: float = 10.0, row: float = 2.0, beyond: float = 0.0) -> None:
        self.usable_gib, self.fixed, self.row, self.beyond = usable_gib, fixed, row, beyond
        self.asked: list[str] = []

    def __call__(self, candidate: SetupCandidate) -> Judged:
        self.asked.append(candidate.name)
        slots = {each.slot: each for each in candidate.choices}
        row = self.row * {None: 1.0, SECOND: 0.6, CHECKPOINTING: 0.2}[slots.get("checkpointing")]
        row *= 0.5 if "precision" in slots else 1
        fixed = self.fixed * (0.7 if "small optimizer" in slots else 1) * (0.3 if "engine" in slots else 1)
        needs = fixed + row * candidate.micro_batch_size
        seconds = (10.0 + 0.1 * candidate.accumulation) * (3 if "engine" in slots else 1)
        seconds *= {None: 1.0, SECOND: 1.15, CHECKPOINTING: 1.3}[slots.get("checkpointing")]
        made = setup(candidate.micro_batch_size, candidate.accumulation, needs, seconds)
        assert made.prediction is not None
        reserved = int((needs + (0 if "allocator" in slots else self.beyond) - 0.5) * GIB)
        prediction = replace(
            made.prediction,
            capacity_bytes=int(self.usable_gib / 0.92 * GIB) + 1,
            peak_reserved_bytes=(reserved, reserved),
            verdict=None,
        )
        fits = prediction.total_bytes[1] <= self.usable_gib * GIB
        return replace(made, candidate=candidate, prediction=prediction, fits=fits, why="" if fits else "too large")


OWN = SetupCandidate(8, 2)


def searched(judge: Formula, own: SetupCandidate = OWN, **known: Any) -> Search:
    found = Search(judge, own, known.pop("ways", WAYS), known.pop("batch", ("same result", "")), **known)
    found.run()
    return found


def fastest(found: Search) -> SetupCandidate:
    fitting = [each for each in found.judged.values() if each.fits]
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
    """Would notice: a micro-batch that is given up too early, a way that is not tried, one wrongly excluded."""
    found = searched(Formula(usable))
    every = [
        judge(found.candidate(size, choices))
        for judge in (Formula(usable),)
        for size in (16, 8, 4, 2, 1)
        for choices in ((), (SECOND,), (CHECKPOINTING,), (SMALL,), (SECOND, SMALL), (CHECKPOINTING, SMALL))
    ]
    truth = min((each for each in every if each.fits), key=lambda each: each.seconds or 0.0)
    assert found.judged[truth.candidate].fits and fastest(found).name == truth.candidate.name == best


def test_beside_an_engine_less_is_recomputed_where_there_is_room() -> None:
    """Would notice: offloading with full checkpointing only, where without it the whole batch fits and is faster."""
    ways = {**WAYS, "small optimizer": [None]}
    found = searched(Formula(38.0, fixed=60.0, row=1.0), ways=ways)
    assert fastest(found).choices == (OFFLOAD,) and fastest(found).micro_batch_size == 16


def test_a_micro_batch_that_is_another_training_says_nothing_of_memory() -> None:
    """Would notice: "nothing fits" where the smallest micro-batches would train on other batches, with which memory
    has nothing to do; or where the script refuses the smallest."""

    class Others(Formula):
        def __call__(self, candidate: SetupCandidate) -> Judged:
            found = super().__call__(candidate)
            is_other = candidate.micro_batch_size < 4
            return replace(found, is_other=True, fits=False, why="other steps") if is_other else found

    found = searched(Others(12.0))
    assert found.judged[found.candidate(4, (CHECKPOINTING,))].fits

    class Refused(Formula):
        def __call__(self, candidate: SetupCandidate) -> Judged:
            found = super().__call__(candidate)
            return Judged(candidate, why="refused") if candidate.micro_batch_size == 1 else found

    found = searched(Refused(12.0))
    assert found.judged[found.candidate(4, (CHECKPOINTING,))].fits


def test_another_precision_is_tried_where_8_bits_do_not_fit() -> None:
    """Would notice: bf16, which halves what rows take, given up because states in 8 bits were not enough."""
    ways = {"checkpointing": [None], "small optimizer": [None, SMALL], "precision": [None, BF16]}
    found = searched(Formula(17.5, fixed=10.0, row=12.0), ways=ways)
    assert fastest(found).choices == (BF16,)
    assert not any(BF16 in each.choices for each in found.excluded if Formula(17.5, fixed=10.0, row=12.0)(each).fits)
    both = searched(Formula(13.5, fixed=10.0, row=12.0), ways=ways)
    assert set(fastest(both).choices) == {SMALL, BF16}
    beside = searched(Formula(9.0, fixed=10.0, row=2.0), ways=ways)
    fitting = [set(each.candidate.choices) for each in beside.judged.values() if each.fits]
    assert {SMALL} in fitting and {SMALL, BF16} in fitting, "bf16 alone does not fit; with 8 bits it is the faster one"


def test_a_leanest_way_that_is_refused_excludes_nothing() -> None:
    """Would notice: all other ways given up because a rule, or the script, refuses the leanest one."""

    class Refusing(Formula):
        def __call__(self, candidate: SetupCandidate) -> Judged:
            refused = CHECKPOINTING in candidate.choices
            return Judged(candidate, why="refused") if refused else super().__call__(candidate)

    assert fastest(searched(Refusing(30.0), own=SetupCandidate(16, 1))).choices in ((), (SECOND,), (SMALL,))


def test_a_method_goes_with_what_the_rest_has() -> None:
    """Would notice: LoRA without the fused optimizer or the precision that all else is compared with, an optimizer
    beside another one."""
    fused = Alternative("optimizer", "fused", {"arguments.optim": "adamw_torch_fused"})
    lora = Alternative("method", "LoRA", {"adapter.r": 16}, "another method", code="model = …")
    lomo = Alternative("method", "lomo", {"arguments.optim": "lomo"}, "another method")
    ways = {"checkpointing": [None], "optimizer": [fused], "precision": [None, BF16], "method": [None, lora, lomo]}
    found = {each.choices for each in searched(Formula(60.0), ways=ways).judged if each.micro_batch_size == 16}
    assert {(fused, lora), (fused, BF16, lora), (lomo,), (BF16, lomo)} <= found
    assert not any(fused in each and lomo in each for each in found)


def test_what_is_excluded_would_not_fit_and_names_what_was_traced() -> None:
    """Would notice: an exclusion by a setup that needs more, or that nobody has traced."""
    judge = Formula(12.0)
    found = searched(judge)
    assert found.excluded and not set(found.excluded) & set(found.judged)
    for candidate, by in found.excluded.items():
        assert by in judge.asked and not Formula(12.0)(candidate).fits
    assert len(judge.asked) == len(set(judge.asked)), "traced twice"


def test_other_sequences_than_the_script_s() -> None:
    """Would notice: a setup of the script's own batch among them, one that does not divide what was asked for, the
    script as it stands not judged."""
    found = searched(Formula(14.0), SetupCandidate(7, 1), per_gpu=12)
    sizes = {each.micro_batch_size: each.accumulation for each in found.judged}
    assert sizes.pop(7) == 1 and len(sizes) > 2
    assert all(size * accumulation == 12 for size, accumulation in sizes.items())
    assert found.with_its_batch() == SetupCandidate(6, 2)
    assert Search(Formula(14.0), OWN, WAYS, ("same result", ""), per_gpu=24).with_its_batch().name == "8 × 3"


def test_the_fastest_of_the_same_result_has_neighbours() -> None:
    """Would notice: half the micro-batch tried only of what is nearly the same, because that is faster."""

    class Padded(Formula):
        def __call__(self, candidate: SetupCandidate) -> Judged:
            flat = any(each.slot == "padding" for each in candidate.choices)
            found = super().__call__(candidate)
            assert found.step_time is not None
            share = 0.5 if flat else 0.8 if candidate.micro_batch_size == 8 else 1.0
            low, middle, high = found.step_time.seconds
            time = replace(found.step_time, seconds=(share * low, share * middle, share * high))
            return replace(found, step_time=time)

    flat = Alternative("padding", "padding-free", {}, "nearly the same", "no padding")
    found = searched(Padded(80.0), ways={"checkpointing": [None, CHECKPOINTING], "padding": [None, flat]})
    assert found.judged[found.candidate(16, (flat,))].fits and found.judged[found.candidate(8, ())].fits
    names = {each.name for each in found.judged}
    assert {"8 × 2", "16 × 1, checkpointing, padding-free"} <= names


def test_what_another_micro_batch_does_to_the_result_is_said() -> None:
    """Would notice: a setup with other draws of dropout that competes as if it had the same result."""
    found = searched(Formula(19.0), batch=("nearly the same", "dropout draws other numbers"))
    groups = {each.micro_batch_size: each.group for each in found.judged if not each.choices}
    assert groups.pop(8) == "same result" and set(groups.values()) == {"nearly the same"}
    fixed = searched(Formula(19.0), batch=("another method", "rows are compared"))
    assert {each.micro_batch_size for each in fixed.judged} == {8}


def test_the_allocator_s_setting_helps_only_where_the_need_itself_fits() -> None:
    """Would notice: a trace for a setting that changes none, or a setup lost to what the allocator reserves beyond."""
    found = searched(Formula(28.0, beyond=4.0))
    assert found.judged[found.candidate(8, (SEGMENTS,))].fits
    tight = Formula(25.0, beyond=4.0)
    searched(tight)
    assert "8 × 2, segments" not in tight.asked


FUSED = Alternative("loss", "fused")


class Padded(Formula):
    """Rows of unequal length and a large vocabulary: a small micro-batch pads less, logits take most of a row, and a
    fused loss costs more the smaller its micro-batch is. Each takes `trace_s` to judge, one at a time."""

    def __init__(self, usable_gib: float, *, trace_s: float = 0.0, **known: float) -> None:
        super().__init__(usable_gib, **known)
        self.trace_s, self.now = trace_s, 0.0

    def __call__(self, candidate: SetupCandidate) -> Judged:
        self.asked.append(candidate.name)
        plain = Formula(self.usable_gib, fixed=self.fixed, row=self.row, beyond=self.beyond)
        found = plain(replace(candidate, choices=candidate.without("loss")))
        assert found.prediction is not None and found.step_time is not None
        fused, size = FUSED in candidate.choices, candidate.micro_batch_size
        reserved = found.prediction.peak_reserved_bytes[1] + int((0 if fused else 2.0 * size) * GIB)
        prediction = replace(found.prediction, peak_reserved_bytes=(reserved, reserved))
        factor = 0.5 + 0.05 * size + (1.2 / size if fused else 0.0)
        low, middle, high = found.step_time.seconds
        time = replace(found.step_time, seconds=(factor * low, factor * middle, factor * high))
        self.now += self.trace_s
        fits = prediction.total_bytes[1] <= self.usable_gib * GIB
        return replace(
            found, candidate=candidate, prediction=prediction, step_time=time, fits=fits,
            why="" if fits else "too large",
        )  # fmt: skip

    def clock(self) -> float:
        return self.now


WITH_FUSED = {"loss": [None, FUSED], **WAYS}


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the order of traces is the same every time."""
    monkeypatch.setattr("hf_memkit.plan.search.AT_ONCE", 1)


def default_search(judge: Padded, own: SetupCandidate) -> Search:
    return searched(judge, own, ways=WITH_FUSED, time_limit=TimeLimit(clock=judge.clock))


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("usable", [11.0, 13.0, 15.0, 18.0, 24.0, 40.0])
def test_what_predict_proposes_and_the_ends_come_first(usable: float) -> None:
    """Would notice: a plan that is worse than the setup that `memkit predict` proposes of the same job, because the
    search was stopped before it came to that; fused kernels taken for granted, though they cost more than they
    save."""
    own = SetupCandidate(8, 1)
    near = Search(Padded(usable), own, WITH_FUSED, ("same result", "")).nearest()
    assert near is not None
    judge = Padded(usable)
    searched(judge, own, ways=WITH_FUSED)
    refined = [at for at, name in enumerate(judge.asked) if name.split()[0] not in ("8", "1")]
    assert judge.asked.index(near.candidate.name) <= 14
    leanest = ("1 × 8, checkpointing", "1 × 8, fused, checkpointing")
    if min(refined, default=99) < 99:
        assert all(judge.asked.index(each) < min(refined) for each in leanest), judge.asked


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("usable", [11.0, 13.0, 15.0, 18.0, 24.0, 40.0])
@pytest.mark.parametrize("own", [SetupCandidate(8, 1), SetupCandidate(16, 2)])
def test_the_default_search_ends_near_the_best(usable: float, own: SetupCandidate) -> None:
    """Would notice: a headline that costs half as long again as what a longer search finds. On a busy machine eight
    setups are judged in the default time."""
    judge = Padded(usable, trace_s=LIMIT_S / 8)
    found, full = default_search(judge, own), searched(Padded(usable), own, ways=WITH_FUSED)
    best = [each.judged[fastest(each)].seconds or 0.0 for each in (found, full)]
    assert best[0] <= 1.15 * best[1], judge.asked
    assert judge.now <= MOST_TIMES * LIMIT_S + 2 * judge.trace_s


@pytest.mark.usefixtures("one_at_a_time")
def test_an_improvement_is_waited_for_and_no_more() -> None:
    """Would notice: a search that ends at its default limit while it still improves, one that goes on for nothing, one
    that goes beyond what was typed."""
    of_time = Padded(13.0, trace_s=LIMIT_S / 4)
    assert default_search(of_time, SetupCandidate(8, 1)).stopped and len(of_time.asked) > 4
    in_vain = Padded(1.0, trace_s=LIMIT_S / 2)
    assert default_search(in_vain, SetupCandidate(8, 1)).stopped and in_vain.now > 2 * LIMIT_S
    typed = Padded(13.0, trace_s=LIMIT_S / 4)
    searched(typed, SetupCandidate(8, 1), ways=WITH_FUSED, time_limit=TimeLimit(LIMIT_S, typed.clock))
    assert typed.now <= LIMIT_S + typed.trace_s


@pytest.mark.usefixtures("one_at_a_time")
def test_a_stopped_search_excludes_nothing_that_it_has_not_looked_at() -> None:
    """Would notice: ways that are said not to fit because the smallest micro-batch was not reached."""
    for limit in range(1, 12):
        judge = Padded(13.0, trace_s=1.0)
        limited = TimeLimit(float(limit), judge.clock)
        found = searched(judge, SetupCandidate(8, 1), ways=WITH_FUSED, time_limit=limited)
        assert not any(Padded(13.0)(each).fits for each in found.excluded), limit


class States(Formula):
    """The optimizer's step needs `fixed`, whatever the micro-batch is."""

    def __call__(self, candidate: SetupCandidate) -> Judged:
        found = super().__call__(candidate)
        slots = {each.slot for each in candidate.choices}
        stepping = self.fixed * (0.7 if "small optimizer" in slots else 1) * (0.3 if "engine" in slots else 1)
        assert found.prediction is not None
        return replace(found, prediction=replace(found.prediction, phases={"optimizer": (int(stepping * GIB), None)}))


def test_where_the_states_alone_do_not_fit_nothing_else_of_them_is_traced() -> None:
    """Would notice: every micro-batch and checkpointing of an optimizer whose states are too large, one after the
    other, before what fits; or "nothing fits" by a setup that is far from the smallest."""
    judge = States(30.0, fixed=40.0)
    found = searched(judge)
    plain = [each for each in judge.asked if "8-bit" not in each and "offload" not in each]
    assert plain == ["8 × 2"] and found.judged[found.candidate(4, (CHECKPOINTING, SMALL))].fits
    assert all(not States(30.0, fixed=40.0)(each).fits for each in found.excluded)
    in_vain = searched(States(5.0, fixed=40.0))
    assert not any(each.fits for each in in_vain.judged.values()) and not in_vain.stopped
    assert in_vain.candidate(1, (CHECKPOINTING, SMALL)) in in_vain.judged, "how much is missing is known"


def test_ram_that_is_short_is_short_with_every_micro_batch() -> None:
    """Would notice: smaller micro-batches traced, and other settings of the allocator, where RAM is what lacks."""

    class Host(Formula):
        def __call__(self, candidate: SetupCandidate) -> Judged:
            found = super().__call__(candidate)
            if "engine" not in {each.slot for each in candidate.choices}:
                return found
            assert found.prediction is not None
            prediction = replace(found.prediction, verdict="does not fit", why="it needs 90 GiB of RAM")
            return replace(found, prediction=prediction, fits=False, why=prediction.why)

    judge = Host(12.0)
    searched(judge)
    assert [each for each in judge.asked if "offload" in each] == ["16 × 1, checkpointing, offload"]


def test_ctrl_c_keeps_what_there_is() -> None:
    """Would notice: what was judged being lost with the exception."""

    def said(judged: Judged) -> None:
        if not judged.candidate.choices and judged.candidate.micro_batch_size == 16:
            raise KeyboardInterrupt

    found = searched(Formula(30.0), said=said)
    assert found.stopped_by_hand and fastest(found)


@pytest.mark.parametrize(
    ("usable", "nearest"),
    [(27.0, "8 × 2"), (19.0, "4 × 4"), (11.0, "2 × 8, checkpointing"), (8.0, "2 × 8, checkpointing, 8-bit")],
)
def test_the_nearest_that_fits_changes_least(usable: float, nearest: str) -> None:
    """Would notice: checkpointing proposed where a smaller micro-batch does, or nothing where 8 bits do."""
    found = Search(Formula(usable), SetupCandidate(16, 1), WAYS, ("same result", ""))
    best = found.nearest()
    assert best is not None and best.fits and best.candidate.name == nearest
    assert Search(Formula(1.0), SetupCandidate(16, 1), WAYS, ("same result", "")).nearest() is None
