"""A script's run with a plan: its overrides, its prediction for the record, and warnings about differences from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_memkit.common.commands import command
from hf_memkit.common.errors import InputError
from hf_memkit.setup.live_arguments import CreationRecord, on_creation
from hf_memkit.setup.script_overrides import OverrideReport, Overrides, install, read_plan


class PlannedRun:
    """A plan in this process.

    Attributes:
        name: its file as given.
        prediction: for the records, or None: the file's `about.prediction`, with `step_time_ms` from
            `about.step_time_s`.
        refused: the InputError that ended the script, because its arguments have no such field.
    """

    def __init__(self, name: str, overrides: Overrides, about: Mapping[str, Any]) -> None:
        self.name = name
        self.prediction = _prediction(name, about)
        self._overrides = overrides
        self._sequences = _count(name, about, "sequences_a_step")
        self._gpus = _count(name, about, "gpus")
        self._gpus_per_batch = _count(name, about, "gpus_per_batch") or 1
        self._gpu = about.get("gpu")
        self._script = about.get("script")
        self._report: OverrideReport | None = None

    @classmethod
    def read(cls, path: str | Path) -> PlannedRun:
        """Read a plan file. Raises InputError as `read_plan`, and for a wrong batch, number of GPUs or prediction
        in `about`."""
        return cls(str(path), *read_plan(path))

    @property
    def refused(self) -> InputError | None:
        return self._report.refused if self._report is not None else None

    def install(self, script: str, say: Callable[[str], None]) -> None:
        """Set the variables, and make the objects of `script` follow the plan (`script_overrides.install`), before its
        first line. `say` gets a line for each value that was overridden, and a warning for each without effect."""

        def warn(line: str) -> None:
            say(f"warning: {self.name}: {line}")

        if self._script and self._script != script:
            plan = command("memkit", "plan", script)
            warn(f"made for {self._script}, but this run is of {script}. Make a plan for it: {plan}")
        self._report = install(
            self._overrides, on_overridden=lambda line: say(f"{self.name}: {line}"), on_difference=warn
        )
        compared: list[bool] = []

        def compare(arguments: Any, record: CreationRecord) -> None:
            if not compared:
                compared.append(True)
                gpus = arguments.world_size * max(1, arguments.n_gpu)
                if self._gpu and arguments.device.type == "cpu":
                    fails = ", where Liger's kernels fail" if getattr(arguments, "use_liger_kernel", False) else ""
                    warn(f"made for {self._gpu}, but this run trains on the CPU{fails}")
                for line in self._other_batch(record, gpus):
                    warn(line)

        on_creation(ends=compare)

    def _other_batch(self, record: CreationRecord, gpus: int) -> list[str]:
        lines = []
        if self._gpus is not None and self._gpus != gpus:
            differs = f"made for {_gpu_count(self._gpus)}, but this run has {gpus}: memory and time will differ"
            lines.append(f"{differs}. Make a plan for this run: memkit plan --gpus {gpus}")
        if self._sequences is None:
            return lines
        made = f"made for {self._sequences} sequences a step"
        shared_by = self._gpus_per_batch
        script_batch = _sequences(record.script, gpus, shared_by)
        batch = _sequences(record.after_init, gpus, shared_by)
        if script_batch[0] != self._sequences:
            lines.append(f"{made}, but the script has {script_batch[1]}: the plan changes the batch size")
        if batch[0] != self._sequences:
            fix = "set gradient_accumulation_steps, or make a plan for this run"
            lines.append(f"{made}, but this run has {batch[1]}: {fix}")
        return lines


def _sequences(fields: Mapping[str, Any], gpus: int, shared_by: int) -> tuple[int, str]:
    """(sequences in an optimizer step, their computation). `shared_by`: GPUs of each micro-batch."""
    micro_batch, accumulation = fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]
    total = micro_batch * accumulation * gpus // shared_by
    shared = f" / {shared_by}" if shared_by > 1 else ""
    return total, f"{micro_batch} × {accumulation} × {_gpu_count(gpus)}{shared} = {total}"


def _gpu_count(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus > 1 else ''}"


def _count(name: str, about: Mapping[str, Any], key: str) -> int | None:
    value = about.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InputError(f"{name}: about: {key}={value!r}: must be a whole number, at least 1")
    return value


def _prediction(name: str, about: Mapping[str, Any]) -> dict[str, Any] | None:
    prediction, seconds = about.get("prediction") or {}, about.get("step_time_s")
    if not isinstance(prediction, dict):
        raise InputError(f"{name}: about: prediction: must be the output of `memkit predict --json`")
    if seconds is None:
        return prediction or None
    times = seconds if isinstance(seconds, list) else [seconds]
    if not times or not all(isinstance(time, int | float) and 0 < time < math.inf for time in times):
        raise InputError(f"{name}: about: step_time_s={seconds!r}: must be seconds, or a list [low, middle, high]")
    return {**prediction, "step_time_ms": [1000 * time for time in times]}
