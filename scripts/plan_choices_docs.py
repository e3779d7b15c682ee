#!/usr/bin/env python3
"""Writes what plans choose among published setups, and what fits, into docs/plan.md; --check only compares.

.venv/bin/python scripts/plan_choices_docs.py [--check]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evidence_tables import RESULTS, ROOT, update

EVIDENCE = RESULTS / "plan_choices.json"

Content = Mapping[str, Any]

_KINDS = {
    "micro-batch": "micro-batch alone",
    "method": "full fine-tuning, LoRA, QLoRA",
    "number of GPUs": "one GPU or two with FSDP",
    "sharding": "FSDP or whole copies, with the micro-batch",
    "published, without micro-batch": "**these without those of the micro-batch**",
    "checkpointing": "checkpointing, precision, optimizer; one GPU (groups formed here)",
    "ZeRO": "micro-batch, checkpointing, offload; ZeRO on one GPU and on eight (groups formed here)",
    "all": "**all**",
}


def choices(content: Content) -> str:
    """How often each way to choose is within 5 % of the best, by kind of group."""
    scores = content["scores"]
    ways = list(scores["all"]["ways"])
    lines = [
        f"| what differs | groups, of which expressed | choices, of which matter | {' | '.join(ways)} |",
        "|---|---|---|" + "---|" * len(ways),
    ]
    for kind, words in _KINDS.items():
        found = scores[kind]
        cells = [
            words,
            f"{found['groups']}, {found['expressed']}",
            f"{found['cases']}, {found['choices_that_matter']}",
            *(_score(found["ways"][way], found["cases"]) for way in ways),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    whole = content["scores_whole_gpu"]
    cells = [
        "on the whole GPU, with what a plan says to fit",
        "–",
        f"{whole['cases']}, {whole['choices_that_matter']}",
    ]
    cells += [_score(whole["ways"][way], whole["cases"]) for way in ways]
    lines += [
        f"| {' | '.join(cells)} |",
        "",
        f"Within {content['within']:.0%} of the best that fits, mean loss of speed. A choice matters if some setup "
        "that fits is further off. A way that leaves several setups counts by their share.",
    ]
    return "\n".join(lines)


def misses(content: Content) -> str:
    """Every choice that is not within 5 %."""
    lines = [
        "| group | under | plan | best | loses |",
        "|---|---|---|---|---|",
    ]
    for group in content["groups"]:
        for case in (*group.get("cases", ()), *([group["whole_gpu"]] if "whole_gpu" in group else [])):
            plan = case["ways"]["plan"]
            if max(plan["losses"]) <= content["within"]:
                continue
            whole = "whole GPU" if case is group.get("whole_gpu") else "whole GPU, by speed alone"
            cap = f"{case['cap_gib']:g} GiB" if case["cap_gib"] else whole
            losses = ", ".join(f"{loss:.1%}" for loss in plan["losses"])
            said = ", ".join(plan["choices"]) or "nothing fits"
            lines.append(f"| {group['name']} | {cap} | {said} | {case['best']} | {losses} |")
    return "\n".join(lines)


def not_expressed(content: Content) -> str:
    """Groups that no plan can be asked for, by reason."""
    found = Counter(_reason(group) for group in content["groups"] if not group["expressed"])
    alone = sum(group["expressed"] == "speed alone" for group in content["groups"])
    lines = ["| why it cannot be expressed | groups |", "|---|---|"]
    lines += [f"| {reason} | {count} |" for reason, count in found.most_common()]
    return "\n".join([*lines, "", f"By speed alone, as FSDP's memory is not modelled: {alone} groups."])


def fits(content: Content) -> str:
    """Whether what is said to fit ran."""
    found = content["fits"]
    ran, below = found["ran_and_called_not_fitting"], found["of_these_below_the_whole_gpu"]
    smaller = found["smaller_gpus"]
    lines = [
        "| published trainings | number |",
        "|---|---|",
        f"| with a prediction of memory | {found['rows']} |",
        f'| ran out of memory; of these said to fit (a false "fits") | {found["out_of_memory"]}; '
        f"{len(found['false_fits'])} |",
        f"| ran, and said to fit | {found['ran_and_fit']} |",
        f"| ran, and said not to fit; of these for the last {1 - found['full_share']:.0%} of the GPU alone | "
        f"{len(ran)}; {len(below)} |",
        f"| asked of the smallest GPU on which each is said to fit; no room for what it held | {smaller['rows']}; "
        f"{len(smaller['too_small'])}, and {len(smaller['too_small_with_other_code'])} whose libraries allocated "
        "otherwise then |",
        f"| without a prediction of memory | {sum(found['not_judged']['memory'].values())} |",
    ]
    return "\n".join(lines)


def fits_rows(content: Content) -> str:
    """Trainings that ran out of memory, and those that ran and are said not to fit."""
    lines = [
        "| training | GPU | may need, GiB | 92 % of it, GiB | said to fit | it |",
        "|---|---|---|---|---|---|",
    ]
    for row in content["fits_rows"]:
        if row["ran"] and row["fits"]:
            continue
        cells = [
            row["id"],
            row["gpu"] if row["gpus"] == 1 else f"{row['gpus']} × {row['gpu']}",
            f"{row['needs_gib']:.1f}",
            f"{content['fits']['full_share'] * row['capacity_gib']:.1f}",
            "yes" if row["fits"] else "no",
            f"ran: {row['gib']:.1f} GiB ({row['measured']})" if row["ran"] else "ran out of memory",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_SOURCES = {
    "hfdoc-": "BERT-large on a V100",
    "exp13-": "BERT-large on an RTX 3090",
    "gpjt-05b": "Qwen1.5-0.5B, ZeRO-3 on an RTX 3090",
    "gpjt-8b": "Llama-3-8B, ZeRO-3 on 8 A100 80GB",
    "fsdpqlora-": "Llama-2-7B with LoRA, FSDP or whole copies on 2 RTX 3090 with slow buses",
}


def times(content: Content) -> str:
    """How far times of the groups formed here are off, by source."""
    lines = ["| trainings | rows | median error | from | to |", "|---|---|---|---|---|"]
    for begin, words in _SOURCES.items():
        rows = [row for row in content["times"] if row["id"].startswith(begin)]
        for note, half, offload in (
            ("fp32", False, False),
            ("half precision", True, False),
            ("Adam in RAM", True, True),
        ):
            errors = [row["error"] for row in rows if (row["half"], row["offload"]) == (half, offload)]
            if errors:
                cells = [f"{words}, {note}", len(errors), f"{statistics.median(map(abs, errors)):.1%}"]
                cells += [f"{min(errors):+.1%}", f"{max(errors):+.1%}"]
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _score(score: Content, cases: int) -> str:
    return f"{score['within_5_percent'] / cases:.0%}, {score['mean_loss']:.1%}"


def _reason(group: Content) -> str:
    reason = str(group["reason"])
    return "rows with kernels of their own (FOAK, GPTQ)" if "kernels of their own" in reason else reason


def tables(path: Path = EVIDENCE) -> dict[Path, dict[str, str]]:
    """The page's tables."""
    content = json.loads(path.read_text())
    return {
        ROOT / "docs" / "plan.md": {
            "choices": choices(content),
            "misses": misses(content),
            "not-expressed": not_expressed(content),
            "fits": fits(content),
            "fits-rows": fits_rows(content),
            "further-times": times(content),
        }
    }


def main(arguments: list[str]) -> int:
    return update(tables(), arguments, "plan_choices_docs.py")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
