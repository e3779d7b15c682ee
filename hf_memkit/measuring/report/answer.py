"""The answer of `memkit report`, which the callback also writes when a training ends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hf_memkit.common.answer import page as answer_page
from hf_memkit.common.answer.answer import (
    Answer,
    AnswerBlock,
    Bar,
    Bars,
    Beside,
    Changes,
    Chart,
    Code,
    Facts,
    Lines,
    Table,
    View,
    WholeGpu,
)
from hf_memkit.common.answer.safe_text import printable
from hf_memkit.common.answer.terminal import plain
from hf_memkit.common.commands import command
from hf_memkit.common.units import GIB, format_size
from hf_memkit.measuring.out_of_memory.change import item_of_change
from hf_memkit.measuring.report import wording
from hf_memkit.measuring.report.advice import changes_of, findings_of, item_of_finding
from hf_memkit.measuring.report.charts import charts, extremes
from hf_memkit.measuring.report.load import Run
from hf_memkit.measuring.report.ranks import by_rank
from hf_memkit.measuring.report.sanitize import few
from hf_memkit.measuring.report.summary import Summary, furthest_off, summarise, summarise_ranks
from hf_memkit.measuring.report.target import Target, figures_and_basis, target_of

PAGE: Final = "memory-report.html"
"""Default name of the page in the run's folder."""

_STEPS_IN_TABLE: Final = 25

GLOSSARY: Final = (
    ("allocated", "Bytes of live tensors. The peak is the highest."),
    ("reserved", "What PyTorch's allocator has taken from the GPU: allocated bytes and its cache. This must fit."),
    ("outside the allocator", "The CUDA context, libraries such as NCCL, other processes. nvidia-smi counts it."),
    ("headroom", "GPU memory minus the peak reserved and what is outside the allocator."),
    ("fragmentation", "Reserved but unused memory. An allocation fails where no free block is large enough."),
    ("weights, gradients, optimizer", "The model's parameters, their gradients, and the optimizer's states."),
    ("activations", "What forward keeps for backward. Grows with batch and length; checkpointing recomputes it."),
    ("loss", "Logits and the loss computed from them: tokens × vocabulary, often in 32 bits."),
    ("buffers, other", "Communication buckets and workspaces; and memory of no known category."),
    ("held", "What stays allocated after the optimizer step, by place: GPU, host, pinned, disk."),
    ("phase", "Part of training: load, data, forward, backward, optimizer, evaluate, save."),
    ("GiB", "2³⁰ bytes, 7 % more than a GB."),
)

_OF_THE_MODEL: Final = (
    "model_class", "model_type", "parameters", "trainable_parameters", "vocabulary", "weights_dtypes", "attention",
    "optimizer_classes", "engine",
)  # fmt: skip


def report_answer(run: Run, *, modules: bool = False) -> Answer:
    """The answer for a run. `modules`: the terminal shows the table by module too."""
    summary = summarise(run)
    return Answer(
        title=f"Memory: {wording.title(run, summary)}",
        verdict=wording.verdict(run, summary),
        state=wording.state(run, summary),
        blocks=tuple(_blocks(run, summary, modules=modules)),
    )


def write_page(run: Run, path: str | Path, command: str = "") -> Path:
    """Writes the run's page and returns its path. `command`: shown at its foot."""
    return answer_page.write_page(path, report_answer(run), guide="report.md", command=command)


def text_report(run: Run, width: int = 80, *, modules: bool = False) -> str:
    """The report as plain text; only the line that names the page may be longer than `width`."""
    return plain(report_answer(run, modules=modules), width)


def report_json(run: Run) -> dict[str, Any]:
    """The report as `memkit report --json` prints it. Names and units are those of the records."""
    summary = summarise(run)
    ranks = [
        {
            **one.to_json(),
            "ending": rank.ending.to_json(),
            "file": str(rank.path),
            "ooms": list(rank.ooms),
            "earlier": [ending.to_json() for _, ending in rank.earlier],
        }
        for rank, one in zip(run.ranks, summarise_ranks(run), strict=True)
    ]
    return {
        "folder": str(run.folder),
        "ending": {"rank": run.ended_by, **run.ending.to_json()},
        "verdict": wording.verdict(run, summary),
        "run": run.first.run,
        "summary": summary.to_json(),
        "findings": [{"rank": rank, **finding.to_json()} for rank, finding in findings_of(run)],
        "changes": [change.to_json() for change in changes_of(run, summary)],
        "ranks": ranks,
        "modules": list(run.first.modules),
        "notes": list(run.notes),
    }


