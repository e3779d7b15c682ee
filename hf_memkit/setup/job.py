"""Input of techniques: one model, one machine, one batch shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hf_memkit.catalog import fit
from hf_memkit.catalog.hardware import Machine
from hf_memkit.catalog.models import ModelFacts
from hf_memkit.common.units import GIB, format_gib
from hf_memkit.setup.ledger import Ledger, Row

DEFAULT_MICRO_BATCH: Final = 8
"""Default of `per_device_train_batch_size` (transformers: training_args.py)."""

DEFAULT_LENGTH: Final = 1024
"""Assumed tokens in a sequence, if none are given; fewer if the model allows fewer. Reported as an assumption."""

DEFAULT_NVME: Final = "memkit-nvme"
"""Default folder of ZeRO-Infinity's swap files."""


@dataclass(frozen=True)
class Job:
    """One model to train on one machine.

    Attributes:
        model: the model's shapes; None if only settings are requested.
        machine: machine to run on. Without a GPU in it, one with bf16 is assumed.
        micro_batch_size: sequences in one forward pass.
        sequence_length: tokens in a sequence.
        nvme_path: folder for swap files.
        values: values of techniques from the recipe's variant or the user, such as the LoRA rank.
        gpus: processes on each machine, one GPU each.
        nodes: machines.
        accumulation: micro-batches in an optimizer step of one process.
    """

    model: ModelFacts | None
    machine: Machine
    micro_batch_size: int = DEFAULT_MICRO_BATCH
    sequence_length: int = DEFAULT_LENGTH
    nvme_path: str = DEFAULT_NVME
    values: Mapping[str, Any] = field(default_factory=dict)
    gpus: int = 1
    nodes: int = 1
    accumulation: int = 1

    @property
    def processes(self) -> int:
        """Total number of processes, one GPU each."""
        return self.gpus * self.nodes

    @property
    def bf16(self) -> bool:
        """Whether the GPU computes in bf16; assumed for an unknown GPU."""
        return self.machine.gpu is None or self.machine.gpu.bf16

    @property
    def gpu_name(self) -> str:
        """Name of the GPU in a reason."""
        return self.machine.gpu.name if self.machine.gpu else "a GPU of Ampere or later (assumed)"

    @property
    def tokens(self) -> int:
        """Tokens in one forward pass."""
        return self.micro_batch_size * self.sequence_length


PROCESS_BYTES = 3 * GIB
"""RAM of one process, for Python, torch and CUDA's libraries. Assumed: not yet measured on a machine with a GPU."""


def process_row(processes: int = 1) -> Row:
    """RAM of the processes on one machine."""
    return Row(
        "host", "other", "Python, torch, CUDA libraries and the system", processes * PROCESS_BYTES,
        "3 GiB a process: assumed, not calibrated",
    )  # fmt: skip


def gpu_shortage(ledger: Ledger, machine: Machine) -> list[str]:
    """A line if the GPU has less memory than the ledger needs; a lower bound, because activations are not counted."""
    gpu = machine.gpu
    needed = ledger.total_bytes("device")
    if gpu is None or not fit.too_small(gpu, needed):
        return []
    has = f"{gpu.name} leaves {format_gib(gpu.usable_bytes)} after its context"
    return [f"needs at least {format_gib(needed)} on the GPU without activations; {has}"]


def shortages(ledger: Ledger, machine: Machine) -> list[str]:
    """A line for each of GPU, RAM and disk that has less than the ledger needs."""
    ram_bytes = ledger.total_bytes("host", "pinned")
    disk_bytes = ledger.total_bytes("disk")
    return gpu_shortage(ledger, machine) + fit.host_shortages(machine, ram_bytes, disk_bytes)
