"""Creates the Trainer of a setup as a script would, with example rows, and calls its `train()`.

python -m hf_memkit.prediction.child.training.setup_trainer FILE    # a `SetupJob` (`setup_as_script.py`)
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import ConcatDataset
from transformers import default_data_collator

from hf_memkit.prediction.child.example_inputs import Rows, example, pads, shortened
from hf_memkit.prediction.child.libraries.deepspeed_engine import prepare_compiling
from hf_memkit.prediction.child.libraries.library_rules import traceable
from hf_memkit.prediction.child.libraries.setup_model import build_fake_model
from hf_memkit.prediction.child.trainer_kinds.generation import arguments_class, generates, generation_config
from hf_memkit.prediction.child.trainer_kinds.sft import as_dataset, is_sft, sft_rows, tokenizer
from hf_memkit.prediction.child.training.evaluations import is_enabled
from hf_memkit.prediction.setup_as_script import SetupJob
from hf_memkit.setup.build import after_making, build_arguments, prepared_rows, trainer_class, trainer_options
from hf_memkit.setup.setup import Setup

_TYPICAL_BATCHES: Final = 9  # number of typical batches for one of the worst, so that the median is typical


def setup_trainer(job: SetupJob) -> Any:
    """The Trainer of the setup, before `train()`."""
    setup = traceable(job.setup)
    kind = trainer_class(setup)
    own = {
        "output_dir": tempfile.gettempdir(), "report_to": [], "push_to_hub": False, "hub_model_id": None,
        "train_sampling_strategy": "sequential", **generation_config(setup), **prepared_rows(setup),
    }  # fmt: skip
    if not torch.cuda.is_available():  # fake tensors on the CPU, as a fallback
        own |= {"use_cpu": True, "tf32": None, "fp16": False}
    arguments = build_arguments(setup, own, arguments_class(setup, kind))
    model = build_fake_model(setup, trust_remote_code=job.trust_remote_code)
    make = rows_for(job, setup, model)
    size = arguments.train_batch_size
    rows: Any = make(size, max(job.rows, size * arguments.gradient_accumulation_steps))
    if job.typical is not None:
        typical = rows_for(job, job.typical, model, job.typical.sequence_length)
        parts: list[Any] = [make(size, size), typical(size, size * _TYPICAL_BATCHES)]
        rows = ConcatDataset(parts)
    size = arguments.eval_batch_size
    evaluated = make(size, size * job.evaluation_batches) if is_enabled(arguments.eval_strategy) else None
    options = trainer_options(setup, model=model, arguments=arguments)
    collator = options.pop("data_collator", None)
    # Predictions are kept for metrics, which compute nothing here; evaluations generate only if there are metrics.
    if job.metrics or options.get("compute_metrics") or generates(arguments, kind):
        options["compute_metrics"] = lambda prediction, compute_result=True: {}
    if is_sft(setup):
        options |= {"processing_class": tokenizer(), "eval_dataset": as_dataset(evaluated) if evaluated else None}
        trainer = kind(model=model, args=arguments, train_dataset=as_dataset(rows), **options)
    else:
        name, dtype = getattr(model, "main_input_name", None), getattr(model, "dtype", None)

        def collate(samples: Any) -> Any:
            """Casts images and sound to the dtype of 16-bit weights, as recipes do: without autocast a convolution
            needs that (`hf_memkit/components/image_batches.py`, `speech_batches.py`)."""
            batch = default_data_collator(samples)
            if name in batch and dtype is not None and dtype.itemsize == 2 and batch[name].is_floating_point():
                batch[name] = batch[name].to(dtype)
            return batch

        options["data_collator"] = collator or collate
        trainer = kind(model=model, args=arguments, train_dataset=rows, eval_dataset=evaluated, **options)
    if arguments.torch_compile and "deepspeed.left_out" in setup:
        prepare_compiling(trainer.model, setup["deepspeed.left_out"])
    if is_sft(setup) or "data.task" in setup:  # as a recipe's run does
        after_making(setup, trainer)
    return trainer


def rows_for(job: SetupJob, setup: Setup, model: Any, length: int | None = None) -> Callable[[int, int], Rows]:
    """A function (batch size, number of rows) → data set with rows of `length` tokens. Default: the training's length.
    If batches are padded, the first row of a batch is the longest."""
    padded = job.padded if job.padded is not None else pads(setup, model)
    row = example(model, length or job.sequence_length, with_mask=padded)
    if "data.target_length" in setup:  # text pairs
        row["labels"] = row["labels"][:1] * int(setup["data.target_length"])
    if is_sft(setup):
        return lambda batch_size, count: sft_rows(setup, row, batch_size, count)
    shorter = shortened(model, row) if padded else None
    return lambda batch_size, count: Rows(row, count, shorter, batch_size)


if __name__ == "__main__":
    setup_trainer(SetupJob.from_json(json.loads(Path(sys.argv[1]).read_text()))).train()
