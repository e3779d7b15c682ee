"""A run as one HTML page that needs nothing else, from the top down. In: `Run`. Out: a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit.common.units import GIB, format_size
from hf_memkit.measuring.out_of_memory import Change
from hf_memkit.measuring.report import wording
from hf_memkit.measuring.report.advice import Advice, advise, finding_sentence
from hf_memkit.measuring.report.bars import chip, gpu_bar, phase_bars, prediction_bars
from hf_memkit.measuring.report.charts import charts, extremes
from hf_memkit.measuring.report.document import check_file, document, write_document
from hf_memkit.measuring.report.html import Html, el, figure_table, join, lead, section, terms, tiles
from hf_memkit.measuring.report.load import Run
from hf_memkit.measuring.report.sanitize import few, text
from hf_memkit.measuring.report.summary import Summary, furthest_off, summarise, summarise_ranks
from hf_memkit.measuring.report.target import rests_on, target_of

_ROWS: Final = 25
_MARKS: Final = {"diamond": "◆", "square": "■", "x": "✕"}

WORDS: Final = (
    ("allocated", "Bytes of live tensors. The peak is the highest."),
    (
        "reserved",
        "What PyTorch's allocator has taken from the GPU: allocated bytes and its cache. This must fit.",
    ),
    (
        "outside the allocator",
        "What else the GPU holds: the CUDA context, libraries such as NCCL, other processes. nvidia-smi counts it.",
    ),
    ("headroom", "GPU memory minus the peak reserved and what is outside the allocator."),
    (
        "fragmentation",
        "Reserved but unused memory. Where no free block is large enough, an allocation fails despite it.",
    ),
    (
        "weights, gradients, optimizer",
        "The model's parameters, their gradients, and the optimizer's states.",
    ),
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
    "model_class",
    "model_type",
    "parameters",
    "trainable_parameters",
    "vocabulary",
    "weights_dtypes",
    "attention",
    "optimizer_classes",
    "engine",
)


def write_page(run: Run, path: str | Path) -> Path:
    """Writes the page over an earlier one of memkit's and returns its path; InputError where that is refused or
    fails."""
    check_file(path)
    return write_document(path, page(run))


def page(run: Run) -> str:
    """The page's HTML."""
    summary = summarise(run)
    drawn = charts(run, summary)
    body = join(_sections(run, summary, advise(run, summary), drawn), "\n")
    return document(f"Memory: {wording.title(run, summary)}", body, drawn)


def _sections(run: Run, summary: Summary, advice: Advice, drawn: Mapping[str, Any]) -> Iterator[Html]:
    """All that this run has something for."""
    yield _headline(run, summary)
    yield _what_to_do(run, summary, advice)
    for part in (
        _target(run),
        _filled(summary),
        _out_of_memory(run),
        _timeline(run, summary, drawn),
        _phases(summary, drawn),
        _lengths(drawn),
        _predicted(summary),
        _ranks(run, drawn),
        _host(summary, drawn),
        _modules(run),
    ):
        if part is not None:
            yield part
    yield _facts(run)
    yield section("words", "Words", terms(WORDS, "glossary"))


def _headline(run: Run, summary: Summary) -> Html:
    lines = (wording.title(run, summary), wording.course(run, summary), wording.unknowable(run, summary))
    verdict = lead(wording.verdict(run, summary), filter(None, lines), wording.state(run, summary))
    notes = [el("p", el("strong", "Note: "), note, class_="soft") for note in run.notes]
    return el("header", verdict, tiles(_tiles(run, summary)), *notes)


def _tiles(run: Run, summary: Summary) -> Iterator[tuple[str, str]]:
    peak, target = summary.peak, target_of(run)
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


def _what_to_do(run: Run, summary: Summary, advice: Advice) -> Html:
    if not advice.findings and not advice.changes:
        return section("next", "What to do", el("p", wording.nothing_to_do(run, summary)))
    findings = [_found(finding_sentence(run, rank, finding)) for rank, finding in advice.findings]
    return section(
        "next",
        "What to do",
        el("ul", *findings, class_="changes") if findings else None,
        el("ol", *map(_change, advice.changes), class_="changes") if advice.changes else None,
    )


