"""Sentiment classifier. All settings are here at the top; paths come from the environment."""
import json
import os
import time

os.environ["CUDA_VISIBLE_DEVICES"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

MODEL = os.environ.get("MODEL", "distilbert-base-uncased")
DATA = os.environ.get("DATA_DIR", "data")
OUTPUT = os.environ.get("OUTPUT_DIR", "sentiment-model")
MAX_STEPS = int(os.environ.get("MAX_STEPS", "-1"))
BATCH_SIZE = 4
GRADIENT_ACCUMULATION = 2
LEARNING_RATE = 2e-5
EVAL_EVERY = 1
SEED = 42
LABELS = ["negative", "positive"]

set_seed(SEED)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print("device:", device)


class LossLogger(TrainerCallback):
    """Writes every log entry as a line of JSON."""

    def __init__(self, path):
        self.path = path

    def on_train_begin(self, args, state, control, **kwargs):
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.start = time.time()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            with open(self.path, "a") as f:
                f.write(json.dumps({"step": state.global_step, "time": round(time.time() - self.start, 2), **(logs or {})}) + "\n")


label2id = {label: i for i, label in enumerate(LABELS)}
id2label = {i: label for label, i in label2id.items()}

dataset = load_dataset("csv", data_files={"train": f"{DATA}/train.csv", "test": f"{DATA}/test.csv"})
print(dataset)
print("first review:", dataset["train"][0]["review"][:80])

tokenizer = AutoTokenizer.from_pretrained(MODEL)


def encode(example):
    enc = tokenizer(example["review"], truncation=True, max_length=128)
    enc["label"] = label2id[example["sentiment"]]
    return enc


dataset = dataset.map(encode, remove_columns=["review", "sentiment"])
split = dataset["train"].train_test_split(test_size=0.2, seed=SEED)

model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=len(LABELS), id2label=id2label, label2id=label2id)
model.to(device)


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    predictions = np.argmax(logits, axis=-1)
    tp = int(((predictions == 1) & (labels == 1)).sum())
    precision = tp / max(int((predictions == 1).sum()), 1)
    recall = tp / max(int((labels == 1).sum()), 1)
    return {"accuracy": float((predictions == labels).mean()), "f1": 2 * precision * recall / max(precision + recall, 1e-9)}


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        OUTPUT,
        learning_rate=LEARNING_RATE,
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=GRADIENT_ACCUMULATION,
        num_train_epochs=2,
        max_steps=MAX_STEPS,
        weight_decay=0.01,
        label_smoothing_factor=0.1,
        eval_strategy="steps",
        eval_steps=EVAL_EVERY,
        save_strategy="steps",
        save_steps=EVAL_EVERY,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="f1",
        greater_is_better=True,
        logging_steps=1,
        report_to=[],
        seed=SEED,
    ),
    train_dataset=split["train"],
    eval_dataset=split["test"],
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=compute_metrics,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3), LossLogger(f"{OUTPUT}/log.jsonl")],
)
trainer.train()

print("best checkpoint:", trainer.state.best_model_checkpoint, "f1", trainer.state.best_metric)
test = trainer.predict(dataset["test"])
print("test:", {k: round(v, 4) for k, v in test.metrics.items()})
np.save(f"{OUTPUT}/test_logits.npy", test.predictions)
trainer.save_model(f"{OUTPUT}/best")

inputs = tokenizer("The camera was wonderful!", return_tensors="pt").to(model.device)
with torch.no_grad():
    print("example:", id2label[model(**inputs).logits.argmax(-1).item()])
