"""Fine-tune Whisper (after the blog post "Fine-Tune Whisper with Transformers")."""
import wave
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from transformers import (
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)


@dataclass
class SpeechArguments:
    checkpoint: str = "openai/whisper-tiny"
    speech_dir: str = field(default="speech", metadata={"help": "wav files, train.csv and test.csv"})
    language: str = "en"
    freeze_encoder: bool = False


@dataclass
class DataCollatorSpeechSeq2SeqWithPadding:
    processor: Any
    decoder_start_token_id: int

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        input_features = [{"input_features": f["input_features"]} for f in features]
        batch = self.processor.feature_extractor.pad(input_features, return_tensors="pt")
        label_features = [{"input_ids": f["labels"]} for f in features]
        labels_batch = self.processor.tokenizer.pad(label_features, return_tensors="pt")
        labels = labels_batch["input_ids"].masked_fill(labels_batch.attention_mask.ne(1), -100)
        if (labels[:, 0] == self.decoder_start_token_id).all().cpu().item():
            labels = labels[:, 1:]
        batch["labels"] = labels
        return batch


def read_wav(path):
    with wave.open(str(path)) as f:
        samples = np.frombuffer(f.readframes(f.getnframes()), dtype="<i2")
        return samples.astype(np.float32) / 32768, f.getframerate()


def word_error_rate(prediction, reference):
    p, r = prediction.split(), reference.split()
    row = list(range(len(p) + 1))
    for i, word in enumerate(r, 1):
        previous, row[0] = row[0], i
        for j, other in enumerate(p, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return row[-1] / max(len(r), 1)


parser = HfArgumentParser((SpeechArguments, Seq2SeqTrainingArguments))
args, training_args = parser.parse_args_into_dataclasses()

processor = WhisperProcessor.from_pretrained(args.checkpoint, language=args.language, task="transcribe")
model = WhisperForConditionalGeneration.from_pretrained(args.checkpoint)
model.generation_config.language = args.language
model.generation_config.task = "transcribe"
model.generation_config.forced_decoder_ids = None
model.config.use_cache = False
if args.freeze_encoder:
    model.freeze_encoder()

speech = Path(args.speech_dir)
data = load_dataset("csv", data_files={"train": str(speech / "train.csv"), "test": str(speech / "test.csv")})


def prepare(row):
    samples, rate = read_wav(speech / row["file_name"])
    return {
        "input_features": processor.feature_extractor(samples, sampling_rate=rate).input_features[0],
        "labels": processor.tokenizer(row["transcription"]).input_ids,
        "input_length": len(samples) / rate,
    }


data = data.map(prepare, remove_columns=["file_name", "transcription"])
data["train"] = data["train"].filter(lambda seconds: seconds < 30.0, input_columns=["input_length"])
data = data.remove_columns("input_length")
print(data)


def compute_metrics(pred):
    label_ids = np.where(pred.label_ids == -100, processor.tokenizer.pad_token_id, pred.label_ids)
    pred_ids = np.where(pred.predictions == -100, processor.tokenizer.pad_token_id, pred.predictions)
    pred_str = processor.tokenizer.batch_decode(pred_ids, skip_special_tokens=True)
    label_str = processor.tokenizer.batch_decode(label_ids, skip_special_tokens=True)
    return {"wer": 100 * float(np.mean([word_error_rate(p, r) for p, r in zip(pred_str, label_str)]))}


trainer = Seq2SeqTrainer(
    args=training_args,
    model=model,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=DataCollatorSpeechSeq2SeqWithPadding(processor, model.config.decoder_start_token_id),
    compute_metrics=compute_metrics,
    processing_class=processor,
)
processor.save_pretrained(training_args.output_dir)
trainer.train()
print(trainer.evaluate())
trainer.save_model()
