"""Text to go on writing: documents → packed blocks of equal length, for a causal language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from hf_memkit.models import hub_reachable
from hf_memkit.recipe.tasks.made_up_texts import help_texts
from hf_memkit.recipe.tasks.task import Task
from hf_memkit.recipe.tokenizer import CONTINUED, Framing
from hf_memkit.setup import Setup

if TYPE_CHECKING:
    from hf_memkit.recipe.data import Documents


class _LanguageModeling(Task):
    name: ClassVar[str] = "language-modeling"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    local_form: ClassVar[str] = "a file of text, JSON lines or parquet, or a folder of one kind of them"
    example: ClassVar[str] = '{"text": "Once upon a time …"}'
    script: ClassVar[str] = "train_text"

    def read(self, setup: Setup) -> Documents:
        from hf_memkit.recipe.data import load_documents
        from hf_memkit.recipe.sources import is_local

        data = setup.section("data")
        own = data["source"] is not None and is_local(str(data["source"]))
        return load_documents(
            data["source"],
            default_hub_id=data["hub_id"],
            default_hub_config=data["hub_config"],
            text_column=data["text_column"],
            hub_reachable=not own and hub_reachable(),
        )

    def framing(self, setup: Setup) -> Framing:
        return CONTINUED

    def examples(self) -> Iterator[dict[str, str]]:
        return ({"text": text} for text in help_texts())


TASK = _LanguageModeling()
