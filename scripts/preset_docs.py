"""Writes the examples and the table of docs/presets.md."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from evidence_tables import ROOT, excerpt, output_of, shown, table

from hf_memkit.presets import PRESETS
from hf_memkit.setup.techniques.registry import TECHNIQUES


def presets() -> str:
    """Each preset: for whom it is, its techniques with their pages, and how much of it arguments can say."""
    rows = []
    for name, preset in PRESETS.items():
        links = [
            f"[{each}](techniques/{TECHNIQUES[each].family}.md#{each})"
            + ("*" if each in preset.where_possible else "")
            for each in preset.techniques
        ]
        rows.append([f"`{name}`", preset.audience, ", ".join(links)])
    note = "\\* left out, with a note, where it does not apply to the model."
    return f"{table('preset | for whom | techniques', rows)}\n\n{note}"


def sized() -> str:
    """A preset for a model and a GPU: two settings with their reasons, the batch, and the bytes on the GPU."""
    command = "memkit preset show resident --model gpt2-xl --gpu 16GB --batch-size 32"
    parts = (
        ("resident:", ""),
        ("  model.dtype", "  arguments.bf16"),
        ("  optimizer.class", "  optimizer.bf16"),
        ("  arguments.per_device_train_batch_size", "  arguments.per_device_eval_batch_size"),
        ("place", "host"),
    )
    return shown(command, excerpt(output_of(command), *parts))


def copied() -> str:
    """A file with the user's own arguments: what overrides, and what the file cannot set."""
    command = "memkit preset copy checkpointed args.json --args mine.json"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.json").write_text(json.dumps({"train_file": "x.txt", "activation_checkpointing": False}))
        output = output_of(command, Path(folder), with_errors=True)
    parts = (("Wrote", ""), ("Use it", ""), ("Override", ""), ("An argument file", ""), ("  model_parts", "Or do"))
    return shown(command, excerpt(output, *parts))


def tables() -> dict[Path, dict[str, str]]:
    """The page's parts."""
    return {ROOT / "docs" / "presets.md": {"sized": sized(), "copied": copied(), "presets": presets()}}
