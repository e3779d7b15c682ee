"""Train a model to classify texts, or pairs of texts. args.yaml has its model, data and settings, with reasons. The
classes are those in the data, sorted by number if they are numbers, otherwise alphabetically. The last examples of
each class are held out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, Trainer, TrainingArguments

from hf_memkit import attach
from hf_memkit.components.classification_metrics import accuracy_and_f1, last_of_each, likeliest_class
from hf_memkit.recipes.export.scripts.class_rows import read
from hf_memkit.recipes.export.scripts.job import TrainingJob


def main() -> None:
    job = TrainingJob(Path(__file__).resolve().parent)
    data = job.data

    rows = read(job.source)
    classes = rows["label"][:]
    labels = sorted(set(classes), key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name))
    tokenizer = job.load_tokenizer(rows["text"])

    def encode(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        second = rows.get("text_pair")  # None without pairs
        options = {"truncation": True, "max_length": data["sequence_length"], "return_attention_mask": False}
        inputs = tokenizer(rows["text"], second, **options)
        return {**inputs, "labels": [labels.index(name) for name in rows["label"]]}

    rows = rows.map(encode, batched=True, remove_columns=rows.column_names)
    held_out = last_of_each(classes, data["held_out"])[: data["evaluated_blocks"]]
    train_dataset = rows.select(sorted(set(range(len(rows))) - set(held_out)))
    eval_dataset = rows.select(held_out)

    arguments = job.training_arguments(TrainingArguments)
    label2id = {name: number for number, name in enumerate(labels)}
    id2label = dict(enumerate(labels))
    kind = AutoModelForSequenceClassification
    model = job.load_model(kind, num_labels=len(labels), id2label=id2label, label2id=label2id)
    options = {
        "data_collator": DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),  # faster on tensor cores
        "compute_metrics": accuracy_and_f1,
        "preprocess_logits_for_metrics": likeliest_class,
        **job.trainer_options(model, arguments, tokenizer),
    }
    trainer = Trainer(train_dataset=train_dataset, eval_dataset=eval_dataset, **options)
    job.prepare_trainer(trainer)
    attach(trainer)  # memory at every step: memory-rank0.jsonl, one file a process
    job.train(trainer)  # started again, it continues from the newest checkpoint; Ctrl-C saves one
    trainer.save_model(str(Path(arguments.output_dir) / "model"))
    job.finish()


if __name__ == "__main__":
    main()
