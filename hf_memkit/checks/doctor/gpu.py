"""GPUs: name, memory, native data types, and whether this torch can use them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, Final

from hf_memkit.catalog.hardware import has_kernels, torch_with_kernels
from hf_memkit.checks.doctor.check import Check
from hf_memkit.common.units import format_gib
from hf_memkit.setup.techniques.allocator import OLD_VARIABLES, VARIABLE, problems_of

_GROUP: Final = "GPU"
_DRIVER: Final = Path("/dev/nvidiactl")
"""Created by NVIDIA's driver; missing in a container without a GPU."""

_ALLOCATOR: Final = (VARIABLE, *OLD_VARIABLES)
"""The current name and the older ones, which torch still reads, and reads first."""


def checks() -> list[Check]:
    """One check for each GPU that torch can see, and those of environment variables."""
    if importlib.util.find_spec("torch") is None:
        return _environment()  # the software checks report it
    import torch

    build = f"torch {torch.__version__}"
    if not torch.cuda.is_available():
        return [*_no_gpu(build, torch.version.cuda), *_environment()]
    return [
        Check(_GROUP, "CUDA", "ok", f"{build}, CUDA {torch.version.cuda}, driver {_driver_version()}"),
        *(check for index in range(torch.cuda.device_count()) for check in _gpu(torch, index)),
        *_environment(),
    ]


def _no_gpu(build: str, cuda: str | None) -> list[Check]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not _DRIVER.exists():
        finding = f"no GPU found; recipes run a rehearsal with a small model ({build})"
        return [Check(_GROUP, "GPU", "warning", finding, "nvidia-smi (in a container: docker run --gpus all)")]
    if visible is not None and visible.strip() in ("", "-1"):
        finding = f"hidden by CUDA_VISIBLE_DEVICES={visible!r}"
        return [Check(_GROUP, "GPU", "warning", finding, "unset CUDA_VISIBLE_DEVICES")]
    if cuda is None:
        finding = f"{build} is a CPU build and cannot use this machine's GPU"
        return [Check(_GROUP, "GPU", "missing", finding, "pip install --force-reinstall torch", core=True)]
    finding = f"{build} needs CUDA {cuda}, and the driver {_driver_version()} cannot start it: too old, or broken"
    fix = "nvidia-smi (then update the driver, or install an older torch)"
    return [Check(_GROUP, "GPU", "missing", finding, fix, core=True)]


def _gpu(torch: Any, index: int) -> list[Check]:
    """A GPU's types by compute capability: `torch.cuda.is_bf16_supported()` includes emulation, slower than fp32."""
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    bf16 = properties.major >= 8
    types = "bf16, fp16" if bf16 else "fp16 with loss scaling; bf16 emulated, slower than fp32"
    finding = f"{properties.name}, {format_gib(properties.total_memory)}"
    finding += f", compute capability {capability[0]}.{capability[1]}: {types}"
    name = f"GPU {index}"
    architectures = torch.cuda.get_arch_list()
    if not has_kernels(capability, architectures):
        finding += f"; torch {torch.__version__} has no kernels for it"
        fix = f"install {torch_with_kernels(capability, architectures)}"
        return [Check(_GROUP, name, "missing", finding, fix, core=True)]
    results = [Check(_GROUP, name, "ok" if bf16 else "warning", finding)]
    if "MIG" in properties.name:
        results.append(Check(_GROUP, f"MIG of GPU {index}", "ok", "a slice of a GPU; the memory above is the slice's"))
    return results


def _driver_version() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        return f"unknown ({error})"
    return driver if isinstance(driver, str) else str(driver.decode())


def _environment() -> list[Check]:
    results = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        results.append(Check(_GROUP, "CUDA_VISIBLE_DEVICES", "ok", f"{visible}: other GPUs are not used"))
    for name in _ALLOCATOR:
        value = os.environ.get(name)
        if value is None:
            continue
        mistakes = [f"{option}: {why}" for option, why, _ in problems_of(value)]
        older = next((older for older in _ALLOCATOR[1:] if older in os.environ and older != name), None)
        if name == VARIABLE and older is not None:
            finding = f"{value} has no effect: torch reads {older} first"
            results.append(Check(_GROUP, name, "warning", finding, f"unset {older}"))
        elif mistakes:
            results.append(Check(_GROUP, name, "warning", f"{value}: {'; '.join(mistakes)}", f"unset {name}"))
        elif "expandable_segments:True" in value:
            results.append(Check(_GROUP, name, "ok", value))
        else:
            finding = f"{value} keeps memkit from setting expandable_segments:True, which reduces fragmentation"
            results.append(Check(_GROUP, name, "warning", finding, f"unset {name}"))
    return results
