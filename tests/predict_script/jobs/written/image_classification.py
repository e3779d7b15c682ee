import argparse
import os

import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer, TrainingArguments


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("data_dir", help="folder with train/CLASS/*.png and test/CLASS/*.png")
    p.add_argument("--model_name_or_path", default="google/vit-base-patch16-224-in21k")
    p.add_argument("--output_dir", default="./vit-finetuned")
    p.add_argument("--per_device_train_batch_size", type=int, default=16)
    p.add_argument("--gradient_accumulation_steps", type=int, default=1)
    p.add_argument("--learning_rate", type=float, default=2e-4)
    p.add_argument("--num_train_epochs", type=float, default=4)
    p.add_argument("--max_steps", type=int, default=-1)
    p.add_argument("--seed", type=int, default=1337)
    p.add_argument("--freeze_backbone", action="store_true")
    return p.parse_args()


def collate_fn(batch):
    return {
        "pixel_values": torch.stack([x["pixel_values"] for x in batch]),
        "labels": torch.tensor([x["label"] for x in batch]),
    }


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)

    ds = load_dataset("imagefolder", data_dir=args.data_dir)
    labels = ds["train"].features["label"].names
    print(labels, {k: len(v) for k, v in ds.items()})

    processor = AutoImageProcessor.from_pretrained(args.model_name_or_path)
    generator = np.random.default_rng(args.seed)

    def transform(batch):
        images = [im.convert("RGB") for im in batch["image"]]
        images = [im.transpose(0) if generator.random() < 0.5 else im for im in images]  # flip left right
        inputs = processor(images, return_tensors="pt")
        inputs["label"] = batch["label"]
        return inputs

    def transform_eval(batch):
        inputs = processor([im.convert("RGB") for im in batch["image"]], return_tensors="pt")
        inputs["label"] = batch["label"]
        return inputs

    train_ds = ds["train"].with_transform(transform)
    test_ds = ds["test"].with_transform(transform_eval)

    model = AutoModelForImageClassification.from_pretrained(
        args.model_name_or_path,
        num_labels=len(labels),
        id2label={str(i): c for i, c in enumerate(labels)},
        label2id={c: str(i) for i, c in enumerate(labels)},
        ignore_mismatched_sizes=True,
    )
    if args.freeze_backbone:
        model.base_model.requires_grad_(False)
    print("trainable parameters:", model.num_parameters(only_trainable=True))

    def compute_metrics(p):
        return {"accuracy": (np.argmax(p.predictions, axis=1) == p.label_ids).astype(np.float32).mean().item()}

    training_args = TrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        eval_strategy="steps",
        eval_steps=100,
        num_train_epochs=args.num_train_epochs,
        max_steps=args.max_steps,
        fp16=torch.cuda.is_available(),
        save_steps=100,
        logging_steps=1,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        save_total_limit=2,
        remove_unused_columns=False,
        push_to_hub=False,
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
        dataloader_num_workers=min(2, os.cpu_count()),
        seed=args.seed,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        data_collator=collate_fn,
        compute_metrics=compute_metrics,
        train_dataset=train_ds,
        eval_dataset=test_ds,
        processing_class=processor,
    )
    train_results = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", train_results.metrics)
    trainer.save_metrics("train", train_results.metrics)
    trainer.save_state()
    metrics = trainer.evaluate(test_ds)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
