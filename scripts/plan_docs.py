#!/usr/bin/env python3
"""Writes the examples and the table of step times of docs/plan.md; with --check only compares.

.venv/bin/python scripts/plan_docs.py [--check]
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from evidence_tables import RESULTS, ROOT, trimmed, update


def example(which: str, path: Path = RESULTS / "plan_example.json") -> str:
    """A plan, as it was typed and answered."""
    if not path.exists():
        return "Not recorded yet."
    content = json.loads(path.read_text())
    found = content["examples"][which]
    answer = f"```bash\n{command_lines(found['command'])}\n```\n\n```text\n{trimmed(found['output'])}\n```"
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
    lines = [
        "| rows | predicted | median error | worst | bars | met |",
        "|---|---|---|---|---|---|",
    ]
    for name, group in content["groups"].items():
        lines.append(
            f"| {name} | {group['predicted']} of {group['rows']} | {group['median']:.1%} | {group['worst']:.1%} "
            f"| {group['bar_median']:.0%}, {group['bar_worst']:.0%} | {'yes' if group['met'] else '**no**'} |"
        )
    lines += [
        "",
        "What a step reaches of the rates of single products and copies was fitted on one half of the models:",
        "",
    ]
    lines += ["| half | models | " + " | ".join(content["groups"]) + " |", "|---" * (2 + len(content["groups"])) + "|"]
    for name, half in content["halves"].items():
        cells = [f"{len(half['models'])}"]
        for group in half["groups"].values():
            found = group["predicted"]
            cells.append(f"{group['median']:.1%}, worst {group['worst']:.1%}, of {found}" if found else "—")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"`plan_speed.json`, made by `{content['command']}`. Decided after a first look at the results:", ""]
    lines += [f"* {each}" for each in content["decided_later"]]
    lines += ["", "<details><summary>Row by row</summary>", ""]
    lines += ["| row | GPU | measured s | predicted s | error |", "|---|---|---|---|---|"]
    for row in content["rows"]:
        if row.get("predicted_s") is None:
            lines.append(f"| {row['id']} | {row['gpu']} | {row['measured_s']:.3g} | not predicted | |")
            continue
        gpu = f"{row['gpus']} × {row['gpu']}" if row["gpus"] > 1 else row["gpu"]
        predicted = row["predicted_s"]
        middle = predicted[1] if isinstance(predicted, list) else predicted
        lines.append(f"| {row['id']} | {gpu} | {row['measured_s']:.3g} | {middle:.3g} | {row['error']:+.1%} |")
    return "\n".join([*lines, "", "</details>"])


def search(path: Path = RESULTS / "plan_search.json") -> str:
    """How long plans took, and how many setups they judged."""
    content = json.loads(path.read_text())
    lines = [
        "| model, 16 sequences of 1,024 tokens a step | GPU | the script's preparation | the whole plan | more | "
        "setups judged | of them traced | ended by the limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        alone, whole = row["script_alone_s"], row["plan_s"]
        judged = row["traced"] + row["excluded"]
        lines.append(
            f"| {row['model']} | {row['gpu']} | {alone:.0f} s | {whole:.0f} s | {whole - alone:.0f} s | {judged} | "
            f"{row['traced']} | {'yes' if row['stopped'] else 'no'} |"
        )
    cores = content["hardware"]["cpu_count"]
    return "\n".join([*lines, "", f"On {cores} CPU cores; made by `{content['command']}`."])


def tables() -> dict[Path, dict[str, str]]:
    """The page's examples and its table."""
    page = {"example": example("one"), "compared": example("compared"), "search": search(), "plan": step_times()}
    return {ROOT / "docs" / "plan.md": page}


def main(arguments: list[str]) -> int:
    return update(tables(), arguments, "plan_docs.py")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
