"""A script of a user: trains GPT-2 on a text file, as transformers' example of this name does."""

import math
import sys
from dataclasses import dataclass, field
from itertools import chain

import torch
from datasets import load_dataset
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None)
    dtype: str | None = field(default=None)
    model_type: str = field(default="gpt2")
    tokenizer_name: str = field(default="")
    config_overrides: str = field(default="")


@dataclass
class DataArguments:
    train_file: str = field(default="")
    validation_file: str = field(default="")
    block_size: int = field(default=1024)


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=sys.argv[1])
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    if model_args.model_name_or_path:
        dtype = getattr(torch, model_args.dtype) if model_args.dtype else None
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=dtype)
    else:
        config = CONFIG_MAPPING[model_args.model_type]()
        config.update_from_string(model_args.config_overrides)
        model = AutoModelForCausalLM.from_config(config)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw = load_dataset("text", data_files=files)
    tokenized = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])

    def group_texts(examples):
        joined = {name: list(chain(*examples[name])) for name in examples}
        length = len(joined["input_ids"]) // data_args.block_size * data_args.block_size
        blocks = {
            name: [values[i : i + data_args.block_size] for i in range(0, length, data_args.block_size)]
            for name, values in joined.items()
        }
        blocks["labels"] = blocks["input_ids"].copy()
        return blocks

    blocks = tokenized.map(group_texts, batched=True)

    def compute_metrics(predictions):
        right = predictions.predictions[:, :-1] == predictions.label_ids[:, 1:]
        return {"accuracy": float(right.mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"],
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
    )

    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = {**result.metrics, "train_samples": len(blocks["train"])}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    trainer.create_model_card(tasks="text-generation")
    sys.exit(3 if metrics["perplexity"] > 1e9 else 0)


if __name__ == "__main__":
    main()
