"""Commands that pages show with their output: which part of it, and the files that they read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from docs_blocks import ROOT, example

from benchmarks import plan_example
from benchmarks.script_overhead import MODELS, SCRIPT
from tests.measuring.report.synthetic_records import Record, healthy, out_of_memory, write

OWN_RECIPE = "docs/your-own-recipe.md"
OWN_ARGUMENTS = {"train_file": "x.txt", "activation_checkpointing": False}


def files(contents: dict[str, str], folder: Path) -> None:
    for name, text in contents.items():
        (folder / name).write_text(text)


def files_of_the_guide(folder: Path) -> None:
    """The files that docs/your-own-recipe.md shows."""
    shown = re.findall(r"^```\w+ (\S+)\n(.*?)^```$", (ROOT / OWN_RECIPE).read_text(), re.MULTILINE | re.DOTALL)
    files(dict(shown), folder)


def launched_job(added: str, folder: Path) -> None:
    """A script, its arguments, and TRL's YAML of accelerate for ZeRO-3, with `added` behind its stage."""
    import trl

    train(folder)
    template = Path(trl.__file__).parent / "accelerate_configs" / "zero3.yaml"
    launcher = template.read_text().replace("  zero_stage: 3", f"  zero_stage: 3{added}")
    arguments = "output_dir: out\nbf16: true\ngradient_accumulation_steps: 4\n"
    files({"zero3.yaml": launcher, "args.yaml": arguments}, folder)


def recorded(records: Iterable[Record], folder: Path) -> None:
    write(folder / "out", records)


train = partial(files, {"train.py": SCRIPT, "config.json": json.dumps(MODELS["GPT-2 XL"])})
train_of_readme = partial(files, {"train.py": plan_example.SCRIPT.read_text()})
own_arguments = partial(files, {"mine.json": json.dumps(OWN_ARGUMENTS)})

example("README.md", "model", ("FITS", "Peak allocated"))
example("README.md", "predict", ("DOES NOT FIT", "Peak allocated"), prepare=train_of_readme)
example("docs/your-script.md", "example", prepare=train)
example("docs/predict.md", "first")
example("docs/your-tools.md", "launcher", prepare=partial(launched_job, ""))
example("docs/your-tools.md", "check", prepare=partial(launched_job, "\n  gradient_accumulation_steps: 8"))
example("docs/report.md", "healthy", prepare=partial(recorded, healthy()))
example("docs/report.md", "oom", prepare=partial(recorded, out_of_memory()))

step = [('    "step"', '    "capacity_gib"'), ('    "categories"', '    "held"')]
example("docs/measuring.md", "step", *step, prepare=partial(recorded, healthy()))

example("docs/techniques/README.md", "list", ("checkpointing", "every-nth"), ("loss", "liger"))

dtype = ("  model.dtype", "  arguments.bf16")
optimizer = ("  optimizer.class", "  optimizer.bf16")
batch = ("  arguments.per_device_train", "  arguments.per_device_eval")
example("docs/presets.md", "sized", "resident:", dtype, optimizer, batch, ("place", "host"))

example("docs/presets.md", "presets", ("preset ", "Techniques"))

notes = ["Wrote", "Use it", "Override", "An argument file", ("  model_parts", "Or do")]
example("docs/presets.md", "copied", *notes, prepare=own_arguments, errors=True)

example("ds_configs/README.md", "show", ("zero2-offload:", "Note"), ('  "zero_optimization"', "}"))

buffers = ("stage3_prefetch_bucket_size", "offload_optimizer.pin_memory")
example("docs/deepspeed.md", "sized", "key", buffers, ("place", "host"), ("disk", "Note"), "Wrote", "Use it")

example("recipes/README.md", "dry-run")

some_recipes = [("16GB GPU", "memkit recipe gpt2"), ("memkit recipe flan", "memkit recipe bert")]
example("recipes/README.md", "fitting", *some_recipes, ("Predicted", "Does not fit"))

example(OWN_RECIPE, "copied")

answer = [("FITS", "Variant"), "Variant", ("Peak allocated", "phase"), ("Note: predicted", "Bytes")]
example(OWN_RECIPE, "judged", *answer, prepare=files_of_the_guide)
