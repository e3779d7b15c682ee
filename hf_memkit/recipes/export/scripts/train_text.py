"""Train a language model on text. args.yaml has its model, data and settings, with reasons. Documents are joined by
the end-of-text token and cut into blocks of equal length, without padding. The last blocks are held out."""

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
"""Characters that are tokenized at once: a token takes some 200 bytes until it is in its block."""

TOKENIZER_OPTIONS = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}


def cut_into_blocks(rows: Dataset, tokenizer: Any, length: int) -> Iterator[dict[str, np.ndarray]]:
    """Blocks of `length` tokens; an incomplete last block is dropped."""
    tokens = array("i")
    for batch in rows.iter(batch_size=1000):
        texts = [text for text in batch["text"] if text and not text.isspace()]
        pieces = [list(split_text(text)) for text in texts]
        joined = [piece for text in pieces for piece in text]
        encoded = iter(tokenizer(joined, **TOKENIZER_OPTIONS)["input_ids"] if joined else [])
        for text in pieces:
            for _ in text:
                tokens.extend(next(encoded))
            tokens.append(tokenizer.eos_token_id)
        end = len(tokens) // length * length
        for block in np.array(tokens[:end], dtype=np.int32).reshape(-1, length):
            labels = block.copy()
            labels[0] = -100  # no token predicts the first one; Trainer's mean would count it
            yield {"input_ids": block, "labels": labels}
        del tokens[:end]


def split_text(text: str) -> Iterator[str]:
    """Pieces of a long text that no token crosses: they end between two lines, or else before a word."""
    while len(text) > PIECE:
        lines = [match.end() for match in re.finditer(r"(?<=\S)\n(?=\S)", text[:PIECE])]
        end = (lines or [match.start() for match in re.finditer(r"(?<=\S) (?=\S)", text[:PIECE])] or [PIECE])[-1]
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
        blocks = Dataset.from_generator(cut_into_blocks, features=features, gen_kwargs=options).with_format("torch")
    except ValueError:  # datasets refuses an empty generator
        blocks = []
    if len(blocks) < 2:
        job.source.refuse(f"fewer than two blocks of {length} tokens; give more text, or shorter blocks")
    train_dataset, eval_dataset = job.hold_out(blocks)

    arguments = job.training_arguments(TrainingArguments)
    model = job.load_model(AutoModelForCausalLM)
    trainer = Trainer(
        train_dataset=train_dataset, eval_dataset=eval_dataset, **job.trainer_options(model, arguments, tokenizer)
    )
    job.prepare_trainer(trainer)
    attach(trainer)  # memory at every step: memory-rank0.jsonl, one file a process
    job.train(trainer)  # started again, it continues from the newest checkpoint; Ctrl-C saves one
    trainer.save_model(str(Path(arguments.output_dir) / "model"))
    job.finish()


if __name__ == "__main__":
    main()
