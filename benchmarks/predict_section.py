"""Section `predict`: predictions against the trainings that they are of, on a GPU.

A case's setup is predicted by the real `predict` on the machine that then trains it, with random weights and made-up
data of the predicted shape. Evidence has both side by side: peaks by phase, reserved, what the process holds outside
the allocator, categories. `history` cases record the allocator's history, which the model of the allocator replays;
the `edge` cases are trained twice, in the predicted smallest cap, which must do, and in a little less, which must not.

`summary` says how far predictions were off, and names every setup that was said to fit and did not.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.children import run_child, summarize
from benchmarks.deepspeed_section import build_operators
from benchmarks.predict_cases import MODELS, Case
from benchmarks.predict_cases import cases as cases
from benchmarks.techniques_section import NOT_ON_CPU, conclude, phase_peaks
from hf_memkit.errors import MemkitError
from hf_memkit.gpu_rates import rates_of
from hf_memkit.hardware import Machine, gpu_of_size, this_machine
from hf_memkit.job import Job
from hf_memkit.memory.records import read_records, steps
from hf_memkit.models import ModelFacts, describe
from hf_memkit.prediction.running_scripts import script_request
from hf_memkit.prediction.setup_training import SETUP_SCRIPT, SetupTraining, as_script
from hf_memkit.prediction.split_states import is_split
from hf_memkit.prediction.step_time import step_time
from hf_memkit.prediction.trace import Trace
from hf_memkit.prediction.worker import shared_worker
from hf_memkit.setup import Setup
from hf_memkit.technique import TECHNIQUES
from hf_memkit.techniques import ledger
from hf_memkit.units import GIB

if TYPE_CHECKING:
    from hf_memkit.prediction import Prediction

STEPS: Final = 5
"""Of each training: the peaks are there from the second on."""

BELOW: Final = 0.97
"""Share of the predicted smallest cap in which an edge case must fail."""

KEPT_BYTES: Final = 2 * 2**20
HISTORIES: Final = Path(__file__).resolve().parent / "results" / "predict_histories"
"""Where recorded histories of up to `KEPT_BYTES` are kept: the model of the allocator is tested with them."""

_CASE_S: Final = 100
_LARGE_CASE_S: Final = 170


def case_limit_s(case: Case) -> float:
    """After how many seconds one training of the case is stopped."""
    return _LARGE_CASE_S if case.model == "llama-8b" or case.kind == "edge" or "qlora" in case.techniques else _CASE_S


def measure(case: Case, *, on_cpu: bool, max_steps: int, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Predicts one case, trains it in a child process, and returns the evidence.

    Args:
        case: what is trained.
        on_cpu: whether it is a rehearsal.
        max_steps: optimizer steps, at most `STEPS`.
        before: what `predicted` gave, here or on another machine; None: it is predicted now.
    """
    started = time.monotonic()
    if case.kind == "calibrate":
        return {**_calibrated(case, on_cpu=on_cpu), "wall_time_s": time.monotonic() - started}
    if case.kind == "script":
        return {**_ran_script(case, on_cpu=on_cpu), "wall_time_s": time.monotonic() - started}
    missing = _missing(case)
    if missing:
        return {"status": "refused", "why": f"{', '.join(missing)} is not installed"}
    skipped = {name: NOT_ON_CPU[name] for name in case.techniques if name in NOT_ON_CPU} if on_cpu else {}
    ran = replace(case, techniques=tuple(name for name in case.techniques if name not in skipped))
    machine = this_machine()
    if on_cpu:
        machine = replace(machine, gpu=gpu_of_size("16GB"))
    if case.kind == "history":
        setup = make_setup(ran, machine, on_cpu=on_cpu)[0]
        found = _trained(ran, {"setup": setup, "on_cpu": on_cpu, "max_steps": min(max_steps, STEPS)})
        return {**found, "wall_time_s": time.monotonic() - started}
    predicting = before if before is not None else predicted(ran, machine, on_cpu=on_cpu)
    if "setup" not in predicting:
        return {"status": "refused", "why": predicting["why_not_predicted"]}
    prediction = predicting.get("prediction")
    train = {"setup": Setup.from_json(predicting["setup"]), "on_cpu": on_cpu, "max_steps": min(max_steps, STEPS)}
    if case.kind != "edge":
        found = _trained(ran, train)
    elif prediction is not None:
        found = _at_the_edge(ran, prediction, train)
    else:
        return {"status": "refused", "why": predicting["why_not_predicted"]}
    kept = ("setup", "prediction", "why_not_predicted", "predicted_step_s", "predicted_s", "predicted_on")
    return {
        **found,
        **({"not_rehearsed": skipped} if skipped else {}),
        **{key: predicting[key] for key in kept if key in predicting},
        "errors": errors(prediction, found, predicting.get("predicted_step_s")) if prediction is not None else {},
        "wall_time_s": time.monotonic() - started,
    }