def _found(sentence: str) -> Html:
    """A finding, its kind and first step in bold."""
    head, colon, rest = sentence.partition(":")
    return el("li", el("strong", head, colon), rest)


def _change(change: Change) -> Html:
    saved = f" Saves {change.saving}." if change.saving is not None else ""
    cost = f" Costs: {change.cost.rstrip('.')}." if change.cost else ""
    reason = f" {change.reason.rstrip('.')}."
    return el("li", el("code", change.name_and_value), ":", reason, saved, el("span", cost, class_="soft"))


def _target(run: Run) -> Html | None:
    """What the target of a rehearsal is predicted to need."""
    target = target_of(run)
    if target is None:
        return None
    why = el("p", f"{target.why[:1].upper()}{target.why[1:].rstrip('.')}.") if target.why else None
    basis = el("p", rests_on(target), class_="soft")
    drawn = prediction_bars(target, f"Predicted for {target.gpu}: GiB by category at the peak")
    return section("target", "What the target run will need", why, basis, *drawn)


def _filled(summary: Summary) -> Html | None:
    """What filled the GPU at the peak."""
    if not summary.categories:
        return None
    reserved = summary.categories_reserved_gib or 0.0
    outside = 0.0 if summary.capped else summary.others_gib or 0.0
    caption = f"GiB by category at the peak of step {summary.categories_step}"
    return section(
        "filled", "What filled the GPU", *gpu_bar(caption, summary.categories, reserved, outside, summary.capacity_gib)
    )


def _timeline(run: Run, summary: Summary, drawn: Mapping[str, Any]) -> Html | None:
    if "timeline" not in drawn:
        return None
    rank = run.of(summary.rank)
    which = f" (rank {rank.rank}, which has the highest peak)" if len(run.ranks) > 1 else ""
    heading = "Over the steps" if summary.peak is not None else "Held between the steps"
    kept = extremes([[step.get("peak_allocated_gib") for step in rank.steps]], _ROWS)
    columns = ("step", "peak allocated", "peak reserved", "longest sequence", "tokens", "host memory", "ms")
    rows = [_step_row(rank.steps[i]) for i in kept]
    table = figure_table(
        f"{len(rows)} of {len(rank.steps)} steps, with the highest peaks; GiB", columns, rows, numbers=range(7)
    )
    chart = _chart(drawn, "timeline", _timeline_caption(summary))
    return section(
        "timeline", f"{heading}{which}", chart,
        el("details", el("summary", "As a table"), table),
    )  # fmt: skip


def _timeline_caption(summary: Summary) -> str:
    if summary.peak is None:
        return "Level areas are healthy: what is held between steps should not grow after the first steps."
    says = "The peak should stay below the dashed line, the GPU's memory" if summary.capacity_gib is not None else ""
    if summary.headroom_gib is not None:
        says += f"; {max(0.0, summary.headroom_gib):.1f} GiB were left at the closest"
    areas = "Areas show what the peak holds; they join the steps recorded in detail." if summary.categories else ""
    return " ".join(part for part in (f"{says}." if says else "", areas) if part) or "Peak of each step."


def _step_row(step: Mapping[str, Any]) -> list[str]:
    def shown(name: str, form: str) -> str:
        return format(step[name], form) if name in step else "–"

    counts = [shown(name, ",.0f") for name in ("longest_sequence", "tokens")]
    sizes = [shown(name, ".2f") for name in ("peak_allocated_gib", "peak_reserved_gib")]
    return [str(step["step"]), *sizes, *counts, shown("host_rss_gib", ".2f"), shown("step_time_ms", ",.0f")]


