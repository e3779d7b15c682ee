"""Writes the tables of docs/techniques/precision.md and loading.md from formulas and evidence."""

from __future__ import annotations

import json
from pathlib import Path

from evidence_tables import RESULTS, ROOT, table

from benchmarks.parameter_bytes import PARAMETER_BYTES

PAGES = ROOT / "docs" / "techniques"


def bytes_table() -> str:
    """Bytes a parameter, as `PARAMETER_BYTES` has them and tests measure them."""
    rows = []
    for name, each in PARAMETER_BYTES.items():
        columns = (each.weights, each.gradients, each.states, each.elsewhere, each.held, each.copies)
        rows.append([f"`{name}`", *(number or "–" for number in columns)])
    return table(
        "technique | weight | gradient | AdamW's moments | elsewhere | between two steps | copies under autocast", rows
    )


def accumulation_table() -> str:
    """What summing micro-gradients in bf16 costs."""
    found = json.loads((RESULTS / "bf16_accumulation.json").read_text())
    rows = (
        [row["micro_batches"], *(_percent(row[name]) for name in ("sum", "arithmetic", "noise"))]
        for row in found["rows"]
    )
    columns = (
        "micro-batches a step | error of the bf16 sum | error of bf16 arithmetic | difference between two batches"
    )
    model, micro = found["model"], found["micro_batch"]
    return (
        f"{table(columns, rows)}\n\n"
        f"Norms over all {model['parameters']:,} parameters of a GPT-2 of {model['n_layer']} layers and width "
        f"{model['n_embd']}, after {found['trained']['steps']} steps on real text (loss "
        f"{found['trained']['loss']:.2f}); micro-batches of {micro['sequences']} × {micro['tokens']} tokens, the "
        f"median of {found['seeds']} windows. Measured on a CPU with torch {found['versions']['torch']}: "
        f"`benchmarks/results/bf16_accumulation.json`, made by `{found['command']}`."
    )


def loading_table() -> str:
    """RAM that a load takes, by the form in which it is done."""
    found = json.loads((RESULTS / "loading_ram.json").read_text())
    sizes = ("weights_mib", "anonymous_mib", "mapped_mib", "peak_mib")
    rows = ([row["load"], *(f"{row[size]:.0f}" for size in sizes)] for row in found["rows"])
    columns = "load | weights, MiB | the process's own, MiB | file pages, MiB | peak, MiB"
    return (
        f"{table(columns, rows)}\n\n"
        f"Added by `from_pretrained` (`from_config` without a file) in a separate process, transformers "
        f"{found['versions']['transformers']}, Linux: `benchmarks/results/loading_ram.json`, made by "
        f"`{found['command']}`."
    )


def tables() -> dict[Path, dict[str, str]]:
    """Each page's tables."""
    return {
        PAGES / "precision.md": {"bytes": bytes_table(), "accumulation": accumulation_table()},
        PAGES / "loading.md": {"loading": loading_table()},
    }


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
