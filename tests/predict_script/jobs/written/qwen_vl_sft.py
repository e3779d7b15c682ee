"""Supervised fine-tuning of Qwen2.5-VL (after the fine-tuning code that comes with it): images are resized to at most
max_pixels, the prompt gets as many image tokens as that gives, and the vision tower stays as it is."""
import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import Dataset
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    HfArgumentParser,
    Qwen2_5_VLForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

IGNORE_INDEX = -100


@dataclass
class ModelArguments:
    model_name_or_path: str = "Qwen/Qwen2.5-VL-3B-Instruct"
    tune_mm_llm: bool = True
    tune_mm_mlp: bool = True
    tune_mm_vision: bool = False


@dataclass
class DataArguments:
    data_path: str = field(default="data", metadata={"help": "folder with images and metadata.jsonl"})
    max_pixels: int = 28 * 28 * 576
    min_pixels: int = 28 * 28 * 16


def set_model(model_args, model):
    for n, p in model.model.visual.named_parameters():
        p.requires_grad = model_args.tune_mm_mlp if n.startswith("merger") else model_args.tune_mm_vision
    for n, p in model.model.language_model.named_parameters():
        p.requires_grad = model_args.tune_mm_llm
    model.lm_head.requires_grad_(model_args.tune_mm_llm)


class LazySupervisedDataset(Dataset):
    def __init__(self, data_args, tokenizer, image_processor):
        self.folder = Path(data_args.data_path)
        self.rows = [json.loads(line) for line in (self.folder / "metadata.jsonl").read_text().splitlines()]
        self.tokenizer, self.image_processor = tokenizer, image_processor

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        image = Image.open(self.folder / row["file_name"]).convert("RGB")
        visual = self.image_processor(images=[image], return_tensors="pt")
        tokens = int(visual["image_grid_thw"][0].prod()) // self.image_processor.merge_size**2
        prompt = f"<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * tokens}<|vision_end|>{row['question']}<|im_end|>\n<|im_start|>assistant\n"
        prompt_ids = self.tokenizer(prompt)["input_ids"]
        answer_ids = self.tokenizer(row["answer"] + "<|im_end|>\n")["input_ids"]
        input_ids = torch.tensor(prompt_ids + answer_ids)
        labels = copy.deepcopy(input_ids)
        labels[: len(prompt_ids)] = IGNORE_INDEX
        image_token = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        return {"input_ids": input_ids, "labels": labels, "mm_token_type_ids": (input_ids == image_token).int(),
                "pixel_values": visual["pixel_values"], "image_grid_thw": visual["image_grid_thw"]}


@dataclass
class DataCollatorForSupervisedDataset:
    tokenizer: object

    def __call__(self, instances):
        def padded(name, value):
            return torch.nn.utils.rnn.pad_sequence([x[name] for x in instances], batch_first=True, padding_value=value)

        input_ids = padded("input_ids", self.tokenizer.pad_token_id)
        return {
            "input_ids": input_ids,
            "labels": padded("labels", IGNORE_INDEX),
            "mm_token_type_ids": padded("mm_token_type_ids", 0),
            "attention_mask": input_ids.ne(self.tokenizer.pad_token_id),
            "pixel_values": torch.cat([x["pixel_values"] for x in instances]),
            "image_grid_thw": torch.cat([x["image_grid_thw"] for x in instances]),
        }


def train():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    training_args.remove_unused_columns = False
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        model_args.model_name_or_path, dtype=torch.bfloat16 if training_args.bf16 else None)
    image_processor = AutoImageProcessor.from_pretrained(
        model_args.model_name_or_path, min_pixels=data_args.min_pixels, max_pixels=data_args.max_pixels)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="right", use_fast=True)
    model.config.use_cache = False
    set_model(model_args, model)
    trainer = Trainer(
        model=model, processing_class=tokenizer, args=training_args,
        train_dataset=LazySupervisedDataset(data_args, tokenizer, image_processor),
        data_collator=DataCollatorForSupervisedDataset(tokenizer))
    trainer.train()
    trainer.save_state()
    trainer.save_model(training_args.output_dir)
    image_processor.save_pretrained(training_args.output_dir)


if __name__ == "__main__":
    train()
