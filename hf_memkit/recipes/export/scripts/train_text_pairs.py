"""Train a model to write a target text for a source: translations, summaries, answers. args.yaml has its model, data
and settings, with reasons. An evaluation measures the loss, generates a text for each source, and compares it with the
target. The last pairs are held out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, Seq2SeqTrainingArguments

from hf_memkit import attach
from hf_memkit.components.generating_trainer import GeneratingTrainer
from hf_memkit.components.generation_metrics import generation_metrics
from hf_memkit.recipes.export.scripts.job import TrainingJob
from hf_memkit.recipes.export.scripts.pair_rows import read


def main() -> None:
    job = TrainingJob(Path(__file__).resolve().parent)
    data = job.data

    rows = read(job.source)
    tokenizer = job.load_tokenizer(text for column in ("source", "target") for text in rows[column])

    def encode(rows: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        sources = [data["prefix"] + text for text in rows["source"]]
        inputs = tokenizer(sources, truncation=True, max_length=data["sequence_length"])
        labels = tokenizer(text_target=rows["target"], truncation=True, max_length=data["target_length"])
        return {"input_ids": inputs["input_ids"], "labels": labels["input_ids"]}

    train_dataset, eval_dataset = job.hold_out(rows.map(encode, batched=True, remove_columns=rows.column_names))

    arguments = job.training_arguments(Seq2SeqTrainingArguments)
    model = job.load_model(AutoModelForSeq2SeqLM)
    options = {
        "data_collator": DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),  # faster on tensor cores
        "compute_metrics": generation_metrics(tokenizer),
        **job.trainer_options(model, arguments, tokenizer),
    }
    trainer = GeneratingTrainer(train_dataset=train_dataset, eval_dataset=eval_dataset, **options)
    job.prepare_trainer(trainer)
    attach(trainer)  # memory at every step: memory-rank0.jsonl, one file a process
    job.train(trainer)  # started again, it continues from the newest checkpoint; Ctrl-C saves one
    trainer.save_model(str(Path(arguments.output_dir) / "model"))
    job.finish()


if __name__ == "__main__":
    main()
