"""The answer of `memkit report`, which the callback also writes when a training ends."""

from __future__ import annotations

import json
import shlex
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
    Item,
    Lines,
    Table,
    View,
    WholeGpu,
)
from hf_memkit.common.answer.safe_text import printable as text
from hf_memkit.common.answer.safe_text import sentence
from hf_memkit.common.answer.terminal import plain
from hf_memkit.common.units import GIB, format_size
from hf_memkit.measuring.out_of_memory.change import item_of_change
from hf_memkit.measuring.report import wording
from hf_memkit.measuring.report.advice import Advice, advise, finding_sentence
from hf_memkit.measuring.report.charts import charts, extremes
from hf_memkit.measuring.report.load import Run
from hf_memkit.measuring.report.sanitize import few
from hf_memkit.measuring.report.summary import Summary, furthest_off, summarise, summarise_ranks
from hf_memkit.measuring.report.target import Target, figures_and_basis, target_of

PAGE: Final = "memory-report.html"
"""Default name of the page in the run's folder."""

_RANKS_ON_TERMINAL: Final = 8
_STEPS_IN_TABLE: Final = 25

GLOSSARY: Final = (
    ("allocated", "Bytes of live tensors. The peak is the highest."),
    ("reserved", "What PyTorch's allocator has taken from the GPU: allocated bytes and its cache. This must fit."),
    (
        "outside the allocator",
        "What else the GPU holds: the CUDA context, libraries such as NCCL, other processes. nvidia-smi counts it.",
    ),
    ("headroom", "GPU memory minus the peak reserved and what is outside the allocator."),
    (
        "fragmentation",
        "Reserved but unused memory. Where no free block is large enough, an allocation fails despite it.",
    ),
    ("weights, gradients, optimizer", "The model's parameters, their gradients, and the optimizer's states."),
    (
        "activations",
        "What forward keeps for backward. Grows with batch size and sequence length; checkpointing recomputes it.",
    ),
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
        **advise(run, summary).to_json(),
        "ranks": ranks,
        "modules": list(run.first.modules),
        "notes": list(run.notes),
    }


def _blocks(run: Run, summary: Summary, *, modules: bool) -> Iterator[AnswerBlock]:
    """All blocks for which the run has figures."""
    target, drawn = target_of(run), charts(run, summary)
    lines = (wording.title(run, summary), wording.ending_and_time(run, summary), wording.reserved(summary))
    yield Lines([each for each in (*lines, wording.unknowable(run, summary)) if each])
    yield Lines([f"Note: {text(note, 300)}" for note in run.notes], "note")
    yield Facts(list(_tiles(summary, target)), "tiles", views=View.PAGE)
    yield _what_to_do(run, summary, advise(run, summary))
    yield from _sizes(summary, target)
    yield from _out_of_memory(run)
    yield from _timeline(run, summary, drawn)
    if "phases" in drawn:
        yield drawn["phases"]
    if inputs := [drawn[name] for name in ("lengths", "tokens") if name in drawn]:
        meaning = "Points rising to the right: input size decides the peak. Level points: it does not."
        heading = "Peak against the size of the batch"
        yield Lines([meaning], "note", heading=heading, name="lengths", views=View.PAGE)
        yield Beside(inputs, views=View.PAGE)
    yield from _ranks(run, drawn)
    yield from _predicted(summary)
    yield from _host(summary, drawn)
    page, folder = run.folder / PAGE, shlex.quote(text(run.folder))
    where = f"Page: {text(page)}" if page.is_file() else f"As a page: memkit report {folder} --html {folder}"
    yield Lines([where], "command", views=View.TERMINAL)
    yield _modules(run, views=View.FULL if modules else View.PAGE)
    yield from _facts(run)
    yield Facts(GLOSSARY, "glossary", heading="Words", name="words", views=View.PAGE)


def _category_bars(categories: Mapping[str, float], caption: str, gpu: WholeGpu) -> Bars:
    """GiB by category, with the GPU that contains them."""
    rows = [Bar(name, gib, (format_size(gib * GIB),), name) for name, gib in categories.items()]
    return Bars(caption, ("category", "size"), rows, gpu)


