"""What a technique works from: one model, one machine, one batch shape.

The formulas below are the thin ones that the choice of a variant needs. They are computed, not measured, and every row
names its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_memkit.hardware import Machine
from hf_memkit.ledger import Row
from hf_memkit.models import ModelFacts
from hf_memkit.units import GIB

__all__ = ["Job", "activation_rows", "process_row", "weight_rows"]


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
    """

    model: ModelFacts
    machine: Machine
    micro_batch_size: int
    sequence_length: int
    nvme_path: str
    values: Mapping[str, Any] = field(default_factory=dict)

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
            "2 bytes × tokens × width × layers (Chen et al. 2016, arXiv 1604.06174)",
        ),
        Row(
            "device", "activations", "one layer recomputed, and its gradients", 2 * 34 * tokens * width,
            "34 bytes × tokens × width a layer, no attention scores kept (Korthikanti et al. 2022, arXiv 2205.05198, "
            "eq. 2), twice for the gradients",
        ),
        Row(
            "device", "loss", "logits: 16-bit, fp32 copy, gradient", 10 * tokens * job.model.vocabulary,
            "(2 + 4 + 4) bytes × tokens × vocabulary (transformers:loss/loss_utils.py, logits.float())",
        ),
    )  # fmt: skip


def process_row() -> Row:
    """RAM of the process itself. Assumed: no measurement on a machine with a GPU stands behind it yet."""
    return Row("host", "other", "Python, torch, CUDA libraries and the system", 3 * GIB, "assumed, not calibrated")
