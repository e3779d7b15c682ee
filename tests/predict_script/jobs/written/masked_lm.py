"""Domain adaptation of BERT: masked language modelling on jsonl."""
import argparse
import math

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="bert-base-uncased")
parser.add_argument("--train", required=True)
parser.add_argument("--valid", required=True)
parser.add_argument("--output", default="bert-domain")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--grad-accum", type=int, default=1)
parser.add_argument("--steps", type=int, default=-1)
parser.add_argument("--epochs", type=float, default=3)
parser.add_argument("--lr", type=float, default=5e-5)
parser.add_argument("--mlm-probability", type=float, default=0.15)
parser.add_argument("--max-length", type=int, default=128)
parser.add_argument("--num-workers", type=int, default=2)
parser.add_argument("--cpu", action="store_true")
parser.add_argument("--freeze-layers", type=int, default=0, help="freeze embeddings and the first N layers")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
if device == "cuda":
    p = torch.cuda.get_device_properties(0)
    print(f"GPU: {p.name}, {p.total_memory / 1024**3:.1f} GB, capability {p.major}.{p.minor}")
else:
    print("No GPU, this is going to be slow")

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForMaskedLM.from_pretrained(args.model).to(device)

if args.freeze_layers:
    for param in model.bert.embeddings.parameters():
        param.requires_grad = False
    for layer in model.bert.encoder.layer[: args.freeze_layers]:
        for param in layer.parameters():
            param.requires_grad = False
trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
total = sum(p.numel() for p in model.parameters())
print(f"trainable {trainable:,} of {total:,} ({100 * trainable / total:.1f}%)")

ds = load_dataset("json", data_files={"train": args.train, "validation": args.valid})
ds = ds.map(
    lambda batch: tokenizer(batch["text"], truncation=True, max_length=args.max_length, return_special_tokens_mask=True),
    batched=True,
    remove_columns=ds["train"].column_names,
)
lengths = [len(x) for x in ds["train"]["input_ids"]]
print(f"{len(lengths)} texts, mean length {sum(lengths) / len(lengths):.1f}, longest {max(lengths)}")

collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=True, mlm_probability=args.mlm_probability, pad_to_multiple_of=8)

use_bf16 = device == "cuda" and torch.cuda.is_bf16_supported()
training_args = TrainingArguments(
    output_dir=args.output,
    per_device_train_batch_size=args.batch_size,
    per_device_eval_batch_size=args.batch_size,
    gradient_accumulation_steps=args.grad_accum,
    num_train_epochs=args.epochs,
    max_steps=args.steps,
    learning_rate=args.lr,
    weight_decay=0.01,
    warmup_steps=1,
    bf16=use_bf16,
    fp16=device == "cuda" and not use_bf16,
    dataloader_num_workers=args.num_workers,
    train_sampling_strategy="group_by_length",
    eval_strategy="epoch",
    save_strategy="no",
    logging_steps=1,
    report_to="none",
    use_cpu=args.cpu,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=ds["train"],
    eval_dataset=ds["validation"],
    data_collator=collator,
    processing_class=tokenizer,
)
before = trainer.evaluate()
print(f"perplexity before: {math.exp(before['eval_loss']):.2f}")
trainer.train()
after = trainer.evaluate()
print(f"perplexity after: {math.exp(after['eval_loss']):.2f}")
trainer.save_model(args.output)

if device == "cuda":
    print(f"peak memory: {torch.cuda.max_memory_allocated() / 1024**2:.0f} MB")

# a look at what it has learned
model.eval()
inputs = tokenizer(f"Anna bought the {tokenizer.mask_token} in Berlin.", return_tensors="pt").to(model.device)
with torch.no_grad():
    logits = model(**inputs).logits
position = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero()[0].item()
print("top 5:", tokenizer.convert_ids_to_tokens(logits[0, position].topk(5).indices.tolist()))
