"""A prediction as one HTML page that needs nothing else: what the terminal shows of it, and the GPU drawn as in a
rehearsal's report. In: a prediction. Out: a file, in the frame of every page of memkit's
(`measuring/report/document.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hf_memkit.cli.predict_render import answer, basis, sizes, warnings
from hf_memkit.measuring.report.bars import prediction_bars
from hf_memkit.measuring.report.document import document, write_document
from hf_memkit.measuring.report.html import el, join, lead, section, terms, tiles
from hf_memkit.measuring.report.page import WORDS
from hf_memkit.measuring.report.target import Target, read_target

if TYPE_CHECKING:
    from hf_memkit.prediction.prediction import Prediction
    from hf_memkit.setup.setup import Setup


_STATES: Final = {"fits": "good", "does not fit": "bad"}
_WORDS: Final = (
    *(each for each in WORDS if each[0] not in ("headroom", "held")),
    ("smallest cap", "The least with which training completes: the allocator frees its cache before it fails."),
)


def write_page(
    path: str, prediction: Prediction, setup: Setup, title: str, change: Sequence[str], above: Sequence[str] = ()
) -> Path:
    """Writes the page, in place of one that memkit wrote before and of no other file; returns its path. The window's
    title has `title` up to the first semicolon; `change`: what to change, a sentence each; `above`: what the verdict
    does not know."""
    gpu, target = setup.resolved_for.machine.gpu, read_target(prediction.to_json())
    assert target is not None
    verdict, *rest = (line.plain for line in answer(prediction, change))
    below, changes = rest[: len(prediction.warnings)], rest[len(prediction.warnings) :]
    warned = (el("p", el("strong", line.plain)) for line in warnings(above))
    head = lead(verdict, [*below, title], _STATES.get(prediction.verdict or "", "near"))
    said = f"Predicted{f' for {gpu.name}' if gpu else ''}: GiB by category at the peak. Reduce the longest part first"
    parts = [
        el("header", *warned, head, tiles(_tiles(prediction, target))),
        section("next", "What to do", el("ul", *(el("li", line) for line in changes), class_="changes"))
        if changes
        else None,
        section(
            "target", "What it will need", el("p", f"{prediction.peak}."), *prediction_bars(target, said),
            terms(sizes(prediction).items(), "facts"),
        ),
        section("basis", "What it rests on", el("ul", *(el("li", line.plain) for line in basis(prediction, above)))),
        section("words", "Words", terms(_WORDS, "glossary")),
    ]  # fmt: skip
    return write_document(path, document(f"Prediction: {title.partition(';')[0]}", join(parts, "\n"), {}))


def _tiles(prediction: Prediction, target: Target) -> Iterator[tuple[str, str]]:
    yield "Takes at most", f"{target.needs_gib:.2f} GiB"
    if target.capacity_gib is not None:
        yield "The GPU has", f"{target.capacity_gib:.2f} GiB"
    yield "Peak allocated", f"{target.peak_gib:.2f} GiB"
    yield "Peak in phase", prediction.peak_phase
    if target.host_gib is not None:
        yield "Host RAM", f"{target.host_gib:.2f} GiB"
