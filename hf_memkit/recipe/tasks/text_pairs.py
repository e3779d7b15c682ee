"""Pairs of texts, a source and its target: translation, summaries, answers. For encoder-decoders.

A row's source (after the recipe's prefix) and target become tokens, each cut to its own length and padded by the
collator to the longest of a batch. An evaluation measures the loss, generates a text for each source, and compares it
with the target (`hf_memkit.components.generation_metrics`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Final

from hf_memkit.errors import DataError
from hf_memkit.recipe.tables import (
    Reader,
    Table,
    as_tokens,
    checked_text,
    hold_out,
    load_table,
    tokenizer_for,
)
from hf_memkit.recipe.tasks.made_up_texts import summaries
from hf_memkit.recipe.tasks.task import Examples, PaddedTask, Say, Settings
from hf_memkit.recipe.tokenizer import Framing
from hf_memkit.setup import Setup

_FRAMING: Final = Framing({"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}, single="$A </s>")
"""T5's special tokens and their IDs (transformers: T5Config)."""

_MULTIPLE: Final = 8
"""Of the tokens of a batch: tensor cores are fast then."""


class _TextPairs(PaddedTask):
    name: ClassVar[str] = "text-pairs"
    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"
    trainer_class: ClassVar[str] = "hf_memkit.components.generating_trainer:GeneratingTrainer"
    arguments_class: ClassVar[str] = "transformers:Seq2SeqTrainingArguments"
    # T5's loss is the mean of its micro-batch, and its forward takes any keyword.
    model_parts: ClassVar[Settings] = {"mean_loss": ({}, "the model averages its loss itself")}
    columns: ClassVar[Mapping[str, str]] = {"source": "source", "target": "target"}
    local_form: ClassVar[str] = "a table of text pairs: JSON lines, CSV, TSV or parquet, or a folder of one kind"
    example: ClassVar[str] = '{"source": "The house is small.", "target": "Das Haus ist klein."}'
    script: ClassVar[str] = "train_text_pairs"
    padded_to: ClassVar[int] = _MULTIPLE
    script_reads: ClassVar[tuple[str, ...]] = ("prefix", "sequence_length")

    def data_settings(self, data: Any) -> Settings:
        found: dict[str, tuple[Any, str]] = {"prefix": (data.prefix, "tells the model what to do; before each source")}
        if data.target_length is not None:
            found["target_length"] = (data.target_length, "the recipe's maximum tokens of a target")
        return found

    def arguments(self, data: Any) -> Settings:
        return {
            "prediction_loss_only": (False, "the generated texts are compared with the targets"),
            "predict_with_generate": (True, "an evaluation keeps the tokens that it generates, and no logits"),
            "generation_num_beams": (1, "each further beam holds its own keys and values"),
        }

    def settled(self, setup: Setup) -> Setup:
        _, target_length = _lengths(setup)
        if setup.get("data.target_length", target_length) != target_length:
            setup = setup.put("data.target_length", target_length, "at most the maximum length of a source")
        return setup.put(
            "arguments.generation_max_length", target_length + 1, "the maximum length of a target, and its first token"
        )

    def reader(self) -> Reader:
        return lambda columns, where, row: {
            role: checked_text(self, columns, role, where, row) for role in ("source", "target")
        }

    def features(self) -> Any:
        import datasets

        return datasets.Features({role: datasets.Value("large_string") for role in self.columns})

    def made_up(self) -> list[dict[str, Any]]:
        return summaries()

    def read(self, setup: Setup) -> Table:
        table = load_table(self, setup)
        if len(table.rows) < 2:
            raise DataError(f"{table.source}: one pair; the minimum is 2, one to train on and one to hold out")
        return table

    def prepare(self, setup: Setup, say: Say) -> Examples:
        data = setup.section("data")
        table = self.read(setup)
        say(f"Data: {table.source}")
        tokenizer = tokenizer_for(setup, table, ("source", "target"), self.framing(setup), say)
        length, target_length = _lengths(setup)
        # A closure would have to be hashed with all that it sees.
        encode = partial(_encode, tokenizer, data["prefix"], length, target_length)
        limits = {"input_ids": ("sources", length), "labels": ("targets", target_length)}
        train, held_out = hold_out(as_tokens(table.rows, encode, limits, say), data["held_out"])
        return Examples(train, held_out, tokenizer)

    def padded(self, setup: Setup) -> tuple[str, ...]:
        return ("input_ids", "labels")

    def framing(self, setup: Setup) -> Framing:
        return _FRAMING

    def examples(self) -> list[dict[str, Any]]:
        return self.made_up()


def _lengths(setup: Setup) -> tuple[int, int]:
    """Tokens of a source and of a target, at most."""
    length = int(setup["data.sequence_length"])
    return length, min(length, int(setup.get("data.target_length", length)))


def _encode(
    tokenizer: Any, prefix: str, length: int, target_length: int, rows: Mapping[str, list[Any]]
) -> dict[str, list[list[int]]]:
    sources = tokenizer([prefix + text for text in rows["source"]], truncation=True, max_length=length)
    targets = tokenizer(text_target=rows["target"], truncation=True, max_length=target_length)
    return {"input_ids": sources["input_ids"], "labels": targets["input_ids"]}


TASK = _TextPairs()
