"""Measures memkit on a GPU, offline, in sections of under nine minutes, and keeps the results as evidence.

    python benchmarks/gpu.py --section recipe          # measures what is not measured yet; run again to go on
    python benchmarks/gpu.py --section recipe --list   # shows the cases
    python benchmarks/gpu.py --section recipe --rehearse   # the same path on a CPU; never evidence

Every case runs in a process of its own under a cap on PyTorch's allocator, so that a large card stands in for a small
one. Its result is written to `benchmarks/results/SECTION.json` as soon as it is known: fits, does not fit (out of
memory), refused (with the reason), or failed (with the error). Without a GPU: one line, and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs from a checkout that is not installed

from hf_memkit import __version__
from hf_memkit.cards import CARDS
from hf_memkit.hardware import Gpu, gpu_of_size, named_gpu, this_machine, use_one_card
from hf_memkit.memory.records import read_records, steps
from hf_memkit.recipe.rehearse import rehearse
from hf_memkit.recipe.resolve import Overrides, resolve
from hf_memkit.recipe.run import Run
from hf_memkit.recipe.schema import load_recipe
from hf_memkit.units import GIB

RESULTS: Final = Path(__file__).resolve().parent / "results"
SECTION_S: Final = 8 * 60  # no case starts after this, so that a section ends within nine minutes
CASE_S: Final = 170  # a case that takes longer is stopped, and measured by the steps it made
STEPS: Final = 12
WARM_UP_STEPS: Final = 2  # compilation, first allocations; left out of the step time
PACKAGES: Final = ("torch", "transformers", "accelerate", "deepspeed", "peft", "torchao", "datasets")


@dataclass(frozen=True)
class Case:
    """One variant of a recipe on one emulated card. `cap_gib` is what PyTorch's allocator may reserve."""

    recipe: str
    variant: str
    card: str
    cap_gib: float

    @property
    def name(self) -> str:
        return f"{self.recipe} {self.variant} {self.card}"

    @property
    def gpu(self) -> Gpu:
        return named_gpu(self.card) if self.card in CARDS else gpu_of_size(self.card)


def recipe_cases() -> list[Case]:
    """Every variant of gpt2-on-16gb on a 16 GB card with bf16, and on a T4 (fp16, no flash attention)."""
    recipe = load_recipe("gpt2-on-16gb")
    cards = {"16GB": 15.1, "T4": 14.2}
    return [Case(recipe.name, variant, card, cap) for card, cap in cards.items() for variant in recipe.variants]


SECTIONS: Final = {"recipe": recipe_cases}


def prepare(case: Case, folder: str, *, on_cpu: bool, max_steps: int) -> Run | str:
    """The run of a case, or the reason why memkit refuses it."""
    quiet = {"save_strategy": "no", "eval_strategy": "no", "eval_on_start": False, "logging_steps": 1}
    overrides = Overrides(case.variant, max_steps=max_steps, output=folder, settings=quiet)
    machine = this_machine(folder).with_gpu(case.gpu)
    resolved = resolve(load_recipe(case.recipe), machine, overrides, use_hub=False)
    if resolved.setup.problems:
        return "; ".join(resolved.setup.problems)
    if not on_cpu:
        return Run(case.recipe, case.variant, resolved.setup)
    rehearsed = rehearse(resolved)
    return Run(case.recipe, case.variant, rehearsed.setup, resolved.setup, rehearsed.not_rehearsed)


def measure(case: Case, *, on_cpu: bool, max_steps: int) -> dict[str, Any]:
    """Runs one case in a child process and returns its evidence."""
    folder = tempfile.mkdtemp(prefix="memkit-benchmark-")
    started = time.monotonic()
    try:
        job = prepare(case, folder, on_cpu=on_cpu, max_steps=max_steps)
        if isinstance(job, str):
            return {"status": "refused", "why": job}
        (Path(folder) / "job.json").write_text(json.dumps({"case": asdict(case), "run": job.to_json()}))
        environment = {**os.environ, **{k: str(v) for k, v in job.setup.section("environment").items()}}
        command = [sys.executable, __file__, "--child", folder]
        try:
            child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CASE_S)
            outcome, output = child.returncode, child.stdout + child.stderr
        except subprocess.TimeoutExpired as expired:
            outcome, output = None, _text(expired.stdout) + _text(expired.stderr)
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


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def judge(outcome: int | None, output: str, records: Sequence[dict[str, Any]], max_steps: int) -> dict[str, Any]:
    """What a child's exit code, output and records mean. `outcome` is None if the child was stopped for time."""
    made = steps(records)
    measured = summarize(made)
    if "torch.OutOfMemoryError" in output:
        lines = [line for line in output.splitlines() if "torch.OutOfMemoryError" in line]
        return {"status": "does not fit", "why": lines[-1][:500], **measured}
    if outcome is None and len(made) > WARM_UP_STEPS:
        return {"status": "fits", "why": f"stopped after {CASE_S} s and {len(made)} of {max_steps} steps", **measured}
    if outcome == 0 and len(made) == max_steps:
        return {"status": "fits", **measured}
    tail = " | ".join(line for line in output.splitlines()[-8:] if line.strip())
    return {"status": "failed", "why": f"exit code {outcome}, {len(made)} steps: {tail[-1500:]}", **measured}


