"""The answer of `memkit predict`: the verdict, what to change, then the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from hf_memkit.catalog.fit import full_share_text, slack_text
from hf_memkit.cli.printing import typed_command
from hf_memkit.common.answer.answer import (
    Answer,
    AnswerBlock,
    Bar,
    Bars,
    Beside,
    Changes,
    Facts,
    Item,
    Lines,
    State,
    View,
    WholeGpu,
)
from hf_memkit.common.answer.page import write_page
from hf_memkit.common.answer.safe_text import printable
from hf_memkit.common.answer.terminal import show, show_blocks
from hf_memkit.common.units import GIB, format_gib
from hf_memkit.measuring.report.answer import GLOSSARY
from hf_memkit.prediction.prediction import size_text
from hf_memkit.prediction.time.compile_time import compile_seconds

if TYPE_CHECKING:
    from hf_memkit.cli.predict_next import NextSetup, NextVariant
    from hf_memkit.prediction.prediction import Prediction
    from hf_memkit.prediction.script_prediction import BatchNeeds
    from hf_memkit.setup.setup import Setup


_STATES: Final[dict[str | None, State]] = {"fits": "good", "tight": "near", "does not fit": "bad"}
_LONGEST_NOTE: Final = 300
"""Characters of a note, which may contain a library's whole message; `--json` has all of it."""

_SMALLER: Final = {
    "variant": ("a smaller --sequence-length", "a smaller --sequence-length"),
    "variant of images": ("a smaller per_device_train_batch_size (--set)", ""),
    "script": ("a smaller per_device_train_batch_size or shorter rows", "shorter rows"),
}
_SMALLER_BY_OPTIONS: Final = ("a smaller --batch-size or --sequence-length", "a smaller --sequence-length")
"""What makes a micro-batch of several rows smaller, and one of a single row."""

_WORDS: Final = (
    *(each for each in GLOSSARY if each[0] not in ("headroom", "held")),
    ("smallest cap", "The least with which training completes: the allocator frees its cache before it fails."),
)


def present(
    prediction: Prediction,
    title: str,
    known: Sequence[str],
    search: Callable[[], Sequence[str]],
    *,
    warnings: Sequence[str] = (),
    short: bool = False,
    html: str | None = None,
    console: Console | None = None,
) -> None:
    """Prints the verdict at once, and the rest when `search` returns; then writes the page `html`.

    Args:
        known: sentences: changes that need no search.
        search: returns further changes.
        warnings: facts that the verdict does not contain.
    """
    first = opening(prediction, title, known, warnings)
    show(first, short=short, console=console)
    rest = [*_changes(search(), heading="" if known else "What to do"), *details(prediction, warnings)]
    show_blocks(rest, short=short, console=console)
    if html is not None:
        print(f"Wrote {write_prediction(html, first.then(*rest))}")


def write_prediction(path: str, answer: Answer) -> Path:
    """Writes the page and returns its path."""
    return write_page(path, answer, guide="predict.md", command=typed_command())


def predict_answer(prediction: Prediction, title: str, changes: Sequence[str], warnings: Sequence[str] = ()) -> Answer:
    """The whole answer."""
    return opening(prediction, title, changes, warnings).then(*details(prediction, warnings))


def opening(prediction: Prediction, title: str, changes: Sequence[str], warnings: Sequence[str] = ()) -> Answer:
    """The verdict, the title, warnings, and what to change."""
    lines = [f"Warning: {each}." for each in (*warnings, *prediction.warnings)]
    return Answer(
        title=f"Prediction: {title.partition(';')[0]}",
        verdict=(prediction.verdict or "no verdict").upper(),
        reason=f"{prediction.why}.",
        state=_STATES.get(prediction.verdict, "none"),
        blocks=(
            Lines([title]),
            Lines(lines, "warning"),
            Facts(list(_tiles(prediction)), "tiles", views=View.PAGE),
            *_changes(changes),
        ),
    )


def _changes(lines: Sequence[str], heading: str = "What to do") -> list[AnswerBlock]:
    return [Changes([Item(line) for line in lines], heading=heading, name="next")] if lines else []


def _tiles(prediction: Prediction) -> Iterator[tuple[str, str]]:
    yield "Takes at most", format_gib(prediction.total_bytes[1])
    if prediction.capacity_bytes is not None:
        yield "The GPU has", format_gib(prediction.capacity_bytes)
    yield "Peak allocated", format_gib(prediction.peak_allocated_bytes)
    yield "Peak in phase", prediction.peak_phase
    host = [size for size in (prediction.host_rss_bytes, prediction.pinned_bytes) if size is not None]
    if host:
        yield "Host RAM", format_gib(sum(host))


