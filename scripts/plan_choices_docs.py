"""Writes what plans choose among published setups, and what fits, into docs/plan.md."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evidence_tables import RESULTS, ROOT, table

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
    rows = []
    for kind, words in _KINDS.items():
        found = scores[kind]
        cells = [
            words,
            f"{found['groups']}, {found['expressed']}",
            f"{found['cases']}, {found['choices_that_matter']}",
            *(_score(found["ways"][way], found["cases"]) for way in ways),
        ]
        rows.append(cells)
    whole = content["scores_whole_gpu"]
    cells = [
        "on the whole GPU, with what a plan says to fit",
        "–",
        f"{whole['cases']}, {whole['choices_that_matter']}",
    ]
    rows.append([*cells, *(_score(whole["ways"][way], whole["cases"]) for way in ways)])
    columns = f"what differs | groups, of which expressed | choices, of which matter | {' | '.join(ways)}"
    return (
        f"{table(columns, rows)}\n\n"
        f"Within {content['within']:.0%} of the best that fits, mean loss of speed. A choice matters if some setup "
        "that fits is further off. A way that leaves several setups counts by their share."
    )


def misses(content: Content) -> str:
    """Every choice that is not within 5 %."""
    rows = []
    for group in content["groups"]:
        for case in (*group.get("cases", ()), *([group["whole_gpu"]] if "whole_gpu" in group else [])):
            plan = case["ways"]["plan"]
            if max(plan["losses"]) <= content["within"]:
                continue
            whole = "whole GPU" if case is group.get("whole_gpu") else "whole GPU, by speed alone"
            cap = f"{case['cap_gib']:g} GiB" if case["cap_gib"] else whole
            losses = ", ".join(f"{loss:.1%}" for loss in plan["losses"])
            said = ", ".join(plan["choices"]) or "nothing fits"
            rows.append([group["name"], cap, said, case["best"], losses])
    return table("group | under | plan | best | loses", rows)


def not_expressed(content: Content) -> str:
    """Groups that no plan can be asked for, by reason."""
    found = Counter(_reason(group) for group in content["groups"] if not group["expressed"])
    alone = sum(group["expressed"] == "speed alone" for group in content["groups"])
    by_reason = table("why it cannot be expressed | groups", found.most_common())
    return f"{by_reason}\n\nBy speed alone, as FSDP's memory is not modelled: {alone} groups."


def fits(content: Content) -> str:
    """Whether what is said to fit ran."""
    found = content["fits"]
    ran, below = found["ran_and_called_not_fitting"], found["of_these_below_the_whole_gpu"]
    smaller = found["smaller_gpus"]
    too_small, otherwise = len(smaller["too_small"]), len(smaller["too_small_with_other_code"])
    rows = {
        "with a prediction of memory": found["rows"],
        'ran out of memory; of these said to fit (a false "fits")':
            f"{found['out_of_memory']}; {len(found['false_fits'])}",
        "ran, and said to fit": found["ran_and_fit"],
        f"ran, and said not to fit; of these for the last {1 - found['full_share']:.0%} of the GPU alone":
            f"{len(ran)}; {len(below)}",
        "asked of the smallest GPU on which each is said to fit; no room for what it held":
            f"{smaller['rows']}; {too_small}, and {otherwise} whose libraries allocated otherwise then",
        "without a prediction of memory": sum(found["not_judged"]["memory"].values()),
    }  # fmt: skip
    return table("published trainings | number", rows.items())


def fits_rows(content: Content) -> str:
    """Trainings that ran out of memory, and those that ran and are said not to fit."""
    rows = []
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
        rows.append(cells)
    return table("training | GPU | may need, GiB | 92 % of it, GiB | said to fit | it", rows)


_SOURCES = {
    "hfdoc-": "BERT-large on a V100",
    "exp13-": "BERT-large on an RTX 3090",
    "gpjt-05b": "Qwen1.5-0.5B, ZeRO-3 on an RTX 3090",
    "gpjt-8b": "Llama-3-8B, ZeRO-3 on 8 A100 80GB",
    "fsdpqlora-": "Llama-2-7B with LoRA, FSDP or whole copies on 2 RTX 3090 with slow buses",
}


def times(content: Content) -> str:
    """How far times of the groups formed here are off, by source."""
    cells = []
    for begin, words in _SOURCES.items():
        rows = [row for row in content["times"] if row["id"].startswith(begin)]
        for note, half, offload in (
            ("fp32", False, False),
            ("half precision", True, False),
            ("Adam in RAM", True, True),
        ):
            errors = [row["error"] for row in rows if (row["half"], row["offload"]) == (half, offload)]
            if errors:
                median = f"{statistics.median(map(abs, errors)):.1%}"
                cells.append([f"{words}, {note}", len(errors), median, f"{min(errors):+.1%}", f"{max(errors):+.1%}"])
    return table("trainings | rows | median error | from | to", cells)


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
