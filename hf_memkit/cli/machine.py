"""`--gpu`, `--gpu-memory` and `--ram`: the machine in question, here or only described."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_memkit.hardware import Gpu, Machine

__all__ = ["described_gpu", "described_machine"]


def described_gpu(gpu: str | None, gpu_memory: str | None) -> Gpu | None:
    """The card that the options describe, or None. With both, that card with that much memory.

    Raises:
        InputError: an unknown card, or no size.
    """
    from hf_memkit.hardware import gpu_of_size, named_gpu

    if gpu and gpu_memory:
        return named_gpu(gpu).with_capacity(gpu_of_size(gpu_memory).capacity_bytes)
    if gpu:
        return named_gpu(gpu)
    return gpu_of_size(gpu_memory) if gpu_memory else None


def described_machine(gpu: str | None, gpu_memory: str | None, ram: str | None, path: str | None) -> Machine:
    """This machine with what the options describe in place of its own; `path` is where states may be swapped to.

    Raises:
        InputError: an unknown card, or no size.
    """
    from hf_memkit.hardware import this_machine
    from hf_memkit.units import parse_size

    machine = this_machine(path or ".")
    described = described_gpu(gpu, gpu_memory)
    machine = machine.with_gpu(described) if described else machine
    return machine.with_ram(parse_size(ram)) if ram else machine
