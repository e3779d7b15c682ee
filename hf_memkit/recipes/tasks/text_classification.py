"""Texts, or pairs of texts, with a class each: sentiment, topic, entailment; for any model with a classification head.
The classes are those in the data, sorted by number if they are numbers, otherwise alphabetically. The recipe's share
of each class is held out from its end, so that data sorted by class is evaluated on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from hf_memkit.recipes.tasks.made_up_texts import kinds_of_text
from hf_memkit.recipes.tasks.task import Framing, Settings, Task
from hf_memkit.setup.setup import Setup

_TOKENS: Final = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
                  "mask_token": "[MASK]"}  # fmt: skip


class _TextClassification(Task):
    name: ClassVar[str] = "text-classification"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    model_parts: ClassVar[Settings] = {"mean_loss": ({}, "the model averages its loss over the examples itself")}
    columns: ClassVar[Mapping[str, str]] = {"text": "text", "label": "label"}
    local_form: ClassVar[str] = (
        "a table of texts with a label each: JSON lines, CSV, TSV or parquet, or a folder of one kind"
    )
    script: ClassVar[str] = "train_text_classification"
    rows: ClassVar[str] = "class_rows"

    def arguments(self, data: Any) -> Settings:
        why = "accuracy and F1 are measured; of the logits only the likeliest class stays"
        return {"prediction_loss_only": (False, why)}

    def padded_columns(self, setup: Setup) -> tuple[str, ...]:
        return ("input_ids",)

    def framing(self, setup: Setup) -> Framing:
        """BERT's special tokens; the second text of a pair is marked if the model distinguishes them."""
        kinds = int(setup["model.architecture"].get("type_vocab_size", 2))
        second = ":1" if kinds > 1 else ""
        return Framing(_TOKENS, single="[CLS] $A [SEP]", pair=f"[CLS] $A [SEP] $B{second} [SEP]{second}")

    def examples(self) -> list[dict[str, Any]]:
        return kinds_of_text()


TASK = _TextClassification()
