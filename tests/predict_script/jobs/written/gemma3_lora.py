"""LoRA for Gemma 3 with images, on plain Trainer."""
import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoProcessor, Gemma3ForConditionalGeneration, Trainer, TrainingArguments

p = argparse.ArgumentParser()
p.add_argument("--model", default="google/gemma-3-4b-it")
p.add_argument("--data", required=True, help="an image folder with metadata.jsonl: file_name, question, answer")
p.add_argument("--output", default="gemma3-vqa-lora")
p.add_argument("--batch", type=int, default=1)
p.add_argument("--accumulate", type=int, default=4)
p.add_argument("--steps", type=int, default=-1)
p.add_argument("--gradient-checkpointing", action="store_true")
args = p.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
processor = AutoProcessor.from_pretrained(args.model)
model = Gemma3ForConditionalGeneration.from_pretrained(
    args.model, dtype=torch.bfloat16 if device == "cuda" else torch.float32, attn_implementation="eager")
model = get_peft_model(model, LoraConfig(
    r=8, lora_alpha=16, lora_dropout=0.05, task_type="CAUSAL_LM",
    target_modules=r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"))
model.print_trainable_parameters()

data = load_dataset("imagefolder", data_dir=args.data)


def collate_fn(rows):
    texts, images = [], []
    for row in rows:
        messages = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["question"]}]},
            {"role": "assistant", "content": [{"type": "text", "text": row["answer"]}]},
        ]
        texts.append(processor.apply_chat_template(messages, tokenize=False).strip())
        images.append([row["image"].convert("RGB")])
    batch = processor(text=texts, images=images, return_tensors="pt", padding=True)
    labels = batch["input_ids"].clone()
    for token in (processor.tokenizer.pad_token_id, processor.tokenizer.boi_token_id, processor.tokenizer.image_token_id):
        labels[labels == token] = -100
    batch["labels"] = labels
    return batch


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=args.output, per_device_train_batch_size=args.batch, gradient_accumulation_steps=args.accumulate,
        max_steps=args.steps, learning_rate=2e-4, bf16=device == "cuda", use_cpu=device == "cpu", logging_steps=1,
        gradient_checkpointing=args.gradient_checkpointing, gradient_checkpointing_kwargs={"use_reentrant": False},
        eval_strategy="epoch", save_strategy="no", report_to="none", remove_unused_columns=False, label_names=["labels"]),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=collate_fn,
)
trainer.train()
model.save_pretrained(args.output)
