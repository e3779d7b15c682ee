"""Writes the examples and tables of recipes/README.md, and the examples of docs/your-own-recipe.md."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from evidence_tables import ROOT, excerpt, output_of, shown, table

from hf_memkit.common import resources
from hf_memkit.common.units import GIB
from hf_memkit.recipes.schema import Recipe, load_recipe
from hf_memkit.recipes.stored_predictions import StoredPrediction, stored
from hf_memkit.recipes.tasks import TASKS, find_task

OWN_RECIPE = ROOT / "docs" / "your-own-recipe.md"


def recipes_table() -> str:
    """Every variant of every recipe, those that do not fit too."""
    entries = stored()["recipes"]
    rows = []
    for name in resources.names("recipes"):
        recipe, entry = load_recipe(name), entries[name]
        rows += [_row(recipe, StoredPrediction.from_json(content)) for content in entry["predicted"]]
        for variant, why in dict.fromkeys(map(tuple, entry["not_predicted"])):
            unknown = [variant, *"–––", f"not predicted: {why}", *"–––"]
            rows.append([f"[{name}]({name}.yaml)", _gpu(recipe), *unknown])
    return table(
        "recipe | GPU | variant | checkpointing | batch | sequence length | predicted reserved, GiB | RAM, GiB "
        "| disk, GiB | verdict",
        rows,
    )


def _row(recipe: Recipe, each: StoredPrediction) -> list[str]:
    one = each.prediction
    ram = ((one.host_rss_bytes or 0) + (one.pinned_bytes or 0)) / GIB
    return [
        f"[{recipe.name}]({recipe.name}.yaml)",
        _gpu(recipe) if each.bf16 else "T4 (fp16)",
        each.variant,
        each.checkpointing or "the preset's",
        f"{each.micro_batch_size} × {each.accumulation}",
        f"{each.sequence_length}",
        f"{one.peak_reserved_bytes[1] / GIB:.1f}",
        f"{ram:.1f}",
        f"{one.disk_bytes / GIB:.1f}" if one.disk_bytes else "–",
        str(one.verdict),
    ]


def _gpu(recipe: Recipe) -> str:
    return recipe.card if recipe.gpus == 1 else f"{recipe.gpus} × {recipe.card}"


def data_table() -> str:
    """What each kind of data looks like, and which recipes take it."""
    of_task: dict[str, list[str]] = {}
    for name in resources.names("recipes"):
        of_task.setdefault(load_recipe(name).task, []).append(name)
    rows = (
        [name, task.local_form, f"`{task.reading.EXAMPLE}`", ", ".join(of_task[name])]
        for name, task in zip(TASKS, map(find_task, TASKS), strict=True)
    )
    return table("task | `--data` | one line of it | recipes", rows)


def fitting() -> str:
    """Some recipes that fit a GPU; none of which a variant needs a disk, since this machine's may be full."""
    command = "memkit recipe --gpu 16GB --ram 32GB"
    parts = (
        ("16GB GPU", "memkit recipe gpt2"),
        ("memkit recipe flan", "memkit recipe bert"),
        ("Predicted", "Does not fit"),
    )
    return shown(command, excerpt(output_of(command), *parts))


def own_recipe() -> dict[str, str]:
    """The first step of the guide, and its own recipe judged, in a folder with the guide's files."""
    files = re.findall(r"^```\w+ (\S+)\n(.*?)^```$", OWN_RECIPE.read_text(), re.MULTILINE | re.DOTALL)
    copy = "memkit recipe bert-large-on-8gb --copy tickets.yaml"
    judge = "memkit recipe tickets.yaml --data tickets.csv --gpu 8GB --ram 32GB --dry-run"
    parts = (("FITS", "Variant"), ("Variant", ""), ("Peak allocated", "phase"), ("Note: predicted", "Bytes"))
    with tempfile.TemporaryDirectory() as folder:
        copied = shown(copy, output_of(copy, Path(folder)))
        for name, content in files:
            (Path(folder) / name).write_text(content)
        return {"copied": copied, "judged": shown(judge, excerpt(output_of(judge, Path(folder)), *parts))}


def tables() -> dict[Path, dict[str, str]]:
    """Each page's examples and tables."""
    return {
        ROOT / "recipes" / "README.md": {"fitting": fitting(), "recipes": recipes_table(), "data": data_table()},
        OWN_RECIPE: own_recipe(),
    }
