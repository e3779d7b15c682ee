"""Settings of PyTorch's caching allocator."""

from __future__ import annotations

from hf_memkit.job import Job
from hf_memkit.training_setup import TrainingSetup

__all__ = ["expandable_segments"]


def expandable_segments(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """Segments that grow instead of many of fixed size.

    Saves most of the fragmentation of jobs whose tensors change size. Costs next to nothing on Linux; not available
    on Windows.
    """
    return setup.put(
        "environment.PYTORCH_ALLOC_CONF", "expandable_segments:True",
        "cached memory does not get stuck in pieces too small to use (torch:c10/core/AllocatorConfig.h)",
    )  # fmt: skip
