"""`memkit plan --verify`: the proposed setup runs on this machine's GPU, in a process of its own; what was measured,
beside what was predicted. If it fails the next one is tried.

In: a plan, the script, its variables. Out: the plan, which proposes none that has failed, and what each run has shown.
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
from dataclasses import replace
from pathlib import Path
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
from hf_memkit.plan.judgement import Judged
from hf_memkit.plan.measured_steps import Verified, measured
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.short_run import request_of
from hf_memkit.run.launch import launch_command

MOST: Final = 3
"""Setups that are run at most."""

_MODULE: Final = "hf_memkit.plan.short_run"
_LAST_LINES: Final = 12
_END_S: Final = 15.0
"""Until processes that were asked to end are killed: torchrun ends its own first."""

_ROOM: Final = 0.9
"""Of a disk, what a checkpoint may take at most."""

_QUIET: Final = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""For scripts that begin a dashboard's run themselves."""

Device = Literal["cuda", "cpu"]


def refuse_unverifiable(machine: Machine | None, gpus: int = 1) -> None:
    """Refuses a plan for another GPU than this machine has, or for more; `machine`: None: this one."""
    here = this_machine().gpu
    if here is None:
        raise InputError(
            "--verify: this machine has no GPU to run the setup on; omit it, or plan on the machine that trains"
        )
    asked = machine.gpu if machine is not None and machine.gpu is not None else here
    if not same_gpu(asked, here):
        raise InputError(
            f"--verify: runs on this machine's {here.name}, and the plan is for {asked.name}; omit --gpu or --verify"
        )
    if abs(asked.capacity_bytes / here.capacity_bytes - 1) > 0.05:
        raise InputError(
            f"--verify: this machine's {here.name} has {format_gib(here.capacity_bytes)}, and the "
            f"plan is for {format_gib(asked.capacity_bytes)}; omit --gpu-memory"
        )
    if gpus > (there := _gpus_here()):
        raise InputError(f"--verify: the plan is for --gpus {gpus}, and this machine has {there}; omit --verify")


def same_gpu(one: Gpu, other: Gpu) -> bool:
    """Whether two names are one GPU's: `"NVIDIA L4"` and `"L4"`."""
    return _plain(one.name) == _plain(other.name)


def _plain(name: str) -> str:
    try:
        return named_gpu(name).name
    except InputError:
        return name.lower()


def _gpus_here() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        import torch

        return torch.cuda.device_count()


def verify(
    plan: Plan,
    script: UserScript,
    *,
    environment: Mapping[str, str] | None = None,
    said: Callable[[str], None] = lambda _: None,
    done: Callable[[Verified], None] = lambda _: None,
    most: int = MOST,
    device: Device = "cuda",
) -> tuple[Plan, tuple[Verified, ...]]:
    """Runs what the plan proposes for this machine's GPU (`refuse_unverifiable`), `most` setups at most; what fails is
    proposed no more, and the next one runs. The plan with `failed`, and what was found: the last has passed, or
    nothing has.

    Args:
        said: is told what is run.
        done: is told of each run that has ended.
        device: `"cpu"`, to try all of it where no GPU is.
    """
    found: list[Verified] = []
    given = dict(os.environ if environment is None else environment)
    while len(found) < most and (judged := plan.proposed) is not None:
        said(f"{judged.candidate.name} runs here, in a separate process")
        verified = _ran(judged, plan, script, given, device)
        found.append(verified)
        done(verified)
        if verified.passed:
            break
        failed = {**plan.failed, judged.candidate: verified.failed}
        if verified.out_of_memory:
            failed |= {
                each.candidate: f"needs as much as {judged.candidate.name}, which ran out of memory here"
                for each in plan.ranked
                if each.needs_bytes >= judged.needs_bytes and each.candidate not in failed
            }
        plan = replace(plan, failed=failed)
    return plan, tuple(found)


