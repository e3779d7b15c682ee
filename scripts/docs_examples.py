"""Commands that pages show with their output: which part of it, and the files that they read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from docs_blocks import ROOT, example

from benchmarks.script_overhead import MODELS, SCRIPT
from tests.measuring.report.synthetic_records import Record, healthy, out_of_memory, write

LOG = """\
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 23.64 GiB of \
which 812.44 MiB is free. Including non-PyTorch memory, this process has 22.84 GiB memory in use. Of the allocated \
memory 22.09 GiB is allocated by PyTorch, and 248.00 MiB is reserved by PyTorch but unallocated.
"""
OWN_RECIPE = "docs/your-own-recipe.md"


def files(contents: dict[str, str], folder: Path) -> None:
    for name, text in contents.items():
        (folder / name).write_text(text)


def files_of_the_guide(folder: Path) -> None:
    """The files that docs/your-own-recipe.md shows."""
    shown = re.findall(r"^```\w+ (\S+)\n(.*?)^```$", (ROOT / OWN_RECIPE).read_text(), re.MULTILINE | re.DOTALL)
    files(dict(shown), folder)


def launched_job(added: str, folder: Path) -> None:
    """A script, its arguments, and accelerate's YAML for ZeRO-3 as TRL has it, with `added` behind its stage."""
    import trl

    train(folder)
    shutil.copyfile(Path(trl.__file__).parent / "accelerate_configs" / "zero3.yaml", folder / "zero3.yaml")
    text = (folder / "zero3.yaml").read_text().replace("  zero_stage: 3", f"  zero_stage: 3{added}")
    arguments = "output_dir: out\nbf16: true\ngradient_accumulation_steps: 4\n"
    files({"zero3.yaml": text, "args.yaml": arguments}, folder)


def recorded(records: Iterable[Record], folder: Path) -> None:
    write(folder / "out", records)


train = partial(files, {"train.py": SCRIPT, "config.json": json.dumps(MODELS["GPT-2 XL"])})

example("README.md", "predict", prepare=train)
example("docs/your-script.md", "example", prepare=train)
example("docs/predict.md", "first")
example("docs/your-tools.md", "launcher", prepare=partial(launched_job, ""))
example("docs/your-tools.md", "check", prepare=partial(launched_job, "\n  gradient_accumulation_steps: 8"))
example("docs/report.md", "healthy", prepare=partial(recorded, healthy()))
example("docs/report.md", "oom", prepare=partial(recorded, out_of_memory()))
example(
    "docs/measuring.md", "step", ('    "step"', '    "capacity_gib"'), ('    "categories"', '    "held"'),
    prepare=partial(recorded, healthy()),
)  # fmt: skip
example("docs/techniques/README.md", "list", ("checkpointing", "every-nth"), ("loss", "liger"))
example(
    "docs/presets.md", "sized", ("resident:", ""), ("  model.dtype", "  arguments.bf16"),
    ("  optimizer.class", "  optimizer.bf16"), ("  arguments.per_device_train", "  arguments.per_device_eval"),
    ("place", "host"),
)  # fmt: skip
example(
    "docs/presets.md", "copied", ("Wrote", ""), ("Use it", ""), ("Override", ""), ("An argument file", ""),
    ("  model_parts", "Or do"), errors=True,
    prepare=partial(files, {"mine.json": json.dumps({"train_file": "x.txt", "activation_checkpointing": False})}),
)  # fmt: skip
example("ds_configs/README.md", "show", ("zero2-offload:", "Note"), ('  "zero_optimization"', "}"))
example(
    "docs/deepspeed.md", "sized", ("key", ""), ("stage3_prefetch_bucket_size", "offload_optimizer.pin_memory"),
    ("place", "host"), ("disk", "Note"), ("Wrote", ""), ("Use it", ""),
)  # fmt: skip
example("recipes/README.md", "dry-run")
example(
    "recipes/README.md", "fitting", ("16GB GPU", "memkit recipe gpt2"), ("memkit recipe flan", "memkit recipe bert"),
    ("Predicted", "Does not fit"),
)  # fmt: skip
example(OWN_RECIPE, "copied")
example(
    OWN_RECIPE, "judged", ("FITS", "Variant"), ("Variant", ""), ("Peak allocated", "phase"),
    ("Note: predicted", "Bytes"), prepare=files_of_the_guide,
)  # fmt: skip
