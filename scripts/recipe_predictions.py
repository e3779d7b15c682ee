#!/usr/bin/env python3
"""Predicts every variant of every recipe and writes recipes/predictions.json; minutes.

.venv/bin/python scripts/recipe_predictions.py [NAME …]      # only these, the others stay as they are
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the recipes' own config values, whatever the hub has today

from hf_memkit.catalog.hardware import Gpu, Machine, gpu_of_size, named_gpu
from hf_memkit.common import resources
from hf_memkit.common.errors import MemkitError
from hf_memkit.prediction import predict
from hf_memkit.recipes.schema import Recipe, load_recipe
from hf_memkit.recipes.stored_predictions import FILE, StoredPrediction, checksum, stored
from hf_memkit.recipes.variant_search import choose
from hf_memkit.setup.bf16_on_gpus import emulated_by_setup
from hf_memkit.setup.request import Request

PLENTY = 2**50  # bytes of RAM and disk: what a variant needs does not depend on them


def main(names: list[str]) -> None:
    content = stored()
    known = resources.names("recipes")
    entries = {name: entry for name, entry in content["recipes"].items() if name in known}
    versions = {package: version(package) for package in ("torch", "transformers")}
    for name in names or known:
        recipe = load_recipe(name)
        entry: dict[str, Any] = {"sha256": checksum(recipe), "versions": versions}
        entry |= {"predicted": [], "not_predicted": []}
        for variant, checkpointing, gpu in cases(recipe):
            try:
                one = predict_variant(recipe, variant, checkpointing, gpu)
            except MemkitError as error:
                print(f"{name} {variant}: {error}")
                entry["not_predicted"].append([variant, str(error)])
                continue
            if one is not None:
                print(f"{name} {variant} {checkpointing} bf16={one.bf16}: {one.prediction.verdict}")
                entry["predicted"].append(one.to_json())
        entries[name] = entry
        text = json.dumps({"schema": 1, **content, "recipes": dict(sorted(entries.items()))}, indent=1)
        (resources.folder("recipes") / FILE).write_text(f"{text}\n", encoding="utf-8")


def cases(recipe: Recipe) -> list[tuple[str, str, Gpu]]:
    """Each variant with each kind of checkpointing on the recipe's GPU, and on a T4 for GPUs that have no bf16."""
    gpus = [gpu_of_size(recipe.card)]
    if recipe.gpus == 1 and gpus[0].capacity_bytes <= gpu_of_size("16GB").capacity_bytes:
        gpus.append(named_gpu("T4"))
    variants = recipe.variants.items()
    return [(name, kind, gpu) for name, each in variants for kind in each.checkpointing or [""] for gpu in gpus]


def predict_variant(recipe: Recipe, name: str, checkpointing: str, gpu: Gpu) -> StoredPrediction | None:
    """None where the variant needs bf16, and the GPU would emulate it."""
    machine = Machine(gpu, ram_bytes=PLENTY, disk_free_bytes=PLENTY, disk_path=".", cpu_count=16)
    request = Request(variant=name, gpus=recipe.gpus, output="run")
    variant = recipe.variants[name].model_copy(update={"checkpointing": [checkpointing] if checkpointing else []})
    only_it = recipe.model_copy(update={"variants": {name: variant}})
    setup, prediction = choose(only_it, machine, request, use_hub=False)
    if emulated_by_setup(setup):
        return None
    return StoredPrediction(
        variant=name,
        checkpointing=checkpointing,
        bf16=gpu.bf16,
        micro_batch_size=int(setup["arguments.per_device_train_batch_size"]),
        accumulation=int(setup["arguments.gradient_accumulation_steps"]),
        sequence_length=int(setup["data.sequence_length"]),
        gpus=setup.resolved_for.gpus,
        nodes=setup.resolved_for.nodes,
        prediction=prediction or predict(setup),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
