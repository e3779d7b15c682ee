"""Speech and its transcripts → spectrograms and labels, for models of Whisper's kind; the files are opened a batch at
a time, in the data loader's workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from hf_memkit.errors import DataError, InputError
from hf_memkit.models import ModelFacts, hub_reachable, quiet_transformers
from hf_memkit.recipe.sources import HubData, kept, source_of, stamps
from hf_memkit.recipe.tasks.audio_files import EXAMPLE, LOCAL_FORM, audio_columns, audio_rows, list_audio, text_columns
from hf_memkit.recipe.tasks.media import hub_rows, loader_arguments, whole_config
from hf_memkit.recipe.tasks.task import Settings, Task
from hf_memkit.recipe.text_readers import in_one_line
from hf_memkit.setup import Setup

_HEARD_S: Final = 30.0
"""Seconds of sound that Whisper's encoder takes at once, whatever its size (arXiv 2212.04356, section 2.2)."""

_FRAMES_A_SECOND: Final = 50
"""Positions of Whisper's encoder: a spectrogram each 10 ms, halved once."""


class _SpeechRecognition(Task):
    name: ClassVar[str] = "speech-recognition"
    auto_class: ClassVar[str] = "AutoModelForSpeechSeq2Seq"
    trainer_class: ClassVar[str] = "hf_memkit.components.generating_trainer:GeneratingTrainer"
    arguments_class: ClassVar[str] = "transformers:Seq2SeqTrainingArguments"
    model_parts: ClassVar[Settings] = {
        "mean_loss": ({}, "Whisper's loss is a mean, which Trainer takes for a sum over the step: it would not divide")
    }
    columns: ClassVar[Mapping[str, str]] = {"audio": "audio", "text": "text"}
    local_form: ClassVar[str] = LOCAL_FORM
    example: ClassVar[str] = EXAMPLE
    script: ClassVar[str] = "train_speech"
    script_needs: ClassVar[tuple[str, ...]] = ("soundfile",)
    script_reads: ClassVar[tuple[str, ...]] = ("language", "sequence_length")
    made_up_by: ClassVar[str] = "made_up_speech"

    def sequence_length(self, asked: int | None, default: int, model: ModelFacts) -> int:
        """The most tokens of a transcript; what the encoder hears has always the same length.

        Raises:
            InputError: more than the decoder has positions for.
        """
        most = getattr(whole_config(model.config), "max_target_positions", None)
        if asked is not None and most is not None and asked > most:
            raise InputError(
                f"--sequence-length {asked}: {model.name} writes transcripts of at most {most} tokens; give {most} or "
                f"less"
            )
        return min(asked or default, most or default)

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

    def settled(self, setup: Setup) -> Setup:
        length = setup["data.sequence_length"]
        return setup.put("arguments.generation_max_length", length, "the maximum length of a transcript")

    def read(self, setup: Setup, longest_s: float = _HEARD_S) -> tuple[Any, str]:
        """(rows, what a person reads)."""
        source = source_of(setup, any_ending=True)
        if source is None:
            return _made_up()
        if isinstance(source, HubData):
            return _from_hub(source, setup["data.columns"], longest_s)
        return _from_files(source, setup["data.columns"], longest_s)

    def columns_among(self, columns: Mapping[str, str], there: Collection[str]) -> dict[str, str]:
        """As AudioFolder and others have them."""
        known = {"audio": audio_columns(columns), "text": text_columns(columns)}
        return {role: next(name for name in names if name in there) for role, names in known.items()}

    def folders(self, path: Path) -> Mapping[str, Any]:
        return {"folder": str(path.resolve())}

    def processor_settings(self, setup: Setup, own: bool) -> tuple[Settings, tuple[str, ...]]:
        extractor, why = _feature_extractor(setup)
        found = {"chunk_length": (extractor.chunk_length, f"seconds of sound that the model hears at once: {why}")}
        if own:
            return found, ()
        found["feature_size"] = (extractor.feature_size, f"bands of its spectrograms: {why}")
        return found, ("hf_memkit.recipe.tasks.whisper_tokenizer",)


def _features() -> Any:
    import datasets

    return datasets.Features(
        {
            "audio": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
            "text": datasets.Value("string"),
            "sha256": datasets.Value("string"),
            "where": datasets.Value("string"),
        }
    )


