"""Writes the examples and the table of step times of docs/plan.md."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evidence_tables import RESULTS, ROOT, shown, table


def example(which: str) -> str:
    """A plan, as it was typed and answered."""
    content = json.loads((RESULTS / "plan_example.json").read_text())
    found = content["examples"][which]
    answer = shown(command_lines(found["command"]), found["output"])
    cores = content["hardware"]["cpu_count"]
    return f"{answer}\n\nThat took {found['seconds']:.0f} s on {cores} CPU cores. Made by `{content['command']}`."


def command_lines(command: list[str]) -> str:
    """As one types it, an option a line."""
    before, _, behind = shlex.join(command).replace("'", '"').partition(" -- ")
    options = before.replace(" --", " \\\n    --")
    return f"{options} -- \\\n    {behind}"


def step_times() -> str:
    """Steps that others measured, and what was predicted of them from the table of GPUs alone."""
    content = json.loads((RESULTS / "plan_speed.json").read_text())
    rows = (
        [
            name, f"{group['predicted']} of {group['rows']}", f"{group['median']:.1%}", f"{group['worst']:.1%}",
            f"{group['bar_median']:.0%}, {group['bar_worst']:.0%}", "yes" if group["met"] else "**no**",
        ]
        for name, group in content["groups"].items()
    )  # fmt: skip
    halves = []
    for name, half in content["halves"].items():
        cells = [name, f"{len(half['models'])}"]
        for group in half["groups"].values():
            found = group["predicted"]
            cells.append(f"{group['median']:.1%}, worst {group['worst']:.1%}, of {found}" if found else "—")
        halves.append(cells)
    parts = [
        table("rows | predicted | median error | worst | bars | met", rows),
        "What a step reaches of the rates of single products and copies was fitted on one half of the models:",
        table(f"half | models | {' | '.join(content['groups'])}", halves),
        f"`plan_speed.json`, made by `{content['command']}`. Decided after a first look at the results:",
        "\n".join(f"* {each}" for each in content["decided_later"]),
        "<details><summary>Row by row</summary>",
        table("row | GPU | measured s | predicted s | error", map(_step_time, content["rows"])),
        "</details>",
    ]
    return "\n\n".join(parts)


def _step_time(row: Mapping[str, Any]) -> list[str]:
    cells = [row["id"], row["gpu"], f"{row['measured_s']:.3g}"]
    predicted = row.get("predicted_s")
    if predicted is None:
        return [*cells, "not predicted", ""]
    cells[1] = f"{row['gpus']} × {row['gpu']}" if row["gpus"] > 1 else row["gpu"]
    middle = predicted[1] if isinstance(predicted, list) else predicted
    return [*cells, f"{middle:.3g}", f"{row['error']:+.1%}"]


def search() -> str:
    """How long plans took, and how many setups they judged."""
    content = json.loads((RESULTS / "plan_search.json").read_text())
    rows = []
    for row in content["rows"]:
        alone, whole = row["script_alone_s"], row["plan_s"]
        times = (f"{seconds:.0f} s" for seconds in (alone, whole, whole - alone))
        judged, stopped = row["traced"] + row["excluded"], "yes" if row["stopped"] else "no"
        rows.append([row["model"], row["gpu"], *times, judged, row["traced"], stopped])
    columns = (
        "model, 16 sequences of 1,024 tokens a step | GPU | the script's preparation | the whole plan | more | "
        "setups judged | of them traced | ended by the limit"
    )
    cores = content["hardware"]["cpu_count"]
    return f"{table(columns, rows)}\n\nOn {cores} CPU cores; made by `{content['command']}`."


def tables() -> dict[Path, dict[str, str]]:
    """The page's examples and its table."""
    page = {"example": example("one"), "compared": example("compared"), "search": search(), "plan": step_times()}
    return {ROOT / "docs" / "plan.md": page}
