"""What a technique works from: one model, one machine, one batch shape.

The formulas below are the thin ones that the choice of a variant needs. They are computed, not measured, and every row
names its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_memkit.hardware import Machine
from hf_memkit.ledger import Ledger, Row
from hf_memkit.models import ModelFacts
from hf_memkit.units import GIB, format_gib

__all__ = ["PROCESS_BYTES", "Job", "activation_rows", "process_row", "shortages", "weight_rows"]


@dataclass(frozen=True)
class Job:
    """One model to train on one machine.

    Attributes:
        model: the model's shapes.
        machine: where it will run; `machine.gpu` is never None here.
        micro_batch_size: sequences in one forward pass.
        sequence_length: tokens in a sequence.
        nvme_path: folder for what goes to disk.
        values: the recipe's values for this variant, such as the LoRA rank.
        gpus: processes on each machine, one card each.
        nodes: machines.
    """

    model: ModelFacts
    machine: Machine
    micro_batch_size: int
    sequence_length: int
    nvme_path: str
    values: Mapping[str, Any] = field(default_factory=dict)
    gpus: int = 1
    nodes: int = 1

    @property
    def processes(self) -> int:
        """Processes in all, one card each."""
        return self.gpus * self.nodes

    @property
    def bf16(self) -> bool:
        return self.machine.gpu is not None and self.machine.gpu.bf16

    @property
    def tokens(self) -> int:
        """Tokens in one forward pass."""
        return self.micro_batch_size * self.sequence_length


def weight_rows(job: Job, trained: int) -> tuple[Row, ...]:
    """16-bit weights of the whole model, and 16-bit gradients of the `trained` parameters."""
    return (
        Row("device", "weights", "16-bit weights", 2 * job.model.parameters, "2 bytes a parameter"),
        Row("device", "gradients", "16-bit gradients", 2 * trained, "2 bytes a trained parameter"),
    )


def activation_rows(job: Job) -> tuple[Row, ...]:
    """Activations with every layer checkpointed, and the loss over the full vocabulary."""
    tokens, width = job.tokens, job.model.width
    return (
        Row(
            "device", "activations", "inputs of the checkpointed layers", 2 * tokens * width * job.model.layers,
            "2 bytes × tokens × width × layers (Chen et al. 2016, arXiv 1604.06174)", "backward",
        ),
        Row(
            "device", "activations", "one layer recomputed, and its gradients", 2 * 34 * tokens * width,
            "34 bytes × tokens × width a layer, no attention scores kept (Korthikanti et al. 2022, arXiv 2205.05198, "
            "eq. 2), twice for the gradients", "backward",
        ),
        Row(
            "device", "loss", "logits: 16-bit, fp32 copy, gradient", 10 * tokens * job.model.vocabulary,
            "(2 + 4 + 4) bytes × tokens × vocabulary (transformers:loss/loss_utils.py, logits.float())", "backward",
        ),
    )  # fmt: skip


PROCESS_BYTES = 3 * GIB
"""RAM of one process, for Python, torch and CUDA's libraries. Assumed, not calibrated: no measurement of ours on a
machine with a GPU stands behind it yet."""


def process_row(processes: int = 1) -> Row:
    """RAM of the processes themselves on one machine."""
    return Row(
        "host", "other", "Python, torch, CUDA libraries and the system", processes * PROCESS_BYTES,
        "3 GiB a process: assumed, not calibrated",
    )  # fmt: skip


def shortages(ledger: Ledger, machine: Machine) -> list[str]:
    """One line for each of card, RAM and disk that has less than the ledger asks for."""
    gpu = machine.gpu
    found = []
    device_bytes = ledger.total_bytes("device")
    if gpu is not None and device_bytes > gpu.usable_bytes:
        found.append(
            f"needs {format_gib(device_bytes)} on the card by formula; {gpu.name} leaves "
            f"{format_gib(gpu.usable_bytes)} after its context"
        )
    ram_bytes = ledger.total_bytes("host", "pinned")
    if ram_bytes > machine.ram_bytes:
        found.append(
            f"needs {format_gib(ram_bytes)} of RAM by formula; this machine has {format_gib(machine.ram_bytes)}"
        )
    disk_bytes = ledger.total_bytes("disk")
    if disk_bytes > machine.disk_free_bytes:
        found.append(
            f"needs {format_gib(disk_bytes)} of disk by formula; {machine.disk_path} has "
            f"{format_gib(machine.disk_free_bytes)} free"
        )
    return found
