"""What a technique works from: one model, one machine, one batch shape."""

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
"""`per_device_train_batch_size` of TrainingArguments, where nobody says anything (transformers: training_args.py)."""

DEFAULT_LENGTH: Final = 1024
"""Tokens in a sequence where none are given; less where the model allows less. An assumption, and said so."""

DEFAULT_NVME: Final = "memkit-nvme"
"""Folder for what ZeRO-Infinity puts on disk, where none is given."""


@dataclass(frozen=True)
class Job:
    """One model to train on one machine.

    Attributes:
        model: the model's shapes; None where only settings are asked for.
        machine: where it will run. Without a GPU in it, one with bf16 is assumed.
        micro_batch_size: sequences in one forward pass.
        sequence_length: tokens in a sequence.
        nvme_path: folder for what goes to disk.
        values: what the recipe's variant or the user gives to the techniques, such as the LoRA rank.
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
        """Processes in all, one GPU each."""
        return self.gpus * self.nodes

    @property
    def bf16(self) -> bool:
        """Whether the GPU computes in bf16; assumed where no GPU is known."""
        return self.machine.gpu is None or self.machine.gpu.bf16

    @property
    def gpu_name(self) -> str:
        """What to call the GPU in a reason."""
        return self.machine.gpu.name if self.machine.gpu else "a GPU of Ampere or later (assumed)"

    @property
    def tokens(self) -> int:
        """Tokens in one forward pass."""
        return self.micro_batch_size * self.sequence_length


PROCESS_BYTES = 3 * GIB
"""RAM of one process, for Python, torch and CUDA's libraries. Assumed, not calibrated: no measurement of ours on a
machine with a GPU stands behind it yet."""


def process_row(processes: int = 1) -> Row:
    """RAM of the processes themselves on one machine."""
    return Row(
        "host", "other", "Python, torch, CUDA libraries and the system", processes * PROCESS_BYTES,
        "3 GiB a process: assumed, not calibrated",
    )  # fmt: skip


def gpu_shortage(ledger: Ledger, machine: Machine) -> list[str]:
    """One line if the GPU has less than the ledger asks for, which counts no activations: a bound from below."""
    gpu, needed = machine.gpu, ledger.total_bytes("device")
    if gpu is None or not fit.too_small(gpu, needed):
        return []
    has = f"{gpu.name} leaves {format_gib(gpu.usable_bytes)} after its context"
    return [f"needs at least {format_gib(needed)} on the GPU without activations; {has}"]


def shortages(ledger: Ledger, machine: Machine) -> list[str]:
    """One line for each of GPU, RAM and disk that has less than the ledger asks for."""
    ram_bytes, disk_bytes = ledger.total_bytes("host", "pinned"), ledger.total_bytes("disk")
    return gpu_shortage(ledger, machine) + fit.host_shortages(machine, ram_bytes, disk_bytes)
