import argparse
import gc

import torch
from datasets import load_dataset
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

parser = argparse.ArgumentParser("LoRA on chat data")
parser.add_argument("--base_model", type=str, required=True)
parser.add_argument("--data_path", type=str, required=True)
parser.add_argument("--output_dir", type=str, default="./lora-out")
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--micro_batch_size", type=int, default=2)
parser.add_argument("--max_steps", type=int, default=-1)
parser.add_argument("--num_epochs", type=int, default=1)
parser.add_argument("--learning_rate", type=float, default=3e-4)
parser.add_argument("--cutoff_len", type=int, default=256)
parser.add_argument("--lora_r", type=int, default=8)
parser.add_argument("--lora_alpha", type=int, default=16)
parser.add_argument("--lora_dropout", type=float, default=0.05)
parser.add_argument("--lora_target_modules", nargs="+", default=["q_proj", "k_proj", "v_proj", "o_proj"])
parser.add_argument("--val_set_size", type=int, default=8)
cfg = parser.parse_args()

dtype = torch.float32
if torch.cuda.is_available():
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    free, total = torch.cuda.mem_get_info()
    print(f"GPU memory: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")

kwargs = {"device_map": "auto"} if torch.cuda.is_available() else {}
model = AutoModelForCausalLM.from_pretrained(cfg.base_model, dtype=dtype, **kwargs)
tokenizer = AutoTokenizer.from_pretrained(cfg.base_model)
if tokenizer.pad_token is None:
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    model.resize_token_embeddings(len(tokenizer))
tokenizer.padding_side = "right"

model.config.use_cache = False
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.enable_input_require_grads()
model = get_peft_model(
    model,
    LoraConfig(
        r=cfg.lora_r,
        lora_alpha=cfg.lora_alpha,
        lora_dropout=cfg.lora_dropout,
        target_modules=cfg.lora_target_modules,
        bias="none",
        task_type=TaskType.CAUSAL_LM,
    ),
)
model.print_trainable_parameters()


def tokenize(example):
    ids = tokenizer.apply_chat_template(example["messages"], tokenize=True, return_dict=False)[: cfg.cutoff_len]
    prompt = tokenizer.apply_chat_template(example["messages"][:-1], tokenize=True, add_generation_prompt=True, return_dict=False)
    labels = [-100] * min(len(prompt), len(ids)) + ids[len(prompt) :]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


data = load_dataset("json", data_files=cfg.data_path, split="train")
print(tokenizer.apply_chat_template(data[0]["messages"], tokenize=False))
parts = data.train_test_split(test_size=cfg.val_set_size, shuffle=True, seed=42)
train_data = parts["train"].shuffle(seed=0).map(tokenize, remove_columns=data.column_names)
val_data = parts["test"].map(tokenize, remove_columns=data.column_names)

trainer = Trainer(
    model=model,
    train_dataset=train_data,
    eval_dataset=val_data,
    args=TrainingArguments(
        per_device_train_batch_size=cfg.micro_batch_size,
        gradient_accumulation_steps=cfg.batch_size // cfg.micro_batch_size,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        warmup_steps=0.1,
        num_train_epochs=cfg.num_epochs,
        max_steps=cfg.max_steps,
        learning_rate=cfg.learning_rate,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        logging_steps=1,
        optim="adamw_torch",
        eval_strategy="no",
        save_strategy="steps",
        save_steps=200,
        output_dir=cfg.output_dir,
        save_total_limit=3,
        report_to="none",
    ),
    data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8, return_tensors="pt", padding=True),
)
trainer.train()
print(trainer.evaluate())
model.save_pretrained(cfg.output_dir)
tokenizer.save_pretrained(cfg.output_dir)

# merge for serving
del model, trainer
gc.collect()
if torch.cuda.is_available():
    torch.cuda.empty_cache()
base = AutoModelForCausalLM.from_pretrained(cfg.base_model, dtype=dtype)
merged = PeftModel.from_pretrained(base, cfg.output_dir).merge_and_unload()
merged.save_pretrained(cfg.output_dir + "/merged")