def _from_files(path: Path, columns: Mapping[str, str], longest_s: float) -> tuple[Any, str]:
    found = list_audio(path, columns)
    arguments = {"files": found.files, "longest_s": longest_s, "stamps": stamps(file.path for file in found.files)}
    return kept(audio_rows, _features(), arguments, found.source), found.source


def _from_hub(wanted: HubData, columns: Mapping[str, str], longest_s: float) -> tuple[Any, str]:
    import datasets

    from hf_memkit.components.speech_batches_sound import SoundError, seconds_of

    rows = hub_rows(wanted, columns, datasets.Audio, {"audio": "sound", "text": "transcripts"}, LOCAL_FORM)
    text = columns["text"]
    usable: list[int] = []
    for number, row in enumerate(rows):
        where = f"{wanted.name}: row {number + 1}"
        if not isinstance(row["text"], str):
            raise DataError(f"{where}: column {text!r}: expected a transcript, found {row['text']!r:.40}")
        try:
            seconds = seconds_of(row["audio"]["bytes"] or row["audio"]["path"])
        except (SoundError, OSError) as error:
            raise DataError(f"{where}: {error}") from error
        if 0 < seconds <= longest_s and row["text"].strip():
            usable.append(number)
    left = len(rows) - len(usable)
    without = f" ({left} rows without words, or longer than {longest_s:g} s, are left out)" if left else ""
    return rows.select(usable), f"{wanted.name}{without}"


def _made_up() -> tuple[Any, str]:
    import datasets

    from hf_memkit.recipe.tasks.made_up_speech import made_up_speech

    found = made_up_speech()
    features = datasets.Features({name: _features()[name] for name in ("audio", "text")})
    rows = datasets.Dataset.from_list(found, features=features)
    return rows, (
        f"{len(rows)} texts in tones, made here because the hub is not reachable (--data trains on {LOCAL_FORM})"
    )


def _feature_extractor(setup: Setup) -> tuple[Any, str]:
    """(the feature extractor, why this one)."""
    name = setup["data.tokenizer"]
    with quiet_transformers():
        from transformers import AutoFeatureExtractor, WhisperFeatureExtractor

        if name is not None:
            try:
                own = AutoFeatureExtractor.from_pretrained(name, local_files_only=not hub_reachable())
                if hasattr(own, "chunk_length") and hasattr(own, "sampling_rate"):
                    return own, f"the model's own ({name})"
            except (
                Exception
            ):  # missing, gated or broken files: no common base class; the config says all that it needs
                pass
        config = whole_config(setup["model.architecture"])
        bands, seconds = int(config.num_mel_bins), int(config.max_source_positions) // _FRAMES_A_SECOND
        made = WhisperFeatureExtractor(feature_size=bands, chunk_length=seconds)
    return made, f"Whisper's, for {bands} bands and {seconds} s"


def _tokenizer(setup: Setup, rows: Any) -> tuple[Any, str, bool]:
    """(tokenizer, why this one, whether it is the model's own)."""
    from hf_memkit.recipe.tasks.whisper_tokenizer import train_whisper_tokenizer

    name, size = setup["data.tokenizer"], int(setup["data.vocabulary_size"])
    why = f"a small model has a small vocabulary ({size})"
    if name is not None:
        try:
            with quiet_transformers():
                from transformers import AutoTokenizer

                own = AutoTokenizer.from_pretrained(name, local_files_only=not hub_reachable())
                if setup["data.language"] is not None and hasattr(own, "set_prefix_tokens"):
                    own.set_prefix_tokens(language=setup["data.language"], task="transcribe")
            if 1 < len(own) <= size and hasattr(own, "prefix_tokens"):
                return own, f"the model's own ({name}, {len(own)} entries)", True
            why = f"{name} gave none for a model of {size}"
        except Exception as error:  # missing, gated or broken files, an unknown class: no common base class
            why = f"{name} gave none ({in_one_line(error)})" if hub_reachable() else f"{name} cannot be reached"
    try:
        trained = train_whisper_tokenizer(rows["text"], size)
    except ValueError as error:
        raise DataError(f"--data: no tokenizer can be trained on its transcripts: {error}") from error
    return trained, f"byte-level BPE of {len(trained)} entries, trained here on the transcripts; {why}", False


TASK = _SpeechRecognition()
