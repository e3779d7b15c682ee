"""A measured process: starting it, and what its end, its output and its records mean."""

from __future__ import annotations

import fcntl
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hf_memkit.memory.records import steps

CASE_S: Final = 170  # a case that takes longer is stopped, and measured by the steps it made
WARM_UP_STEPS: Final = 2  # compilation, first allocations; left out of the step time


TURN: Final = "MEMKIT_BENCHMARK_TURN"
"""Variable with the file whose lock a measured process holds while it uses the GPU."""


def take_gpu() -> None:
    """Waits until no other measured process uses the GPU, and keeps it until this process ends.

    Several cases may start at once, because libraries and models load on the CPU; they train one after another.
    """
    if path := os.environ.get(TURN):
        turn = os.open(path, os.O_RDWR | os.O_CREAT)  # never closed: its end gives the turn back
        fcntl.flock(turn, fcntl.LOCK_EX)


def run_child(
    section: str, folder: str, environment: Mapping[str, str], limit_s: float = CASE_S
) -> tuple[int | None, str]:
    """(exit code, output) of `gpu.py --section SECTION --child FOLDER`; None if it was stopped after `limit_s`."""
    script = Path(__file__).with_name("gpu.py")
    command = [sys.executable, str(script), "--section", section, "--child", folder]
    try:
        child = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=limit_s
        )
        return child.returncode, child.stdout + child.stderr
    except subprocess.TimeoutExpired as expired:
        return None, _text(expired.stdout) + _text(expired.stderr)


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
