"""One case of `gpu.py`: a prediction against the training that it is of.

A case's setup is predicted by the real `predict` on the machine that then trains it, with random weights and made-up
data of the predicted shape. Evidence has both side by side: peaks by phase, reserved, what the process holds outside
the allocator, categories. `history` cases record the allocator's history, which the model of the allocator replays;
the `edge` cases are trained twice, in the predicted smallest cap, which must do, and in a little less, which must not.
"""

from __future__ import annotations

import atexit
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.gpu_cases import MODELS, Case
from benchmarks.gpu_child import READY
from benchmarks.gpu_summary import errors
from hf_memkit.catalog.gpu_rates import rates_of
from hf_memkit.catalog.hardware import Machine, gpu_of_size, this_machine
from hf_memkit.catalog.models import ModelFacts, describe
from hf_memkit.common.errors import MemkitError, RunError
from hf_memkit.common.units import GIB
from hf_memkit.deepspeed import ops
from hf_memkit.deepspeed import techniques as _zero_techniques  # noqa: F401  # its techniques, in the registry
from hf_memkit.measuring.memory.records import read_records, steps
from hf_memkit.prediction.running_scripts import ScriptJob, script_request
from hf_memkit.prediction.setup_as_script import SETUP_SCRIPT, SetupJob, as_script
from hf_memkit.prediction.split_states import is_split
from hf_memkit.prediction.time.step_time import step_time
from hf_memkit.prediction.worker import shared_worker
from hf_memkit.setup.job import Job
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques import setup_ledger
from hf_memkit.setup.techniques.registry import TECHNIQUES

if TYPE_CHECKING:
    from hf_memkit.prediction import Prediction

STEPS: Final = 5
"""Of each training: the peaks are there from the second on."""

BELOW: Final = 0.97
"""Share of the predicted smallest cap in which an edge case must fail."""

KEPT_BYTES: Final = 2 * 2**20
HISTORIES: Final = Path(__file__).resolve().parent / "results" / "predict_histories"
"""Where recorded histories of up to `KEPT_BYTES` are kept: the model of the allocator is tested with them."""

WARM_UP_STEPS: Final = 2  # compilation, first allocations; left out of the step time

NOT_ON_CPU: Final[Mapping[str, str]] = {
    "compile": "its kernels are compiled for the GPU",
    "fp16-autocast": "Trainer runs fp16 on no CPU",
    "garbage-collection-threshold": "a setting of the CUDA allocator",
    "expandable-segments": "a setting of the CUDA allocator",
    "paged-adamw-8bit": "unified memory needs a CUDA driver",
}
"""Techniques that a rehearsal leaves out, each with the reason; the others of the case run."""

_CASE_S: Final = 100
_LARGE_CASE_S: Final = 170
_OWN_SCRIPT_S: Final = 400


