"""Language modeling: documents → packed blocks of equal length, for a causal language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from hf_memkit.recipes.tasks.made_up_texts import help_texts
from hf_memkit.recipes.tasks.task import END_OF_TEXT, Framing, Task
from hf_memkit.setup.setup import Setup


class _LanguageModeling(Task):
    name: ClassVar[str] = "language-modeling"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    local_form: ClassVar[str] = "a file of text, JSON lines or parquet, or a folder of one kind of them"
    script: ClassVar[str] = "train_text"
    rows: ClassVar[str] = "text_rows"

    def framing(self, setup: Setup) -> Framing:
        names = ("bos_token", "eos_token", "pad_token")  # packing puts the end between documents
        return Framing(dict.fromkeys(names, END_OF_TEXT))

    def examples(self) -> Iterator[dict[str, str]]:
        return ({"text": text} for text in help_texts())


TASK = _LanguageModeling()
