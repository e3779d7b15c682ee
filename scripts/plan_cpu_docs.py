"""Writes the tables of docs/plan.md that lay predicted times beside steps on a CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evidence_tables import RESULTS, ROOT, table

from benchmarks.plan_cpu import EIGHT

EVIDENCE = RESULTS / "plan_cpu.json"

Row = Mapping[str, Any]


def cpu_table(path: Path = EVIDENCE) -> str:
    """Steps on a CPU, predicted and measured, and the bars."""
    evidence = json.loads(path.read_text())
    eight, every, bars = evidence["eight"], evidence["all"], evidence["bars"]
    rates = evidence["rates"]
    said = (
        f"`{path.name}`: one core, torch {evidence['versions']['torch']}, transformers "
        f"{evidence['versions']['transformers']}; {1e3 * rates['float32']:.0f} GFLOPS in fp32, "
        f"{1e3 * rates['bfloat16']:.0f} in bf16, {rates['memory']:.0f} GB/s."
    )
    correlation, span = "rank_correlation", "span"
    figures = (
        ("rank correlation of predicted and measured", f"≥ {bars[correlation]:g}",
         *(_judged(found[correlation], bars[correlation]) for found in (eight, every))),
        ("slowest beside fastest", f"≥ {bars[span]:g}",
         *(_judged(found[span], bars[span]) for found in (eight, every))),
        ("pairs that differ by more than three repeats do", "all of the eight", _pairs(eight),
         f"{every['apart']} of {every['pairs']}"),
        ("pairs of these in the right order", "–",
         *(f"{found['apart_in_order']} of {found['apart']}" for found in (eight, every))),
        ("what is ranked first, behind the fastest", f"≤ {_percent(bars['behind_best'])}",
         *(_behind(found, bars) for found in (eight, every))),
        ("error, median (worst)", "–", _errors(eight), _errors(every)),
    )  # fmt: skip
    rows = (
        [
            row["name"], f"{row['measured_s']:.3f}", f"{row['predicted_s'][1]:.3f}", _signed(row["error"]),
            "yes" if row["name"] in EIGHT else "",
        ]
        for row in sorted(evidence["rows"], key=lambda row: row["measured_s"])
    )  # fmt: skip
    setups = table(
        "micro-batch × accumulation, techniques | measured, s a step | predicted | error | one of the eight", rows
    )
    bars_met = table(" | bar | the eight | all setups", figures)
    return f"{said}\n\n{bars_met}\n\n{setups}\n\nMade by `{evidence['command']}`."


def cpu_choices() -> str:
    """What each way to choose takes where not every setup fits, and how far that is behind the fastest that fits."""
    rows = []
    for row in json.loads(EVIDENCE.read_text())["choices"]:
        memory = f"{row['memory_bytes'] / 2**20:.0f}"
        cells = [memory, row["fit"], row["best"], row["plan"]["names"][0], _behind_best(row["plan"])]
        rules = ("largest micro-batch", "no checkpointing")
        rows.append([*cells, *(_behind_best(row[rule]) if rule in row else "nothing fits" for rule in rules)])
    return table(
        "memory, MiB | setups that fit | fastest, measured | a plan's | behind the fastest | largest micro-batch | "
        "largest without checkpointing",
        rows,
    )


def _judged(figure: float, bar: float) -> str:
    return f"{figure:.2f}" if figure >= bar else f"{figure:.2f}, missed"


def _pairs(found: Row) -> str:
    missed = ", missed" if found["apart"] < found["pairs"] else ""
    return f"{found['apart']} of {found['pairs']}{missed}"


def _behind(found: Row, bars: Row) -> str:
    missed = ", missed" if found["first_behind_best"] > bars["behind_best"] else ""
    return f"{_percent(found['first_behind_best'])} ({found['first']}){missed}"


def _errors(found: Row) -> str:
    return f"{_percent(found['median_error'])} ({_percent(found['worst_error'])})"


def _behind_best(way: Row) -> str:
    low, high = (_percent(each) for each in way["behind_best"])
    return low if low == high else f"{low} to {high}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _signed(share: float) -> str:
    return f"{100 * share:+.0f} %"


def tables() -> dict[Path, dict[str, str]]:
    """The page's tables."""
    return {ROOT / "docs" / "plan.md": {"cpu": cpu_table(), "cpu-choices": cpu_choices()}}