def _phase_bars(phases: Mapping[str, float], caption: str) -> Bars:
    rows = [Bar(name, gib, (format_size(gib * GIB),), f"phase-{name}") for name, gib in phases.items()]
    return Bars(caption, ("phase", "peak"), rows)


def _tiles(summary: Summary, target: Target | None) -> Iterator[tuple[str, str]]:
    peak = summary.peak
    if target is not None:
        yield "Target needs at most", f"{target.needs_gib:.2f} GiB"
        yield "Target's peak allocated", f"{target.peak_gib:.2f} GiB"
        if target.peak_phase:
            yield "Target's peak in phase", target.peak_phase
    if peak is not None:
        share = f" ({summary.percent:.0f}\u00a0%)" if summary.percent is not None else ""
        yield "Peak allocated", f"{peak.gib:.2f} GiB{share}"
    if summary.reserved_gib is not None:
        yield "Peak reserved", f"{summary.reserved_gib:.2f} GiB"
    if summary.headroom_gib is not None:
        yield "Headroom", f"{max(0.0, summary.headroom_gib):.2f} GiB"
    if peak is not None and peak.phase:
        yield "Peak in phase", peak.phase
    if "rss_gib" in summary.host:
        yield "Host RAM, this process", f"{summary.host['rss_gib']:.2f} GiB"
    if summary.steps:
        yield "Steps recorded", f"{summary.steps:,}"
    if summary.step_time_ms is not None:
        yield "A step took", f"{summary.step_time_ms:,.0f} ms"


def _what_to_do(run: Run, summary: Summary, advice: Advice) -> AnswerBlock:
    items = []
    for rank, finding in advice.findings:
        head, _, rest = finding_sentence(run, rank, finding).partition(": ")
        items.append(Item(sentence(rest), head))
    items += map(item_of_change, advice.changes)
    if items:
        return Changes(items, numbered=True, heading="What to do", name="next")
    return Lines([wording.nothing_to_do(run, summary)], heading="What to do", name="next")


def _sizes(summary: Summary, target: Target | None) -> Iterator[AnswerBlock]:
    """Sizes by category and phase: for a rehearsal's target, else at the peak, else between steps."""
    if target is not None:
        why = [f"{target.why[:1].upper()}{target.why[1:].rstrip('.')}."] if target.why else []
        yield Lines([*why, figures_and_basis(target)], heading="What the target run will need", name="target")
        gpu = WholeGpu(target.reserved_gib[1], target.outside_gib, target.capacity_gib)
        phases = _phase_bars(target.phases, "Target by phase, predicted")
        bars = [_category_bars(target.categories, "Target by category, predicted", gpu)]
        yield Beside([*bars, *([phases] if target.phases else [])])
        return
    phases = _phase_bars(summary.phases, "By phase, highest")
    if summary.categories:
        outside = 0.0 if summary.capped else summary.others_gib or 0.0
        gpu = WholeGpu(summary.categories_reserved_gib or 0.0, outside, summary.capacity_gib)
        at = f" of step {summary.categories_step}" if summary.categories_step is not None else ""
        bars = [_category_bars(summary.categories, f"By category, peak{at}", gpu)]
        yield Beside([*bars, *([phases] if summary.phases else [])], heading="What filled the GPU", name="filled")
        offloaded = {place: sum(sizes.values()) for place, sizes in summary.held.items() if place != "device"}
        if any(offloaded.values()):
            sizes = ", ".join(f"{place} {format_size(gib * GIB)}" for place, gib in offloaded.items())
            yield Lines([f"Held between steps outside the GPU: {sizes}."], views=View.TERMINAL)
        return
    held = [
        (f"{category}, {place}" if len(summary.held) > 1 else category, category, gib)
        for place, categories in summary.held.items()
        for category, gib in categories.items()
    ]
    rows = [Bar(name, gib, (format_size(gib * GIB),), category) for name, category, gib in held if gib > 0]
    yield Bars("Held between steps", ("category", "size"), rows, views=View.TERMINAL)
    if summary.phases:
        yield replace(phases, heading="By phase", name="phases")


