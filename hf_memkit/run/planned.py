"""A script's run with a plan: its overrides, its prediction for the record, and lines on standard error about what
differs from what the plan was made for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_memkit.common.errors import InputError
from hf_memkit.setup.live_arguments import Made, when_made
from hf_memkit.setup.script_overrides import FoundInScript, Overrides, install, read_plan


class PlannedRun:
    """A plan, and what became of it in this process.

    Attributes:
        name: of its file, as it was given.
        prediction: for the records, or None: that of the file's `about.prediction`, and `step_time_ms`, which is
            `about.step_time_s`.
        refused: the InputError that ended the script, because its arguments have no such field.
    """

    def __init__(self, name: str, overrides: Overrides, about: Mapping[str, Any]) -> None:
        self.name = name
        self.prediction = _prediction(name, about)
        self._overrides = overrides
        self._sequences = _count(name, about, "sequences_a_step")
        self._gpus = _count(name, about, "gpus")
        self._gpu = about.get("gpu")
        self._script = about.get("script")
        self._found: FoundInScript | None = None

    @classmethod
    def read(cls, path: str | Path) -> PlannedRun:
        """Of a plan file. Refuses as `read_plan`, and what `about` says of the batch, the GPUs or the prediction if it
        is not that."""
        return cls(str(path), *read_plan(path))

    @property
    def refused(self) -> InputError | None:
        return self._found.refused if self._found is not None else None

    def install(self, script: str, say: Callable[[str], None]) -> None:
        """Sets the variables, and has the script's objects made with the plan (`script_overrides.install`). Comes
        before the first line of `script` (its name). `say` gets a line for each value that was overridden, and a
        warning for each that the script has otherwise all the same.
        """

        def warn(line: str) -> None:
            say(f"warning: {self.name}: {line}")

        if self._script and self._script != script:
            warn(f"made for {self._script}, but this run is of {script}. Make a plan for it: memkit plan {script}")
        self._found = install(self._overrides, overridden=lambda line: say(f"{self.name}: {line}"), differs=warn)
        compared: list[bool] = []

        def compare(arguments: Any, made: Made) -> None:
            if not compared:
                compared.append(True)
                gpus = arguments.world_size * max(1, arguments.n_gpu)
                if self._gpu and arguments.device.type == "cpu":
                    fails = ", where Liger's kernels fail" if getattr(arguments, "use_liger_kernel", False) else ""
                    warn(f"made for {self._gpu}, but this run trains on the CPU{fails}")
                for line in self._other_batch(made, gpus):
                    warn(line)

        when_made(ends=compare)

    def _other_batch(self, made: Made, gpus: int) -> list[str]:
        lines = []
        if self._gpus is not None and self._gpus != gpus:
            lines.append(
                f"made for {_gpu_count(self._gpus)}, but this run has {gpus}: memory and time will differ. Make a "
                f"plan for this run: memkit plan --gpus {gpus}"
            )
        if self._sequences is not None:
            own, now = _sequences(made.script, gpus), _sequences(made.settled, gpus)
            if own[0] != self._sequences:
                lines.append(
                    f"made for {self._sequences} sequences a step, but the script has {own[1]}: the plan changes "
                    "the batch size"
                )
            if now[0] != self._sequences:
                lines.append(
                    f"made for {self._sequences} sequences a step, but this run has {now[1]}: set "
                    "gradient_accumulation_steps, or make a plan for this run"
                )
        return lines


def _sequences(fields: Mapping[str, Any], gpus: int) -> tuple[int, str]:
    batch, times = fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]
    return batch * times * gpus, f"{batch} × {times} × {_gpu_count(gpus)} = {batch * times * gpus}"


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
    if not times or not all(isinstance(each, int | float) and 0 < each < math.inf for each in times):
        raise InputError(f"{name}: about: step_time_s={seconds!r}: must be seconds, or a list [low, middle, high]")
    return {**prediction, "step_time_ms": [1000 * each for each in times]}
