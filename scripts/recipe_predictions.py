#!/usr/bin/env python3
"""Predicts every variant of every recipe and writes recipes/predictions.json; minutes.

.venv/bin/python scripts/recipe_predictions.py [NAME …]      # only these, the others stay as they are
.venv/bin/python scripts/recipe_predictions.py --check       # says which recipes changed since they were predicted
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the recipes' own config values, whatever the hub has today

from hf_memkit.catalog.hardware import Gpu, Machine, gpu_of_size, named_gpu
from hf_memkit.common import resources
from hf_memkit.common.errors import InputError, MemkitError
from hf_memkit.prediction import predict
from hf_memkit.recipes.schema import Recipe, Variant, load_recipe
from hf_memkit.recipes.stored_predictions import FILE, StoredPrediction, checksum, stored
from hf_memkit.recipes.variant_search import choose
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup

PATH = resources.folder("recipes") / FILE
WITHOUT_BF16: Final = "T4"
"""The GPU that stands for those that compute in fp16 only."""

_PLENTY: Final = 2**50
"""RAM and disk of the machine that is predicted for: what a variant needs does not depend on them."""


def main(arguments: list[str]) -> int:
    content = stored()
    names = resources.names("recipes")
    if "--check" in arguments:
        return _check(content, names)
    content["recipes"] = {name: entry for name, entry in content["recipes"].items() if name in names}
    for name in arguments or names:
        recipe = load_recipe(name)
        entry: dict[str, Any] = {
            "sha256": checksum(recipe),
            "versions": {package: version(package) for package in ("torch", "transformers")},
            "predicted": [],
            "not_predicted": [],
        }
        for made in make(recipe):
            if isinstance(made, StoredPrediction):
                one = made.prediction
                size = one.total_bytes[1] / 2**30
                print(f"{name} {made.variant} {made.checkpointing} bf16={made.bf16}: {size:.2f} GiB, {one.verdict}")
                entry["predicted"].append(made.to_json())
            else:
                print(f"{name} {made[0]}: {made[1]}")
                entry["not_predicted"].append(list(made))
        content["recipes"][name] = entry
        content["recipes"] = dict(sorted(content["recipes"].items()))
        PATH.write_text(json.dumps({"schema": 1, **content}, indent=1) + "\n", encoding="utf-8")
    return 0


def make(recipe: Recipe) -> Iterator[StoredPrediction | tuple[str, str]]:
    """Predicts every variant; where that cannot be, (variant, why)."""
    described = [gpu_of_size(recipe.card)]
    if recipe.gpus == 1 and described[0].capacity_bytes <= gpu_of_size("16GB").capacity_bytes:
        described.append(named_gpu(WITHOUT_BF16))
    for name, variant in recipe.variants.items():
        for choice in variant.checkpointing or [""]:
            for gpu in described:
                try:
                    found = _predicted(recipe, name, variant, choice, gpu)
                    if found is not None:
                        yield found
                except InputError as error:
                    yield name, str(error)


def _predicted(recipe: Recipe, name: str, variant: Variant, choice: str, gpu: Gpu) -> StoredPrediction | None:
    """None where the variant computes in a dtype that the GPU has not.

    Raises:
        InputError: it cannot be predicted.
    """
    machine = Machine(gpu, ram_bytes=_PLENTY, disk_free_bytes=_PLENTY, disk_path=".", cpu_count=16)
    request = Request(variant=name, gpus=recipe.gpus, output="run")
    only = variant.model_copy(update={"checkpointing": [choice] if choice else []})
    alone = recipe.model_copy(update={"variants": {name: only}})
    try:
        setup, found = choose(alone, machine, request, use_hub=False)
        if not gpu.bf16 and _computes_in_bf16(setup):
            return None
        found = found or predict(setup)
    except MemkitError as error:
        raise InputError(str(error)) from error
    return StoredPrediction(
        variant=name,
        checkpointing=choice,
        bf16=gpu.bf16,
        micro_batch_size=int(setup["arguments.per_device_train_batch_size"]),
        accumulation=int(setup["arguments.gradient_accumulation_steps"]),
        sequence_length=int(setup["data.sequence_length"]),
        gpus=setup.resolved_for.gpus,
        nodes=setup.resolved_for.nodes,
        prediction=found,
    )


def _computes_in_bf16(setup: Setup) -> bool:
    config = setup.get("deepspeed.config", {})
    enabled = config.get("bf16", {}).get("enabled")
    return setup.get("model.dtype") == "bfloat16" or setup.get("arguments.bf16") is True or enabled is True


def _check(content: dict[str, Any], names: list[str]) -> int:
    entries = content["recipes"]
    stale = [name for name in names if name not in entries or entries[name]["sha256"] != checksum(load_recipe(name))]
    stale += sorted(entries.keys() - set(names))
    for name in stale:
        print(f"{name}: changed since it was predicted: run scripts/recipe_predictions.py {name}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
