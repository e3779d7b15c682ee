"""Code shared by tasks with images and sound."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hf_memkit.recipes.tasks.task import Settings


def loader_arguments(work: str) -> Settings:
    """Fields of TrainingArguments for a collator that opens files; `work`: its work, for the reasons."""
    workers = min(4, os.cpu_count() or 1)
    return {
        "remove_unused_columns": (False, "the collator opens the files that a row names"),
        "dataloader_num_workers": (
            workers,
            f"processes that {work} while the GPU computes; batches come through shared memory (a container may need "
            f"a larger --shm-size)",
        ),
        "dataloader_prefetch_factor": (2, "batches that each of them has ready"),
        "dataloader_persistent_workers": (True, "they are started once, not in every epoch"),
        "dataloader_pin_memory": (True, "batches go to the GPU while it computes"),
    }


def whole_config(values: Mapping[str, Any]) -> Any:
    """The config of these values, with the architecture's defaults for all others."""
    from transformers import AutoConfig

    given = {key: value for key, value in values.items() if key != "transformers_version"}
    return AutoConfig.for_model(given.pop("model_type"), **given)
