"""The `aio` section for one disk, from a measurement of some seconds on that disk.

It uses DeepSpeed's handle and the values that DeepSpeed tries (deepspeed 0.19.8: nvme/perf_run_sweep.py,
DEFAULT_SWEEP_CONFIG), one setting at a time: DeepSpeed's own tuner, `ds_nvme_tune`, takes minutes. Larger `block_size`
values are not tried: tensors smaller than a block are not swapped (runtime/swap_tensor/optimizer_utils.py,
`min_aio_bytes`). A child process measures, because the handle ends its process at an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_memkit.common import boot
from hf_memkit.common.ended_with_parent import ends_with_this
from hf_memkit.common.errors import MissingPackageError, RunError
from hf_memkit.common.units import GB, MIB
from hf_memkit.common.user_files import user_path
from hf_memkit.deepspeed import ops
from hf_memkit.deepspeed.nvme import preflight

DEFAULTS: Final[Mapping[str, int | bool]] = {
    "block_size": MIB,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}
"""DeepSpeed's defaults of the section (deepspeed 0.19.8: runtime/swap_tensor/constants.py)."""

_TRIED: Final[Mapping[str, tuple[int | bool, ...]]] = {
    "queue_depth": (32, 128),
    "intra_op_parallelism": (2, 4, 8),
    "overlap_events": (False,),
    "single_submit": (True,),
}
_BUFFER_BYTES: Final = 64 * MIB
_PIECES: Final = 4

_CHILD_OVERHEAD_S: Final = 120.0
"""Extra time of the child process: it imports torch and DeepSpeed, and finishes a slow trial."""


@dataclass(frozen=True)
class AioMeasurement:
    """Measurement on one folder's disk.

    Attributes:
        read_gb_s, write_gb_s: speed with these settings, in 10**9 bytes a second.
        file_bytes: size of the file that was written and read, without the page cache. A disk with a cache may be
            slower with larger files.
    """

    settings: Mapping[str, int | bool]  # the `aio` section
    read_gb_s: float
    write_gb_s: float
    file_bytes: int
    trials: int  # number of settings that were measured
    why: str  # reason for these settings

    @property
    def label(self) -> str:
        return (
            f"measured: reads {self.read_gb_s:.2f} GB/s, writes {self.write_gb_s:.2f} GB/s "
            f"(file of {self.file_bytes // MIB} MiB, {self.trials} settings)"
        )


def measure(
    folder: str | Path, *, cpu: bool, start: Mapping[str, int | bool] = DEFAULTS, budget_s: float = 5.0
) -> AioMeasurement:
    """Measure DeepSpeed's reads and writes in `folder`; the files are removed.

    Args:
        cpu: use async_io's build for a CPU, otherwise the one for a GPU.
        start: settings to compare with, kept if none is clearly faster.
        budget_s: seconds to measure; the current trial is finished, and `start` is always measured.

    Raises:
        MissingPackageError: async_io is not built.
        MemkitError: the folder is unusable (`nvme.preflight`).
    """
    extensions = ops.extensions_folder(cpu=cpu)
    if not all((extensions / name / f"{name}.so").exists() for name in ("pin_memory", "async_io")):
        raise MissingPackageError(
            f"{folder}: not measured, because DeepSpeed's async_io is not built yet. Build it with the first run of "
            f"an infinity variant: memkit recipe gpt2-on-16gb --variant infinity"
        )
    path = user_path(folder)
    preflight(path, needed_bytes=_PIECES * _BUFFER_BYTES, locked_bytes=_BUFFER_BYTES).raise_problems()
    environment = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(extensions),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "DS_LOG_LEVEL": "error",
        **({"DS_ACCELERATOR": "cpu"} if cpu else {}),
    }
    with tempfile.TemporaryDirectory(prefix="memkit-aio-", dir=path) as inside:
        values = json.dumps({**DEFAULTS, **start})
        command = boot.command("-m", "hf_memkit.deepspeed.aio", inside, values, str(budget_s))
        try:
            child = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=budget_s + _CHILD_OVERHEAD_S,
                preexec_fn=ends_with_this(),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            size = _PIECES * _BUFFER_BYTES // MIB
            raise RunError(
                f"{folder}: too slow: {size} MiB took longer than {budget_s + _CHILD_OVERHEAD_S:.0f} s; give a folder "
                f"on another disk: --nvme-path FOLDER"
            ) from None
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}, no message"])[-1]
        own = f"{RunError.__module__}.{RunError.__name__}: "
        of_disk = child.returncode < 0 or last.startswith(own)  # async_io ends the process where it cannot read
        fix = "look for errors of the disk: sudo dmesg" if of_disk else "check DeepSpeed: ds_report"
        raise RunError(f"{folder}: the measurement failed: {last.removeprefix(own)[-300:].rstrip('.')}; {fix}")
    return AioMeasurement(**json.loads(child.stdout.splitlines()[-1]))


def _measure_here(folder: str, start: Mapping[str, int | bool], budget_s: float) -> dict[str, Any]:
    """The fields of `measure`'s result, measured in this process."""
    import torch
    from deepspeed.accelerator import get_accelerator

    handle_class = get_accelerator().create_op_builder("AsyncIOBuilder").load(verbose=False).aio_handle
    keeper = handle_class(**start)
    buffer = keeper.new_cpu_locked_tensor(_BUFFER_BYTES, torch.empty(0, dtype=torch.uint8)).random_()
    file = f"{folder}/probe"

    def trial(settings: Mapping[str, int | bool]) -> tuple[float, float]:
        """Seconds to read the file, and seconds to write it."""
        handle = handle_class(**settings)
        return _time_transfers(handle.sync_pread, buffer, file), _time_transfers(handle.sync_pwrite, buffer, file)

    _time_transfers(keeper.sync_pwrite, buffer, file)  # the first write allocates the blocks and is slower
    deadline = time.monotonic() + budget_s
    first = trial(start)
    best, best_times, trials = dict(start), first, 1
    cores = len(os.sched_getaffinity(0))
    for key, value in ((key, value) for key, values in _TRIED.items() for value in values):
        if time.monotonic() > deadline:
            break
        if best[key] == value or (key == "intra_op_parallelism" and value > cores):
            continue
        settings = {**best, key: value}
        times = trial(settings)
        trials += 1
        if sum(times) < sum(best_times):
            best, best_times = settings, times
    repeated = trial(start)
    noise = abs(sum(first) - sum(repeated))
    start_times = min(first, repeated, key=sum)
    why = f"the fastest of {trials} that were measured on that path"
    if sum(best_times) >= sum(start_times) - noise:
        best, best_times = dict(start), start_times
        why = f"kept: none of {trials} is faster on that path by more than two trials of these differ"
    size = _PIECES * _BUFFER_BYTES
    read_s, write_s = best_times
    return {
        "settings": best,
        "read_gb_s": size / read_s / GB,
        "write_gb_s": size / write_s / GB,
        "file_bytes": size,
        "trials": trials,
        "why": why,
    }


def _time_transfers(swap: Callable[[Any, str, int], int], buffer: Any, file: str) -> float:
    """Seconds to move the whole file with `swap`."""
    started = time.perf_counter()
    for piece in range(_PIECES):
        if swap(buffer, file, piece * _BUFFER_BYTES) != 1:
            raise RunError("DeepSpeed's async_io could not read or write a file")
    return time.perf_counter() - started


if __name__ == "__main__":
    print(json.dumps(_measure_here(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]))))
