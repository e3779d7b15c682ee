#!/usr/bin/env python3
"""Predicts every variant of every recipe and writes recipes/predictions.json; minutes.

.venv/bin/python scripts/recipe_predictions.py [NAME …]      # only these, the others stay as they are
.venv/bin/python scripts/recipe_predictions.py --check       # says which recipes changed since they were predicted
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the recipes' own config values, whatever the hub has today

from hf_memkit import resources
from hf_memkit.recipe.predictions import FILE, StoredPrediction, checksum, make, stored
from hf_memkit.recipe.schema import load_recipe

PATH = resources.folder("recipes") / FILE


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


def _check(content: dict[str, Any], names: list[str]) -> int:
    entries = content["recipes"]
    stale = [name for name in names if name not in entries or entries[name]["sha256"] != checksum(load_recipe(name))]
    stale += sorted(entries.keys() - set(names))
    for name in stale:
        print(f"{name}: changed since it was predicted: run scripts/recipe_predictions.py {name}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