def predicted(case: Case, machine: Machine, *, on_cpu: bool) -> dict[str, Any]:
    """What a user of `machine` would be told: `setup`, `prediction`, `predicted_step_s` (low, middle and high).

    Beside them `predicted_s`, how long that took; `why_not_predicted` where memkit refuses.
    """
    started = time.monotonic()
    result: dict[str, Any] = {}
    try:
        setup, facts = make_setup(case, machine, on_cpu=on_cpu)
        if setup.problems:
            return {"why_not_predicted": "; ".join(setup.problems), "predicted_s": time.monotonic() - started}
        result["setup"] = setup.to_json()
        prediction = _predicted(case, setup, facts, machine, on_cpu=on_cpu)
        result["prediction"] = prediction.to_json()
        seconds = _step_seconds(case, setup, machine, on_cpu=on_cpu)
        result |= {"predicted_step_s": seconds} if seconds is not None else {}
    except MemkitError as error:
        result["why_not_predicted"] = str(error)
    return {**result, "predicted_s": time.monotonic() - started}


def _missing(case: Case) -> list[str]:
    """Packages that the case needs and that are not installed."""
    needed = dict.fromkeys(package for name in case.techniques for package in TECHNIQUES[name].packages)
    return [package for package in needed if find_spec(package) is None]


def make_setup(case: Case, machine: Machine, *, on_cpu: bool) -> tuple[Setup, ModelFacts | None]:
    """The case's techniques and arguments, for this machine; and the model's shapes if it is a causal one."""
    model = MODELS[case.model]
    values = model.values(on_cpu=on_cpu)
    micro_batch, length = case.shape(on_cpu=on_cpu)
    why = "the case"
    setup = Setup(preset=case.name).put("model.name", case.model, why)
    setup = setup.put("model.origin", "architecture", "random weights").put("model.architecture", values, why)
    setup = setup.put("arguments.per_device_train_batch_size", micro_batch, why)
    setup = setup.put("arguments.per_device_eval_batch_size", micro_batch, why)
    setup = setup.put("arguments.gradient_accumulation_steps", case.accumulation, why)
    setup = setup.put("arguments.save_strategy", "no", why)
    if case.evaluates:
        setup = setup.put("arguments.eval_strategy", "steps", why)
    for name, value in case.arguments.items():
        if not (on_cpu and name == "fp16"):
            setup = setup.put(f"arguments.{name}", value, why)
    if model.model_class is not None:
        return setup.put("model.class", model.model_class, why), None
    facts = describe(f"{case.model}-shape", values, use_hub=False)
    job = Job(facts, machine, micro_batch, length, "unused", dict(case.values), accumulation=case.accumulation)
    setup = replace(setup, job=job)
    for name in case.techniques:
        setup = TECHNIQUES[name](setup)
    return setup.with_rows(*ledger.rows(setup)).made_by(case.techniques), facts


def errors(
    prediction: Mapping[str, Any], found: Mapping[str, Any], step_s: Sequence[float] | None = None
) -> dict[str, float]:
    """Predicted over measured, less one: `peak_allocated`; `peak_reserved`, which is nought between both ends of the
    predicted range, otherwise from the nearer one; `total`, of the higher end with what lies outside the allocator;
    `allocated_PHASE`; and `step_time`, of the middle of `step_s`. What was not measured is absent."""
    result: dict[str, float] = {}
    if step_s is not None and (measured := found.get("step_time_ms")):
        result["step_time"] = 1000 * step_s[1] / measured - 1
    if measured := found.get("peak_allocated_gib"):
        result["peak_allocated"] = prediction["peak_allocated_gib"] / measured - 1
    low, high = prediction["peak_reserved_gib"]
    if measured := found.get("peak_reserved_gib"):
        result["peak_reserved"] = min(max(measured, low), high) / measured - 1
    if measured := found.get("device_used_gib"):
        result["total"] = (high + prediction["outside_allocator_gib"]) / measured - 1
    for phase, peaks in prediction["phases"].items():
        if measured := found.get("phases", {}).get(phase):
            result[f"allocated_{phase}"] = peaks["peak_allocated_gib"] / measured - 1
    return result


