"""A user's script with rows of many lengths, an evaluation, saves, and actions that a short run must not take."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if "--waits" in sys.argv:
    Path("waits").touch()
    time.sleep(600)
if os.environ.get("OWN_MEMORY") == "0":

    class OutOfMemoryError(RuntimeError):
        pass

    raise OutOfMemoryError("CUDA out of memory")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments


@dataclass
class Own:
    fails_from: int = 100


LENGTHS = [4, 5, 6, 7, 5, 4, 6, 5, 23, 4, 5, 6, 5, 7, 4, 5]
rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in LENGTHS]


def padded(batch):
    longest = max(len(row["input_ids"]) for row in batch)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in batch])
    return {"input_ids": ids, "labels": ids.clone()}


class Marks(TrainerCallback):
    def on_train_begin(self, *args, **kwargs):
        Path("callback-was-called").touch()


class Picky(Trainer):
    def training_step(self, model, inputs, *args):
        size, length = inputs["input_ids"].shape
        with Path("batches").open("a") as file:
            file.write(f"{size} {length}\n")
        if size >= own.fails_from:
            raise RuntimeError("no such batch")  # not: CUDA out of memory
        return super().training_step(model, inputs, *args)


arguments, own = HfArgumentParser((TrainingArguments, Own)).parse_args_into_dataclasses()
Path(arguments.output_dir).mkdir(exist_ok=True, parents=True)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=32))
trainer = Picky(model, arguments, train_dataset=rows, eval_dataset=rows[:6], data_collator=padded, callbacks=[Marks()])
trainer.train()
(Path(sys.argv[0]).parent / "below-train").touch()
