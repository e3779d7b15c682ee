"""Where the evidence lies, and what stands beside each measurement: versions and hardware."""

from __future__ import annotations

import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from hf_memkit import __version__
from hf_memkit.catalog.hardware import this_machine

RESULTS: Final = Path(__file__).resolve().parent / "results"
_PACKAGES: Final = (
    "torch", "transformers", "accelerate", "deepspeed", "peft", "torchao", "datasets", "bitsandbytes", "lightning",
    "nvidia-ml-py", "liger-kernel", "galore-torch", "apollo-torch", "lomo-optim",
)  # fmt: skip


def provenance() -> dict[str, Any]:
    """Versions and hardware that stand beside every result; where on the disk it ran is nobody's business."""
    hardware = {key: value for key, value in this_machine().to_json().items() if key != "disk_path"}
    versions = {"memkit": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"versions": versions, "hardware": hardware, "time": int(time.time())}
