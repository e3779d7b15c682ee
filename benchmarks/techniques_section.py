"""Section `techniques`: every technique on a GPU, alone and in ladders from Trainer's defaults to everything.

A case trains a model of a built-in architecture for a few steps on text. All cases of a model start from the same
random weights, written to a folder once, and read the same tokens, so that their losses can be compared. Measured are
the allocator's peaks over the training and by phase, tokens a second, the losses, and what evaluating takes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from benchmarks.children import CASE_S, judge, run_child
from benchmarks.techniques_cases import MODELS, Case
from benchmarks.techniques_cases import cases as cases
from hf_memkit.architectures import ARCHITECTURES
from hf_memkit.errors import MemkitError, RunError
from hf_memkit.hardware import this_machine
from hf_memkit.job import Job
from hf_memkit.memory.records import read_records, steps
from hf_memkit.models import describe
from hf_memkit.setup import Setup
from hf_memkit.technique import TECHNIQUES
from hf_memkit.techniques import ledger
from hf_memkit.units import GIB

NOT_ON_CPU: Final[Mapping[str, str]] = {
    "adalomo": "lomo-optim moves its states to CUDA wherever it runs",
    "adamw-4bit-stochastic": "its step is compiled, which takes a CPU longer than a rehearsal",
    "compile": "its kernels are compiled for the GPU",
    "cpu-offload-optimizer": "copies between a GPU and RAM",
    "flash-attention": "its kernels are for CUDA",
    "fp16-autocast": "Trainer runs fp16 on no CPU",
    "garbage-collection-threshold": "a setting of the CUDA allocator",
    "expandable-segments": "a setting of the CUDA allocator",
    "liger": "its kernels are Triton's",
    "low-host-ram": "there is no GPU to read the weights to",
    "max-split-size": "a setting of the CUDA allocator",
    "offloaded-checkpointing": "page-locked memory needs a CUDA driver",
    "paged-adamw-8bit": "unified memory needs a CUDA driver",
    "tf32": "TrainingArguments refuses it without an Ampere GPU",
}
"""Techniques that a rehearsal leaves out, each with the reason; the others of the case run."""

_SHORT_CASE_S: Final = 90
_COMPILES: Final = ("compile", "adamw-8bit-stochastic", "adamw-4bit-stochastic")  # the latter: their step


def case_limit_s(case: Case) -> float:
    """After how many seconds a case is stopped: those that compile at the first step get longer."""
    return CASE_S if set(_COMPILES) & set(case.techniques) else _SHORT_CASE_S


def model_folder(name: str, *, on_cpu: bool) -> Path:
    """Where a model's first weights lie; a machine that is used again has them already, unless their shape changed."""
    config = {**ARCHITECTURES[MODELS[name].hub_id].config, **(MODELS[name].rehearsed if on_cpu else {})}
    digest = zlib.crc32(json.dumps(config, sort_keys=True).encode())
    return Path(tempfile.gettempdir()) / "memkit-benchmark-models" / f"{name}-{digest:08x}"


def refusal(case: Case) -> str | None:
    """Why this case does not run here, if so."""
    needed = [package for name in case.techniques for package in TECHNIQUES[name].packages]
    missing = [package for package in dict.fromkeys(needed) if find_spec(package) is None]
    return f"{', '.join(missing)} is not installed" if missing else None


def left_out(case: Case, *, on_cpu: bool) -> dict[str, str]:
    """Techniques of the case that do not run here, each with the reason."""
    return {name: NOT_ON_CPU[name] for name in case.techniques if name in NOT_ON_CPU} if on_cpu else {}


