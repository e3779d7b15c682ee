"""Pairs of texts, a source and its target: translation, summaries, answers; for encoder-decoders.

A row's source (after the recipe's prefix) and target become tokens, each truncated to its own length and padded by the
collator to the longest of a batch. An evaluation measures the loss, generates a text for each source, and compares it
with the target (`hf_memkit.components.generation_metrics`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from hf_memkit.recipes.tasks.made_up_texts import summaries
from hf_memkit.recipes.tasks.task import Framing, Settings, Task
from hf_memkit.setup.setup import Setup

_FRAMING: Final = Framing({"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}, single="$A </s>")
"""T5's special tokens and their IDs (transformers: T5Config)."""


class _TextPairs(Task):
    name: ClassVar[str] = "text-pairs"
    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"
    trainer_class: ClassVar[str] = "hf_memkit.components.generating_trainer:GeneratingTrainer"
    arguments_class: ClassVar[str] = "transformers:Seq2SeqTrainingArguments"
    # T5's loss is the mean of its micro-batch, and its forward takes any keyword.
    model_parts: ClassVar[Settings] = {"mean_loss": ({}, "the model averages its loss itself")}
    columns: ClassVar[Mapping[str, str]] = {"source": "source", "target": "target"}
    local_form: ClassVar[str] = "a table of text pairs: JSON lines, CSV, TSV or parquet, or a folder of one kind"
    script: ClassVar[str] = "train_text_pairs"
    rows: ClassVar[str] = "pair_rows"
    script_reads: ClassVar[tuple[str, ...]] = ("prefix", "sequence_length")

    def data_settings(self, data: Any) -> Settings:
        settings = {"prefix": (data.prefix, "tells the model what to do; before each source")}
        if data.target_length is not None:
            settings["target_length"] = (data.target_length, "the recipe's maximum tokens of a target")
        return settings

    def arguments(self, data: Any) -> Settings:
        return {
            "prediction_loss_only": (False, "the generated texts are compared with the targets"),
            "predict_with_generate": (True, "an evaluation keeps the tokens that it generates, and no logits"),
            "generation_num_beams": (1, "each further beam holds its own keys and values"),
        }

    def with_derived_settings(self, setup: Setup) -> Setup:
        length = int(setup["data.sequence_length"])
        target_length = min(length, int(setup.get("data.target_length", length)))
        if setup.get("data.target_length", target_length) != target_length:
            setup = setup.put("data.target_length", target_length, "at most the maximum length of a source")
        why = "the maximum length of a target, and its first token"
        return setup.put("arguments.generation_max_length", target_length + 1, why)

    def padded_columns(self, setup: Setup) -> tuple[str, ...]:
        return ("input_ids", "labels")

    def framing(self, setup: Setup) -> Framing:
        return _FRAMING

    def examples(self) -> list[dict[str, Any]]:
        return summaries()


TASK = _TextPairs()