@dataclass(frozen=True, slots=True)
class Summary:
    """How far predictions were off.

    Attributes:
        cases: trainings that were compared.
        median_error, worst_error: of `peak_allocated`, as shares without their sign; None where nothing was compared.
        worst_case: the case with the worst.
        median_reserved_error, worst_reserved_error: the same of `peak_reserved`.
        wrongly_fits: cases whose prediction said `fits`, and which ran out of memory or failed.
        edges, edges_right: cases that were trained in the predicted smallest cap and in less, and those of them that
            completed in the one and ran out of memory in the other.
        histories, histories_exact: recorded histories, and those that the model of the allocator followed to the end.
    """

    cases: int
    median_error: float | None
    worst_error: float | None
    worst_case: str | None
    median_reserved_error: float | None
    worst_reserved_error: float | None
    wrongly_fits: tuple[str, ...]
    edges: int
    edges_right: int
    histories: int
    histories_exact: int


def summary(rows: Sequence[Mapping[str, Any]]) -> Summary:
    """Of the `cases` of an evidence file."""
    trained = [row for row in rows if row.get("kind") in ("script", "train") and "prediction" in row]
    off = {row["case"]: abs(row["errors"]["peak_allocated"]) for row in trained if "peak_allocated" in row["errors"]}
    reserved = [abs(row["errors"]["peak_reserved"]) for row in trained if "peak_reserved" in row["errors"]]
    edges = [row for row in rows if row.get("kind") == "edge" and "runs" in row]
    histories = [row["history_replay"] for row in rows if "exact" in row.get("history_replay", {})]
    worst = max(off, key=lambda name: off[name], default=None)
    return Summary(
        cases=len(off),
        median_error=statistics.median(off.values()) if off else None,
        worst_error=off[worst] if worst is not None else None,
        worst_case=worst,
        median_reserved_error=statistics.median(reserved) if reserved else None,
        worst_reserved_error=max(reserved, default=None),
        wrongly_fits=tuple(
            row["case"]
            for row in trained
            if row["prediction"]["verdict"] == "fits" and row["status"] in ("does not fit", "failed")
        ),
        edges=len(edges),
        edges_right=sum(row["as_predicted"] for row in edges),
        histories=len(histories),
        histories_exact=sum(history["exact"] for history in histories),
    )


# ---- predicting ----


def _predicted(case: Case, setup: Setup, facts: ModelFacts | None, machine: Machine, *, on_cpu: bool) -> Prediction:
    """What a user of this machine would be told."""
    from hf_memkit.prediction import predict

    micro_batch, length = case.shape(on_cpu=on_cpu)
    sizes = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": case.accumulation}
    for name, size in sizes.items():
        setup = setup.put(f"arguments.{name}", size, "the case's")
    return predict(replace(setup, job=Job(facts, machine, micro_batch, length)))


def _step_seconds(case: Case, setup: Setup, machine: Machine, *, on_cpu: bool) -> list[float] | None:
    """Low, middle and high seconds of an optimizer step; None where an engine splits it, or the GPU has no rates."""
    gpu = machine.gpu
    rates = rates_of(gpu.name) if gpu is not None else None
    if gpu is None or gpu.capability is None or rates is None or is_split(setup):
        return None
    request = replace(script_request(SETUP_SCRIPT, machine, os.environ, gpus=1, nodes=1), work=True)
    with as_script(SetupTraining(setup, case.shape(on_cpu=on_cpu)[1])) as script:
        content, _ = shared_worker().run(replace(request, script=script))
    if content is None or "trace" not in content:
        return None
    work = Trace.from_json(content["trace"]).work
    assert work is not None
    begin, end = content["about"]["work_steps"][-1][1:]
    step = step_time(work, rates, capability=gpu.capability, span=(begin, end), micro_batches=case.accumulation)
    return list(step.seconds)


# ---- measuring ----