def details(prediction: Prediction, leave_out: Sequence[str] = ()) -> list[AnswerBlock]:
    """The figures and their basis, without the notes `leave_out`."""
    peak = prediction.peak_allocated_bytes
    categories = [
        Bar(name, size / GIB, (size_text(size), f"{100 * size / peak:.0f} %" if size else ""), name)
        for name, size in prediction.categories.items()
    ]
    phases = [
        Bar(name, allocated / GIB, (size_text(allocated), size_text(reserved)), f"phase-{name}")
        for name, (allocated, reserved) in prediction.phases.items()
    ]

    capacity = prediction.capacity_bytes / GIB if prediction.capacity_bytes is not None else None
    gpu = WholeGpu(prediction.peak_reserved_bytes[1] / GIB, prediction.outside_allocator_bytes / GIB, capacity)
    basis = [f"Confidence: {prediction.confidence}.", f"Computed from: {prediction.source}."]
    notes = (note.rstrip(".") for note in prediction.notes if note not in leave_out)
    basis += [f"Note: {printable(note, _LONGEST_NOTE)}." for note in notes]

    return [
        Lines([f"{line}." for line in prediction.summary()], views=View.SHORT),
        Lines(["Omit --short to see RAM and notes; --json prints every number."], views=View.SHORT),
        Lines([f"{prediction.peak}."], heading="What it will need", name="target", views=View.FULL),
        Beside(
            [
                Bars("", ("category", "size", "of the peak"), categories, gpu),
                Bars("", ("phase", "peak allocated", "peak reserved"), phases),
            ],
            views=View.FULL,
        ),
        Facts(list(sizes(prediction).items()), views=View.FULL),
        Lines(basis, "note", heading="What it rests on", name="basis", views=View.FULL),
        Facts(_WORDS, "glossary", heading="Words", name="words", views=View.PAGE),
    ]


def advice_for(prediction: Prediction, setup: Setup, instead: NextSetup | NextVariant | None) -> list[str]:
    """`advice` for a preset or a recipe's variant."""
    what = "preset" if setup.resolved_for.model is not None else ""
    if setup.request is not None and setup.request.recipe is not None:
        from hf_memkit.recipes.tasks import task_of

        what = "variant" if task_of(setup).takes_length else "variant of images"
    return advice(prediction, instead, what, setup.micro_batch_size)


def title_of(setup: Setup) -> str:
    """Model, parameters, preset, GPUs and batch in one line."""
    facts = setup.resolved_for.model
    parameters = f", {facts.parameters:,} parameters" if facts is not None else ""
    job = f"{setup['model.name']}{parameters}; {setup.preset}; {gpus_of(setup)}"
    return f"{job}; {batch_of(setup)} per GPU{accumulated(setup)}"


def batch_of(setup: Setup) -> str:
    """`"8 × 1024 tokens"`; for a recipe that pads rows, `"8 × up to 1024 tokens"`."""
    from hf_memkit.recipes.by_data import padded_columns

    longest = "up to " if "data.task" in setup and padded_columns(setup) else ""
    return f"{setup.micro_batch_size} × {longest}{setup.sequence_length} tokens"


def gpus_of(setup: Setup) -> str:
    """`"2 × RTX 4090, 23.99 GiB"`."""
    job = setup.resolved_for
    gpu = job.machine.gpu
    each = f"{gpu.name}, {format_gib(gpu.capacity_bytes)}" if gpu is not None else "no GPU"
    return f"{job.processes} × {each}" if job.processes > 1 else each


def accumulated(setup: Setup) -> str:
    """`", 4 micro-batches a step"`; empty for one."""
    return f", {setup.accumulation} micro-batches a step" if setup.accumulation > 1 else ""