def _blocks(run: Run, summary: Summary, *, modules: bool) -> Iterator[AnswerBlock]:
    """All blocks for which the run has figures."""
    target = target_of(run)
    drawn = charts(run, summary)

    lines = (
        wording.title(run, summary),
        wording.ending_and_time(run, summary),
        wording.compiling(summary),
        wording.reserved(summary),
        wording.unknowable(run, summary),
    )
    yield Lines([line for line in lines if line])
    yield Lines([f"Note: {printable(note, 300)}" for note in run.notes], "note")
    yield Facts(list(_tiles(summary, target)), "tiles", views=View.PAGE)
    yield _what_to_do(run, summary)
    yield from _sizes(summary) if target is None else _sizes_of_target(target)
    yield from _out_of_memory(run)

    yield from _timeline(run, summary, drawn)
    for name in ("phases", "lengths"):
        if name in drawn:
            yield drawn[name]
    yield from by_rank(run)
    yield from _predicted(summary)
    yield from _host(summary, drawn)

    page = run.folder / PAGE
    make = command("memkit", "report", run.folder, "--html", run.folder)
    where = f"Page: {printable(page)}" if page.is_file() else f"As a page: {make}"
    yield Lines([where], "command", views=View.TERMINAL)
    yield _modules(run, views=View.FULL if modules else View.PAGE)
    yield from _facts(run, summary)
    yield Facts(GLOSSARY, "glossary", heading="Words", name="words", views=View.PAGE)


def _tiles(summary: Summary, target: Target | None) -> Iterator[tuple[str, str]]:
    if target is not None:
        yield "Target needs at most", f"{target.needs_gib:.2f} GiB"
        yield "Target's peak allocated", f"{target.peak_gib:.2f} GiB"
    if (peak := summary.peak) is not None:
        share = f" ({summary.percent:.0f}\u00a0%)" if summary.percent is not None else ""
        yield "Peak allocated", f"{peak.gib:.2f} GiB{share}"
    if summary.reserved_gib is not None:
        yield "Peak reserved", f"{summary.reserved_gib:.2f} GiB"
    if summary.headroom_gib is not None:
        yield "Headroom", f"{max(0.0, summary.headroom_gib):.2f} GiB"
    if "rss_gib" in summary.host:
        yield "Host RAM, this process", f"{summary.host['rss_gib']:.2f} GiB"
    if summary.steps:
        yield "Steps recorded", f"{summary.steps:,}"


def _what_to_do(run: Run, summary: Summary) -> AnswerBlock:
    items = [item_of_finding(run, rank, finding) for rank, finding in findings_of(run)]
    items += map(item_of_change, changes_of(run, summary))
    if items:
        return Changes(items, numbered=True, heading="What to do", name="next")
    return Lines([wording.nothing_to_do(run, summary)], heading="What to do", name="next")


def _sizes_of_target(target: Target) -> Iterator[AnswerBlock]:
    """Sizes by category and phase that a rehearsal's target will need."""
    why = [f"{target.why[:1].upper()}{target.why[1:].rstrip('.')}."] if target.why else []
    yield Lines([*why, figures_and_basis(target)], heading="What the target run will need", name="target")
    gpu = WholeGpu(target.reserved_gib[1], target.outside_gib, target.capacity_gib)
    bars = [_category_bars(target.categories, "Target by category, predicted", gpu)]
    if target.phases:
        bars.append(_phase_bars(target.phases, "Target by phase, predicted"))
    yield Beside(bars)


def _sizes(summary: Summary) -> Iterator[AnswerBlock]:
    """Sizes by category and phase at the peak; without categories, what is held between steps."""
    phases = _phase_bars(summary.phases, "By phase, highest")
    if not summary.categories:
        bars = []
        for place, categories in summary.held.items():
            where = f", {place}" if len(summary.held) > 1 else ""
            bars += [_bar(f"{name}{where}", gib, name) for name, gib in categories.items() if gib > 0]
        yield Bars("Held between steps", ("category", "size"), bars)
        if summary.phases:
            yield replace(phases, heading="By phase", name="phases")
        return

    outside = 0.0 if summary.capped else summary.others_gib or 0.0
    gpu = WholeGpu(summary.categories_reserved_gib or 0.0, outside, summary.capacity_gib)
    step = f" of step {summary.categories_step}" if summary.categories_step is not None else ""
    categories_bars = _category_bars(summary.categories, f"By category, peak{step}", gpu)
    beside = [categories_bars, phases] if summary.phases else [categories_bars]
    yield Beside(beside, heading="What filled the GPU", name="filled")
    offloaded = [f"{place} {_size(sum(sizes.values()))}" for place, sizes in summary.held.items() if place != "device"]
    if offloaded:
        yield Lines([f"Held between steps outside the GPU: {', '.join(offloaded)}."])


