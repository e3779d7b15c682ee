"""Chat: conversations → rows of tokens with labels on the assistant's turns, for TRL's SFTTrainer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hf_memkit.errors import DataError
from hf_memkit.models import hub_reachable
from hf_memkit.recipe.tables import Table, hold_out, load_table
from hf_memkit.recipe.tasks.chat_markup import CHATML
from hf_memkit.recipe.tasks.chat_rows import EXAMPLE, as_json, conversation, form_of
from hf_memkit.recipe.tasks.chat_tokens import CHATML_FRAMING, Tokenised, tokenise, training_template
from hf_memkit.recipe.tasks.task import Examples, PaddedTask, Say, Settings
from hf_memkit.recipe.text_readers import name_of
from hf_memkit.recipe.tokenizer import Framing
from hf_memkit.setup import Setup

if TYPE_CHECKING:
    from hf_memkit.recipe.schema import Data


_PACKED: Final = "short conversations share a sequence, and each sees only itself (trl: packing_strategy bfd)"
_NOT_PACKED: Final = "each conversation is one sequence, padded to the longest of its micro-batch"


class _Reader:
    """Reads the rows of one table, all of one form."""

    def __init__(self) -> None:
        self._form, self._where = "", ""

    def __call__(self, columns: Mapping[str, str], where: str, row: Mapping[str, Any]) -> dict[str, Any]:
        form = form_of(columns, where, row)
        if self._form and form != self._form:
            raise DataError(
                f"{where}: this row has {form}, but {self._where} has {self._form}. Train on one file for "
                "each form, or write all rows as messages"
            )
        if not self._form:
            self._form, self._where = form, where
        tools = row.get("tools")
        if tools is not None and not isinstance(tools, str | list):
            raise DataError(f"{where}: tools: expected a list of functions as JSON schemas, found {name_of(tools)}")
        return {
            "messages": as_json(conversation(columns, where, row)),
            "tools": tools if isinstance(tools, str) else json.dumps(tools) if tools else "",
            "place": where,
        }


class _Chat(PaddedTask):
    name: ClassVar[str] = "chat"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    trainer_class: ClassVar[str] = "trl:SFTTrainer"
    arguments_class: ClassVar[str] = "trl:SFTConfig"
    further_arguments: ClassVar[Mapping[str, Any]] = {"packing": bool, "assistant_only_loss": bool}
    packages: ClassVar[tuple[str, ...]] = ("trl",)
    columns: ClassVar[Mapping[str, str]] = {"messages": "messages"}
    local_form: ClassVar[str] = "a file of conversations in JSON lines or parquet, or a folder of one kind of them"
    example: ClassVar[str] = EXAMPLE
    script: ClassVar[str] = "train_chat"
    script_needs: ClassVar[tuple[str, ...]] = ("trl",)
    script_reads: ClassVar[tuple[str, ...]] = ()

    def arguments(self, data: Data) -> Settings:
        return {
            "assistant_only_loss": (
                True,
                "the model learns to answer, not to ask: loss on the assistant's turns only (a prediction counts "
                "every token)",
            ),
            "packing": (data.packing, _PACKED if data.packing else _NOT_PACKED),
        }

    def settled(self, setup: Setup) -> Setup:
        # SFTConfig's own defaults switch both on where nothing is said (trl 1.16.0: base_config.py).
        for key in ("activation_checkpointing", "bf16"):
            if f"arguments.{key}" not in setup:
                setup = setup.put(f"arguments.{key}", False, "as the variant has it; SFTConfig's default is on")
        length = setup["data.sequence_length"]
        if setup["arguments.packing"] and "flash" not in str(setup.get("model.attn_implementation")):
            tokens = int(setup["arguments.per_device_train_batch_size"]) * int(length)
            # TRL joins the rows of a micro-batch into one (sft_trainer.py, `padding_free`).
            mask = (
                f"{_PACKED}; without flash attention by a mask of the micro-batch's {tokens} × {tokens} tokens, a "
                "byte each, and all of them are compared: prefer a micro-batch of 1"
            )
            setup = setup.put("arguments.packing", True, mask)
        return setup.put("arguments.max_length", length, "data.sequence_length: longer conversations are cut")

    def padded(self, setup: Setup) -> tuple[str, ...]:
        return () if setup["arguments.packing"] else ("input_ids",)

    def reader(self) -> _Reader:
        return _Reader()

    def features(self) -> Any:
        import datasets

        text = datasets.Value("large_string")
        return datasets.Features({"messages": text, "tools": text, "place": text})

    def made_up(self) -> list[dict[str, Any]]:
        from hf_memkit.recipe.tasks.chat_made_up import made_up_conversations

        return [
            {"messages": as_json(messages), "tools": "", "place": f"made-up conversation {number}"}
            for number, messages in enumerate(made_up_conversations(), 1)
        ]

    def read(self, setup: Setup) -> Table:
        return load_table(self, setup)

    def prepare(self, setup: Setup, say: Say) -> Examples:
        data, packing = setup.section("data"), bool(setup["arguments.packing"])
        assistant_only = bool(setup["arguments.assistant_only_loss"])
        table = self.read(setup)
        say(f"Data: {table.source}")
        tokenizer, template = _tokenizer(table, data, say, assistant_only=assistant_only)
        train, held_out = hold_out(table.rows, data["held_out"])
        held_out = held_out.select(range(min(data["evaluated_blocks"], len(held_out))))
        made, evaluated = (
            tokenise(
                rows,
                tokenizer,
                template,
                length=data["sequence_length"],
                packing=packing,
                assistant_only=assistant_only,
            )
            for rows in (train, held_out)
        )
        _say_what_was_cut(made, "to train on", data["sequence_length"], say)
        _say_what_was_cut(evaluated, "held out", data["sequence_length"], say)
        facts = {
            "conversations": made.conversations,
            "tokens": made.tokens,
            "trained_tokens": made.trained_tokens,
            "packed": packing,
        }
        return Examples(made.rows, evaluated.rows, tokenizer, facts)

    def framing(self, setup: Setup) -> Framing:
        return CHATML_FRAMING

    def examples(self) -> Iterator[dict[str, Any]]:
        from hf_memkit.recipe.tasks.chat_made_up import made_up_conversations

        return ({"messages": messages} for messages in made_up_conversations())


def _say_what_was_cut(made: Tokenised, what: str, length: int, say: Say) -> None:
    if not made.cut:
        return
    gone = f"; {made.without_label} have no answer left to train on" if made.without_label else ""
    say(f"WARNING: {made.cut} conversations {what} are cut at {length} tokens{gone}. Give a longer --sequence-length")


def _tokenizer(table: Table, data: Mapping[str, Any], say: Say, *, assistant_only: bool) -> tuple[Any, str]:
    """(the model's own tokenizer, or one that is trained on the conversations; the template to train with)."""
    from hf_memkit.recipe.data import Documents
    from hf_memkit.recipe.tokenizer import check_vocabulary, get_tokenizer

    documents = Documents(_Contents(table.rows), table.source)
    chosen = get_tokenizer(
        data["tokenizer"],
        documents,
        vocabulary_size=data["vocabulary_size"],
        allow_download=hub_reachable(),
        framing=CHATML_FRAMING,
    )
    tokenizer = chosen.tokenizer
    if chosen.trained_here:
        tokenizer.chat_template = template = CHATML
        say(f"Tokenizer: {chosen.reason}; its chat template is plain ChatML, not the model's")
    else:
        template = training_template(tokenizer, str(data["tokenizer"]), marked=assistant_only)
        marked = "" if template == tokenizer.chat_template else "; the assistant's turns are marked in its template"
        say(f"Tokenizer: {chosen.reason}{marked}")
    check_vocabulary(tokenizer, data["vocabulary_size"])
    return tokenizer, template


class _Contents(Sequence[str]):
    """The texts of conversations, a conversation each, as a sequence that reads from the table."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        found = self._rows[index]["messages"]
        return list(map(_content, found)) if isinstance(found, list) else _content(found)


def _content(messages: str) -> str:
    return "\n".join(message["content"] for message in json.loads(messages))


TASK = _Chat()
