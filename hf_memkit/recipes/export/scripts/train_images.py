"""Train a model to classify images. args.yaml has its model, data and settings, with reasons. The data loader's
workers open image files when their batch is made. The last images of each label are held out, unless the data has a
separate part for that."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    ViTImageProcessor,
)

from hf_memkit import attach
from hf_memkit.components.image_batches import Accuracy, ImageBatches, each_label_split, most_likely
from hf_memkit.recipes.export.scripts.image_rows import read
from hf_memkit.recipes.export.scripts.job import TrainingJob


def hold_out(job: TrainingJob, rows: Dataset, first: int | None) -> tuple[Dataset, Dataset]:
    """Split the rows: to train on, and to evaluate, with a column that marks images to crop at random."""
    most = job.data["evaluated_blocks"]
    if first is None:
        train, held_out = each_label_split(rows["label"], min(job.data["held_out"], most / len(rows)))
    else:  # labels mixed evenly, so that the evaluated part has all of them
        train = list(range(first))
        held_out = [first + number for half in each_label_split(rows["label"][first:], 0.5) for number in half]
        if len(held_out) > most and int(os.environ.get("RANK", 0)) == 0:
            print(f"{len(held_out)} images for the evaluation; {most} of them are used (args.yaml: evaluated_blocks)")
    trained = set(train)
    rows = rows.add_column("augment", [number in trained for number in range(len(rows))])
    return rows.select(train), rows.select(held_out[:most])


def main() -> None:
    job = TrainingJob(Path(__file__).resolve().parent)
    data = job.data

    rows, first = read(job.source)
    labels = rows.features["label"].names
    train_dataset, eval_dataset = hold_out(job, rows, first)
    if data["tokenizer"] is None:
        image_processor = ViTImageProcessor(size=data["image_size"])
    else:
        image_processor = AutoImageProcessor.from_pretrained(data["tokenizer"])

    arguments = job.training_arguments(TrainingArguments)
    label2id = {name: number for number, name in enumerate(labels)}
    id2label = dict(enumerate(labels))
    job.model.setdefault("ignore_mismatched_sizes", True)  # a head for other labels is replaced, not refused
    kind = AutoModelForImageClassification
    model = job.load_model(kind, num_labels=len(labels), id2label=id2label, label2id=label2id)
    dtype = getattr(torch, job.model["dtype"]) if "dtype" in job.model else None
    options = {
        "data_collator": ImageBatches(image_processor, smallest_crop=data["smallest_crop"], dtype=dtype),
        "compute_metrics": Accuracy(),
        "preprocess_logits_for_metrics": most_likely,
        **job.trainer_options(model, arguments, image_processor),
    }
    trainer = Trainer(train_dataset=train_dataset, eval_dataset=eval_dataset, **options)
    job.prepare_trainer(trainer)
    attach(trainer)  # memory at every step: memory-rank0.jsonl, one file a process
    job.train(trainer)  # started again, it continues from the newest checkpoint; Ctrl-C saves one
    trainer.save_model(str(Path(arguments.output_dir) / "model"))
    job.finish()


if __name__ == "__main__":
    main()