def _category_bars(categories: Mapping[str, float], caption: str, gpu: WholeGpu) -> Bars:
    return Bars(caption, ("category", "size"), [_bar(name, gib, name) for name, gib in categories.items()], gpu)


def _phase_bars(phases: Mapping[str, float], caption: str) -> Bars:
    return Bars(caption, ("phase", "peak"), [_bar(name, gib, f"phase-{name}") for name, gib in phases.items()])


def _bar(name: str, gib: float, colour: str) -> Bar:
    return Bar(name, gib, (_size(gib),), colour)


def _size(gib: float) -> str:
    return format_size(gib * GIB)


_ERROR_FIELDS: Final = (
    "step", "phase", "micro_batch", "samples", "tokens", "longest_sequence", "inputs", "requested_gib", "free_gib",
    "allocated_gib", "reserved_gib", "cause", "error_type", "snapshot",
)  # fmt: skip
"""Shown fields of the record of an out-of-memory error."""


def _out_of_memory(run: Run) -> Iterator[AnswerBlock]:
    """The last out-of-memory error of the rank that ended the run."""
    rank = run.of(run.ended_by)
    if not rank.ooms:
        return
    oom: Mapping[str, Any] = rank.ooms[-1]
    # If it ended the run, it is in the first line.
    first = [] if run.ending.kind == "out of memory" else [wording.out_of_memory(run) or ""]
    yield Lines(first, heading="The out-of-memory error", name="oom", views=View.PAGE)
    fields = []
    for name in _ERROR_FIELDS:
        if oom.get(name) not in (None, ""):
            label = name.removesuffix("_gib").replace("_", " ").capitalize()
            fields.append((label, _size(oom[name]) if name.endswith("_gib") else _fact(oom[name])))
    yield Facts(fields, views=View.PAGE)
    if oom.get("error"):
        yield Code("", [printable(oom["error"], 3000)], views=View.PAGE)


_STEP_COLUMNS: Final = {
    "peak_allocated_gib": ("peak allocated", ".2f"),
    "peak_reserved_gib": ("peak reserved", ".2f"),
    "longest_sequence": ("longest sequence", ",.0f"),
    "tokens": ("tokens", ",.0f"),
    "host_rss_gib": ("host memory", ".2f"),
    "step_time_ms": ("ms", ",.0f"),
}
"""Fields of a step in the table → column and format."""


def _timeline(run: Run, summary: Summary, drawn: Mapping[str, Chart]) -> Iterator[AnswerBlock]:
    if "timeline" not in drawn:
        return
    rank = run.of(summary.rank)
    which = f" (rank {rank.rank}, which has the highest peak)" if len(run.ranks) > 1 else ""
    heading = "Over the steps" if summary.peak is not None else "Held between the steps"
    yield replace(drawn["timeline"], heading=f"{heading}{which}")

    kept = extremes([[step.get("peak_allocated_gib") for step in rank.steps]], _STEPS_IN_TABLE)
    rows = []
    for place in kept:
        step: Mapping[str, Any] = rank.steps[place]
        cells = [format(step[name], form) if name in step else "–" for name, (_, form) in _STEP_COLUMNS.items()]
        rows.append([str(step["step"]), *cells])
    columns = [">step", *(f">{column}" for column, _ in _STEP_COLUMNS.values())]
    caption = f"{len(kept)} of {len(rank.steps)} steps, with the highest peaks; GiB"
    yield Table(columns, rows, caption, views=View.PAGE, folded="As a table")


def _host(summary: Summary, drawn: Mapping[str, Chart]) -> Iterator[AnswerBlock]:
    line = wording.host(summary)
    if line is None:
        return
    yield Lines([line], heading="Host and disk", name="host")
    if "host" in drawn:
        yield drawn["host"]