def _trained(case: Case, train: Mapping[str, Any], cap_bytes: int | None = None) -> dict[str, Any]:
    """What one training came to, in a child process with no more than `cap_bytes` for the allocator."""
    setup: Setup = train["setup"]
    on_cpu: bool = train["on_cpu"]
    folder = Path(tempfile.mkdtemp(prefix="memkit-benchmark-"))
    try:
        job = {
            "case": asdict(case), "on_cpu": on_cpu, "max_steps": train["max_steps"], "setup": setup.to_json(),
            "length": case.shape(on_cpu=on_cpu)[1], "cap_bytes": cap_bytes, "evaluates": case.evaluates,
            "history": case.kind == "history",
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        if "deepspeed.config" in setup:
            build_operators(setup["deepspeed.config"], on_cpu=on_cpu)
        environment = {key: str(value) for key, value in setup.section("environment").items()}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if on_cpu else {}
        outcome, output = run_child("predict", str(folder), environment, limit_s=case_limit_s(case))
        found = conclude(folder, outcome, output, train["max_steps"])
        found |= _by_record(folder)
        if (folder / "history.json.gz").exists():
            found["history_replay"] = _replayed(folder / "history.json.gz", case)
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ran_script(case: Case, *, on_cpu: bool) -> dict[str, Any]:
    """`memkit run --predict` of a user's script, by the record that it leaves."""
    with tempfile.TemporaryDirectory(prefix="memkit-benchmark-") as folder:
        options = {"output_dir": folder, "max_steps": STEPS, "report_to": "none", "save_strategy": "no"}
        options |= {"per_device_train_batch_size": case.shape(on_cpu=on_cpu)[0], **case.arguments}
        options |= {"use_cpu": True} if on_cpu else {}
        script = str(Path(__file__).with_name("gpu_script.py"))
        command = [sys.executable, "-m", "hf_memkit", "run", script, "--predict", "--"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=case_limit_s(case))
        if ran.returncode != 0:
            tail = " | ".join(line for line in (ran.stdout + ran.stderr).splitlines()[-8:] if line.strip())
            return {"status": "failed", "why": f"exit code {ran.returncode}: {tail[-1500:]}"}
        return of_record(Path(folder) / "memory-rank0.jsonl")


def of_record(path: Path) -> dict[str, Any]:
    """What was predicted and measured, by the record of a run that ended well."""
    records = read_records(path)
    made = steps(records)
    found = {"status": "fits", **summarize(made), "phases": phase_peaks(made), **_by_record(path.parent)}
    prediction = next(record.get("prediction") for record in records if record["kind"] == "run")
    if prediction is None:  # a rehearsal: there is no GPU to predict for
        return found
    return {**found, "prediction": prediction, "errors": errors(prediction, found)}


def _by_record(folder: Path) -> dict[str, Any]:
    """Reserved peaks of the phases, and what lay outside the allocator."""
    path = folder / "memory-rank0.jsonl"
    made = steps(read_records(path)) if path.exists() else []
    reserved: dict[str, float] = {}
    for step in made:
        for phase, counters in step.get("phases", {}).items():
            if "peak_reserved_gib" in counters:
                reserved[phase] = max(reserved.get(phase, 0.0), counters["peak_reserved_gib"])
    outside = [step["outside_allocator_gib"] for step in made if "outside_allocator_gib" in step]
    return {
        **({"phases_reserved": reserved} if reserved else {}),
        **({"outside_allocator_gib": max(outside)} if outside else {}),
    }


def _replayed(path: Path, case: Case) -> dict[str, Any]:
    """The model of the allocator beside the recorded one; a small recording is kept."""
    from benchmarks.allocator_compare import compare
    from benchmarks.allocator_history import read_history

    try:
        history = read_history(path)
        found = compare(history)
    except MemkitError as error:
        return {"error": str(error)}
    name = "".join(letter if letter.isalnum() else "-" for letter in case.name) + ".json.gz"
    kept = path.stat().st_size <= KEPT_BYTES
    if kept:
        HISTORIES.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, HISTORIES / name)
    return {
        "recorded_peak_reserved_gib": found.recorded_peak_reserved_bytes / GIB,
        "replayed_peak_reserved_gib": found.replayed_peak_reserved_bytes / GIB,
        "exact": found.exact,
        "divergence": found.divergence.what if found.divergence is not None else None,
        "entries": len(history.entries),
        "kept_as": name if kept else None,
    }


def _at_the_edge(case: Case, prediction: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    """In the predicted smallest cap, and in less. On a CPU, where nothing has a cap, both complete."""
    cap = round(prediction["smallest_cap_gib"] * GIB)
    runs = {"at_smallest_cap": _trained(case, train, cap), "below": _trained(case, train, int(BELOW * cap))}
    first = runs["at_smallest_cap"]
    as_predicted = first["status"] == "fits" and runs["below"]["status"] == "does not fit"
    return {**first, "runs": runs, "cap_gib": cap / GIB, "below_share": BELOW, "as_predicted": as_predicted}


def _calibrated(case: Case, *, on_cpu: bool) -> dict[str, Any]:
    if on_cpu:
        return {"status": "refused", "why": "there is no GPU whose libraries could be measured"}
    folder = Path(tempfile.mkdtemp(prefix="memkit-benchmark-"))
    try:
        (folder / "job.json").write_text(json.dumps({"case": asdict(case)}))
        outcome, output = run_child("predict", str(folder), {}, limit_s=case_limit_s(case))
        result = folder / "result.json"
        if not result.exists():
            tail = " | ".join(line for line in output.splitlines()[-8:] if line.strip())
            return {"status": "failed", "why": f"exit code {outcome}: {tail[-1500:]}"}
        return {"status": "fits", **json.loads(result.read_text())}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def child(folder: str) -> int:
    """The measured process."""
    job = json.loads((Path(folder) / "job.json").read_text())
    if job["case"]["kind"] == "calibrate":
        from benchmarks import predict_calibrate

        return predict_calibrate.run(Path(folder))
    from benchmarks import predict_child

    return predict_child.run(Path(folder), job)
