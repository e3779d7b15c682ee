"""The plot of a plan: GiB against speed. Colours are CSS variables of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hf_memkit.catalog.fit import LIMIT_NAME, limit_bytes
from hf_memkit.common.answer.answer import Chart, View
from hf_memkit.common.answer.document import plotly_text
from hf_memkit.common.units import GIB
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.plan import Plan
from hf_memkit.setup.techniques.registry import GROUPS, Group

_COLOURS: Final[Mapping[Group, str]] = {
    "same result": "var(--optimizer)",
    "nearly the same": "var(--activations)",
    "another method": "var(--buffers)",
}
_TIGHT: Final = "var(--bad)"
_LOST: Final = "var(--soft)"
_CODE: Final = "var(--weights)"

_LABELS: Final = "ABC"
"""Labels of further points."""


def frontier(plan: Plan) -> tuple[Judgement, ...]:
    """The setups, smallest first, for which no other is both faster and smaller. They fit, have a known time and need
    no change of code."""
    setups: list[Judgement] = []
    pasted = [each for each in _timed(plan) if each.fits and not each.candidate.code]
    for each in sorted(pasted, key=lambda each: (each.needs_bytes, each.seconds or 0.0)):
        if not setups or (each.seconds or 0.0) < (setups[-1].seconds or 0.0):
            setups.append(each)
    return tuple(setups)


def plot(plan: Plan, place: str = "plan-0") -> Chart | None:
    """The chart of a plan; None if no time is known. `place`: its id on the page."""
    timed = _timed(plan)
    if not timed:
        return None
    front = frontier(plan)
    fitting = [each for each in timed if each.fits]
    tight = [each for each in timed if each.tight]
    lost = [each for each in timed if not each.fits and not each.tight]
    traces = [
        _line("frontier", [_gib(each) for each in front], [_rate(plan, each) for each in front], "var(--soft)", "dot")
    ]
    for group in GROUPS:
        of_group = [each for each in fitting if each.candidate.group == group and not each.candidate.code]
        traces.append(_marks(plan, group, of_group, _COLOURS[group]))
    code = [each for each in fitting if each.candidate.code]
    traces.append(_marks(plan, "needs other code", code, _CODE, symbol="diamond-open"))
    traces.append(_marks(plan, "tight", tight, _TIGHT, symbol="x"))
    traces.append(_marks(plan, "does not fit", lost, _LOST, symbol="x"))

    labels = _labelled(plan, timed, front)
    for label, each in labels:
        ring = {"best": "circle-open", "yours": "square-open"}.get(label, "circle")
        colour = "var(--ink)" if ring != "circle" else "rgba(0,0,0,0)"
        place_of_text = "bottom center" if label == "yours" else "top center"
        mark = _marks(plan, label, [each], colour, symbol=ring, size=20)
        where = {"textposition": place_of_text, "cliponaxis": False}
        traces.append(mark | where | {"mode": "markers+text", "text": [label]})

    usable = round(limit_bytes(plan.gpu.capacity_bytes) / GIB, 3)
    highest = max(_rate(plan, each) for each in timed)
    traces.append(_line(LIMIT_NAME, [usable, usable], [0, highest], "var(--bad)", "dash"))
    points = [
        (label, f"{each.candidate.name}: {_gib(each):.2f} GiB, {_rate(plan, each):,.0f} {plan.rate_unit}")
        for label, each in labels
    ]
    return Chart(
        place, "Each mark is a setup: further left needs less, higher is faster.",
        [trace for trace in traces if trace["x"]], "GiB of the GPU, at most (predicted)", plan.rate_unit, "closest",
        points, heading="Memory and speed", views=View.PAGE,
    )  # fmt: skip


def _line(name: str, x: Sequence[float], y: Sequence[float], colour: str, dash: str) -> dict[str, Any]:
    line = {"color": colour, "width": 2, "dash": dash}
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": line, "hoverinfo": "skip"}


def _labelled(plan: Plan, timed: Sequence[Judgement], front: Sequence[Judgement]) -> list[tuple[str, Judgement]]:
    """The best setup, the script's own, a faster one with nearly the same result, the smallest, and the fastest."""
    own = [("best", plan.proposed), ("yours", plan.own)]
    labels = [(label, each) for label, each in own if each is not None and each in timed]
    others: list[Judgement] = []
    for each in (plan.faster(), *front[:1], *reversed(front)):
        if each is not None and each in timed and each not in others and each not in (plan.proposed, plan.own):
            others.append(each)
    return [*labels, *zip(_LABELS, others, strict=False)]


def _timed(plan: Plan) -> list[Judgement]:
    return [each for each in plan.compared if each.prediction is not None and plan.rate(each)]


def _marks(
    plan: Plan, name: str, setups: Sequence[Judgement], colour: str, *, symbol: str = "circle", size: int = 11
) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": [_gib(each) for each in setups],
        "y": [_rate(plan, each) for each in setups],
        "customdata": [plotly_text(each.candidate.name) for each in setups],
        "marker": {"symbol": symbol, "size": size, "color": colour, "line": {"width": 1, "color": colour}},
        "hovertemplate": f"%{{customdata}}<br>%{{x:.2f}} GiB, %{{y:,.0f}} {plan.rate_unit}<extra>{name}</extra>",
    }  # fmt: skip


def _gib(judgement: Judgement) -> float:
    return round(judgement.needs_bytes / GIB, 3)


def _rate(plan: Plan, judgement: Judgement) -> float:
    return round(plan.rate(judgement) or 0.0, 3)
