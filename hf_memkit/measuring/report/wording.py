"""Sentences and table rows about a run. Text from the records is made safe to print."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Literal

from hf_memkit.common.terms import at
from hf_memkit.common.units import format_size
from hf_memkit.measuring.report.diagnosis import MIN_STEPS
from hf_memkit.measuring.report.load import Run
from hf_memkit.measuring.report.sanitize import text
from hf_memkit.measuring.report.summary import Summary
from hf_memkit.measuring.report.target import next_command, sentence, target_of


def title(run: Run, summary: Summary) -> str:
    """`GPT2LMHeadModel, 1,558 M parameters, on Tesla T4, 15.8 GiB`"""
    record = run.first.run
    parts = [text(record.get("model_class") or "Unknown model", 60)]
    parameters, trainable = record.get("parameters"), record.get("trainable_parameters")
    if parameters:
        part = f"{_millions(parameters)} parameters"
        if trainable is not None and trainable < parameters:
            part += f" ({_millions(trainable)} trained)"
        parts.append(part)
    hardware = record.get("hardware", {})
    device = text(hardware.get("device_name") or "unknown device", 60)
    where = f"on a CPU ({device})" if hardware.get("device_type") == "cpu" else f"on {device}"
    if len(run.ranks) > 1:
        where = f"on {len(run.ranks)} ranks, {device}"
    elif summary.capacity_gib is not None:
        where += f" ({summary.capacity_gib:.1f} GiB)"
    facts = record.get("facts", {})
    if facts.get("recipe"):
        rehearsal = " (a rehearsal)" if facts.get("rehearsal") is True else ""
        parts.append(f"recipe {text(facts['recipe'], 40)} {text(facts.get('variant', ''), 30)}{rehearsal}")
    return ", ".join([*parts, where])


def ending_and_time(run: Run, summary: Summary) -> str:
    """How the run ended, and the time of a step."""
    line = run.ending.why
    if len(run.ranks) > 1 and run.ending.kind != "finished":
        line = f"rank {run.ended_by} {line}"
    parts = [f"{line[0].upper()}{line[1:].rstrip('.')}."]
    if summary.step_time_ms is not None:
        if run.ending.kind == "out of memory" and out_of_memory(run):
            parts = []  # the verdict contains it
        predicted = ""
        if expected := sorted(summary.predicted_step_time_ms):
            predicted = f", {_time(expected[len(expected) // 2])} predicted"
            predicted += f" ({_time(expected[0])}–{_time(expected[-1])})" if len(expected) > 1 else ""
        parts.append(f"A step took {_time(summary.step_time_ms)} (median){predicted}.")
    return " ".join(parts)


def state(run: Run, summary: Summary) -> Literal["bad", "near", "good"]:
    """`"bad"` if the run failed, `"near"` if it was tight."""
    if run.ending.kind in ("out of memory", "failed", "killed"):
        return "bad"
    target = target_of(run)
    return "near" if summary.tight or (target is not None and target.verdict != "fits") else "good"


def highest(summary: Summary) -> tuple[str, ...]:
    """A rank's peak, reserved and host memory, in GiB; a dash where unknown."""
    figures = (summary.peak.gib if summary.peak else None, summary.reserved_gib, summary.host.get("rss_gib"))
    return tuple("–" if figure is None else f"{figure:.2f}" for figure in figures)


def verdict(run: Run, summary: Summary) -> str:
    """The first line of the report."""
    if run.ending.kind == "out of memory" and (line := out_of_memory(run)):
        return line
    peak = summary.peak
    if peak is None and (target := target_of(run)) is not None and run.ending.kind in ("finished", "running"):
        return f"Rehearsal {run.ending.kind}. {sentence(target)}"
    if peak is None:
        rss = summary.host.get("rss_gib")
        if rss is None:
            return "No memory figures recorded."
        total = summary.host.get("total_gib")
        of = f" of {total:.1f}" if total else ""
        return f"Host RAM peak {rss:.2f}{of} GiB; no GPU to measure."
    where = f", in {peak.phase}" if peak.phase else ""
    if peak.step is not None:
        where += f" at step {peak.step}"
    if len(run.ranks) > 1:
        where += f" on rank {peak.rank}"
    if summary.capacity_gib is None or summary.percent is None:
        return f"Peak {peak.gib:.2f} GiB{where}."
    of_what = "the allocator's cap" if summary.capped else "the GPU"
    line = f"Peak {peak.gib:.1f} of {summary.capacity_gib:.1f} GiB: {summary.percent:.0f} % of {of_what}{where}."
    if summary.tight and summary.headroom_gib is not None:
        left = summary.headroom_gib
        line += f" Tight: {left:.1f} GiB left." if left >= 0.05 else " Tight: nothing left."
    return line


def reserved(summary: Summary) -> str | None:
    """Reserved memory, memory outside the allocator, and headroom."""
    if summary.reserved_gib is None:
        return None
    parts = [f"Peak reserved {summary.reserved_gib:.1f} GiB"]
    if summary.peak is not None and summary.reserved_gib >= summary.peak.gib:
        parts[0] += f" ({summary.reserved_gib - summary.peak.gib:.1f} above the peak allocated)"
    if summary.others_gib is not None:
        parts.append(f"outside the allocator {summary.others_gib:.1f}")
    if summary.headroom_gib is not None:
        left = summary.headroom_gib
        parts.append(f"headroom {left:.1f} GiB" if left >= 0.05 else "no headroom")
    if summary.retries:
        parts.append(f"cache freed and allocation retried {summary.retries} times")
    return "; ".join(parts) + "."


