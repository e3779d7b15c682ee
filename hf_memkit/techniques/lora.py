"""LoRA: train low-rank adapters beside frozen weights (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

from hf_memkit.job import Job
from hf_memkit.ledger import Row
from hf_memkit.training_setup import TrainingSetup

__all__ = ["lora"]


def lora(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """Low-rank adapters through PEFT; the model's own weights are frozen.

    Saves gradients and optimizer states of the whole model. Costs capacity to learn: only the adapters change, which
    suits a new style or task and not new knowledge. It is not full training, and must not be called that.

    Values: `rank` (default 16), `alpha` (default 2 × rank), `dropout` (default 0).
    """
    rank = int(job.values.get("rank", 16))
    # Every linear layer of a transformer block, counted from above: at most 2 × rank × (in + out) for each of the
    # four matrices of a block with a feed-forward of 4 × width (Hu et al. 2021, section 4.2).
    adapters = job.model.layers * rank * job.model.width * (4 + 2 + 5 + 5)
    return (
        setup.put_all(
            "adapter",
            {
                "task_type": ("CAUSAL_LM", "a causal language model"),
                "r": (rank, "the recipe's rank"),
                "lora_alpha": (
                    int(job.values.get("alpha", 2 * rank)),
                    "twice the rank: the update keeps its scale",
                ),
                "lora_dropout": (float(job.values.get("dropout", 0.0)), "the recipe's"),
                "target_modules": ("all-linear", "every linear layer of the blocks, not attention alone"),
            },
        )
        .put("arguments.optim", "adamw_torch_fused", "the adapters are few: their fp32 states weigh little")
        .with_rows(
            Row("device", "weights", "frozen 16-bit weights", 2 * job.model.parameters, "2 bytes a parameter"),
            Row(
                "device",
                "weights",
                "adapters, fp32",
                4 * adapters,
                "4 bytes an adapter parameter (PEFT casts up)",
            ),
            Row("device", "gradients", "of the adapters, fp32", 4 * adapters, "4 bytes an adapter parameter"),
            Row(
                "device",
                "optimizer",
                "AdamW moments of the adapters",
                8 * adapters,
                "8 bytes an adapter parameter",
            ),
            Row(
                "host",
                "weights",
                "16-bit weights while loading",
                2 * job.model.parameters * job.gpus,
                "read on the CPU first",
            ),
        )
        .with_notes("Only LoRA adapters are trained: the model's own weights stay as they are.")
    )
