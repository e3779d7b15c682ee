"""A script of a user: an encoder-decoder that learns to shorten sentences, evaluated by what it generates."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model: str = field(default="")
    train_file: str = field(default="")
    max_source_length: int = field(default=48)
    max_target_length: int = field(default=16)


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, Seq2SeqTrainingArguments))
    script_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(script_args.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(script_args.model)

    def encode(text: str) -> dict:
        source = tokenizer(text, max_length=script_args.max_source_length, truncation=True)
        target = tokenizer(text.split(" jumps ")[0], max_length=script_args.max_target_length, truncation=True)
        source["labels"] = target["input_ids"]
        return source

    texts = [json.loads(line)["text"] for line in Path(script_args.train_file).read_text().splitlines()]

    def compute_metrics(predictions):
        ids = np.where(predictions.predictions < 0, tokenizer.pad_token_id, predictions.predictions)
        lengths = [len(text.split()) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
        return {"generated_words": float(np.mean(lengths)), "first_token": float(ids[:, 1].mean())}

    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=[encode(text) for text in texts[:64]],
        eval_dataset=[encode(text) for text in texts[64:72]],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100, pad_to_multiple_of=8),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    results = trainer.predict(trainer.eval_dataset, metric_key_prefix="predict", max_length=12, num_beams=2)
    decoded = tokenizer.batch_decode(np.where(results.predictions < 0, 0, results.predictions))
    (Path(training_args.output_dir) / "generated_predictions.txt").write_text("\n".join(decoded))


if __name__ == "__main__":
    main()