def _out_of_memory(run: Run) -> Iterator[AnswerBlock]:
    """The last out-of-memory error of the rank that ended the run."""
    rank = run.of(run.ended_by)
    if not rank.ooms:
        return
    oom = rank.ooms[-1]
    # If it ended the run, it is in the first line.
    first = [] if run.ending.kind == "out of memory" else [wording.out_of_memory(run) or ""]
    yield Lines(first, heading="The out-of-memory error", name="oom", views=View.PAGE)
    yield Facts(list(_fields_of_error(oom)), views=View.PAGE)
    if oom.get("error"):
        yield Code("", [text(oom["error"], 3000)], views=View.PAGE)


_ERROR_FIELDS: Final = (
    ("Step", "step", "{:,}"), ("Phase", "phase", ""), ("Micro-batch", "micro_batch", "{:,}"),
    ("Samples", "samples", "{:,}"), ("Tokens", "tokens", "{:,}"), ("Longest sequence", "longest_sequence", "{:,}"),
    ("Inputs", "inputs", ""), ("Requested", "requested_gib", "{:.2f} GiB"),
    ("Free on the GPU", "free_gib", "{:.2f} GiB"), ("Allocated", "allocated_gib", "{:.2f} GiB"),
    ("Reserved", "reserved_gib", "{:.2f} GiB"), ("Cause", "cause", ""), ("Error", "error_type", ""),
    ("Allocator snapshot", "snapshot", ""),
)  # fmt: skip
"""Of the record of an out-of-memory error: (label, field, format)."""


