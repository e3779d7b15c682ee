"""Speech and its transcripts → spectrograms and labels, as for Whisper; the data loader's workers open the files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from hf_memkit.catalog.models import ModelFacts, hub_reachable, quiet_transformers
from hf_memkit.common.errors import InputError
from hf_memkit.recipes.tasks.media import loader_arguments, whole_config
from hf_memkit.recipes.tasks.task import Settings, Task
from hf_memkit.setup.setup import Setup

_FRAMES_A_SECOND: Final = 50
"""Positions of Whisper's encoder: a spectrogram each 10 ms, halved once."""


class _SpeechRecognition(Task):
    name: ClassVar[str] = "speech-recognition"
    auto_class: ClassVar[str] = "AutoModelForSpeechSeq2Seq"
    trainer_class: ClassVar[str] = "hf_memkit.components.generating_trainer:GeneratingTrainer"
    arguments_class: ClassVar[str] = "transformers:Seq2SeqTrainingArguments"
    model_parts: ClassVar[Settings] = {
        "mean_loss": ({}, "Whisper's loss is a mean; Trainer treats it as a sum over the step and would not divide it")
    }
    columns: ClassVar[Mapping[str, str]] = {"audio": "audio", "text": "text"}
    local_form: ClassVar[str] = "a folder of sound files with metadata.csv, or with a .txt beside each"
    script: ClassVar[str] = "train_speech"
    rows: ClassVar[str] = "speech_rows"
    script_needs: ClassVar[tuple[str, ...]] = ("soundfile",)
    script_reads: ClassVar[tuple[str, ...]] = ("language", "sequence_length")
    made_up_by: ClassVar[str] = "made_up_speech"

    def sequence_length(self, requested: int | None, default: int, model: ModelFacts) -> int:
        """Maximum tokens of a transcript, limited by the decoder's positions; the encoder's input has one length."""
        maximum = getattr(whole_config(model.config), "max_target_positions", None)
        if requested is not None and maximum is not None and requested > maximum:
            limit = f"{model.name} writes at most {maximum} tokens"
            raise InputError(f"--sequence-length {requested}: {limit}. Give {maximum} or less")
        return min(requested or default, maximum or default)

    def data_settings(self, data: Any) -> Settings:
        return {"language": (data.language, "the language of the default data set; a multilingual model needs it")}

    def arguments(self, data: Any) -> Settings:
        return {
            **loader_arguments("read sound and compute its spectrograms"),
            "label_names": (["labels"], "what the collator calls them"),
            "prediction_loss_only": (False, "an evaluation also counts wrong words"),
            "predict_with_generate": (True, "on texts that the model generates; no logits are kept"),
            "generation_num_beams": (1, "each further beam holds its own keys and values"),
            "batch_eval_metrics": (True, "counted batch by batch"),
        }

    def with_derived_settings(self, setup: Setup) -> Setup:
        length = setup["data.sequence_length"]
        return setup.put("arguments.generation_max_length", length, "the maximum length of a transcript")

    def columns_among(self, columns: Mapping[str, str], available: Collection[str]) -> dict[str, str]:
        """Names of columns as in AudioFolder and others."""
        known = {
            "audio": ("file_name", "audio", "path", "file", columns["audio"]),
            "text": (columns["text"], "text", "transcription", "sentence", "transcript"),
        }
        return {role: next((n for n in names if n in available), columns[role]) for role, names in known.items()}

    def folders(self, path: Path) -> Mapping[str, Any]:
        return {"folder": str(path.resolve())}

    def processor_settings(self, setup: Setup, own: bool) -> tuple[Settings, tuple[str, ...]]:
        extractor, why = _feature_extractor(setup)
        settings = {"chunk_length": (extractor.chunk_length, f"maximum seconds of sound: {why}")}
        if own:
            return settings, ()
        settings["feature_size"] = (extractor.feature_size, f"bands of its spectrograms: {why}")
        return settings, ("hf_memkit.recipes.tasks.whisper_tokenizer",)


def _feature_extractor(setup: Setup) -> tuple[Any, str]:
    """(the feature extractor, the reason for it)."""
    name = setup["data.tokenizer"]
    with quiet_transformers():
        from transformers import AutoFeatureExtractor, WhisperFeatureExtractor

        if name is not None:
            try:
                own = AutoFeatureExtractor.from_pretrained(name, local_files_only=not hub_reachable())
                if hasattr(own, "chunk_length") and hasattr(own, "sampling_rate"):
                    return own, f"the model's own ({name})"
            except Exception:  # missing, gated or broken files: no common base class
                pass  # the config has all values
        config = whole_config(setup["model.architecture"])
        bands, seconds = int(config.num_mel_bins), int(config.max_source_positions) // _FRAMES_A_SECOND
        extractor = WhisperFeatureExtractor(feature_size=bands, chunk_length=seconds)
    return extractor, f"Whisper's, for {bands} bands and {seconds} s"


TASK = _SpeechRecognition()
