"""Trains a language model to go on with a text. What it trains, on what and how stands in args.yaml, with reasons.

Documents are joined by the end-of-text token and cut into blocks of equal length: no padding. The last blocks are held
out.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Sequence, Value
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_memkit import attach
from hf_memkit.recipes.export.scripts.job import TrainingJob
from hf_memkit.recipes.export.scripts.text_rows import read

PIECE = 500_000
"""Characters that are encoded at once: a token takes some 200 bytes until it is in its block."""


def blocks_of(rows: Dataset, tokenizer: Any, length: int) -> Iterator[dict[str, np.ndarray]]:
    """Blocks of `length` tokens; what is left of the last block is dropped."""
    tokens = array("i")
    for batch in rows.iter(batch_size=1000):
        texts = [text for text in batch["text"] if text and not text.isspace()]
        pieces = [list(pieces_of(text)) for text in texts]
        encoded = iter(tokenizer([each for text in pieces for each in text], **PLAIN)["input_ids"] if pieces else [])
        for text in pieces:
            for _ in text:
                tokens.extend(next(encoded))
            tokens.append(tokenizer.eos_token_id)
        whole = len(tokens) // length * length
        for block in np.array(tokens[:whole], dtype=np.int32).reshape(-1, length):
            labels = block.copy()
            labels[0] = -100  # nothing predicts the first token; Trainer's mean would count it
            yield {"input_ids": block, "labels": labels}
        del tokens[:whole]


PLAIN = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}


def pieces_of(text: str) -> Iterator[str]:
    """A long text in pieces that end where no token goes across: between two lines, or else before a word."""
    while len(text) > PIECE:
        lines = [found.end() for found in re.finditer(r"(?<=\S)\n(?=\S)", text[:PIECE])]
        end = (lines or [found.start() for found in re.finditer(r"(?<=\S) (?=\S)", text[:PIECE])] or [PIECE])[-1]
        yield text[:end]
        text = text[end:]
    yield text


def main() -> None:
    job = TrainingJob(Path(__file__).resolve().parent)
    length = job.data["sequence_length"]

    rows = read(job.source)
    tokenizer = job.load_tokenizer(text for text in rows["text"] if text)
    options = {"rows": rows, "tokenizer": tokenizer, "length": length}
    features = Features({name: Sequence(Value("int32"), length) for name in ("input_ids", "labels")})
    try:
        blocks = Dataset.from_generator(blocks_of, features=features, gen_kwargs=options).with_format("torch")
    except ValueError:  # datasets: a generator that gives nothing
        blocks = []
    if len(blocks) < 2:
        job.source.refuse(f"fewer than two blocks of {length} tokens; give more text, or shorter blocks")
    train_dataset, eval_dataset = job.hold_out(blocks)

    arguments = job.training_arguments(TrainingArguments)
    model = job.load_model(AutoModelForCausalLM)
    trainer = Trainer(
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        **job.trainer_options(model, arguments, tokenizer),
    )
    job.ready(trainer)
    attach(trainer)  # memory at every step: memory-rank0.jsonl, one file a process
    trainer.train()
    trainer.save_model(str(Path(arguments.output_dir) / "model"))
    job.leave()


if __name__ == "__main__":
    main()
