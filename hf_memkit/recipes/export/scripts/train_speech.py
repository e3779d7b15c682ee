"""Train a model such as Whisper to transcribe speech. args.yaml has its model, data and settings, with reasons. The
data loader's workers open sound files when their batch is made. The last ones are held out."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForSpeechSeq2Seq, Seq2SeqTrainingArguments, WhisperFeatureExtractor, WhisperProcessor

from hf_memkit import attach
from hf_memkit.components.generating_trainer import GeneratingTrainer
from hf_memkit.components.speech_batches import SpeechBatches, WordErrors, label_tokens
from hf_memkit.recipes.export.scripts.job import TrainingJob
from hf_memkit.recipes.export.scripts.speech_rows import read


def main() -> None:
    job = TrainingJob(Path(__file__).resolve().parent)
    data = job.data

    rows = read(job.source)
    tokens: dict[str, int] = {}  # config values for a tokenizer that is trained here
    if data["tokenizer"] is None:
        from hf_memkit.recipes.tasks.whisper_tokenizer import token_values, train_whisper_tokenizer

        extractor = WhisperFeatureExtractor(feature_size=data["feature_size"], chunk_length=data["chunk_length"])
        processor = WhisperProcessor(extractor, train_whisper_tokenizer(rows["text"], data["vocabulary_size"]))
        tokens = token_values(processor.tokenizer)
    else:
        language = {"language": data["language"], "task": "transcribe"} if data["language"] else {}
        processor = WhisperProcessor.from_pretrained(data["tokenizer"], **language)

    maximum = data["sequence_length"]  # tokens
    too_long = {
        number for number, text in enumerate(rows["text"]) if len(label_tokens(processor.tokenizer, text)) > maximum
    }
    if too_long and "hub_id" not in data:
        name = rows[min(too_long)]["audio"]["path"]
        raise SystemExit(f"{name}: its transcript has more than {maximum} tokens; cut file and text into pieces")
    rows = rows.select(sorted(set(range(len(rows))) - too_long))
    train_dataset, eval_dataset = job.hold_out(rows)

    arguments = job.training_arguments(Seq2SeqTrainingArguments)
    model = job.load_model(AutoModelForSpeechSeq2Seq, **tokens)
    dtype = getattr(torch, job.model["dtype"]) if "dtype" in job.model else None
    options = {
        "data_collator": SpeechBatches(processor, dtype=dtype),
        "compute_metrics": WordErrors(processor.tokenizer),
        **job.trainer_options(model, arguments, processor),
    }
    trainer = GeneratingTrainer(train_dataset=train_dataset, eval_dataset=eval_dataset, **options)
    job.prepare_trainer(trainer)
    attach(trainer)  # memory at every step: memory-rank0.jsonl, one file a process
    job.train(trainer)  # started again, it continues from the newest checkpoint; Ctrl-C saves one
    trainer.save_model(str(Path(arguments.output_dir) / "model"))
    job.finish()


if __name__ == "__main__":
    main()