def _ran(judged: Judged, plan: Plan, script: UserScript, environment: Mapping[str, str], device: Device) -> Verified:
    notes = []
    with _folder() as folder:
        paths = {name: folder / name for name in ("records", "output", "result", "plan", "request")}
        paths["records"].mkdir()
        saves, why = _has_room(judged, folder)
        if why:
            notes.append(why)
        # YAML reads JSON, too, but not all of it.
        paths["plan"].write_text(yaml.safe_dump(_short_plan(judged, plan, paths["output"], device)))
        read = {name: paths[name] for name in ("records", "output", "result", "plan")}
        paths["request"].write_text(json.dumps(request_of(script, read, saves=saves)))
        own: tuple[str, ...] = ("-m", _MODULE, str(paths["request"]))
        by = signal.SIGKILL
        if plan.gpus > 1:
            own, by = launch_command(plan.gpus, *own), signal.SIGTERM
            notes.append(f"run by torchrun --nproc_per_node {plan.gpus}")
        command = boot.command(*own)
        variables = {**environment, **judged.candidate.environment, **_QUIET}
        if device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        code, last = _process(command, variables, folder / "written", by)
        result = json.loads(paths["result"].read_text()) if paths["result"].exists() else {}
        records = _records(paths["records"])
    passed = code == 0 and result.get("stage") == "done"
    failed, out_of_memory = ("", False) if passed else _failure(code, result, records, last)
    return Verified(
        judged,
        failed=failed,
        out_of_memory=out_of_memory,
        last_lines=() if passed else last[-_LAST_LINES:],
        gpus=plan.gpus,
        notes=(*notes, *result.get("notes", ())),
        **measured(records, result),
    )


def _short_plan(judged: Judged, plan: Plan, output: Path, device: Device) -> dict[str, Any]:
    """The plan's file with what has to be known before `train()`: what the script writes into its output folder goes
    into another, and no dashboard is begun."""
    content = plan.file(judged)
    arguments = {
        **content.get("arguments", {}),
        "output_dir": str(output),
        "report_to": "none",
        "push_to_hub": False,
        "resume_from_checkpoint": None,
        **({"use_cpu": True} if device == "cpu" else {}),
    }
    return {**content, "arguments": arguments, "about": {}}


def _has_room(judged: Judged, folder: Path) -> tuple[bool, str]:
    """(whether a checkpoint may be written there, why not)."""
    training, prediction = judged.training, judged.prediction
    if training is None or prediction is None:
        return True, ""
    needs = training.facts.saved_bytes + prediction.categories["optimizer"]
    free = shutil.disk_usage(folder).free
    if needs <= _ROOM * free:
        return True, ""
    return False, f"not saved: a checkpoint takes about {format_gib(needs)}, and {free / GIB:.1f} GiB are free here"


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """On the disk with more room: that of temporary files, or the one that the user works on."""
    places = [Path(tempfile.gettempdir())]
    if os.access(Path.cwd(), os.W_OK) and shutil.disk_usage(Path.cwd()).free > shutil.disk_usage(places[0]).free:
        places = [Path.cwd()]
    with tempfile.TemporaryDirectory(prefix=".memkit-verify-", dir=places[0], ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _process(
    command: list[str], environment: Mapping[str, str], written: Path, by: signal.Signals
) -> tuple[int, tuple[str, ...]]:
    """(exit code, the lines that it wrote last). Whatever ends this, that process and what it started end too; where
    this one is killed, that one gets the signal `by`."""
    with written.open("wb") as out:
        # Ctrl-C is for this process, which ends that one.
        process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=ends_with_this(by),
        )  # fmt: skip
        try:
            code = process.wait()
        finally:
            _end(process)
    with written.open("rb") as file:
        file.seek(max(0, written.stat().st_size - 65_536))
        lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return code, tuple(lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends it and what it has started, if it runs."""
    started = []
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    for each in started:
        with contextlib.suppress(psutil.Error):
            each.kill()
    process.kill()
    process.wait()
    with contextlib.suppress(ProcessLookupError):  # what a script that has ended has left running
        os.killpg(process.pid, signal.SIGKILL)


def _records(folder: Path) -> Run | None:
    try:
        return load_run(folder)
    except InputError:
        return None


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
    errors = [found["error"] for line in lines if (found := _ERROR.match(line))]
    out_of_memory = any("OutOfMemoryError" in each or "CUDA out of memory" in each for each in errors)
    if result and code == 0:
        return "the script did not call Trainer.train()", False
    where = _STAGES.get(str(result.get("stage")), "before the script began")
    how = f"ended by signal {-code} {where}" if code < 0 else f"failed {where}"
    return ": ".join([how, *(each[:300] for each in errors[-1:])]), out_of_memory
