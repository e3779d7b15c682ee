"""Fine-tune Wav2Vec2 with CTC (after "Fine-Tune Wav2Vec2 for English ASR"); sound of any length, padded to the longest."""
import argparse
from dataclasses import dataclass

import numpy as np
import torch
from datasets import load_dataset
from transformers import Trainer, TrainingArguments, Wav2Vec2ForCTC, Wav2Vec2Processor

p = argparse.ArgumentParser()
p.add_argument("--model", default="facebook/wav2vec2-base")
p.add_argument("--data", required=True, help="parquet files with audio (a list of samples), sampling_rate and sentence")
p.add_argument("--output", default="wav2vec2-asr")
p.add_argument("--steps", type=int, default=-1)
p.add_argument("--cpu", action="store_true")
args = p.parse_args()

processor = Wav2Vec2Processor.from_pretrained(args.model)
data = load_dataset("parquet", data_files={s: f"{args.data}/{s}-*.parquet" for s in ("train", "test")})


def prepare(row):
    row["input_values"] = processor(np.asarray(row["audio"]), sampling_rate=row["sampling_rate"]).input_values[0]
    row["labels"] = processor.tokenizer(row["sentence"].lower()).input_ids
    return row


data = data.map(prepare, remove_columns=data["train"].column_names)


@dataclass
class DataCollatorCTCWithPadding:
    processor: Wav2Vec2Processor
    padding: bool | str = True

    def __call__(self, features):
        batch = self.processor.feature_extractor.pad(
            [{"input_values": f["input_values"]} for f in features], padding=self.padding, return_tensors="pt")
        labels = self.processor.tokenizer.pad([{"input_ids": f["labels"]} for f in features], padding=self.padding, return_tensors="pt")
        batch["labels"] = labels["input_ids"].masked_fill(labels.attention_mask.ne(1), -100)
        return batch


def compute_metrics(pred):
    ids = np.argmax(pred.predictions, axis=-1)
    pred.label_ids[pred.label_ids == -100] = processor.tokenizer.pad_token_id
    said, meant = processor.batch_decode(ids), processor.batch_decode(pred.label_ids, group_tokens=False)
    return {"exact": float(np.mean([a == b for a, b in zip(said, meant)]))}


model = Wav2Vec2ForCTC.from_pretrained(args.model, ctc_loss_reduction="mean", pad_token_id=processor.tokenizer.pad_token_id)
model.freeze_feature_encoder()
trainer = Trainer(
    model=model,
    data_collator=DataCollatorCTCWithPadding(processor),
    args=TrainingArguments(
        output_dir=args.output, train_sampling_strategy="group_by_length", length_column_name="length",
        per_device_train_batch_size=4, eval_strategy="steps", eval_steps=2, max_steps=args.steps, fp16=not args.cpu, use_cpu=args.cpu,
        save_strategy="no", logging_steps=1, learning_rate=1e-4, weight_decay=0.005, report_to="none"),
    compute_metrics=compute_metrics,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=processor.feature_extractor,
)
trainer.train()
