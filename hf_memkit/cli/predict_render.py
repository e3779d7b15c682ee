"""What `memkit predict` prints for a person: the answer, then the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hf_memkit.catalog.fit import full_share_text, slack_text
from hf_memkit.cli.tables import plain_table
from hf_memkit.common.units import format_gib
from hf_memkit.measuring.report.palette import CATEGORY_COLOURS
from hf_memkit.measuring.report.sanitize import text
from hf_memkit.prediction.prediction import size_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hf_memkit.cli.predict_next import NextSetup, NextVariant
    from hf_memkit.prediction.prediction import Prediction
    from hf_memkit.setup.setup import Setup


_COLOURS: Final = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red"}
_GAP: Final = 2
_SHORTEST: Final = 8
"""Characters of the longest bar at least, however narrow the terminal."""

_LONGEST_WARNING: Final = 1000
_LONGEST_NOTE: Final = 300
"""Characters of a warning, and of a note, which may hold a library's whole message; `--json` has all of it."""

_SMALLER: Final = {
    "variant": ("a smaller --sequence-length", "a smaller --sequence-length"),
    "variant of images": ("a smaller per_device_train_batch_size (--set)", ""),
    "script": ("a smaller per_device_train_batch_size or shorter rows", "shorter rows"),
}
_SMALLER_BY_OPTIONS: Final = ("a smaller --batch-size or --sequence-length", "a smaller --sequence-length")
"""What makes a micro-batch smaller, and what makes one of a single row smaller."""

_SHORT_ANSWER: Final = 232
_SHORT_LINE: Final = 140
"""Characters of a paragraph of `--short`, verdict and advice or anything else: three lines of 80 columns, and two."""


def show(
    prediction: Prediction,
    title: str,
    known: Sequence[str],
    search: Callable[[], Sequence[str]],
    *,
    above: Sequence[str] = (),
    short: bool = False,
    console: Console | None = None,
) -> list[str]:
    """Prints the verdict at once, and when `search` has found what to change, that and the numbers; returns all that
    is to be changed. Names of models and modules are never markup.

    Args:
        known: what to change that needs no search, a sentence each.
        above: warnings of what the verdict does not know.
        short: whether in 24 lines of 80 columns at most.
    """
    console = console or Console(highlight=False)
    console.print(Group(*warnings(above, short=short), *answer(prediction, known, short=short)), crop=False)
    console.file.flush()
    found = search()
    sentences = [Text(text(line, _SHORT_ANSWER) if short else line) for line in found]
    console.print(Group(*sentences, *_rest(prediction, title, console.width, above, short=short)), crop=False)
    return [*known, *found]


def advice_for(prediction: Prediction, setup: Setup, instead: NextSetup | NextVariant | None) -> list[str]:
    """`advice` for a preset or a recipe's variant."""
    of_recipe = setup.request is not None and setup.request.recipe is not None
    what = of_variant(setup) if of_recipe else "preset" if setup.resolved_for.model is not None else ""
    return advice(prediction, instead, what, setup.micro_batch_size)


def _rest(
    prediction: Prediction, title: str, width: int, above: Sequence[str], *, short: bool
) -> list[RenderableType]:
    if short:
        rest = "Omit --short to see RAM and notes; --json prints every number."
        return [Text(text(title, _SHORT_LINE)), *brief(prediction), Text(rest)]
    named = [Text(""), Text(title, style="bold"), Text("")]
    return [*named, *tables(prediction, width), Text(""), *basis(prediction, leave_out=above)]


def warnings(lines: Iterable[str], *, short: bool = False) -> list[Text]:
    """What the verdict does not know: above it what makes it another job, under it what costs much."""
    return [Text(f"Warning: {text(line, _SHORT_LINE if short else _LONGEST_WARNING)}.", "yellow") for line in lines]


def answer(prediction: Prediction, change: Sequence[str] = (), *, short: bool = False) -> list[Text]:
    """The verdict, warnings under it, and what to change."""
    verdict = prediction.verdict or "no verdict"
    why, *change = (text(line, _SHORT_ANSWER) if short else line for line in (prediction.why, *change))
    first = Text.assemble((verdict.upper(), _COLOURS.get(verdict, "bold")), f": {why}.")
    return [first, *warnings(prediction.warnings, short=short), *map(Text, change)]


def tables(prediction: Prediction, width: int) -> list[RenderableType]:
    """The peak, what it is made of, the phases, and what the GPU and the machine hold."""
    return [
        Text(prediction.peak),
        _bars(prediction, width),
        Text(""),
        _phases(prediction),
        Text(""),
        _sizes(prediction),
    ]


def basis(prediction: Prediction, leave_out: Sequence[str] = ()) -> list[Text]:
    """What the numbers rest on, and the notes that are not shown elsewhere."""
    lines = [f"Computed from: {prediction.source}."]
    lines += [f"Note: {text(note.rstrip('.'), _LONGEST_NOTE)}." for note in prediction.notes if note not in leave_out]
    return [Text(f"Confidence: {prediction.confidence}."), *(Text(line, style="dim") for line in lines)]


