"""Several cards that each hold everything, and average their gradients: DistributedDataParallel, through Trainer."""

from __future__ import annotations

from hf_memkit.job import Job
from hf_memkit.ledger import Row
from hf_memkit.training_setup import TrainingSetup

__all__ = ["data_parallel"]


def data_parallel(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """Trainer's own DistributedDataParallel, with one process a card; nothing where there is one process.

    Saves time, and no memory: every card holds all of it, and buckets with a copy of the gradients besides. Comes
    after the techniques that train weights: the buckets are as large as the gradients in the ledger.
    """
    if job.processes == 1:
        return setup
    gradients = sum(
        row.size_bytes for row in setup.ledger.rows if row.place == "device" and row.category == "gradients"
    )
    return setup.put(
        "arguments.ddp_find_unused_parameters", False,
        "every trained parameter takes part in every step: searching the graph for others would cost time",
    ).with_rows(
        Row(
            "device", "buffers", "gradient buckets of DistributedDataParallel", gradients,
            "as large as the gradients, kept beside them (torch:nn/parallel/distributed.py, gradient_as_bucket_view)",
        )
    )  # fmt: skip
