"""A script of a user: several processes, DeepSpeed ZeRO. Started by torchrun, with the JSON given by --deepspeed."""

import json
from dataclasses import dataclass, field
from pathlib import Path

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


def main() -> None:
    script_args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(script_args.model)
    model = AutoModelForCausalLM.from_pretrained(script_args.model)
    texts = [json.loads(line)["text"] for line in Path(script_args.train_file).read_text().splitlines()]
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=[tokenizer(text, truncation=True, max_length=48) for text in texts],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.accelerator.print("saved")


if __name__ == "__main__":
    main()
