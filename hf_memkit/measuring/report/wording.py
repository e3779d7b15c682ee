"""Sentences about a run. Text from the records is made safe to print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from hf_memkit.common.answer.safe_text import printable
from hf_memkit.common.commands import command
from hf_memkit.common.terms import at
from hf_memkit.measuring.report.diagnosis import MIN_STEPS
from hf_memkit.measuring.report.load import Run
from hf_memkit.measuring.report.sanitize import few
from hf_memkit.measuring.report.summary import Summary
from hf_memkit.measuring.report.target import next_command, sentence, target_of


def title(run: Run, summary: Summary) -> str:
    """`GPT2LMHeadModel, 1,558 M parameters, on Tesla T4 (15.8 GiB)`"""
    record = run.first.run
    parts = [printable(record.get("model_class") or "Unknown model", 60)]

    if parameters := record.get("parameters"):
        trained = record.get("trainable_parameters", parameters)
        of_them = f" ({_millions(trained)} trained)" if trained < parameters else ""
        parts.append(f"{_millions(parameters)} parameters{of_them}")

    facts = record.get("facts", {})
    if facts.get("recipe"):
        rehearsal = " (a rehearsal)" if facts.get("rehearsal") is True else ""
        parts.append(f"recipe {printable(facts['recipe'], 40)} {printable(facts.get('variant', ''), 30)}{rehearsal}")

    hardware = record.get("hardware", {})
    device = printable(hardware.get("device_name") or "unknown device", 60)
    if hardware.get("device_type") == "cpu":
        device = f"a CPU ({device})"
    ranks = f"{len(run.ranks)} ranks, " if len(run.ranks) > 1 else ""
    size = f" ({summary.capacity_gib:.1f} GiB)" if summary.capacity_gib is not None else ""
    if record.get("engine") == "FSDP2":
        parts.append("sharded by FSDP2")
    parts.append(f"on {ranks}{device}{size}")
    return ", ".join(parts)


def ending_and_time(run: Run, summary: Summary) -> str:
    """How the run ended, unless the verdict says it, and the time of a step."""
    sentences = []
    if out_of_memory_at_end(run) is None:
        rank = f"rank {run.ended_by} " if len(run.ranks) > 1 and run.ending.kind != "finished" else ""
        why = f"{rank}{run.ending.why.rstrip('.')}."
        sentences.append(why[0].upper() + why[1:])

    if summary.step_time_ms is not None:
        predicted = ""
        if expected := sorted(summary.predicted_step_time_ms):
            predicted = f", {expected[len(expected) // 2]:,.0f} ms predicted"
            predicted += f" ({expected[0]:,.0f} ms–{expected[-1]:,.0f} ms)" if len(expected) > 1 else ""
        sentences.append(f"A step took {summary.step_time_ms:,.0f} ms (median){predicted}.")
    return " ".join(sentences)


def state(run: Run, summary: Summary) -> Literal["bad", "near", "good"]:
    """`"bad"` if the run failed, `"near"` if it was tight."""
    if run.ending.kind in ("out of memory", "failed", "killed"):
        return "bad"
    target = target_of(run)
    return "near" if summary.tight or (target is not None and target.verdict != "fits") else "good"


def verdict(run: Run, summary: Summary) -> str:
    """The first line of the report."""
    if (line := out_of_memory_at_end(run)) is not None:
        return line

    peak = summary.peak
    if peak is None:
        target = target_of(run)
        if target is not None and run.ending.kind in ("finished", "running"):
            return f"Rehearsal {run.ending.kind}. {sentence(target)}"
        if "rss_gib" not in summary.host:
            return "No memory figures recorded."
        return f"Host RAM peak {summary.host['rss_gib']:.1f} GiB; no GPU to measure."

    line = f"Peak {peak.gib:.1f} GiB"
    if summary.capacity_gib is not None and summary.percent is not None:
        whole = "the allocator's cap" if summary.capped else "the GPU"
        line = f"Peak {peak.gib:.1f} of {summary.capacity_gib:.1f} GiB: {summary.percent:.0f} % of {whole}"
    moment = at(peak.phase, peak.step)
    line += f", {moment}" if moment else ""
    line += f" on rank {peak.rank}" if len(run.ranks) > 1 else ""
    if summary.tight and summary.headroom_gib is not None:
        return f"{line}. Tight: {max(0.0, summary.headroom_gib):.1f} GiB left."
    return f"{line}."


def reserved(summary: Summary) -> str | None:
    """Reserved memory, memory outside the allocator, and headroom."""
    if summary.reserved_gib is None:
        return None
    parts = [f"Peak reserved {summary.reserved_gib:.1f} GiB"]
    if summary.others_gib is not None:
        parts.append(f"outside the allocator {summary.others_gib:.1f} GiB")
    if summary.headroom_gib is not None:
        parts.append(f"headroom {max(0.0, summary.headroom_gib):.1f} GiB")
    if summary.retries:
        parts.append(f"cache freed and allocation retried {summary.retries} times")
    return "; ".join(parts) + "."


def compiling(summary: Summary) -> str | None:
    """What torch.compile did; None if nothing was compiled."""
    figures = summary.compilation
    if figures is None:
        return None
    parts = [_count(figures.get("graphs", 0), "graph")]
    if "compile_time_ms" in figures:
        parts[0] += f" in {figures['compile_time_ms'] / 1000:,.1f} s"
    if steps := summary.compiled_steps:
        parts.append(f"compiled in step{'s' if len(steps) > 1 else ''} {few(steps)}")
    if breaks := figures.get("graph_breaks"):
        parts.append(_count(breaks, "graph break") + _first_of(figures.get("graph_break_reasons")))
    if again := figures.get("recompilations"):
        parts.append(_count(again, "recompilation") + _first_of(figures.get("recompile_reasons")))
    if given_up := figures.get("given_up"):
        parts.append(f"gave up on {_count(given_up, 'function')}")
    return f"torch.compile: {'; '.join(parts)}."


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def _first_of(reasons: list[str] | None) -> str:
    """The first reason in brackets; empty without one."""
    return f" ({printable(reasons[0], 160)})" if reasons else ""


def host(summary: Summary) -> str | None:
    """RAM of this process and of the machine; None if neither was recorded."""
    figures = summary.host
    parts = []
    if "rss_gib" in figures:
        parts.append(f"this process peak {figures['rss_gib']:.2f} GiB")
    if "available_gib" in figures:
        of = f" of {figures['total_gib']:.1f}" if "total_gib" in figures else ""
        parts.append(f"minimum free {figures['available_gib']:.1f}{of} GiB")
    if not parts:
        return None
    if figures.get("pinned_gib"):
        parts.append(f"pinned {figures['pinned_gib']:.2f} GiB")
    if figures.get("disk_swap_gib"):
        parts.append(f"swapped to disk {figures['disk_swap_gib']:.2f} GiB")
    return f"Host RAM: {', '.join(parts)}."


def unknowable(run: Run, summary: Summary) -> str | None:
    """Which figures this device does not have."""
    if summary.peak is not None:
        return None
    if target_of(run) is not None:
        return "A small model ran on this CPU: its memory says nothing about the target's."
    device = printable(run.first.run.get("hardware", {}).get("device_type") or "cpu", 20)
    return f"This device ({device}) has no peak counter: peaks by phase and category are unknown."


def out_of_memory_at_end(run: Run) -> str | None:
    """The recorded out-of-memory error that ended the run, as a sentence."""
    return out_of_memory(run) if run.ending.kind == "out of memory" else None


def out_of_memory(run: Run) -> str | None:
    """The last out-of-memory error of the rank that ended the run, with the requested and the free memory."""
    rank = run.of(run.ended_by)
    if not rank.ooms:
        return None
    oom: Mapping[str, Any] = rank.ooms[-1]
    whose = "host RAM" if oom.get("cause") == "host memory" else "memory"
    line = f"Out of {whose} {at(printable(oom.get('phase') or '', 20), oom.get('step'))}".rstrip()
    line += f" on rank {rank.rank}" if len(run.ranks) > 1 else ""
    fields = {"requested_gib": "requested", "free_gib": "free", "allocated_gib": "allocated", "capacity_gib": "total"}
    figures = [f"{oom[name]:.2f} GiB {words}" for name, words in fields.items() if name in oom]
    return f"{line}: {', '.join(figures)}." if figures else f"{line}."


def nothing_to_do(run: Run, summary: Summary) -> str:
    """What to do if there are no findings and no changes."""
    kind = run.ending.kind
    if kind == "out of memory":
        return f"For fixes: {command('memkit', 'explain', run.folder)}"
    target = target_of(run)
    if kind == "finished" and target is not None:
        return next_command(run, target)
    line = f"No memory problem found over {summary.steps:,} step{'s' if summary.steps != 1 else ''}."
    if kind in ("failed", "killed"):
        return f"{line} For the cause, see the job's own log."
    return f"{line} That is too few to tell whether memory grows." if summary.steps < MIN_STEPS else line


def _millions(count: int) -> str:
    return f"{count / 1e6:,.0f} M" if count >= 1e7 else f"{count:,}"
