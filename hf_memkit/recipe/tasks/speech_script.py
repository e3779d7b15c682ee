"""The part of an exported script that reads speech."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_memkit.recipe.export_data import literal, tokenizer_is_trained, uses_fallback
from hf_memkit.recipe.table_rows import TABLE_SUFFIXES
from hf_memkit.recipe.tasks.media import files_in, load_table_line, source_text
from hf_memkit.recipe.tasks.task import Script
from hf_memkit.training_setup import TrainingSetup
from hf_memkit.user_files import user_path

__all__ = ["speech_script"]


def speech_script(job: Any, feature_extractor: Any) -> Script:
    """Lines that read the same speech, and the files that they need.

    Args:
        job: the run.
        feature_extractor: what it would use here.
    """
    setup = job.setup
    trained = tokenizer_is_trained(setup)
    names = ("speech_batches", "speech_batches_sound")
    package = "from hf_memkit.components."
    files = {f"{name}.py": source_text(f"hf_memkit.components.{name}").replace(package, "from ") for name in names}
    data = _data_lines(setup, feature_extractor.chunk_length)
    used = [name for name in ("Audio", "Dataset", "load_dataset") if any(name in line for line in data)]
    imports = [f"from datasets import {', '.join(used)}"]
    imports.append("from speech_batches import SpeechBatches, WordErrors")
    if any("seconds_of" in line for line in data):
        imports.append("from speech_batches_sound import seconds_of")
    if uses_fallback(setup):
        files["made_up_speech.py"] = source_text("hf_memkit.recipe.tasks.made_up_speech")
        imports.append("from made_up_speech import made_up_speech")
    if trained:
        files["whisper_tokenizer.py"] = source_text("hf_memkit.recipe.tasks.whisper_tokenizer")
        imports.append("from whisper_tokenizer import token_values, train_whisper_tokenizer")
    dtype = setup.get("model.dtype")
    cast = f", dtype=torch.{dtype}" if dtype else ""
    return Script(
        data="\n".join([*data, "", *_split_lines(job), "", *_processor_lines(setup, feature_extractor, trained)]),
        imports=tuple(imports),
        transformers=(
            "WhisperProcessor",
            *(("WhisperFeatureExtractor",) if trained else ()),
        ),
        processing="processor",
        model_values=("**token_values(processor.tokenizer)",) if trained else (),
        decided=_decided() if trained else (),
        trainer=(
            f"    data_collator=SpeechBatches(processor{cast}),",
            "    compute_metrics=WordErrors(processor.tokenizer),",
        ),
        requirements=("soundfile",),
        files=files,
    )


def _decided() -> tuple[str, ...]:
    from hf_memkit.recipe.tasks.whisper_tokenizer import TOKEN_VALUES  # which imports transformers

    return TOKEN_VALUES


def _data_lines(setup: TrainingSetup, longest_s: float) -> list[str]:
    """Lines that make `rows`."""
    source, columns = setup["data.source"], setup["data.columns"]
    lines = ["# Speech: files that are opened when their batch is made."]
    if uses_fallback(setup):
        return [*lines, "rows = Dataset.from_list(made_up_speech())"]
    path = user_path(str(source)) if source is not None else None
    if path is None or not path.exists():
        return [*lines, *_hub_lines(setup, columns, longest_s)]
    table: Path | None = path
    if path.is_dir():
        table = next((file for file in files_in(path)[1] if file.suffix.lower() in TABLE_SUFFIXES), None)
    if table is not None:
        folder = path if path.is_dir() else path.parent
        return [
            *lines,
            f'FOLDER = Path("{folder.resolve()}")',
            load_table_line("table", table),
            'name = next(each for each in ("file_name", "audio", "path", "file") if each in table.column_names)',
            f'text = next(each for each in ("{columns["text"]}", "text", "transcription", "sentence", "transcript")'
            " if each in table.column_names)",
            'audio = [{"bytes": None, "path": str(FOLDER / each)} for each in table[name]]',
            'rows = Dataset.from_dict({"audio": audio, "text": [" ".join(each.split()) for each in table[text]]})',
        ]
    return [
        *lines,
        f'FOLDER = Path("{path.resolve()}")',
        'texts = sorted(FOLDER.rglob("*.txt"))',
        "sounds = [next(file for file in text.parent.glob(f\"{text.stem}.*\") if file != text) for text in texts]",
        'audio = [{"bytes": None, "path": str(file)} for file in sounds]',
        'words = [" ".join(text.read_text(encoding="utf-8-sig").split()) for text in texts]',
        'rows = Dataset.from_dict({"audio": audio, "text": words})',
    ]  # fmt: skip


def _hub_lines(setup: TrainingSetup, columns: Mapping[str, str], longest_s: float) -> list[str]:
    name, config, split = setup["data.hub_id"], setup["data.hub_config"], setup["data.hub_split"]
    if setup["data.source"] is not None:
        name, _, asked = str(setup["data.source"]).partition(":")
        config, split = asked or None, "train"
    audio, text = columns["audio"], columns["text"]
    renamed = [
        f'rows = rows.rename_column("{have}", "{want}")'
        for have, want in ((audio, "audio"), (text, "text"))
        if have != want
    ]
    return [
        f'rows = load_dataset("{name}", {literal(config)}, split="{split}").select_columns(["{audio}", "{text}"])',
        *renamed,
        'rows = rows.cast_column("audio", Audio(decode=False))',
        f"# The model hears {longest_s:g} s at once.",
        "rows = rows.filter(",
        '    lambda row: row["text"].strip() and 0 < seconds_of(row["audio"]["bytes"] or row["audio"]["path"]) '
        f"<= {longest_s:g}",
        ")",
    ]


def _split_lines(job: Any) -> list[str]:
    """Lines that make `train_dataset` and `eval_dataset`."""
    setup = job.setup
    batch = setup["arguments.per_device_eval_batch_size"] * job.processes
    return [
        f"held_out = min(max(1, round({setup['data.held_out']} * len(rows))), len(rows) - 1)",
        "train_dataset = rows.select(range(len(rows) - held_out))",
        f"evaluated = min(held_out, {setup['data.evaluated_blocks']})",
        f"evaluated = evaluated // {batch} * {batch} or evaluated  # whole batches",
        "eval_dataset = rows.select(range(len(rows) - held_out, len(rows) - held_out + evaluated))",
    ]


def _processor_lines(setup: TrainingSetup, feature_extractor: Any, trained: bool) -> list[str]:
    if not trained:
        language = setup["data.language"]
        told = f', language="{language}", task="transcribe"' if language else ""
        return [f'processor = WhisperProcessor.from_pretrained("{setup["data.tokenizer"]}"{told})']
    return [
        "processor = WhisperProcessor(",
        f"    WhisperFeatureExtractor(feature_size={feature_extractor.feature_size}, "
        f"chunk_length={feature_extractor.chunk_length}),",
        f'    train_whisper_tokenizer(rows["text"], {setup["data.vocabulary_size"]}),',
        ")",
    ]