def brief(prediction: Prediction) -> list[Text]:
    """The peak by category and by phase in a few lines, for `--short`."""
    return [Text(f"{text(line, _SHORT_LINE)}.") for line in prediction.summary()]


def title_of(setup: Setup) -> str:
    """What is predicted, in one line."""
    facts = setup.resolved_for.model
    parameters = f", {facts.parameters:,} parameters" if facts is not None else ""
    job = f"{setup['model.name']}{parameters}; {setup.preset}; {gpus_of(setup)}"
    return f"{job}; {batch_of(setup)} per GPU{accumulated(setup)}"


def batch_of(setup: Setup) -> str:
    """`"8 × 1024 tokens"`; of a recipe that pads rows of different lengths `"8 × up to 1024 tokens"`."""
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
    """`", 4 micro-batches a step"`, or nothing."""
    return f", {setup.accumulation} micro-batches a step" if setup.accumulation > 1 else ""


def _bars(prediction: Prediction, width: int) -> Table:
    """A bar a category; the largest is as long as the terminal lets it."""
    peak, categories = prediction.peak_allocated_bytes, prediction.categories
    rows = [(name, size_text(size), f"{100 * size / peak:.0f} %" if size else "") for name, size in categories.items()]
    taken = sum(max(map(len, column)) + _GAP for column in zip(*rows, strict=True))
    longest, highest = max(_SHORTEST, width - taken), max(categories.values())
    table = Table.grid(padding=(0, _GAP, 0, 0))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for row, (name, size) in zip(rows, categories.items(), strict=True):
        length = round(longest * size / highest) if highest else 0
        # A sliver is shown for what is there, however small.
        bar = "█" * length if length else "▏" if size else ""
        table.add_row(*row, Text(bar, CATEGORY_COLOURS[name]))
    return table


def _phases(prediction: Prediction) -> Table:
    table = plain_table("phase", "peak allocated", "peak reserved")
    for column in table.columns[1:]:
        column.justify = "right"
    table.padding = (0, 2, 0, 0)
    for name, (allocated, reserved) in prediction.phases.items():
        table.add_row(name, size_text(allocated), size_text(reserved))
    return table


def _sizes(prediction: Prediction) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, line in sizes(prediction).items():
        table.add_row(name, Text(line))
    return table


def sizes(prediction: Prediction) -> dict[str, str]:
    """What the allocator takes, the least that it needs, and what the machine holds."""
    low, high = prediction.peak_reserved_bytes
    total = [size + prediction.outside_allocator_bytes for size in (low, high)]
    outside, level = size_text(prediction.outside_allocator_bytes), prediction.confidence.level
    limit = f"fits up to {size_text(prediction.limit_bytes)}: {full_share_text(level)} of "
    return {
        "reserved": f"{_range(low, high)}; with {outside} outside the allocator (context, libraries): "
        f"{_range(*total)}",
        "smallest cap": f"{size_text(prediction.smallest_cap_bytes)}: with less, training runs out of memory; "
        f"with {slack_text(level)} of slack and what is outside {size_text(prediction.least_bytes)}",
        **({"limit": limit + size_text(prediction.room_bytes)} if prediction.capacity_bytes else {}),
        "host": f"RAM {size_text(prediction.host_rss_bytes)}, page-locked RAM {size_text(prediction.pinned_bytes)}, "
        f"disk {size_text(prediction.disk_bytes)}",
    }


def of_variant(setup: Setup) -> str:
    """What `advice` takes for a recipe's setup."""
    from hf_memkit.recipes.tasks import task_of

    return "variant" if task_of(setup).takes_length else "variant of images"


def advice(prediction: Prediction, instead: NextSetup | NextVariant | None, what: str, micro_batch: int) -> list[str]:
    """What to change where a job does not fit, or is tight: what the peak is mostly made of, and what to try next.

    Args:
        instead: what is known to fit in its place.
        what: `"preset"` or what `of_variant` gives, whichever that is; `"script"`: the user's own; `""`: none was
            looked for.
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
    """What makes the micro-batch smaller; empty where that does not free enough, or nothing does."""
    too_much = prediction.least_bytes - prediction.room_bytes
    if prediction.verdict == "tight":
        too_much = prediction.total_bytes[1] - prediction.limit_bytes
    if prediction.categories["activations"] + prediction.categories["loss"] <= too_much:
        return ""
    several, single = _SMALLER.get(what, _SMALLER_BY_OPTIONS)
    return several if micro_batch > 1 else single


def _leaner(prediction: Prediction, what: str) -> str:
    """What makes smaller what does not grow with the micro-batch."""
    if what.startswith("variant") or prediction.largest_category not in ("weights", "gradients", "optimizer"):
        return "a larger GPU"
    states = "an optimizer with smaller states (adamw_bnb_8bit), " * (prediction.largest_category == "optimizer")
    return f"{states}LoRA or a larger GPU"


def _range(low: int, high: int) -> str:
    return size_text(low) if size_text(low) == size_text(high) else f"{size_text(low)} to {size_text(high)}"
