# LoRA, resumed, the best of its checkpoints merged and saved in 16 bit
import os
import sys

import torch
from datasets import load_dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
set_seed(args.seed)
base, data = os.environ["BASE_MODEL"], os.environ["DATA_DIR"]

tokenizer = AutoTokenizer.from_pretrained(base)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(base)
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))

files = {split: f"{data}/{split}.txt" for split in ("train", "validation")}
texts = load_dataset("text", data_files=files).filter(lambda row: row["text"].strip())
tokens = texts.map(
    lambda row: tokenizer(row["text"], truncation=True, max_length=96, padding="max_length"), remove_columns="text"
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=tokens["train"],
    eval_dataset=tokens["validation"].select(range(8)),
    processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.log_metrics("train", result.metrics)
trainer.save_metrics("train", result.metrics)
trainer.save_model()
tokenizer.save_pretrained(args.output_dir)
with open(os.path.join(args.output_dir, "done.txt"), "w") as f:
    print(result.training_loss, file=f)

folder = os.path.join(args.output_dir, "merged")
os.makedirs(folder, exist_ok=True)
if os.environ.get("MERGE") == "reloaded":  # beside the one that was trained
    reloaded = AutoPeftModelForCausalLM.from_pretrained(args.output_dir, dtype=torch.bfloat16)
    merged = reloaded.to(args.device).merge_and_unload()
else:
    merged = trainer.model.merge_and_unload(safe_merge=True).to(torch.bfloat16)
merged.save_pretrained(folder)
tokenizer.save_pretrained(folder)
print("merged into", folder, file=sys.stderr)