def case_limit_s(case: Case) -> float:
    """After how many seconds one training of the case is stopped."""
    if case.script:
        return _OWN_SCRIPT_S
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
    if case.kind in ("history", "kernels"):
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
    """What memkit answers for `machine`: `setup`, `prediction`, `predicted_step_s` (low, middle and high).

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
    return setup.with_rows(*setup_ledger.rows(setup)).made_by(case.techniques), facts


# ---- predicting ----


def _predicted(case: Case, setup: Setup, facts: ModelFacts | None, machine: Machine, *, on_cpu: bool) -> Prediction:
    """What memkit answers on this machine."""
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
    request = replace(script_request(ScriptJob(SETUP_SCRIPT, machine)), for_plan=True)
    with as_script(SetupJob(setup, case.shape(on_cpu=on_cpu)[1])) as script:
        found = shared_worker().run(replace(request, script=script)).training
    if found is None:
        return None
    work, span = found.trace.work, found.steps[-1].calls
    assert work is not None
    step = step_time(work, rates, capability=gpu.capability, span=span, micro_batches=case.accumulation)
    return list(step.seconds)


# ---- measuring ----


_waiting: list[subprocess.Popen[str]] = []
"""The process of the next case, which has loaded its libraries."""


def _run_child(folder: Path, environment: Mapping[str, str], limit_s: float) -> tuple[int | None, str]:
    """(exit code, output) of `gpu_child.py` for this folder; None if it was stopped after `limit_s`.

    While it builds its model, the next case's process loads the libraries. Nothing else runs while it trains.
    """
    child = _waiting.pop() if _waiting and not environment else _loaded_child(environment)
    assert child.stdin is not None
    print(folder, file=child.stdin, flush=True)
    if not _waiting:
        _waiting.append(_loaded_child({}))
    try:
        child.communicate("train\n", timeout=limit_s)
        code: int | None = child.returncode
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        code = None
    return code, (folder / "output.txt").read_text(errors="replace")


def _loaded_child(environment: Mapping[str, str]) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("gpu_child.py"))], env={**os.environ, **environment},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(child.kill)
    assert child.stdout is not None
    if not any(line.strip() == READY for line in child.stdout):
        raise RunError("benchmarks/gpu_child.py could not load its libraries: see the message above")
    return child


def _build_operators(config: dict[str, Any], *, on_cpu: bool) -> None:
    """Before the case, so that compiling does not count as its time; in a process of its own, so that this one makes
    no CUDA context that would count as the case's memory."""
    names = ops.needed(config, cpu=on_cpu)
    code = f"from hf_memkit.deepspeed import ops; ops.build({names!r}, print, cpu={on_cpu})"
    found = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(found)}
    if on_cpu:
        environment["DS_ACCELERATOR"] = "cpu"
    built = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if built.returncode != 0:
        raise RunError((built.stderr.strip().splitlines() or ["no message"])[-1])


def judge(outcome: int | None, output: str, made: Sequence[Mapping[str, Any]], max_steps: int) -> dict[str, Any]:
    """What a child's exit code, output and steps mean. `outcome` is None if the child was stopped for time."""
    measured = summarize(made)
    if "torch.OutOfMemoryError" in output:
        lines = [line for line in output.splitlines() if "torch.OutOfMemoryError" in line]
        return {"status": "does not fit", "why": lines[-1][:500], **measured}
    if outcome is None and len(made) > WARM_UP_STEPS:
        return {"status": "fits", "why": f"stopped for time after {len(made)} of {max_steps} steps", **measured}
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
        if "tokens" in warm[0]:  # images have none
            result["tokens_per_s"] = warm[0]["tokens"] / step_time_ms * 1000
    return result


def conclude(folder: Path, outcome: int | None, output: str, max_steps: int) -> dict[str, Any]:
    """What the child's end, its records and its own result come to. What was not measured is absent."""
    own = folder / "result.json"
    result: dict[str, Any] = json.loads(own.read_text()) if own.exists() else {}
    if "refused" in result:
        return {"status": "refused", "why": result["refused"]}
    path = folder / "memory-rank0.jsonl"
    records = read_records(path) if path.exists() else []  # a child may die before its training begins
    made = steps(records)
    found = {**judge(outcome, output, made, result.get("expected_steps", max_steps)), **result}
    found |= {"phases": phase_peaks(made), "categories": categories_at_peak(made)}
    for record in records:
        if record["kind"] == "evaluate" and "peak_allocated_gib" in record:
            found["evaluate_peak_allocated_gib"] = record["peak_allocated_gib"]
        if record["kind"] == "run" and "load" in record.get("phases", {}):
            found["load_peak_allocated_gib"] = record["phases"]["load"].get("peak_allocated_gib")
    return {key: value for key, value in found.items() if value not in ({}, [], None)}


def phase_peaks(made: Sequence[Mapping[str, Any]], kind: str = "peak_allocated_gib") -> dict[str, float]:
    """The highest peak of each phase over the steps, GiB."""
    peaks: dict[str, float] = {}
    for step in made:
        for phase, counters in step.get("phases", {}).items():
            if kind in counters:
                peaks[phase] = max(peaks.get(phase, 0.0), counters[kind])
    return peaks


