import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    TorchAoConfig,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("model_id")
parser.add_argument("data")
parser.add_argument("--quantization", choices=("nf4", "int8", "torchao"), default="nf4")
parser.add_argument("--optim", default="paged_adamw_8bit")
parser.add_argument("--dora", action="store_true")
parser.add_argument("--compile-backend")
parser.add_argument("--output-dir", default="outputs")
parser.add_argument("--max-steps", type=int, default=10)
args = parser.parse_args()

compute_dtype = torch.float32
if torch.cuda.is_available():
    compute_dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
if args.quantization == "nf4":
    quantization_config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=compute_dtype,
    )
elif args.quantization == "int8":
    quantization_config = BitsAndBytesConfig(load_in_8bit=True)
else:
    from torchao.quantization import Int8WeightOnlyConfig

    quantization_config = TorchAoConfig(Int8WeightOnlyConfig())

tokenizer = AutoTokenizer.from_pretrained(args.model_id)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(
    args.model_id, quantization_config=quantization_config, dtype=compute_dtype
)
print(f"{model.get_memory_footprint() / 2**20:.2f} MiB")

model.gradient_checkpointing_enable()
model = prepare_model_for_kbit_training(model)
config = LoraConfig(
    r=8,
    lora_alpha=32,
    target_modules=["q_proj", "v_proj"],
    lora_dropout=0.05,
    bias="none",
    task_type="CAUSAL_LM",
    use_dora=args.dora,
)
model = get_peft_model(model, config)
model.print_trainable_parameters()

data = load_dataset("text", data_files=args.data)
data = data.map(lambda samples: tokenizer(samples["text"], truncation=True), batched=True, remove_columns=["text"])

trainer = Trainer(
    model=model,
    train_dataset=data["train"],
    args=TrainingArguments(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        warmup_steps=2,
        max_steps=args.max_steps,
        learning_rate=2e-4,
        bf16=compute_dtype == torch.bfloat16,
        fp16=compute_dtype == torch.float16,
        logging_steps=1,
        output_dir=args.output_dir,
        optim=args.optim,
        report_to="none",
        torch_compile_backend=args.compile_backend,
    ),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
model.config.use_cache = False
trainer.train()
