"""Fine-tune SmolVLM on visual questions (after the notebook "Fine-tune SmolVLM on Visual Question Answering")."""
import os
import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainingArguments

model_id = os.environ.get("MODEL_ID", "HuggingFaceTB/SmolVLM-Instruct")
FREEZE_VISION = "--freeze-vision" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

processor = AutoProcessor.from_pretrained(model_id)
model = AutoModelForImageTextToText.from_pretrained(model_id, dtype=torch.bfloat16 if DEVICE == "cuda" else "auto").to(DEVICE)
if FREEZE_VISION:
    for param in model.model.vision_model.parameters():
        param.requires_grad = False

split_ds = load_dataset("imagefolder", data_dir=os.environ["DATA_DIR"], split="train").train_test_split(test_size=0.2, seed=0)
train_ds = split_ds["train"]

image_token_id = processor.tokenizer.additional_special_tokens_ids[
    processor.tokenizer.additional_special_tokens.index("<image>")
] if hasattr(processor.tokenizer, "additional_special_tokens") else processor.tokenizer.convert_tokens_to_ids("<image>")


def collate_fn(examples):
    texts = []
    images = []
    for example in examples:
        image = example["image"]
        if image.mode != "RGB":
            image = image.convert("RGB")
        messages = [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Answer briefly."},
                    {"type": "image"},
                    {"type": "text", "text": example["question"]},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": example["answer"]}]},
        ]
        text = processor.apply_chat_template(messages, add_generation_prompt=False)
        texts.append(text.strip())
        images.append([image])

    batch = processor(text=texts, images=images, return_tensors="pt", padding=True)
    labels = batch["input_ids"].clone()
    labels[labels == processor.tokenizer.pad_token_id] = -100
    labels[labels == image_token_id] = -100
    batch["labels"] = labels
    return batch


training_args = TrainingArguments(
    num_train_epochs=1,
    max_steps=int(os.environ.get("MAX_STEPS", -1)),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    warmup_steps=1,
    learning_rate=1e-4,
    weight_decay=0.01,
    logging_steps=1,
    save_strategy="no",
    optim="adamw_torch",
    bf16=DEVICE == "cuda",
    use_cpu=DEVICE == "cpu",
    output_dir=os.environ.get("OUTPUT_DIR", "./smolvlm-vqa"),
    report_to="none",
    remove_unused_columns=False,
    gradient_checkpointing="--gradient-checkpointing" in sys.argv,
)
trainer = Trainer(model=model, args=training_args, data_collator=collate_fn, train_dataset=train_ds)
trainer.train()
trainer.save_model()