def measure(case: Case, *, on_cpu: bool, max_steps: int) -> dict[str, Any]:
    """Runs one case in a child process and returns its evidence."""
    why = refusal(case)
    if why is not None:
        return {"status": "refused", "why": why}
    skipped = left_out(case, on_cpu=on_cpu)
    folder = tempfile.mkdtemp(prefix="memkit-benchmark-")
    started = time.monotonic()
    try:
        model = write_model(case.model, on_cpu=on_cpu)
        ran = replace(case, techniques=tuple(name for name in case.techniques if name not in skipped))
        try:
            setup = make_setup(ran, str(model), on_cpu=on_cpu)
        except MemkitError as error:
            return {"status": "refused", "why": str(error)}
        if setup.problems:
            return {"status": "refused", "why": "; ".join(setup.problems)}
        job = {"case": asdict(ran), "model": str(model), "on_cpu": on_cpu, "max_steps": max_steps}
        (Path(folder) / "job.json").write_text(json.dumps({**job, "setup": setup.to_json()}))
        environment = {key: str(value) for key, value in setup.section("environment").items()}
        environment |= {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
        outcome, output = run_child("techniques", folder, environment, limit_s=case_limit_s(case))
        return {
            **conclude(Path(folder), outcome, output, max_steps),
            **({"not_rehearsed": skipped} if skipped else {}),
            "formula_device_gib": setup.ledger.total_bytes("device") / GIB,
            "wall_time_s": time.monotonic() - started,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_setup(case: Case, model: str, *, on_cpu: bool) -> Setup:
    """The case's techniques applied to the model in the folder `model`, on this machine."""
    size = MODELS[case.model]
    job = Job(
        describe(model, use_hub=False), this_machine(model), size.micro_batch(on_cpu=on_cpu),
        size.length(on_cpu=on_cpu), model, dict(case.values), accumulation=size.accumulation,
    )  # fmt: skip
    setup = Setup(preset=case.name, job=job).put("model.name", model, "the case's first weights")
    setup = setup.put("model.origin", "local", "written once, the same for every case of the model")
    for name in case.techniques:
        setup = TECHNIQUES[name](setup)
    if on_cpu and str(setup.get("optimizer.class", "")).endswith((":AdamW8bit", ":AdamW4bit")):
        setup = setup.put("optimizer.compiled", False, "compiling takes a CPU longer than a rehearsal")
    return setup.with_rows(*ledger.rows(setup)).made_by(case.techniques)


def write_model(name: str, *, on_cpu: bool) -> Path:
    """The folder of a model's first weights, made in a process of its own, so that none of it counts as a case's."""
    folder = model_folder(name, on_cpu=on_cpu)
    if not folder.exists():
        code = "import sys; from benchmarks.techniques_child import write_model; write_model(*sys.argv[1:])"
        command = [sys.executable, "-c", code, name, str(folder), "cpu" if on_cpu else "card"]
        root = Path(__file__).resolve().parents[1]
        made = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if made.returncode != 0:
            raise RunError(f"{name} cannot be written to {folder}: {made.stderr.strip().splitlines()[-1:]}")
    return folder


def conclude(folder: Path, outcome: int | None, output: str, max_steps: int) -> dict[str, Any]:
    """What the child's end, its records and its own result come to. What was not measured is absent."""
    own = folder / "result.json"
    result: dict[str, Any] = json.loads(own.read_text()) if own.exists() else {}
    if "refused" in result:
        return {"status": "refused", "why": result["refused"]}
    path = folder / "memory-rank0.jsonl"
    records = read_records(path) if path.exists() else []  # a child may die before its training begins
    made = steps(records)
    expected = result.get("expected_steps", max_steps)
    measured = judge(outcome, output, records, expected)
    if "tokens_per_s" in result:  # counted, where batches differ in length
        measured["tokens_per_s"] = result.pop("tokens_per_s")
    found = {**measured, **result, "phases": phase_peaks(made), "categories": categories_at_peak(made)}
    for record in records:
        if record["kind"] == "evaluate" and "peak_allocated_gib" in record:
            found["evaluate_peak_allocated_gib"] = record["peak_allocated_gib"]
        if record["kind"] == "run" and "load" in record.get("phases", {}):
            found["load_peak_allocated_gib"] = record["phases"]["load"].get("peak_allocated_gib")
    return {key: value for key, value in found.items() if value not in ({}, [], None)}


def phase_peaks(made: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The highest peak of each phase over the steps, GiB allocated."""
    peaks: dict[str, float] = {}
    for step in made:
        for phase, counters in step.get("phases", {}).items():
            if "peak_allocated_gib" in counters:
                peaks[phase] = max(peaks.get(phase, 0.0), counters["peak_allocated_gib"])
    return peaks


def categories_at_peak(made: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the peak of the highest step that was looked at closely is made of, GiB."""
    looked = [step for step in made if "categories" in step and "peak_allocated_gib" in step]
    return dict(max(looked, key=lambda step: step["peak_allocated_gib"])["categories"]) if looked else {}


def child(folder: str) -> int:
    """The measured process."""
    from benchmarks import techniques_child

    job = json.loads((Path(folder) / "job.json").read_text())
    content = job.pop("case")
    case = Case(**{**content, "techniques": tuple(content["techniques"])})
    return techniques_child.run(case, MODELS[case.model], Path(folder), job)
