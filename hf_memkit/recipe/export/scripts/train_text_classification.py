"""Trains a model to tell kinds of texts, or of pairs of texts, apart. What it trains, on what and how stands in
args.yaml, with reasons.

The classes are those that stand in the data, in the order of their numbers if they are numbers, otherwise of the
alphabet. Of each class the last examples are held out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, Trainer, TrainingArguments

from hf_memkit import attach
from hf_memkit.components.classification_metrics import accuracy_and_f1, last_of_each, likeliest_class
from hf_memkit.recipe.export.scripts.job import TrainingJob


def class_names(rows: Dataset, column: str) -> list[str]:
    """The class of each row: its name, where the data set has names, or what stands in the column."""
    names = getattr(rows.features[column], "names", None)
    return [names[value] if names else str(value) for value in rows[column]]


def main() -> None:
    job = TrainingJob(Path(__file__).resolve().parent)
    data, columns = job.data, job.data["columns"]

    rows = job.load_rows()
    classes = class_names(rows, columns["label"])
    labels = sorted(set(classes), key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))
    tokenizer = job.load_tokenizer(rows[columns["text"]])

    def encode(rows: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        second = rows.get(columns.get("text_pair", "text_pair"))  # texts, where there are pairs
        options = {"truncation": True, "max_length": data["sequence_length"], "return_attention_mask": False}
        inputs = tokenizer(rows[columns["text"]], second, **options)
        return {**inputs, "labels": [labels.index(classes[number]) for number in numbers]}

    rows = rows.map(encode, with_indices=True, batched=True, remove_columns=rows.column_names)
    held_out = last_of_each(classes, data["held_out"])
    train_dataset = rows.select(sorted(set(range(len(rows))) - set(held_out)))
    eval_dataset = rows.select(held_out[: job.evaluated(len(held_out))])

    arguments = job.training_arguments(TrainingArguments)
    numbers = {name: number for number, name in enumerate(labels)}
    model = job.load_model(
        AutoModelForSequenceClassification,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id=numbers,
    )
    options = {
        "data_collator": DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),  # tensor cores are fast then
        "compute_metrics": accuracy_and_f1,
        "preprocess_logits_for_metrics": likeliest_class,
        **job.trainer_options(model, arguments, tokenizer),
    }
    trainer = Trainer(train_dataset=train_dataset, eval_dataset=eval_dataset, **options)
    job.ready(trainer)
    attach(trainer)  # memory at every step: memory-rank0.jsonl, one file a process
    trainer.train()
    trainer.save_model(str(Path(arguments.output_dir) / "model"))
    job.leave()


if __name__ == "__main__":
    main()