def _fields_of_error(oom: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for label, name, form in _ERROR_FIELDS:
        value = oom.get(name)
        if isinstance(value, dict):
            value = ", ".join(f"{text(key, 40)} {text(shape, 40)}" for key, shape in value.items())
        if value not in (None, ""):
            yield label, form.format(value) if form else text(value, 120)


def _timeline(run: Run, summary: Summary, drawn: Mapping[str, Chart]) -> Iterator[AnswerBlock]:
    if "timeline" not in drawn:
        return
    rank = run.of(summary.rank)
    which = f" (rank {rank.rank}, which has the highest peak)" if len(run.ranks) > 1 else ""
    heading = "Over the steps" if summary.peak is not None else "Held between the steps"
    yield replace(drawn["timeline"], heading=f"{heading}{which}")
    kept = extremes([[step.get("peak_allocated_gib") for step in rank.steps]], _STEPS_IN_TABLE)
    columns = (">step", ">peak allocated", ">peak reserved", ">longest sequence", ">tokens", ">host memory", ">ms")
    fields = {
        "peak_allocated_gib": ".2f", "peak_reserved_gib": ".2f", "longest_sequence": ",.0f", "tokens": ",.0f",
        "host_rss_gib": ".2f", "step_time_ms": ",.0f",
    }  # fmt: skip
    steps: list[Mapping[str, Any]] = [rank.steps[place] for place in kept]
    rows = [
        [str(step["step"]), *(format(step[name], form) if name in step else "–" for name, form in fields.items())]
        for step in steps
    ]
    caption = f"{len(kept)} of {len(rank.steps)} steps, with the highest peaks; GiB"
    yield Table(columns, rows, caption, views=View.PAGE, folded="As a table")


def _ranks(run: Run, drawn: Mapping[str, Chart]) -> Iterator[AnswerBlock]:
    if len(run.ranks) < 2:
        return
    if "ranks" in drawn:
        yield drawn["ranks"]
    summaries = summarise_ranks(run)
    pairs = sorted(zip(run.ranks, summaries, strict=True), key=lambda pair: -(pair[1].peak.gib if pair[1].peak else 0))
    columns = (">rank", ">peak GiB", ">reserved GiB", ">host GiB", "ended")
    rows = [(str(rank.rank), *wording.highest(one), rank.ending.kind) for rank, one in pairs]
    yield Table(columns, rows, rows_shown=_RANKS_ON_TERMINAL, views=View.TERMINAL)
    every = [
        (str(rank.rank), *wording.highest(one), rank.ending.why)
        for rank, one in zip(run.ranks, summaries, strict=True)
    ]
    columns = (">rank", ">peak allocated", ">peak reserved", ">host memory", "how it ended")
    heading = "" if "ranks" in drawn else "By rank"
    yield Table(columns, every, "Highest of each rank, GiB", heading=heading, name="ranks", views=View.PAGE)


def _host(summary: Summary, drawn: Mapping[str, Chart]) -> Iterator[AnswerBlock]:
    line = wording.host(summary)
    if line is None:
        return
    yield Lines([line], heading="Host and disk", name="host")
    rows = [
        (place, category, format_size(gib * GIB))
        for place, held in summary.held.items()
        for category, gib in held.items()
    ]
    beside: list[AnswerBlock] = [drawn["host"]] if "host" in drawn else []
    beside += [Table(("where", "what", ">size"), rows, "Held between steps", views=View.PAGE)] if rows else []
    yield Beside(beside, views=View.PAGE)


def _predicted(summary: Summary) -> Iterator[AnswerBlock]:
    if not summary.predicted:
        return
    furthest = furthest_off(summary.predicted)
    lines, rows = [], []
    for what, predicted, measured in summary.predicted:
        shown = f"{measured:.2f}" if measured is not None else ""
        low = float(predicted.split("–")[0])
        off = f"{100 * (measured - low) / low:+.0f} %" if measured is not None and "–" not in predicted and low else ""
        rows.append((what, predicted, shown or "–", off))
        if what.startswith("peak "):
            beside = f"measured {shown}" if shown else "not measured"
            lines.append(f"{what.capitalize()}: predicted {predicted} GiB, {beside}.")
    yield Lines([*lines, *([furthest] if furthest else [])], heading="Predicted and measured", name="predicted")
    yield Table(("what", ">predicted", ">measured", ">off by"), rows, "GiB", views=View.PAGE)


def _modules(run: Run, *, views: View) -> AnswerBlock:
    """The table by module of the first rank."""
    rows = wording.module_rows(run)
    if not rows:
        return Lines(["No table by module recorded."], views=views & View.TERMINAL)
    columns = ("module", "class", ">parameters", ">trained", ">size", "where")
    caption = "Parameters and their bytes by module"
    return Table(columns, rows, caption, heading="By module", name="modules", views=views, tall=True)


def _facts(run: Run) -> Iterator[AnswerBlock]:
    """Model, arguments, machine, versions and the recipe's settings."""
    record = run.first.run
    facts = record.get("facts", {})
    settings = facts.get("setup")
    if not isinstance(settings, list) or not all(isinstance(each, dict) and "key" in each for each in settings):
        settings = []
    elsewhere = ("target_prediction", *(["setup"] if settings else []))
    given = {name: value for name, value in facts.items() if name not in elsewhere}
    groups = [
        ("Model", {name: record.get(name) for name in _OF_THE_MODEL}),
        ("Arguments", record.get("arguments", {})),
        ("Machine", {**record.get("hardware", {}), "world_size": record.get("world_size")}),
        ("Versions", record.get("versions", {})),
        ("Recipe" if "recipe" in facts else "Given by the user", given),
    ]
    shown = [
        Facts([(name, _fact(value)) for name, value in values.items() if value is not None], heading=heading)
        for heading, values in groups
        if any(value is not None for value in values.values())
    ]
    yield Beside(shown, heading="The run", name="facts", views=View.PAGE)
    if settings:
        rows = [
            (text(each["key"], 80), _fact(each.get("value")), text(each.get("reason", ""), 300)) for each in settings
        ]
        caption, folded = "What the recipe set, and why", f"The recipe's settings ({len(rows)})"
        yield Table(("setting", "value", "reason"), rows, caption, views=View.PAGE, folded=folded)
    files = few([rank.path.name for rank in run.ranks])
    yield Lines([f"Records: {files} in {text(run.folder, 300)}"], "note", views=View.PAGE)


def _fact(value: Any) -> str:
    if isinstance(value, bool | str):
        return text(value, 300)
    if isinstance(value, int):
        return f"{value:,}" if value >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list) and all(isinstance(each, str | int | float) for each in value):
        return text(", ".join(map(_fact, value)), 300)
    if isinstance(value, dict) and all(isinstance(each, str | int | float) for each in value.values()):
        return text(", ".join(f"{name}: {_fact(each)}" for name, each in value.items()), 300)
    return text(json.dumps(value, ensure_ascii=False), 300)