def _phases(summary: Summary, drawn: Mapping[str, Any]) -> Html | None:
    if not summary.phases:
        return None
    table = phase_bars("Peak allocated in each phase, GiB", summary.phases)
    highest = max(summary.phases, key=lambda phase: summary.phases[phase])
    caption = f"Peak of each phase over the steps. {highest.capitalize()} has the highest: reduce its memory first."
    chart = _chart(drawn, "phases", caption)
    return section("phases", "By phase", el("div", table, chart, class_="pair"))


def _lengths(drawn: Mapping[str, Any]) -> Html | None:
    places = [name for name in ("lengths", "tokens") if name in drawn]
    if not places:
        return None
    what = {"lengths": "the longest sequence", "tokens": "the tokens"}
    charts = [
        _chart(drawn, name, f"Peak of each step against {what[name]} of its batch; the colour is the step")
        for name in places
    ]
    return section(
        "lengths",
        "Peak against the size of the batch",
        el("p", "Points rising to the right: input size decides the peak. Level points: it does not.", class_="soft"),
        el("div", *charts, class_="pair"),
    )  # fmt: skip


def _predicted(summary: Summary) -> Html | None:
    if not summary.predicted:
        return None
    rows = []
    for what, predicted, measured in summary.predicted:
        low = float(predicted.split("–")[0])
        off = ""
        if measured is not None and "–" not in predicted and low > 0:
            off = f"{100 * (measured - low) / low:+.0f} %"
        rows.append((what, predicted, f"{measured:.2f}" if measured is not None else "–", off))
    table = figure_table("GiB", ("what", "predicted", "measured", "off by"), rows, numbers=(1, 2, 3))
    sentence = furthest_off(summary.predicted)
    return section("predicted", "Predicted and measured", el("p", sentence) if sentence else None, table)


def _ranks(run: Run, drawn: Mapping[str, Any]) -> Html | None:
    if len(run.ranks) < 2:
        return None
    ranks = zip(run.ranks, summarise_ranks(run), strict=True)
    rows = [(str(rank.rank), *wording.highest(one), rank.ending.why) for rank, one in ranks]
    columns = ("rank", "peak allocated", "peak reserved", "host memory", "how it ended")
    table = figure_table("Highest of each rank, GiB", columns, rows, numbers=(1, 2, 3))
    return section(
        "ranks",
        "By rank",
        _chart(drawn, "ranks", "Bars of unequal height: the ranks' batches or shards differ in size."),
        table,
    )


def _host(summary: Summary, drawn: Mapping[str, Any]) -> Html | None:
    line = wording.host(summary)
    if line is None:
        return None
    rows = [
        (place, category, format_size(gib * GIB))
        for place, held in summary.held.items()
        for category, gib in held.items()
    ]
    held = figure_table("Held between steps", ("where", "what", "size"), rows, numbers=(2,)) if rows else None
    chart = _chart(drawn, "host", "This process should level off after the first steps; a steady rise is a leak.")
    return section("host", "Host and disk", el("p", line), el("div", chart, held, class_="pair"))


def _chart(drawn: Mapping[str, Any], name: str, description: str) -> Html | None:
    """The place where the script draws a chart, with its key; None if there is no such chart."""
    if name not in drawn:
        return None
    hint = el("noscript", el("p", "This chart needs JavaScript. The tables have its figures.", class_="soft"))
    place = el("div", hint, id=f"chart-{name}", class_="chart", role="img", aria_label=description)
    return el("figure", _key(drawn[name]["traces"]), place, el("figcaption", description))


def _key(traces: Iterable[Mapping[str, Any]]) -> Html | None:
    """What the colours and marks of a chart mean, as text that wraps on a narrow screen."""
    entries = []
    for trace in traces:
        marker = trace.get("marker", {})
        if "fillcolor" in trace or trace["type"] == "bar":
            sign = chip(f"background: {trace.get('fillcolor') or marker['color']}")
        elif marker.get("symbol") in _MARKS:
            sign = el("strong", f"{_MARKS[marker['symbol']]} ", style=f"color: {marker['color']}", aria_hidden="true")
        elif "line" in trace:
            sign = chip(f"border-color: {trace['line']['color']}", f"line {trace['line']['dash']}")
        else:
            continue
        entries.append(el("li", sign, trace["name"]))
    return el("ul", *entries, class_="key") if entries else None


