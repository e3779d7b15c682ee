"""The cards: what they are, what they really compute in, and whether this torch can use them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from hf_memkit.doctor.check import Check
from hf_memkit.hardware import has_kernels
from hf_memkit.techniques.allocator import OLD_VARIABLES, VARIABLE, problems_of
from hf_memkit.units import format_gib

__all__ = ["checks"]

_GROUP: Final = "GPU"
_DRIVER: Final = Path("/dev/nvidiactl")
"""Made by NVIDIA's driver; a container that was given no card has none."""

_ALLOCATOR: Final = (VARIABLE, *OLD_VARIABLES)
"""Today's name and those before it, which torch still reads, and reads first."""


def checks() -> list[Check]:
    """One check a card that torch can see, and what of the environment changes it."""
    import torch

    build = f"torch {torch.__version__}"
    if not torch.cuda.is_available():
        return [*_no_card(build, torch.version.cuda), *_environment()]
    return [
        Check(_GROUP, "CUDA", "ok", f"{build}, CUDA {torch.version.cuda}, driver {_driver_version()}"),
        *(check for index in range(torch.cuda.device_count()) for check in _card(torch, index)),
        *_environment(),
    ]


def _no_card(build: str, cuda: str | None) -> list[Check]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not _DRIVER.exists():
        found = f"none; recipes are rehearsed with a small model ({build})"
        return [Check(_GROUP, "card", "warning", found, "nvidia-smi (in a container: docker run --gpus all)")]
    if visible is not None and visible.strip() in ("", "-1"):
        found = f"hidden by CUDA_VISIBLE_DEVICES={visible!r}"
        return [Check(_GROUP, "card", "warning", found, "unset CUDA_VISIBLE_DEVICES")]
    if cuda is None:
        found = f"{build} is a CPU build and cannot use this machine's card"
        return [Check(_GROUP, "card", "missing", found, "pip install --force-reinstall torch", core=True)]
    found = f"{build} was built for CUDA {cuda}, and the driver {_driver_version()} does not start it: too old, or ill"
    return [
        Check(_GROUP, "card", "missing", found, "nvidia-smi (then update the driver, or take an older torch)", True)
    ]


def _card(torch: Any, index: int) -> list[Check]:
    """What a card can do by its compute capability: `torch.cuda.is_bf16_supported()` is true where bf16 is emulated,
    slower than fp32."""
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    bf16 = properties.major >= 8
    types = "bf16, fp16" if bf16 else "fp16 with loss scaling; bf16 only emulated, slower than fp32"
    found = f"{properties.name}, {format_gib(properties.total_memory)}, {capability[0]}.{capability[1]}: {types}"
    name = f"card {index}"
    if not has_kernels(capability, torch.cuda.get_arch_list()):
        found += f"; torch {torch.__version__} has no kernels for it"
        return [Check(_GROUP, name, "missing", found, "install a torch built for an older CUDA (pytorch.org)", True)]
    results = [Check(_GROUP, name, "ok" if bf16 else "warning", found)]
    if "MIG" in properties.name:
        results.append(
            Check(_GROUP, f"MIG of card {index}", "ok", "a slice of a card: its memory is what stands above")
        )
    return results


def _driver_version() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        found = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        return f"unknown ({error})"
    return found if isinstance(found, str) else str(found.decode())


def _environment() -> list[Check]:
    results = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        results.append(Check(_GROUP, "CUDA_VISIBLE_DEVICES", "ok", f"{visible}: other cards are not used"))
    for name in _ALLOCATOR:
        value = os.environ.get(name)
        if value is None:
            continue
        mistakes = [f"{option}: {why}" for option, why, _ in problems_of(value)]
        older = next((older for older in _ALLOCATOR[1:] if older in os.environ and older != name), None)
        if name == VARIABLE and older is not None:
            found = f"{value} has no effect: torch reads {older} first"
            results.append(Check(_GROUP, name, "warning", found, f"unset {older}"))
        elif mistakes:
            results.append(Check(_GROUP, name, "warning", f"{value}: {'; '.join(mistakes)}", f"unset {name}"))
        elif "expandable_segments:True" in value:
            results.append(Check(_GROUP, name, "ok", value))
        else:
            found = f"{value} is kept, without expandable_segments:True, which memkit sets where nothing is set"
            results.append(Check(_GROUP, name, "warning", found, f"unset {name}"))
    return results
