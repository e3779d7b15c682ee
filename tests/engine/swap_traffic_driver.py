"""Trains two steps in one process with states and weights on disk, and writes what the second reads and writes.

    python -m tests.engine.swap_traffic_driver FOLDER

`FOLDER/swaps.json`: "read" and "write" → bytes that the real engine asks its disk for, rounded up to what it reads at
once. A hundred megabytes a step: DeepSpeed swaps nothing that is smaller than a mebibyte.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any, Final

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")

import torch
from transformers import AutoModelForCausalLM, GPT2Config, TrainerCallback
from transformers.utils import logging

from hf_memkit.setup.process_group import leave_process_group
from tests.engine.preset_cases import small_config
from tests.engine.tiny_training import MICRO_BATCH, MODEL, LossTrainer, cpu_arguments

WIDE: Final = {**MODEL, "vocab_size": 512, "n_embd": 512, "n_layer": 1}
"""All matrices but that of positions have a mebibyte in fp32."""


def swapping(folder: str) -> dict[str, Any]:
    """The preset's JSON, with no weight kept for its second use."""
    config = small_config("zero3-infinity", folder)
    zero = config["zero_optimization"]
    zero |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0, "sub_group_size": 1_100_000}
    zero["offload_param"]["buffer_size"] = 1_100_000
    return config


class CountSwaps(TrainerCallback):  # type: ignore[misc]
    """`swapped`: bytes of the last step."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.swapped: dict[str, int] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.now.clear()  # the engine's own start writes everything once

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.swapped = dict(self.now)
        self.now.clear()


def count_swaps(counting: CountSwaps) -> None:
    """Every read and write of the engine goes through two functions."""
    names = ("async_swapper", "optimizer_utils", "partitioned_optimizer_swapper", "partitioned_param_swapper", "utils")
    modules = [import_module(f"deepspeed.runtime.swap_tensor.{name}") for name in names]
    utils = modules[-1]
    for name, kind in ("swap_in_tensors", "read"), ("swap_out_tensors", "write"):
        function = getattr(utils, name)

        def counted(handle: Any, buffers: Any, paths: Any, _kind: str = kind, _function: Any = function) -> Any:
            counting.now[_kind] += sum(each.nbytes for each in buffers)
            return _function(handle, buffers, paths)

        for module in modules:
            if hasattr(module, name):
                setattr(module, name, counted)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    arguments = cpu_arguments(
        folder, deepspeed=swapping(str(folder / "disk")), per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=2, max_steps=2,
    )  # fmt: skip
    torch.manual_seed(0)
    values = {key: value for key, value in WIDE.items() if key != "model_type"}
    trainer = LossTrainer(AutoModelForCausalLM.from_config(GPT2Config(**values), dtype=torch.float32), arguments)
    counting = CountSwaps()
    count_swaps(counting)
    trainer.add_callback(counting)
    trainer.train()
    trainer.deepspeed.destroy()
    (folder / "swaps.json").write_text(json.dumps(counting.swapped))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
