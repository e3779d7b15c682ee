"""`memkit plan --verify`: runs the proposed setup on this machine's GPU in a separate process, and compares
measurements with the prediction. If the setup fails, the next one runs.

In: a plan, the script, its environment variables. Out: the plan without setups that failed, and the result of each
run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import psutil
import yaml

from hf_memkit.catalog.hardware import Gpu, Machine, named_gpu, this_machine
from hf_memkit.common import boot
from hf_memkit.common.ended_with_parent import ends_with_this
from hf_memkit.common.errors import InputError
from hf_memkit.common.units import GIB, format_gib
from hf_memkit.common.user_script import UserScript
from hf_memkit.measuring.report.load import Run, load_run
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.short_run import WORST_STEPS
from hf_memkit.run.launch import launch_command

_MAX_RUNS: Final = 3
"""Number of setups that run at most."""

_MODULE: Final = "hf_memkit.plan.short_run"
_LAST_LINES: Final = 12
_END_S: Final = 15.0
"""Seconds between SIGTERM and SIGKILL, in which torchrun ends its own processes."""

_DISK_SHARE: Final = 0.9
"""Share of the free disk space that a checkpoint may take."""

_QUIET: Final = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Variables that keep the script from starting a run in a dashboard."""

Device = Literal["cuda", "cpu"]

_NONE: Final = "–"


@dataclass(frozen=True, slots=True)
class Verified:
    """A setup that ran for a few steps.

    Attributes:
        judgement: of the setup, with its prediction.
        failed: where and why it failed; empty if it passed.
        out_of_memory: whether it failed because the GPU ran out of memory.
        last_lines: last lines of output of a failed run.
        peak_allocated_gib, peak_reserved_gib, outside_allocator_gib: maximum over all GPUs; None if not measured (on a
            CPU, without NVML).
        alloc_retries: number of times the allocator freed its cache to serve a request; None as above.
        step_time_s: median of the steps with batches of the script's own loader; None if there were none.
        evaluated, saved: whether the run reached it; None if the script does not do it, or the notes say why not.
        worst_batch: shape of the worst batch, in the first steps; empty if unknown.
        gpus: number of GPUs that trained together.
        notes: remarks for the user.
    """

    judgement: Judgement
    failed: str = ""
    out_of_memory: bool = False
    last_lines: tuple[str, ...] = ()
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    outside_allocator_gib: float | None = None
    alloc_retries: int | None = None
    step_time_s: float | None = None
    evaluated: bool | None = None
    saved: bool | None = None
    worst_batch: str = ""
    gpus: int = 1
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def title(self) -> str:
        """`"4 × 2, checkpointing: ran here"`."""
        return f"{self.judgement.candidate.name}: {'ran here' if self.passed else 'failed here'}"

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """(label, measured, predicted) as text; without rows that are neither measured nor predicted."""
        predicted = self._predicted
        for label, gib, expected in (
            ("peak allocated", self.peak_allocated_gib, predicted["peak_allocated_gib"]),
            ("peak reserved", self.peak_reserved_gib, predicted["peak_reserved_gib"]),
            ("outside the allocator", self.outside_allocator_gib, predicted["outside_allocator_gib"]),
        ):
            if gib is not None or expected is not None:
                yield label, _NONE if gib is None else f"{gib:.2f} GiB", _between(expected, "GiB", ".2f")

        time = self.judgement.step_time
        if self.step_time_s is not None or time is not None:
            step = _NONE if self.step_time_s is None else f"{self.step_time_s:.3g} s"
            expected = _NONE
            if time is not None and self.judgement.is_priced:
                low, likely, high = time.seconds
                expected = f"{likely:.3g} s, {_between([low, high], 's', '.3g')}"
            yield "a step", step, expected
        if self.alloc_retries is not None:
            yield "allocator retries", str(self.alloc_retries), "0"
        for label, done in (("evaluation", self.evaluated), ("save", self.saved)):
            if done is not None:
                yield label, "done" if done else "not reached", ""

    @property
    def _predicted(self) -> dict[str, Any]:
        prediction, time = self.judgement.prediction, self.judgement.step_time
        return {
            "peak_allocated_gib": prediction.peak_allocated_bytes / GIB if prediction else None,
            "peak_reserved_gib": [size / GIB for size in prediction.peak_reserved_bytes] if prediction else None,
            "outside_allocator_gib": prediction.outside_allocator_bytes / GIB if prediction else None,
            "step_time_s": list(time.seconds) if time else None,
        }

    def to_json(self) -> dict[str, Any]:
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "judgement"}
        name = self.judgement.candidate.name
        return {"name": name, "passed": self.passed, **own, "predicted": self._predicted}


