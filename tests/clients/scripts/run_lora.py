"""A script of a user: fine-tunes a language model, with PEFT's LoRA (and merges the adapter at the end) or whole."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model: str = field(default="")
    train_file: str = field(default="")
    rank: int = field(default=8)


def main() -> None:
    script_args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(script_args.model)
    model = AutoModelForCausalLM.from_pretrained(script_args.model)
    if script_args.rank:
        config = LoraConfig(r=script_args.rank, lora_alpha=16, lora_dropout=0.1, target_modules=["c_attn"])
        config.task_type = TaskType.CAUSAL_LM
        model = get_peft_model(model, config)
        model.print_trainable_parameters()

    texts = [json.loads(line)["text"] for line in Path(script_args.train_file).read_text().splitlines()]
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=[tokenizer(text, truncation=True, max_length=48) for text in texts],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    if script_args.rank:
        model.save_pretrained(Path(training_args.output_dir) / "adapter")
        model.merge_and_unload().save_pretrained(Path(training_args.output_dir) / "merged")
    else:
        trainer.save_model()
        trainer.save_state()
        trainer.accelerator.print("saved")


if __name__ == "__main__":
    main()
