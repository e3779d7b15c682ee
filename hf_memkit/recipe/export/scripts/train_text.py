"""Trains a language model to go on with a text. What it trains, on what and how stands in args.yaml, with reasons.

Documents are joined by the end-of-text token and cut into blocks of equal length: no padding. The last blocks are held
out.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_memkit import attach
from hf_memkit.recipe.export.scripts.job import TrainingJob


def cut_into_blocks(texts: Iterable[str], tokenizer: Any, length: int) -> np.ndarray:
    """Token IDs of shape (blocks, length); what is left of the last block is dropped."""
    ids: list[int] = []
    for text in texts:
        if text and not text.isspace():
            ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            ids.append(tokenizer.eos_token_id)
    return np.array(ids[: len(ids) // length * length], dtype=np.int32).reshape(-1, length)


def as_dataset(blocks: np.ndarray) -> Dataset:
    labels = blocks.copy()
    labels[:, 0] = -100  # nothing predicts the first token; Trainer's mean would count it
    return Dataset.from_dict({"input_ids": blocks, "labels": labels}).with_format("torch")


def main() -> None:
    job = TrainingJob(Path(__file__).resolve().parent)

    texts = job.load_rows()[job.data["text_column"]]
    tokenizer = job.load_tokenizer(texts)
    blocks = cut_into_blocks(texts, tokenizer, job.data["sequence_length"])
    held_out = max(1, round(job.data["held_out"] * len(blocks)))
    train_dataset = as_dataset(blocks[:-held_out])
    eval_dataset = as_dataset(blocks[-held_out:][: job.evaluated(held_out)])

    arguments = job.training_arguments(TrainingArguments)
    model = job.load_model(AutoModelForCausalLM)
    trainer = Trainer(
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        **job.trainer_options(model, arguments, tokenizer),
    )
    job.ready(trainer)
    attach(trainer)  # memory at every step: run/memory-rank0.jsonl, one file a process
    trainer.train()
    trainer.save_model(str(Path(arguments.output_dir) / "model"))
    job.leave()


if __name__ == "__main__":
    main()