def sizes(prediction: Prediction) -> dict[str, str]:
    """Rows: reserved memory, the smallest cap, the limit of the GPU, RAM and disk, and the time to compile."""
    level = prediction.confidence.level
    low, high = prediction.peak_reserved_bytes
    outside = prediction.outside_allocator_bytes
    total = _range(low + outside, high + outside)
    reserved = f"{_range(low, high)}; with {size_text(outside)} outside the allocator (context, libraries): {total}"
    cap = f"{size_text(prediction.smallest_cap_bytes)}: with less, training runs out of memory"
    slack = f"with {slack_text(level)} of slack and what is outside {size_text(prediction.least_bytes)}"
    rows = {"reserved": reserved, "smallest cap": f"{cap}; {slack}"}
    if prediction.capacity_bytes:
        share = f"{full_share_text(level)} of {size_text(prediction.room_bytes)}"
        rows["limit"] = f"fits up to {size_text(prediction.limit_bytes)}: {share}"
    ram = f"RAM {size_text(prediction.host_rss_bytes)}, page-locked RAM {size_text(prediction.pinned_bytes)}"
    rows["host"] = f"{ram}, disk {size_text(prediction.disk_bytes)}"
    if prediction.compilation is not None:
        low, middle, high = map(round, compile_seconds(prediction.compilation))
        graphs = prediction.compilation.graphs
        rows["compiling"] = f"about {middle} s in the first steps ({low} to {high}, predicted): {graphs} graphs"
    return rows


def advice(prediction: Prediction, instead: NextSetup | NextVariant | None, what: str, micro_batch: int) -> list[str]:
    """Sentences for a job that does not fit, or is tight: the largest part of the peak, and what to try next.

    Args:
        instead: a setup that fits.
        what: kind of the job: `"preset"`, `"variant"`, `"variant of images"` or `"script"`; `""` for a setup without
            a model.
    """
    if prediction.verdict not in ("tight", "does not fit"):
        return []
    smaller = _smaller(prediction, what, micro_batch)
    largest, lines = prediction.largest_category, []
    if prediction.lacks_room:
        vain = "" if smaller else " A smaller micro-batch does not free enough."
        lines.append(f"Largest part of the peak: {largest}, {size_text(prediction.categories[largest])}.{vain}")
    smaller = smaller or _leaner(prediction, what)
    if prediction.verdict == "tight":
        return [*lines, f"To leave room, give {smaller}."]
    if instead is not None:
        lines.append(f"Try next: {instead}.")
    elif what.startswith("variant"):
        lines.append(f"No later variant of the recipe is predicted to fit. Give {smaller}, or more --ram.")
    elif what == "preset" and not prediction.lacks_room:
        lines.append("The GPU has room. Use a machine with more RAM (--ram) or disk.")
    elif what == "preset":
        lines.append(f"Give {smaller}, or more RAM for offload (--ram).")
    elif prediction.lacks_room or what != "script":
        lines.append(f"Give {smaller}.")
    return lines


def _smaller(prediction: Prediction, what: str, micro_batch: int) -> str:
    """What makes the micro-batch smaller; empty if nothing does, or not enough."""
    too_much = prediction.least_bytes - prediction.room_bytes
    if prediction.verdict == "tight":
        too_much = prediction.total_bytes[1] - prediction.limit_bytes
    if prediction.categories["activations"] + prediction.categories["loss"] <= too_much:
        return ""
    several, single = _SMALLER.get(what, _SMALLER_BY_OPTIONS)
    return several if micro_batch > 1 else single


def _leaner(prediction: Prediction, what: str) -> str:
    """What saves memory that does not grow with the micro-batch."""
    if what.startswith("variant") or prediction.largest_category not in ("weights", "gradients", "optimizer"):
        return "a larger GPU"
    states = "an optimizer with smaller states (adamw_bnb_8bit), " * (prediction.largest_category == "optimizer")
    return f"{states}LoRA or a larger GPU"


def _range(low: int, high: int) -> str:
    return size_text(low) if size_text(low) == size_text(high) else f"{size_text(low)} to {size_text(high)}"


def batch_sentences(prediction: Prediction, batches: BatchNeeds | None) -> Iterator[str]:
    """Sentences: what the worst batch needs compared with a typical one, and what makes it smaller."""
    if batches is None:
        return
    yield f"{batches.sentence(prediction)}."
    if prediction.verdict == "does not fit":
        for change, needs in batches.smaller.items():
            yield f"With {change} the worst needs {format_gib(needs.total_bytes[1])}: {needs.verdict}."
        if batches.shapes.grouping:
            yield "Grouping by length would not help: the longest rows would still meet in one batch."


def batches_json(batches: BatchNeeds | None) -> dict[str, Any] | None:
    if batches is None:
        return None

    def needs(prediction: Prediction) -> dict[str, Any]:
        return {"total_gib": prediction.total_bytes[1] / GIB, "verdict": prediction.verdict}

    return {
        "worst": batches.shapes.worst,
        "usual": {"batch": batches.shapes.typical, **needs(batches.typical)},
        "high": batches.shapes.high,
        "smaller": {change: needs(prediction) for change, prediction in batches.smaller.items()},
    }