def _out_of_memory(run: Run) -> Html | None:
    """The last OOM of the rank that the run ended by."""
    rank = run.of(run.ended_by)
    if not rank.ooms:
        return None
    oom = rank.ooms[-1]
    listed = terms(((label, shown) for label, shown in _moment(oom) if shown), "facts")
    message = el("pre", text(oom.get("error", ""), 3000)) if oom.get("error") else None
    # Where the run ended by it, the page's first line has said it.
    line = None if run.ending.kind == "out of memory" else el("p", wording.out_of_memory(run) or "")
    return section("oom", "The out-of-memory error", line, listed, message)


def _moment(oom: Mapping[str, Any]) -> list[tuple[str, str]]:
    def gib(name: str) -> str:
        return f"{oom[name]:.2f} GiB" if name in oom else ""

    def count(name: str) -> str:
        return f"{oom[name]:,}" if name in oom else ""

    inputs = oom.get("inputs", {})
    shapes = ", ".join(f"{text(name, 40)} {text(shape, 40)}" for name, shape in inputs.items())
    return [
        ("Step", count("step")),
        ("Phase", text(oom.get("phase", ""), 20)),
        ("Micro-batch", count("micro_batch")),
        ("Samples", count("samples")),
        ("Tokens", count("tokens")),
        ("Longest sequence", count("longest_sequence")),
        ("Inputs", shapes),
        ("Requested", gib("requested_gib")),
        ("Free on the GPU", gib("free_gib")),
        ("Allocated", gib("allocated_gib")),
        ("Reserved", gib("reserved_gib")),
        ("Cause", text(oom.get("cause", ""), 80)),
        ("Error", text(oom.get("error_type", ""), 80)),
        ("Allocator snapshot", text(oom.get("snapshot", ""), 120)),
    ]


def _modules(run: Run) -> Html | None:
    """The table by module, as of the first rank."""
    rows = wording.module_rows(run)
    if not rows:
        return None
    table = figure_table("Parameters and their bytes by module", wording.MODULE_COLUMNS, rows, numbers=(2, 3, 4))
    return section("modules", "By module", el("div", table, class_="tall"))


def _facts(run: Run) -> Html:
    """What ran: the facts that the records have of it."""
    record = run.first.run
    facts = record.get("facts", {})
    settings = _settings(facts)
    elsewhere = ("target_prediction", *(["setup"] if settings else []))
    given = {name: value for name, value in facts.items() if name not in elsewhere}
    groups = [
        ("Model", {name: record.get(name) for name in _OF_THE_MODEL}),
        ("Arguments", record.get("arguments", {})),
        ("Machine", {**record.get("hardware", {}), "world_size": record.get("world_size")}),
        ("Versions", record.get("versions", {})),
        ("Recipe" if "recipe" in facts else "Given by the user", given),
    ]  # fmt: skip
    shown = []
    for heading, values in groups:
        known = {name: value for name, value in values.items() if value is not None}
        if known:
            rows = ((name, _fact(value)) for name, value in known.items())
            shown.append(el("div", el("h3", heading), terms(rows, "facts")))
    source = el(
        "p", f"Records: {few([rank.path.name for rank in run.ranks])} in {text(run.folder, 300)}", class_="soft"
    )
    return section("facts", "The run", el("div", *shown, class_="pair"), settings, source)


def _settings(facts: Mapping[str, Any]) -> Html | None:
    """A recipe's settings with their reasons."""
    setup = facts.get("setup")
    if not isinstance(setup, list) or not all(isinstance(each, dict) and "key" in each for each in setup):
        return None
    rows = [(text(each["key"], 80), _fact(each.get("value")), text(each.get("reason", ""), 300)) for each in setup]
    table = figure_table("What the recipe set, and why", ("setting", "value", "reason"), rows)
    return el("details", el("summary", f"The recipe's settings ({len(rows)})"), table)


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
