"""What `memkit predict` prints for a person: one screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hf_memkit.cli.tables import plain_table
from hf_memkit.report.palette import CATEGORY_COLOURS
from hf_memkit.report.untrusted import text
from hf_memkit.units import format_gib, format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hf_memkit.cli.predict_job import Prepared
    from hf_memkit.cli.predict_next import Next, NextVariant
    from hf_memkit.predict.prediction import Prediction

__all__ = ["body", "show", "view"]

_COLOURS: Final = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red"}
_GAP: Final = 2
_SHORTEST: Final = 8
"""Characters of the longest bar at least, however narrow the terminal."""

_LONGEST_NOTE: Final = 300
"""Characters of a note, which may hold a library's whole message; `--json` has all of it."""


def show(prediction: Prediction, prepared: Prepared, instead: Next | NextVariant | None = None) -> None:
    console = Console(highlight=False)
    console.print(view(prediction, prepared, console.width, instead), crop=False)


def view(prediction: Prediction, prepared: Prepared, width: int, instead: Next | NextVariant | None = None) -> Group:
    """The prediction for a Rich console of `width` characters. Names of models and modules are never markup."""
    advice = _advice(prediction, prepared, instead) if prediction.verdict == "does not fit" else []
    title = Text(_title(prepared), style="bold")
    return Group(title, Text(""), body(prediction, width, advice))


def body(prediction: Prediction, width: int, advice: Sequence[str] = ()) -> Group:
    """The numbers, the verdict with `advice` below it, and what they rest on."""
    parts: list[RenderableType] = [Text(_peak(prediction)), _bars(prediction, width), Text(""), _phases(prediction)]
    parts += [Text(""), _sizes(prediction), Text("")]
    verdict = prediction.verdict or "no verdict"
    parts.append(Text.assemble((verdict.upper(), _COLOURS.get(verdict, "bold")), f": {prediction.why}."))
    parts += [Text(line) for line in advice]
    parts.append(Text(f"Confidence: {prediction.confidence}."))
    parts.append(Text(f"Computed from: {prediction.source}.", style="dim"))
    parts += [Text(f"Note: {text(note.rstrip('.'), _LONGEST_NOTE)}.", style="dim") for note in prediction.notes]
    return Group(*parts)


def _title(prepared: Prepared) -> str:
    facts, gpu = prepared.model.facts, prepared.machine.gpu
    parameters = f", {facts.parameters:,} parameters" if facts is not None else ""
    card = f"{gpu.name}, {format_gib(gpu.capacity_bytes)}" if gpu is not None else "no card"
    times = f"{prepared.gpus * prepared.nodes} × " if prepared.gpus * prepared.nodes > 1 else ""
    accumulated = f", {prepared.accumulation} times a step" if prepared.accumulation > 1 else ""
    return (
        f"{prepared.model.name}{parameters}; {prepared.setup.preset}; {times}{card}; "
        f"{prepared.micro_batch_size} × {prepared.sequence_length} tokens a card{accumulated}"
    )


def _peak(prediction: Prediction) -> str:
    """Where the peak is, as far as a trace says."""
    where = f"in {prediction.peak_phase}"
    if prediction.peak_operation:
        where += f", at {prediction.peak_operation}"
    if prediction.peak_module:
        where += f" of {prediction.peak_module}"
    return f"Peak allocated on a card: {_size(prediction.peak_allocated_bytes)}, {where}"


def _bars(prediction: Prediction, width: int) -> Table:
    """A bar a category; the largest is as long as the terminal lets it."""
    peak, categories = prediction.peak_allocated_bytes, prediction.categories
    rows = [(name, _size(size), f"{100 * size / peak:.0f} %" if size else "") for name, size in categories.items()]
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
        table.add_row(name, _size(allocated), _size(reserved))
    return table


def _sizes(prediction: Prediction) -> Table:
    low, high = prediction.peak_reserved_bytes
    table = Table.grid(padding=(0, 2, 0, 0))
    total = [size + prediction.outside_allocator_bytes for size in (low, high)]
    outside = _size(prediction.outside_allocator_bytes)
    beyond = " at least" if prediction.confidence.level == "formula" else ""
    rows = {
        "reserved": f"{_range(low, high)}{beyond}; with {outside} outside the allocator (context, libraries) "
        f"{_range(*total)}",
        "smallest cap": f"{_size(prediction.smallest_cap_bytes)}{beyond}: with less, the allocator fails",
        "host": f"RAM {_size(prediction.host_rss_bytes)}, page-locked RAM {_size(prediction.pinned_bytes)}, "
        f"disk {_size(prediction.disk_bytes)}",
    }
    for name, line in rows.items():
        table.add_row(name, Text(line))
    return table


def _advice(prediction: Prediction, prepared: Prepared, instead: Next | NextVariant | None) -> list[str]:
    """What the peak is mostly made of, and the preset to try next."""
    largest = prediction.largest_category
    lines = [f"Most of the peak is {largest}: {_size(prediction.categories[largest])}."]
    if instead is not None:
        lines.append(f"Try next: {instead}.")
    elif prepared.resolved is not None:
        lines.append(
            "No later variant of the recipe is predicted to fit: give a smaller --sequence-length, or more --ram."
        )
    elif prepared.model.facts is not None:
        lines.append(
            "No other preset fits by formula with this batch and length: give a smaller --batch-size or "
            "--sequence-length, or more RAM for offload (--ram)."
        )
    return lines


def _range(low: int, high: int) -> str:
    return _size(low) if _size(low) == _size(high) else f"{_size(low)} to {_size(high)}"


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "not modelled"
    return format_size(size_bytes) if size_bytes else "none"