def _predicted(summary: Summary) -> Iterator[AnswerBlock]:
    if not summary.predicted:
        return
    lines = []
    rows = []
    for row in summary.predicted:
        measured = f"{row.measured_gib:.2f}" if row.measured_gib is not None else "–"
        off = row.off_gib
        share = f"{100 * off / row.predicted_gib[0]:+.0f} %" if off is not None and row.predicted_gib[0] else ""
        rows.append((row.what, row.predicted, measured, share))
        if row.kind == "peak":
            lines.append(f"{row.what.capitalize()}: predicted {row.predicted} GiB, measured {measured}.")
    if furthest := furthest_off(summary.predicted):
        lines.append(furthest)
    yield Lines(lines, heading="Predicted and measured", name="predicted")
    yield Table(("what", ">predicted", ">measured", ">off by"), rows, "GiB", views=View.PAGE)


def _modules(run: Run, *, views: View) -> AnswerBlock:
    """The table by module of the first rank, with a row of totals.

    A record contains the figures of one of `repeats` equal modules, a row of the table those of all of them.
    """
    if not run.first.modules:
        return Lines(["No table by module recorded."], views=views & View.TERMINAL)
    rows: list[tuple[str, ...]] = []
    totals = [0, 0, 0]
    for module in run.first.modules:
        sizes = (module.get("parameters", 0), module.get("trainable_parameters", 0), module.get("bytes", 0))
        counts = [max(1, module.get("repeats", 1)) * size for size in sizes]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        places = ", ".join(printable(place, 20) for place in module.get("places", {}))
        name = printable(module.get("name") or "(model)", 120)
        rows.append((name, printable(module.get("class", ""), 60), *_count_cells(*counts), places))
    rows.append(("total", "", *_count_cells(*totals), ""))
    columns = ("module", "class", ">parameters", ">trained", ">size", "where")
    caption = "Parameters and their bytes by module"
    return Table(columns, rows, caption, heading="By module", name="modules", views=views, tall=True)


def _count_cells(parameters: int, trained: int, size_bytes: int) -> list[str]:
    return [f"{parameters:,}", "all" if trained == parameters else f"{trained:,}", format_size(size_bytes)]


def _facts(run: Run, summary: Summary) -> Iterator[AnswerBlock]:
    """Model, arguments, machine, versions, figures of torch.compile, and the recipe's settings."""
    record = run.first.run
    facts = dict(record.get("facts", {}))
    facts.pop("target_prediction", None)
    settings = facts.get("setup")
    rows = []
    if isinstance(settings, list) and all(isinstance(each, dict) and "key" in each for each in settings):
        del facts["setup"]
        for each in settings:
            rows.append((printable(each["key"], 80), _fact(each.get("value")), printable(each.get("reason", ""), 300)))

    groups: dict[str, Mapping[str, Any]] = {
        "Model": {name: record.get(name) for name in _OF_THE_MODEL},
        "Arguments": record.get("arguments", {}),
        "Machine": {**record.get("hardware", {}), "world_size": record.get("world_size")},
        "Versions": record.get("versions", {}),
        "torch.compile": summary.compilation or {},
        "Recipe" if "recipe" in facts else "Given by the user": facts,
    }
    beside = []
    for heading, values in groups.items():
        if known := [(name, _fact(value)) for name, value in values.items() if value is not None]:
            beside.append(Facts(known, heading=heading))
    yield Beside(beside, heading="The run", name="facts", views=View.PAGE)
    if rows:
        folded = f"The recipe's settings ({len(rows)})"
        caption = "What the recipe set, and why"
        yield Table(("setting", "value", "reason"), rows, caption, views=View.PAGE, folded=folded)
    files = few([rank.path.name for rank in run.ranks])
    yield Lines([f"Records: {files} in {printable(run.folder, 300)}"], "note", views=View.PAGE)


def _fact(value: Any) -> str:
    """A value of a record as text; it may contain anything."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if value >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str | bool):
        return printable(value, 300)
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list) or not all(isinstance(each, str | int | float) for each in inner):
        return printable(json.dumps(value, ensure_ascii=False), 300)
    if isinstance(value, dict):
        return printable(", ".join(f"{name}: {_fact(each)}" for name, each in value.items()), 300)
    return printable(", ".join(map(_fact, value)), 300)
