"""`memkit plan --calibrate`: how much longer this machine's GPU takes than a plan computes, by kind of operation.

```
this GPU, probes (a process of its own) ─┐
                                         ├─> factors ─> a file of the user's cache (calibration.py) ─> plans
records of a run with its prediction ────┘
```
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hf_memkit import boot
from hf_memkit.ended_with_parent import ends_with_this
from hf_memkit.errors import InputError, RunError
from hf_memkit.hardware import Machine, this_machine
from hf_memkit.plan.calibration import (
    ALL,
    HOST,
    MOST,
    Calibration,
    driver_version,
    plain_name,
    store,
    today,
    torch_version,
)
from hf_memkit.plan.pricing import Pricing
from hf_memkit.prediction.operation_time import OperationSeconds
from hf_memkit.prediction.step_time import queueing_s
from hf_memkit.prediction.work import Work
from hf_memkit.rates import GpuRates
from hf_memkit.report.load import Run, load_run

_MODULE: Final = "hf_memkit.plan.calibration_probes"
_LIMIT_S: Final = 120.0
_LIKELY: Final = 5.0
"""A larger factor, or one below its inverse, is no matter of rates."""

_LEAST_STEPS: Final = 5


def calibrate(
    *, machine: Machine | None = None, said: Callable[[str], None] = lambda _: None
) -> tuple[Calibration, Path]:
    """Measures this machine's GPU; (what was found, the file that keeps it).

    Args:
        machine: None: this one.
        said: is told that it begins.

    Raises:
        InputError: there is no GPU, or what was measured is no matter of rates.
        RunError: it could not be measured.
    """
    machine = this_machine() if machine is None else machine
    if machine.gpu is None:
        raise InputError(
            "--calibrate: this machine has no GPU to measure. Use the records of a run on one: "
            "memkit plan --calibrate RUN_DIR"
        )
    pricing = Pricing.of(machine)
    if pricing.rates is None:
        raise InputError(
            f"--calibrate: no published rates for {machine.gpu.name} to correct. Plans for it rank by memory"
        )
    said(f"measuring {machine.gpu.name}, up to a minute; nothing else may use the GPU meanwhile")
    likely = MOST if pricing.stands_for else _LIKELY
    factors = factors_of(measured_probes("cuda"), pricing.rates, pricing.capability, likely=likely)
    found = Calibration(
        plain_name(machine.gpu.name), driver_version(), torch_version(), factors,
        "products, copies and launches on this GPU", today(),
    )  # fmt: skip
    return found, store(found)


def measured_probes(device: str) -> list[dict[str, Any]]:
    """What `calibration_probes.measure` gives, of a process of its own.

    Raises:
        RunError: it failed, with its last line.
    """
    with tempfile.TemporaryDirectory(prefix="memkit-") as folder:
        result = Path(folder) / "measured.json"
        try:
            ran = subprocess.run(
                boot.command("-m", _MODULE, device, str(result)),
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S,
                preexec_fn=ends_with_this(),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RunError(
                f"--calibrate: took more than {_LIMIT_S:.0f} s; another process may be using the GPU: see nvidia-smi"
            ) from None
        if ran.returncode:
            last = next((line for line in reversed(ran.stderr.splitlines()) if line.strip()), "")
            raise RunError(
                f"--calibrate: measuring failed (exit code {ran.returncode}): {last[:300].rstrip('.')}. Check torch "
                f"and the GPU: memkit doctor; other processes on it: nvidia-smi"
            )
        found: list[dict[str, Any]] = json.loads(result.read_text())
        return found


def factors_of(
    probes: Sequence[Mapping[str, Any]], rates: GpuRates, capability: float, *, likely: float = _LIKELY
) -> dict[str, float]:
    """By kind: the median of measured by computed seconds.

    Args:
        probes: as `calibration_probes.measure` gives them.
        rates, capability: of the GPU.
        likely: the largest factor that is believed, and the inverse of the smallest.

    Raises:
        InputError: another factor.
    """
    gpu = OperationSeconds(rates, capability, {})
    ratios: dict[str, list[float]] = {}
    for probe in probes:
        operations = Work.from_json(probe["work"]).operations
        computed = sum(map(queueing_s if probe["kind"] == HOST else gpu.of, operations))
        if computed:
            ratios.setdefault(probe["kind"], []).append(probe["seconds"] / computed)
    factors = {kind: round(statistics.median(each), 4) for kind, each in ratios.items()}
    wrong = [
        f"--calibrate: {kind} takes {factor:.3g} times as long as published for this GPU. Another process may use it: "
        "see nvidia-smi, then calibrate again. Nothing was stored"
        for kind, factor in factors.items()
        if not 1 / likely <= factor <= likely
    ]
    if wrong:
        raise InputError("\n".join(wrong))
    return factors


def calibrate_by_run(folder: str | Path, *, device_type: str = "cuda") -> tuple[Calibration, Path]:
    """One factor for all that a step computes, from the records of a run with a plan.

    Raises:
        InputError: there are no records, none with a predicted step time, too few steps, or a run on another kind of
            device.
    """
    run = load_run(folder)
    record = run.first.run
    hardware = record.get("hardware", {})
    prediction: dict[str, Any] = dict(record.get("prediction", {}))
    if hardware.get("device_type") != device_type:
        raise InputError(
            f"--calibrate {folder}: ran on {hardware.get('device_type', 'an unknown device')}, not on a GPU. Give a "
            "run on one"
        )
    factor = run_factor(run)
    # The prediction was made with these; by them and the factor the run's time is what would be predicted.
    before = {str(kind): float(each) for kind, each in (prediction.get("time_factors") or {}).items()}
    factors = {**before, ALL: round(before.get(ALL, 1.0) * factor, 4)}
    arguments = record.get("arguments", {})
    batch = [arguments.get(name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    setup = prediction.get("setup") or " × ".join(map(str, batch))
    found = Calibration(
        plain_name(str(hardware.get("device_name", ""))), driver_version(),
        str(record.get("versions", {}).get("torch", "")), factors,
        f"the steps of {Path(folder).resolve().name} ({setup})", today(),
    )  # fmt: skip
    return found, store(found)


def run_factor(run: Run, *, likely: float = _LIKELY) -> float:
    """The median step of a run by the step time in its record.

    Raises:
        InputError: as `calibrate_by_run`.
    """
    rank = run.first
    expected = rank.run.get("prediction", {}).get("step_time_ms")
    if not expected:
        raise InputError(
            f"--calibrate {run.folder}: its records have no predicted step time. Record a run with a plan: memkit "
            "plan train.py --write plan.yaml -- ARGUMENTS; then memkit run train.py --plan plan.yaml -- ARGUMENTS"
        )
    middle = expected[len(expected) // 2] if isinstance(expected, list) else expected
    # The first waits for what is done once, and a step that is watched closely for that.
    times = [
        step["step_time_ms"]
        for step in rank.steps
        if step["step"] > 1 and "categories" not in step and "held" not in step and "step_time_ms" in step
    ]
    if len(times) < _LEAST_STEPS:
        raise InputError(
            f"--calibrate {run.folder}: {len(times)} of its steps can be used, {_LEAST_STEPS} are needed; the first "
            "steps and those recorded in detail do not count. Train for 20 steps or more"
        )
    factor = statistics.median(times) / middle
    if not 1 / likely <= factor <= likely:
        raise InputError(
            f"--calibrate {run.folder}: a step took {factor:.3g} times as long as predicted; accepted are "
            f"{1 / likely:.2g} to {likely:.2g}. Look for slow data loading and other processes on the GPU. Nothing "
            "was stored"
        )
    return factor
