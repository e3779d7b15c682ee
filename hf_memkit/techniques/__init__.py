"""Ways to save memory, one file a family. Importing this registers them (`hf_memkit.technique.TECHNIQUES`).

A technique is a function `(setup, job) -> setup`: it puts its settings with their reasons, and its decorator says what
it saves, what it costs and when not to use it. What the finished setup needs is computed by
`hf_memkit.techniques.ledger`, from its settings.
"""

from hf_memkit.techniques import (
    activation_functions,
    adapters,
    allocator,
    attention,
    batch,
    checkpointing,
    compiling,
    evaluation,
    loading,
    loss,
    offload,
    optimizers,
    optimizers_in_backward,
    optimizers_large_batch,
    optimizers_low_bit,
    optimizers_low_rank,
    precision,
    replicas,
    sequences,
)

__all__ = [
    "activation_functions",
    "adapters",
    "allocator",
    "attention",
    "batch",
    "checkpointing",
    "compiling",
    "evaluation",
    "loading",
    "loss",
    "offload",
    "optimizers",
    "optimizers_in_backward",
    "optimizers_large_batch",
    "optimizers_low_bit",
    "optimizers_low_rank",
    "precision",
    "replicas",
    "sequences",
]
