"""Trains a tiny model with DeepSpeed, stage by stage: `python -m tests.measuring.memory.deepspeed_driver FOLDER`.

The records of stage N are in `FOLDER/N`; the order in which the phases of its first step ended is printed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")

from hf_memkit.setup.process_group import single_process_environment

os.environ.update(single_process_environment())

from accelerate.state import AcceleratorState, GradientState
from transformers import Trainer, TrainingArguments

from hf_memkit import attach
from hf_memkit.measuring.memory.recorder import RunRecorder
from hf_memkit.setup.process_group import join_process_group, leave_process_group
from tests.engine.tiny_training import blocks, load_model, save_initial_weights
from tests.tiny_trainer import FakeAllocator

BUCKET = 100_000


def main(folder: Path) -> None:
    save_initial_weights(folder / "initial")
    ended: list[str] = []
    original = RunRecorder._on_boundary

    def note(self: RunRecorder, phase: Any) -> None:
        ended.append(phase)
        original(self, phase)

    RunRecorder._on_boundary = note  # type: ignore[method-assign]
    for stage in (1, 3):
        ended.clear()
        config = {
            "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET},
            "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "train_batch_size": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        }
        arguments = TrainingArguments(
            output_dir=str(folder / str(stage)), deepspeed=config, bf16=True, use_cpu=True, report_to="none",
            disable_tqdm=True, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            save_strategy="no",
        )  # fmt: skip
        join_process_group(arguments)
        model = load_model(folder / "initial", bf16_weights=False, lora=False)
        trainer = Trainer(model=model, args=arguments, train_dataset=blocks())
        callback = attach(trainer, readers=[FakeAllocator()], summary=False, html=False)
        trainer.train()
        assert callback.callback_errors == 0, callback._barrier.messages
        print(json.dumps(ended[: len(ended) // 2 + 1]))
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
