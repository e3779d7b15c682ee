"""Section `recipe`: every variant of the recipe on emulated GPUs."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import judge, run_child, take_gpu
from hf_memkit.hardware import Gpu, gpu_of_size, named_gpu, this_machine
from hf_memkit.known_gpus import KNOWN_GPUS
from hf_memkit.memory.records import read_records
from hf_memkit.recipe.choose import choose, unjudged
from hf_memkit.recipe.rehearse import rehearse
from hf_memkit.recipe.run import RecipeRun
from hf_memkit.recipe.schema import load_recipe
from hf_memkit.request import Request
from hf_memkit.units import GIB


@dataclass(frozen=True)
class Case:
    """One variant of a recipe on one emulated GPU. `cap_gib` is what PyTorch's allocator may reserve."""

    recipe: str
    variant: str
    card: str
    cap_gib: float

    @property
    def name(self) -> str:
        return f"{self.recipe} {self.variant} {self.card}"

    @property
    def gpu(self) -> Gpu:
        return named_gpu(self.card) if self.card in KNOWN_GPUS else gpu_of_size(self.card)


def cases() -> list[Case]:
    """Every variant of gpt2-on-16gb on a 16 GB GPU with bf16, and on a T4 (fp16, no flash attention)."""
    recipe = load_recipe("gpt2-on-16gb")
    cards = {"16GB": 15.1, "T4": 14.2}
    return [Case(recipe.name, variant, card, cap) for card, cap in cards.items() for variant in recipe.variants]


def prepare(case: Case, folder: str, *, on_cpu: bool, max_steps: int) -> RecipeRun | str:
    """The run of a case, or the reason why memkit refuses it."""
    quiet = {"save_strategy": "no", "eval_strategy": "no", "eval_on_start": False, "logging_steps": 1}
    request = Request(variant=case.variant, max_steps=max_steps, output=folder, arguments=quiet)
    machine = this_machine(folder).with_gpu(case.gpu)
    resolved = choose(load_recipe(case.recipe), machine, request, use_hub=False, judge=unjudged)[0]
    if resolved.problems:
        return "; ".join(resolved.problems)
    if not on_cpu:
        resolved = resolved.put("model.random_weights", True, "the benchmark")
        return RecipeRun(case.recipe, case.variant, resolved)
    rehearsed = rehearse(load_recipe(case.recipe), resolved)
    return RecipeRun(case.recipe, case.variant, rehearsed.setup, resolved, rehearsed.not_rehearsed)


def measure(case: Case, *, on_cpu: bool, max_steps: int) -> dict[str, Any]:
    """Runs one case in a child process and returns its evidence."""
    folder = tempfile.mkdtemp(prefix="memkit-benchmark-")
    started = time.monotonic()
    try:
        job = prepare(case, folder, on_cpu=on_cpu, max_steps=max_steps)
        if isinstance(job, str):
            return {"status": "refused", "why": job}
        write_job(Path(folder), asdict(case), job)
        environment = {key: str(value) for key, value in job.setup.section("environment").items()}
        outcome, output = run_child("recipe", folder, environment)
        path = Path(folder) / "memory-rank0.jsonl"
        records = read_records(path) if path.exists() else []  # a child may die before its training begins
        ledger = job.setup.ledger if job.target is None else job.target.ledger
        return {
            **judge(outcome, output, records, max_steps),
            "formula_device_gib": ledger.total_bytes("device") / GIB,
            "wall_time_s": time.monotonic() - started,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_job(folder: Path, case: dict[str, Any], job: RecipeRun) -> None:
    """What `child` reads."""
    (folder / "job.json").write_text(json.dumps({"case": case, "run": job.to_json()}))


def child(folder: str) -> int:
    """The measured process: caps the allocator, then runs the job that `measure` left in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer  # noqa: F401  (loads the libraries beside another case)

    from hf_memkit.recipe.ranks import Ranks
    from hf_memkit.recipe.run import run

    content = json.loads((Path(folder) / "job.json").read_text())
    case, job = Case(**content["case"]), RecipeRun.from_json(content["run"])
    take_gpu()
    if not job.is_rehearsal:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, case.cap_gib * GIB / total))
        if not case.gpu.bf16:  # GPUs before Ampere have neither flash nor cuDNN attention
            torch.backends.cuda.enable_flash_sdp(False)
            torch.backends.cuda.enable_cudnn_sdp(False)
    content = run(job, print, Ranks())
    return 0 if content["status"] == "finished" else 1