def refuse_unverifiable(machine: Machine | None, gpus: int = 1) -> None:
    """Refuses a plan for another GPU or for more GPUs than this machine has. `machine`: None for this machine."""
    here = this_machine().gpu
    if here is None:
        raise InputError(
            "--verify: this machine has no GPU to run the setup on; omit it, or plan on the machine that trains"
        )
    planned = machine.gpu if machine is not None and machine.gpu is not None else here
    if _catalogue_name(planned) != _catalogue_name(here):
        raise InputError(
            f"--verify: runs on this machine's {here.name}, and the plan is for {planned.name}; omit --gpu or --verify"
        )
    if abs(planned.capacity_bytes / here.capacity_bytes - 1) > 0.05:
        raise InputError(
            f"--verify: this machine's {here.name} has {format_gib(here.capacity_bytes)}, and the "
            f"plan is for {format_gib(planned.capacity_bytes)}; omit --gpu-memory"
        )
    if gpus > (there := _gpus_here()):
        raise InputError(f"--verify: the plan is for --gpus {gpus}, and this machine has {there}; omit --verify")


def _catalogue_name(gpu: Gpu) -> str:
    """One name for `"NVIDIA L4"` and `"L4"`."""
    try:
        return named_gpu(gpu.name).name
    except InputError:
        return gpu.name.lower()


def _gpus_here() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([index for index in visible.split(",") if index.strip() not in ("", "-1")])
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        import torch

        return torch.cuda.device_count()


def verify(
    plan: Plan, script: UserScript, *, environment: Mapping[str, str] | None = None,
    on_start: Callable[[str], None] = lambda _: None, on_end: Callable[[Verified], None] = lambda _: None,
    device: Device = "cuda",
) -> tuple[Plan, tuple[Verified, ...]]:  # fmt: skip
    """Runs the proposed setups of a plan for this machine's GPU (`refuse_unverifiable`), one after the other, until
    one passes.

    Args:
        environment: environment variables of the script; None: those of this process.
        on_start: called with a line about the run that starts.
        on_end: called with the result of each run.
        device: `"cpu"` runs on a machine without a GPU, to test memkit.

    Returns:
        The plan with its `failed` setups, and the results. Only the last one may have passed.
    """
    results: list[Verified] = []
    variables = dict(os.environ if environment is None else environment)
    while len(results) < _MAX_RUNS and (proposed := plan.proposed) is not None:
        on_start(f"{proposed.candidate.name} runs here, in a separate process")
        result = _run(proposed, plan, script, variables, device)
        results.append(result)
        on_end(result)
        if result.passed:
            break
        failed = {**plan.failed, proposed.candidate: result.failed}
        if result.out_of_memory:
            failed |= {
                each.candidate: f"needs as much as {proposed.candidate.name}, which ran out of memory here"
                for each in plan.ranked
                if each.needs_bytes >= proposed.needs_bytes and each.candidate not in failed
            }
        plan = replace(plan, failed=failed)
    return plan, tuple(results)


def _run(
    judgement: Judgement, plan: Plan, script: UserScript, environment: Mapping[str, str], device: Device
) -> Verified:
    notes = []
    with _folder() as folder:
        paths = {name: folder / name for name in ("records", "output", "result", "plan", "request")}
        paths["records"].mkdir()
        saves, why = _can_save(judgement, folder)
        if why:
            notes.append(why)
        # Not as JSON: YAML does not read all of it.
        paths["plan"].write_text(yaml.safe_dump(_short_plan(judgement, plan, paths["output"], device)))
        named = {name: str(path) for name, path in paths.items()}
        own = {"target": script.target, "is_module": script.is_module, "arguments": list(script.arguments)}
        paths["request"].write_text(json.dumps({**named, **own, "saves": saves}))

        arguments: tuple[str, ...] = ("-m", _MODULE, str(paths["request"]))
        end_signal = signal.SIGKILL
        if plan.gpus > 1:
            arguments, end_signal = launch_command(plan.gpus, *arguments), signal.SIGTERM
            notes.append(f"run by torchrun --nproc_per_node {plan.gpus}")
        variables = {**environment, **judgement.candidate.environment, **_QUIET}
        if device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        code, lines = _run_process(boot.command(*arguments), variables, folder / "written", end_signal)
        result = json.loads(paths["result"].read_text()) if paths["result"].exists() else {}
        records = None
        with contextlib.suppress(InputError):
            records = load_run(paths["records"])

    passed = code == 0 and result.get("stage") == "done"
    failed, out_of_memory = ("", False) if passed else _failure(code, result, records, lines)
    return Verified(
        judgement,
        failed=failed,
        out_of_memory=out_of_memory,
        last_lines=() if passed else lines[-_LAST_LINES:],
        gpus=plan.gpus,
        notes=(*notes, *result.get("notes", ())),
        **measured(records, result),
    )


