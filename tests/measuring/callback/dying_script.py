"""A user's training script in which memory runs out. Tests run it as a script, by `python -m`, and by torchrun."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_memkit.measuring.callback.numbers_of_ranks
from hf_memkit import MemoryReportCallback
from tests.tiny_trainer import samples, tiny_gpt2

OOM = (
    "CUDA out of memory. Tried to allocate 2.34 GiB. GPU 0 has a total capacity of 15.77 GiB of which 0.2 GiB is free."
)


class Raises(TrainerCallback):  # type: ignore[misc]
    """From step `step` on, the model's last layer raises."""

    def __init__(self, step: int, error: BaseException, pause_s: float = 0.0) -> None:
        self.step, self.error, self.pause_s = step, error, pause_s

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        time.sleep(self.pause_s)
        if state.global_step + 1 == self.step:
            model.transformer.h[-1].mlp.forward = self.fails

    def fails(self, *args: Any) -> None:
        raise self.error


def train(folder: Path, raises: Raises) -> None:
    arguments = TrainingArguments(
        str(folder), use_cpu=True, max_steps=60, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    callbacks = [MemoryReportCallback(), raises]
    Trainer(tiny_gpt2(), arguments, train_dataset=samples(600), callbacks=callbacks).train()


def main() -> None:
    out, mode = Path(sys.argv[1]), sys.argv[2]
    if mode == "ranks":
        hf_memkit.measuring.callback.numbers_of_ranks._INTERVAL_S = 0.05  # type: ignore[misc]
        dies = 20 if os.environ["RANK"] == "1" else 1000
        return train(out, Raises(dies, torch.OutOfMemoryError(OOM), pause_s=0.1))
    if os.fork() == 0:
        return train(out / "exited", Raises(2, SystemExit(3)))
    print("exit code of the other:", os.waitstatus_to_exitcode(os.wait()[1]))
    try:
        train(out / "caught", Raises(2, torch.OutOfMemoryError(OOM)))
    except torch.OutOfMemoryError as error:
        print("caught", getattr(error, "__notes__", "without a note"))
    return train(out / "died", Raises(3, torch.OutOfMemoryError(OOM)))


if __name__ == "__main__":
    main()