def summarize(made: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Peaks over all steps, times over those after the warm-up. What was not measured is absent."""
    result: dict[str, Any] = {"steps": len(made)}
    for key in ("peak_allocated_gib", "peak_reserved_gib", "device_used_gib", "host_rss_gib", "alloc_retries"):
        values = [step[key] for step in made if key in step]
        if values:
            result[key] = max(values)
    warm = made[WARM_UP_STEPS:]
    if warm:
        step_time_ms = statistics.median(step["step_time_ms"] for step in warm)
        result["step_time_ms"] = step_time_ms
        result["tokens_per_s"] = warm[0]["tokens"] / step_time_ms * 1000
    return result


def child(folder: str) -> int:
    """The measured process: caps the allocator, then runs the job that `measure` left in `folder`."""
    import torch

    from hf_memkit.recipe.run import run

    content = json.loads((Path(folder) / "job.json").read_text())
    case, job = Case(**content["case"]), Run.from_json(content["run"])
    if not job.is_rehearsal:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, case.cap_gib * GIB / total))
        if not case.gpu.bf16:  # cards before Ampere have neither flash nor cuDNN attention
            torch.backends.cuda.enable_flash_sdp(False)
            torch.backends.cuda.enable_cudnn_sdp(False)
    content = run(job, print)
    return 0 if content["status"] == "finished" else 1


def provenance() -> dict[str, Any]:
    """Versions and hardware that stand beside every result."""
    machine = this_machine()
    versions = {"memkit": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"versions": versions, "hardware": machine.to_json(), "time": int(time.time())}


def load_results(path: Path) -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in json.loads(path.read_text())["cases"]} if path.exists() else {}


def flush(path: Path, section: str, rows: Mapping[str, dict[str, Any]], *, rehearsal: bool) -> None:
    """Writes all results, whole: a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    content = {"schema": 1, "section": section, "rehearsal": rehearsal, "cases": list(rows.values())}
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def run_section(
    section: str, path: Path, *, on_cpu: bool, max_steps: int, only: str | None, section_s: float = SECTION_S
) -> int:
    """Measures the cases of a section that have no result yet; 0 if all of them then have one, 1 if time ran out."""
    started = time.monotonic()
    rows = load_results(path)
    for case in SECTIONS[section]():
        if case.name in rows or (only is not None and only not in case.name):
            continue
        if time.monotonic() - started + CASE_S > section_s:
            print(f"time is up before {case.name}; run this section again to go on")
            return 1
        row = {"case": case.name, **asdict(case), **measure(case, on_cpu=on_cpu, max_steps=max_steps), **provenance()}
        rows[case.name] = row
        flush(path, section, rows, rehearsal=on_cpu)
        peak = f"{row['peak_allocated_gib']:.2f} GiB" if "peak_allocated_gib" in row else "no peak"
        print(
            f"{case.name}: {row['status']}, {peak}, {row.get('wall_time_s', 0):.0f} s {row.get('why', '')}", flush=True
        )
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=sorted(SECTIONS), help="what to measure")
    parser.add_argument("--list", action="store_true", help="show the section's cases")
    parser.add_argument("--only", help="only cases whose name contains this")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps a case")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--rehearse", action="store_true", help="run the path on a CPU; never evidence")
    parser.add_argument("--child", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    use_one_card()
    if options.child:
        return child(options.child)
    if not options.section:
        parser.error("--section is needed")
    if options.list:
        print("\n".join(f"{case.name}: cap {case.cap_gib} GiB" for case in SECTIONS[options.section]()))
        return 0
    if not options.rehearse and this_machine().gpu is None:
        print("benchmarks/gpu.py: this machine has no CUDA GPU; nothing was measured", file=sys.stderr)
        return 2
    name = f"{options.section}-rehearsal" if options.rehearse else options.section
    path = options.out / f"{name}.json"
    return run_section(options.section, path, on_cpu=options.rehearse, max_steps=options.steps, only=options.only)


if __name__ == "__main__":
    raise SystemExit(main())
