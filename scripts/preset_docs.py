#!/usr/bin/env python3
"""Writes the examples and the table of docs/presets.md; with --check only compares.

.venv/bin/python scripts/preset_docs.py [--check]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from evidence_tables import ROOT, excerpt, output_of, shown, update

from hf_memkit.presets import PRESETS
from hf_memkit.setup.techniques.registry import TECHNIQUES


def table() -> str:
    """Each preset: for whom it is, its techniques with their pages, and how much of it arguments can say."""
    lines = ["| preset | for whom | techniques |", "|---|---|---|"]
    for name, preset in PRESETS.items():
        links = [
            f"[{each}](techniques/{TECHNIQUES[each].family}.md#{each})"
            + ("*" if each in preset.where_possible else "")
            for each in preset.techniques
        ]
        lines.append(f"| `{name}` | {preset.for_whom} | {', '.join(links)} |")
    if any(preset.where_possible for preset in PRESETS.values()):
        lines += ["", "\\* left out, with a note, where it does not apply to the model."]
    return "\n".join(lines)


def sized() -> str:
    """A preset for a model and a GPU: two settings with their reasons, the batch, and the bytes on the GPU."""
    command = "memkit preset show resident --model gpt2-xl --gpu 16GB --batch-size 32"
    parts = (
        ("resident:", ""),
        ("model.dtype", "arguments.bf16"),
        ("optimizer.class", "optimizer.bf16"),
        ("arguments.per_device_train_batch_size", "arguments.per_device_eval_batch_size"),
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


def main(arguments: list[str]) -> int:
    page = {"sized": sized(), "copied": copied(), "presets": table()}
    return update({ROOT / "docs" / "presets.md": page}, arguments, "preset_docs.py")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
