"""What memkit knows of DeepSpeed's config, against the installed DeepSpeed and torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import hf_memkit.checks
from hf_memkit.checks.deepspeed_keys import BOUNDS, REMOVED, TORCH_OPTIMIZERS, TORCH_SCHEDULERS, UNTYPED
from tests.conftest import ROOT
from tests.loaded import Loaded

GENERATED: dict[str, Any] = json.loads(Path(hf_memkit.checks.__file__).with_name("deepspeed_0_19.json").read_text())


def test_the_generated_file_is_what_the_installed_deepspeed_says(process: Loaded) -> None:
    done = process.run([ROOT / "scripts" / "deepspeed_keys.py", "--check"], ROOT)
    assert done.returncode == 0, done.output


def test_the_top_level_is_what_deepspeed_reads() -> None:
    ours, read = set(UNTYPED[""]), set(GENERATED["top_level"])
    # "bfloat16" has its own rule; transformers and accelerate read the first two; the third is read where
    # torch.distributed has started; the fourth only where "zero_optimization" is a mere true.
    assert read - set(REMOVED) <= ours
    assert ours - read <= {"inference", "msamp", "sequence_parallel_size", "allgather_size", "bfloat16"}


def test_handwritten_entries_are_about_keys_that_exist() -> None:
    generated = {f"{name}.{key}" for name, section in GENERATED["sections"].items() for key in section["keys"]}
    assert set(BOUNDS) <= generated
    assert not set(UNTYPED) & set(GENERATED["sections"])
    assert set(REMOVED) == set(GENERATED["removed"])


def test_optimizers_and_schedulers_of_torch_exist() -> None:
    schedulers = torch.optim.lr_scheduler
    assert all(issubclass(getattr(torch.optim, name), torch.optim.Optimizer) for name in TORCH_OPTIMIZERS)
    assert all(issubclass(getattr(schedulers, name), schedulers.LRScheduler) for name in TORCH_SCHEDULERS)
