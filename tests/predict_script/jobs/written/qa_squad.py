"""Extractive question answering on files in SQuAD v1.1 format."""
import collections
import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    DefaultDataCollator,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class QAArguments:
    model_name: str
    squad_dir: str
    max_length: int = 160
    doc_stride: int = field(default=48, metadata={"help": "overlap of windows"})
    pad_token: str = "[PAD]"


def read_squad(path):
    rows = collections.defaultdict(list)
    for article in json.loads(Path(path).read_text())["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                rows["id"].append(qa["id"])
                rows["question"].append(qa["question"])
                rows["context"].append(paragraph["context"])
                rows["answers"].append({"text": [a["text"] for a in qa["answers"]], "answer_start": [a["answer_start"] for a in qa["answers"]]})
    return Dataset.from_dict(dict(rows))


def main():
    qa_args, training_args = HfArgumentParser((QAArguments, TrainingArguments)).parse_args_into_dataclasses()
    Path(training_args.output_dir).mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(message)s",
        handlers=[logging.FileHandler(Path(training_args.output_dir) / "qa.log"), logging.StreamHandler(sys.stderr)],
    )
    tokenizer = AutoTokenizer.from_pretrained(qa_args.model_name)
    model = AutoModelForQuestionAnswering.from_pretrained(qa_args.model_name)

    def tokenize(examples, with_labels=True):
        enc = tokenizer(
            [q.strip() for q in examples["question"]],
            examples["context"],
            max_length=qa_args.max_length,
            truncation="only_second",
            stride=qa_args.doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length",
        )
        sample_map = enc.pop("overflow_to_sample_mapping")
        if not with_labels:
            enc["example_id"] = [examples["id"][s] for s in sample_map]
            enc["offset_mapping"] = [
                [o if enc.sequence_ids(i)[k] == 1 else None for k, o in enumerate(offsets)] for i, offsets in enumerate(enc["offset_mapping"])
            ]
            return enc
        enc["start_positions"], enc["end_positions"] = [], []
        for i, offsets in enumerate(enc.pop("offset_mapping")):
            answer = examples["answers"][sample_map[i]]
            start_char = answer["answer_start"][0]
            end_char = start_char + len(answer["text"][0])
            ids = enc.sequence_ids(i)
            first = ids.index(1)
            last = len(ids) - 1 - ids[::-1].index(1)
            if offsets[first][0] > start_char or offsets[last][1] < end_char:
                enc["start_positions"].append(0)
                enc["end_positions"].append(0)
                continue
            while first <= last and offsets[first][0] <= start_char:
                first += 1
            while last >= 0 and offsets[last][1] >= end_char:
                last -= 1
            enc["start_positions"].append(first - 1)
            enc["end_positions"].append(last + 1)
        return enc

    train_raw = read_squad(Path(qa_args.squad_dir) / "train-v1.1.json")
    dev_raw = read_squad(Path(qa_args.squad_dir) / "dev-v1.1.json")
    train = train_raw.map(tokenize, batched=True, remove_columns=train_raw.column_names)
    dev = dev_raw.map(lambda e: tokenize(e, with_labels=False), batched=True, remove_columns=dev_raw.column_names)
    logging.info("%d questions make %d windows", len(train_raw), len(train))

    trainer = Trainer(model=model, args=training_args, train_dataset=train, processing_class=tokenizer, data_collator=DefaultDataCollator())
    trainer.train()
    trainer.save_model()

    (start_logits, end_logits), _, _ = trainer.predict(dev.remove_columns(["example_id", "offset_mapping"]))[:3]
    windows = collections.defaultdict(list)
    for i, example_id in enumerate(dev["example_id"]):
        windows[example_id].append(i)
    correct, predictions = 0, {}
    for example in dev_raw:
        best = (-1e9, "")
        for i in windows[example["id"]]:
            offsets = dev[i]["offset_mapping"]
            for s in np.argsort(start_logits[i])[-10:]:
                for e in np.argsort(end_logits[i])[-10:]:
                    if offsets[s] is None or offsets[e] is None or e < s or e - s > 15:
                        continue
                    score = start_logits[i][s] + end_logits[i][e]
                    if score > best[0]:
                        best = (score, example["context"][offsets[s][0] : offsets[e][1]])
        predictions[example["id"]] = best[1]
        correct += best[1] in example["answers"]["text"]
    Path(training_args.output_dir, "predictions.json").write_text(json.dumps(predictions, indent=2))
    logging.info("exact match %.2f", 100 * correct / len(dev_raw))


if __name__ == "__main__":
    main()