def categories_at_peak(made: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the peak of the highest step that was looked at closely is made of, GiB."""
    looked = [step for step in made if "categories" in step and "peak_allocated_gib" in step]
    return dict(max(looked, key=lambda step: step["peak_allocated_gib"])["categories"]) if looked else {}


def _trained(case: Case, train: Mapping[str, Any], cap_bytes: int | None = None) -> dict[str, Any]:
    """What one training came to, in a child process with no more than `cap_bytes` for the allocator."""
    setup: Setup = train["setup"]
    on_cpu: bool = train["on_cpu"]
    folder = Path(tempfile.mkdtemp(prefix="memkit-benchmark-"))
    try:
        job = {
            "case": asdict(case), "on_cpu": on_cpu, "max_steps": train["max_steps"], "setup": setup.to_json(),
            "length": case.shape(on_cpu=on_cpu)[1], "cap_bytes": cap_bytes, "evaluates": case.evaluates,
            "history": case.kind == "history", "kernels": case.kind == "kernels",
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        if "deepspeed.config" in setup:
            try:
                _build_operators(setup["deepspeed.config"], on_cpu=on_cpu)
            except MemkitError as error:
                return {"status": "refused", "why": str(error)}
        environment = {key: str(value) for key, value in setup.section("environment").items()}
        environment |= {"DS_ACCELERATOR": "cpu"} if on_cpu and "deepspeed.config" in setup else {}
        outcome, output = _run_child(folder, environment, case_limit_s(case))
        found = conclude(folder, outcome, output, train["max_steps"])
        found |= _by_record(folder)
        if (folder / "history.json.gz").exists():
            found["history_replay"] = _replayed(folder / "history.json.gz", case)
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ran_script(case: Case, *, on_cpu: bool) -> dict[str, Any]:
    """`memkit run --predict` of a user's script, by the record that it leaves. What a launcher starts is predicted
    first by `memkit predict`."""
    with tempfile.TemporaryDirectory(prefix="memkit-benchmark-") as folder:
        options = {"output_dir": folder, "max_steps": STEPS, "report_to": "none", "save_strategy": "no"}
        options |= {"per_device_train_batch_size": case.shape(on_cpu=on_cpu)[0], **case.arguments}
        options |= {"use_cpu": True} if on_cpu else {}
        own = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        script, *words = shlex.split(case.script) or [str(Path(__file__).with_name("gpu_script.py")), *own]
        memkit = [sys.executable, "-m", "hf_memkit"]
        prediction = None
        if case.launcher:
            training = [*case.launcher, script, *words]
            if not on_cpu:
                answer = subprocess.run(
                    [*memkit, "predict", "--json", "--", *training], capture_output=True, text=True
                )
                if answer.returncode not in (0, 1):
                    return {"status": "refused", "why": answer.stderr[-1500:]}
                prediction = json.loads(answer.stdout)
            memkit += ["run", "--records", folder, *training]
        else:
            memkit += ["run", script, "--predict", "--records", folder, "--", *words]
        ran = subprocess.Popen(memkit, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output, _ = ran.communicate(timeout=case_limit_s(case))
        except subprocess.TimeoutExpired:
            ran.terminate()  # so that a launcher can end its processes
            ran.communicate()
            return {"status": "failed", "why": f"stopped after {case_limit_s(case):.0f} s"}
        if ran.returncode != 0:
            tail = " | ".join(line for line in output.splitlines()[-8:] if line.strip())
            return {"status": "failed", "why": f"exit code {ran.returncode}: {tail[-1500:]}"}
        return of_record(Path(folder) / "memory-rank0.jsonl", prediction)


def of_record(path: Path, prediction: dict[str, Any] | None = None) -> dict[str, Any]:
    """What was predicted and measured, by the record of a run that ended well. `prediction`: instead of the one in
    the record."""
    records = read_records(path)
    made = steps(records)
    found = {"status": "fits", **summarize(made), "phases": phase_peaks(made), **_by_record(path.parent)}
    prediction = prediction or next(record.get("prediction") for record in records if record["kind"] == "run")
    if prediction is None:  # a rehearsal: there is no GPU to predict for
        return found
    return {**found, "prediction": prediction, "errors": errors(prediction, found)}


def _by_record(folder: Path) -> dict[str, Any]:
    """Reserved peaks of the phases, and what lay outside the allocator."""
    path = folder / "memory-rank0.jsonl"
    made = steps(read_records(path)) if path.exists() else []
    reserved = phase_peaks(made, "peak_reserved_gib")
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