def host(summary: Summary) -> str | None:
    figures = summary.host
    if "rss_gib" not in figures and "available_gib" not in figures:
        return None
    parts = [f"this process peak {figures['rss_gib']:.2f} GiB"] if "rss_gib" in figures else []
    if "available_gib" in figures:
        of = f" of {figures['total_gib']:.1f}" if "total_gib" in figures else ""
        parts.append(f"minimum free {figures['available_gib']:.1f}{of} GiB")
    if figures.get("pinned_gib"):
        parts.append(f"pinned {figures['pinned_gib']:.2f} GiB")
    if figures.get("disk_swap_gib"):
        parts.append(f"swapped to disk {figures['disk_swap_gib']:.2f} GiB")
    return "Host RAM: " + ", ".join(parts) + "."


def unknowable(run: Run, summary: Summary) -> str | None:
    """Which figures this device does not have."""
    if summary.peak is not None:
        return None
    if target_of(run) is not None:
        return "A small model ran on this CPU: its memory says nothing about the target's."
    kind = text(run.first.run.get("hardware", {}).get("device_type") or "", 20)
    if kind in ("", "cpu"):
        return (
            "A CPU has no peak counter. Peaks by phase and category need a GPU; shown below is what is held between "
            "steps."
        )
    return f"This device ({kind}) gives no allocator figures, so peaks by phase and category are unknown."


def out_of_memory(run: Run) -> str | None:
    """The out-of-memory error that ended the run, with the requested and the free memory."""
    rank = run.of(run.ended_by)
    if not rank.ooms:
        return None
    oom: Mapping[str, Any] = rank.ooms[-1]
    whose = "host RAM" if oom.get("cause") == "host memory" else "memory"
    line = f"Out of {whose} {at(text(oom.get('phase') or '', 20), oom.get('step'))}".rstrip()
    if len(run.ranks) > 1:
        line += f" on rank {rank.rank}"
    fields = {"requested_gib": "requested", "free_gib": "free", "allocated_gib": "allocated", "capacity_gib": "total"}
    figures = [f"{oom[name]:.2f} GiB {words}" for name, words in fields.items() if name in oom]
    return f"{line}{': ' if figures else ''}{', '.join(figures)}."


def nothing_to_do(run: Run, summary: Summary) -> str:
    """What to do if there are no findings and no changes."""
    if run.ending.kind == "out of memory":
        return f"For fixes: memkit explain {shlex.quote(text(run.folder))}"
    if run.ending.kind in ("failed", "killed"):
        return "No memory problem found over the steps. For the cause, see the job's own log."
    if run.ending.kind == "unknown":
        return "No memory problem found over the recorded steps."
    if run.ending.kind == "finished" and (target := target_of(run)) is not None:
        if target.gpu_verdict == "does not fit":
            return f"Choose another GPU or variant: {next_command(run, target)}"
        return f"Run it on a machine with that GPU: {next_command(run, target)}"
    if summary.steps == 0:
        return "No step recorded."
    fits = ""
    if summary.peak is not None and summary.headroom_gib is not None and not summary.tight:
        fits = f": it fits with {max(0.0, summary.headroom_gib):.1f} GiB to spare"
    if summary.steps < MIN_STEPS and run.ending.kind != "running":
        steps = "One step is" if summary.steps == 1 else f"{summary.steps} steps are"
        return f"No memory problem found{fits}. {steps} too few to tell whether memory grows."
    return f"No memory problem found{f'{fits}, and memory does not grow' if fits else ''} over the steps."


def module_rows(run: Run) -> list[tuple[str, ...]]:
    """The table by module of the first rank, with a row of totals. A record contains the figures of one of `repeats`
    equal modules, a row those of all of them."""
    rows: list[tuple[str, ...]] = []
    totals = [0, 0, 0]
    for module in run.first.modules:
        repeats = max(1, module.get("repeats", 1))
        sizes = module.get("parameters", 0), module.get("trainable_parameters", 0), module.get("bytes", 0)
        counts = [repeats * size for size in sizes]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        places = {text(place, 20): repeats * size for place, size in module.get("places", {}).items()}
        each = places if len(places) < 2 else (f"{place} {format_size(size)}" for place, size in places.items())
        name, kind = text(module.get("name") or "(model)", 120), text(module.get("class", ""), 60)
        rows.append((name, kind, *_counts(*counts), ", ".join(each)))
    return [*rows, ("total", "", *_counts(*totals), "")] if rows else []


def _counts(parameters: int, trained: int, size: int) -> tuple[str, str, str]:
    of_them = (
        "all" if trained == parameters and parameters else f"{trained:,}" if trained else "no" if parameters else ""
    )
    return f"{parameters:,}", of_them, format_size(size)


def _millions(count: int) -> str:
    return f"{count / 1e6:,.0f} M" if count >= 1e7 else f"{count / 1e6:.2f} M" if count >= 1e5 else f"{count:,}"


def _time(ms: float) -> str:
    return f"{ms:,.0f} ms" if ms < 10_000 else f"{ms / 1000:,.1f} s"