def _short_plan(judgement: Judgement, plan: Plan, output: Path, device: Device) -> dict[str, Any]:
    """The plan file with the changes to make before `train()`: another output folder, and no dashboard."""
    content = plan.file(judgement)
    arguments = {
        **content.get("arguments", {}),
        "output_dir": str(output),
        "report_to": "none",
        "push_to_hub": False,
        "resume_from_checkpoint": None,
        **({"use_cpu": True} if device == "cpu" else {}),
    }
    return {**content, "arguments": arguments, "about": {}}


def _can_save(judgement: Judgement, folder: Path) -> tuple[bool, str]:
    """(whether the disk has room for a checkpoint, a note if not)."""
    training, prediction = judgement.training, judgement.prediction
    if training is None or prediction is None:
        return True, ""
    needs = training.facts.saved_bytes + prediction.categories["optimizer"]
    free = shutil.disk_usage(folder).free
    if needs <= _DISK_SHARE * free:
        return True, ""
    return False, f"not saved: a checkpoint takes about {format_gib(needs)}, and {free / GIB:.1f} GiB are free here"


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder, in the working directory if its disk has more room than that of temporary files."""
    parent = Path(tempfile.gettempdir())
    if os.access(Path.cwd(), os.W_OK) and shutil.disk_usage(Path.cwd()).free > shutil.disk_usage(parent).free:
        parent = Path.cwd()
    with tempfile.TemporaryDirectory(prefix=".memkit-verify-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _run_process(
    command: list[str], environment: Mapping[str, str], output: Path, end_signal: signal.Signals
) -> tuple[int, tuple[str, ...]]:
    """Runs a command with its output in a file. An exception in this process ends it and all its children; if this
    process is killed, it gets `end_signal`.

    Returns:
        (exit code, last lines of output).
    """
    with output.open("wb") as out:
        # In its own session it gets no Ctrl-C: this process does, and ends it.
        process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=ends_with_this(end_signal),
        )  # fmt: skip
        try:
            code = process.wait()
        finally:
            _end(process)
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - 65_536))
        lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return code, tuple(lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all processes that it started."""
    started = []
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    for child in started:
        with contextlib.suppress(psutil.Error):
            child.kill()
    process.kill()
    process.wait()
    with contextlib.suppress(ProcessLookupError):  # what an ended script left running
        os.killpg(process.pid, signal.SIGKILL)


_ERROR: Final = re.compile(r"(\[rank\d+\]: ?)?(?P<error>[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)(: .*)?)$")
"""The last line of a traceback; torch puts the rank before it."""

_STAGES: Final = {
    "script": "before it trained",
    "batches": "while memkit read its batches",
    "steps": "in its first steps",
    "evaluation": "in the evaluation",
    "save": "in the save",
}


def _failure(code: int, result: Mapping[str, Any], records: Run | None, lines: tuple[str, ...]) -> tuple[str, bool]:
    """(where and why, whether GPU memory ran out)."""
    if records is not None and records.ending.kind == "out of memory":
        return records.ending.why, True
    errors = [match["error"] for line in lines if (match := _ERROR.match(line))]
    out_of_memory = any("OutOfMemoryError" in error or "CUDA out of memory" in error for error in errors)
    if result and code == 0:
        return "the script did not call Trainer.train()", False
    where = _STAGES.get(str(result.get("stage")), "before the script began")
    how = f"ended by signal {-code} {where}" if code < 0 else f"failed {where}"
    return ": ".join([how, *(error[:300] for error in errors[-1:])]), out_of_memory


def measured(records: Run | None, result: Mapping[str, Any]) -> dict[str, Any]:
    """The measured fields of a `Verified`, from the records of all ranks and the result file of `short_run.py`."""
    times = result.get("step_times_s", [])[WORST_STEPS:]
    values: dict[str, Any] = {
        "step_time_s": median(times) if times else None,
        "evaluated": result.get("evaluated"),
        "saved": result.get("saved"),
        "worst_batch": result.get("worst", ""),
    }
    if records is None:
        return values
    lines: list[Mapping[str, Any]] = []
    for rank in records.ranks:
        lines += (rank.run, *rank.steps, *rank.evaluations, *rank.saves, *rank.ooms, rank.end or {})
    for key in ("peak_allocated_gib", "peak_reserved_gib", "outside_allocator_gib", "alloc_retries"):
        values[key] = max((line[key] for line in lines if line.get(key) is not None), default=None)
    return values


def _between(expected: float | list[float] | None, unit: str, digits: str) -> str:
    """`"1.50 GiB"`, or `"1.50 to 1.75 GiB"` for a low and a high value that differ."""
    if expected is None:
        return _NONE
    values = expected if isinstance(expected, list) else [expected]
    return f"{' to '.join(dict.fromkeys(format(each, digits) for each in values))} {unit}"
