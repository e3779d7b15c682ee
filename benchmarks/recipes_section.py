"""Section `recipes`: every variant of every recipe at full size, under the cap of its own GPU, with random weights.

The evidence of a case holds what was predicted for it (`recipes/predictions.json`, where it has the case) beside what
was measured; `scripts/recipe_docs.py` puts both into recipes/README.md. A recipe for several GPUs is refused: one is
what this section has.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import recipe_section
from benchmarks.children import judge, run_child
from benchmarks.deepspeed_section import build_operators
from hf_memkit import resources
from hf_memkit.errors import InputError, MemkitError
from hf_memkit.hardware import this_machine
from hf_memkit.memory.records import read_records
from hf_memkit.prediction import Prediction, predict
from hf_memkit.recipe.choose import choose, unjudged
from hf_memkit.recipe.predictions import predicted_beforehand
from hf_memkit.recipe.rehearse import rehearse
from hf_memkit.recipe.run import RecipeRun
from hf_memkit.recipe.schema import Recipe, load_recipe
from hf_memkit.request import Request
from hf_memkit.setup import Setup
from hf_memkit.units import GIB

STEPS: Final = 5
"""Optimizer steps: the peak is reached in the second; an 8 B model takes most of a case's time to be built."""

CASE_S: Final = 400
_PREPARING: Final = threading.Lock()
"""Cases that are started together are resolved one after another."""


@dataclass(frozen=True)
class Case(recipe_section.Case):
    """As there; the GPU is the recipe's own, or a T4."""


def case_limit_s(case: Case) -> float:
    return CASE_S


def cases() -> list[Case]:
    """Every variant on its recipe's GPU, and those of 16 GB GPUs on a T4 too. The cap is what the context leaves."""
    found = []
    for name in resources.names("recipes"):
        recipe = load_recipe(name)
        for card in (recipe.card, "T4") if recipe.card == "16GB" else (recipe.card,):
            for variant in recipe.variants:
                case = Case(name, variant, card, 0.0)
                found.append(Case(name, variant, card, case.gpu.usable_bytes / GIB))
    return found


def prepare(case: Case, folder: str, *, on_cpu: bool) -> tuple[RecipeRun, Prediction | None] | str:
    """The resolved recipe, its run and its prediction, or the reason why it does not run here."""
    recipe = load_recipe(case.recipe)
    if recipe.gpus > 1 and not on_cpu:
        return f"needs {recipe.gpus} GPUs"
    quiet = {"save_strategy": "no", "eval_strategy": "no", "eval_on_start": False, "logging_steps": 1}
    request = Request(variant=case.variant, max_steps=STEPS, output=folder, arguments=quiet)
    machine = this_machine(folder).with_gpu(case.gpu)
    if not on_cpu:  # what is predicted not to fit runs all the same: the prediction is what is tried
        setup, prediction = choose(recipe, machine, request, use_hub=False, judge=partial(_judged, recipe))
        setup = setup.put("model.random_weights", True, "the benchmark")
        return RecipeRun(case.recipe, case.variant, setup), prediction
    setup = choose(recipe, machine, request, use_hub=False, judge=unjudged)[0]
    rehearsed = rehearse(recipe, setup)
    job = RecipeRun(case.recipe, case.variant, rehearsed.setup, setup, rehearsed.not_rehearsed)
    return job, None


def _judged(recipe: Recipe, setup: Setup) -> Prediction:
    """As it was predicted when the recipe was released, else a prediction of today."""
    try:
        return predicted_beforehand(recipe, setup)
    except InputError:
        return predict(setup)


def measure(case: Case, *, on_cpu: bool, max_steps: int) -> dict[str, Any]:
    """Runs one case in a child process and returns its evidence. `max_steps` is the section's own."""
    folder = tempfile.mkdtemp(prefix="memkit-benchmark-")
    started = time.monotonic()
    facts = {"recipe": case.recipe, "variant": case.variant, "bf16": case.gpu.bf16, "checkpointing": ""}
    try:
        try:
            with _PREPARING:
                prepared = prepare(case, folder, on_cpu=on_cpu)
        except MemkitError as error:
            prepared = str(error)
        if isinstance(prepared, str):
            return {**facts, "status": "refused", "why": prepared}
        job, prediction = prepared
        facts["checkpointing"] = checkpointing_of(job.target or job.setup, case.recipe)
        recipe_section.write_job(Path(folder), asdict(case), job)
        if "deepspeed.config" in job.setup:
            build_operators(job.setup["deepspeed.config"], on_cpu=on_cpu)
        environment = {key: str(value) for key, value in job.setup.section("environment").items()}
        outcome, output = run_child("recipes", folder, environment, limit_s=CASE_S)
        path = Path(folder) / "memory-rank0.jsonl"
        records = read_records(path) if path.exists() else []  # a child may die before its training begins
        return {
            **facts,
            **judge(outcome, output, records, STEPS),
            "predicted": prediction.to_json() if prediction is not None else None,
            "wall_time_s": time.monotonic() - started,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def checkpointing_of(setup: Setup, recipe: str) -> str:
    """The kind that was chosen of those that the variant lists; empty where it lists none."""
    listed = load_recipe(recipe).variants[setup.preset].checkpointing
    return next((name for name in listed if name in setup.techniques), listed[0] if listed else "")


def child(folder: str) -> int:
    """The measured process."""
    return recipe_section.child(folder)
