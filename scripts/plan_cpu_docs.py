#!/usr/bin/env python3
"""Writes the tables of docs/plan.md that lay predicted times beside steps on a CPU; with --check only compares.

.venv/bin/python scripts/plan_cpu_docs.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evidence_tables import RESULTS, ROOT, update

PAGE = ROOT / "docs" / "plan.md"

Row = Mapping[str, Any]


def cpu_table(path: Path = RESULTS / "plan_cpu.json") -> str:
    """Steps on a CPU, predicted and measured, and the bars."""
    if not path.exists():
        return "Not measured yet."
    evidence = json.loads(path.read_text())
    eight, every, bars = evidence["eight"], evidence["all"], evidence["bars"]
    rates = evidence["rates"]
    lines = [
        f"`{path.name}`: one core, torch {evidence['versions']['torch']}, transformers "
        f"{evidence['versions']['transformers']}; {1e3 * rates['float32']:.0f} GFLOPS in fp32, "
        f"{1e3 * rates['bfloat16']:.0f} in bf16, {rates['memory']:.0f} GB/s.",
        "",
        "| | bar | the eight | all setups |",
        "|---|---|---|---|",
        f"| rank correlation of predicted and measured | ≥ {bars['rank_correlation']:g} | "
        f"{_judged(eight['rank_correlation'], bars['rank_correlation'])} | "
        f"{_judged(every['rank_correlation'], bars['rank_correlation'])} |",
        f"| slowest beside fastest | ≥ {bars['span']:g} | {_judged(eight['span'], bars['span'])} | "
        f"{_judged(every['span'], bars['span'])} |",
        f"| pairs that differ by more than three repeats do | all of the eight | {_pairs(eight)} | "
        f"{every['apart']} of {every['pairs']} |",
        f"| pairs of these in the right order | – | {eight['apart_in_order']} of {eight['apart']} | "
        f"{every['apart_in_order']} of {every['apart']} |",
        f"| what is ranked first, behind the fastest | ≤ {_percent(bars['behind_best'])} | "
        f"{_behind(eight, bars)} | {_behind(every, bars)} |",
        f"| error, median (worst) | – | {_errors(eight)} | {_errors(every)} |",
        "",
        "| micro-batch × accumulation, techniques | measured, s a step | predicted | error | one of the eight |",
        "|---|---|---|---|---|",
    ]
    names = _eight()
    for row in sorted(evidence["rows"], key=lambda row: row["measured_s"]):
        lines.append(
            f"| {row['name']} | {row['measured_s']:.3f} | {row['predicted_s'][1]:.3f} | "
            f"{_signed(row['error'])} | {'yes' if row['name'] in names else ''} |"
        )
    return "\n".join([*lines, "", f"Made by `{evidence['command']}`."])


def cpu_choices() -> str:
    """What each way to choose takes where not every setup fits, and how far that is behind the fastest that fits."""
    rules = ("largest micro-batch", "no checkpointing")
    lines = [
        "| memory, MiB | setups that fit | fastest, measured | a plan's | behind the fastest | largest micro-batch | "
        "largest without checkpointing |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in json.loads((RESULTS / "plan_cpu.json").read_text())["choices"]:
        memory = f"{row['memory_bytes'] / 2**20:.0f}"
        cells = [memory, str(row["fit"]), row["best"], row["plan"]["names"][0], _behind_best(row["plan"])]
        cells += [_behind_best(row[rule]) if rule in row else "nothing fits" for rule in rules]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _eight() -> tuple[str, ...]:
    sys.path.insert(0, str(ROOT))
    from benchmarks.plan_cpu import EIGHT

    return EIGHT


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
    return {PAGE: {"cpu": cpu_table(), "cpu-choices": cpu_choices()}}


def main(arguments: list[str]) -> int:
    return update(tables(), arguments, "plan_cpu_docs.py")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
