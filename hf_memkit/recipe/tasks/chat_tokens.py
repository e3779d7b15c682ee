"""Conversations in, rows of tokens and labels out, as TRL's SFTTrainer makes them of the same conversations.

The trainer is given these rows as they are (`hf_memkit.train.prepared_rows`): they are made once, by the first process
of a machine, before a model is loaded. The order is the trainer's own (trl 1.16.0: `SFTTrainer._prepare_dataset`):
tokens of the template, labels on the assistant's, cut at the length, those without a label left out, or packed.

The loss is taken over the assistant's turns, which a template marks with `{% generation %}`. Few models ship such a
template. TRL has one for many families (`trl/chat_template_utils.py`, told by the exact text of the model's own); that
of Llama 3.1 to 3.3 is marked here. For any other, nothing is guessed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hf_memkit.errors import DataError
from hf_memkit.recipe.sources import quiet_datasets
from hf_memkit.recipe.tasks.chat_markup import LLAMA_MARKED, LLAMA_TURN
from hf_memkit.recipe.tokenizer import END_OF_TEXT, Framing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_IGNORED: Final = -100
"""Label of a token that the loss leaves out (torch.nn.functional.cross_entropy, `ignore_index`)."""


@dataclass(frozen=True)
class Tokenised:
    """`rows` is a `datasets.Dataset` of `input_ids` and `labels` (packed: and `seq_lengths`).

    Attributes:
        conversations: in `rows`.
        cut: conversations that were longer than a sequence.
        without_label: those of them of which no label is left; only packed ones are in `rows`, as SFTTrainer has it.
        tokens, trained_tokens: in `rows`; those of the assistant, which the loss is taken over.
    """

    rows: Any
    conversations: int
    cut: int
    without_label: int
    tokens: int
    trained_tokens: int


def tokenise(
    conversations: Any, tokenizer: Any, template: str, *, length: int, packing: bool, assistant_only: bool
) -> Tokenised:
    """The rows of `conversations`.

    Args:
        conversations: a `datasets.Dataset` of `messages` and `tools` (JSON) and `place`.
        tokenizer: the model's.
        template: the chat template, with the assistant's turns marked.
        length: tokens of a sequence, at most.
        packing: whether short conversations share a sequence, each seeing only itself.
        assistant_only: whether the loss is taken over the assistant's turns only.

    Raises:
        DataError: the template refuses a conversation, or no conversation has a label left.
    """
    import datasets

    features = datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("int64")),
            "labels": datasets.List(datasets.Value("int64")),
            "whole": datasets.Value("int64"),
        }
    )
    how = {"tokenizer": tokenizer, "template": template, "length": length, "assistant_only": assistant_only}
    with quiet_datasets():
        rows = conversations.map(
            _one,
            fn_kwargs=how,
            remove_columns=conversations.column_names,
            features=features,
        )
        lengths = rows.with_format("numpy")["whole"][:]
        kept = rows.filter(_has_label)
        cut, without_label = int((lengths > length).sum()), len(rows) - len(kept)
        if not len(kept):
            raise DataError(
                f"{conversations[0]['place']}: no answer of the assistant begins within {length} tokens (the "
                f"longest of {len(rows)} conversations has {int(lengths.max())}). Give a longer --sequence-length"
            )
        kept = (rows if packing else kept).remove_columns("whole")
        tokens, trained = _counted(kept)
        count = len(kept)
        if packing:
            from trl.data_utils import pack_dataset

            kept = pack_dataset(kept, length, "bfd")
    return Tokenised(kept, count, cut, without_label, tokens, trained)


def _one(row: dict[str, Any], tokenizer: Any, template: str, length: int, assistant_only: bool) -> dict[str, Any]:
    from jinja2.exceptions import TemplateError

    tools = json.loads(row["tools"]) if row["tools"] else None
    try:
        made = tokenizer.apply_chat_template(
            json.loads(row["messages"]),
            tools=tools,
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=assistant_only,
        )
    except (TemplateError, TypeError) as error:  # templates refuse by raise_exception, and fail where a key is missing
        raise DataError(
            f"{row['place']}: the model's chat template rejects this conversation ({error}). Correct it, or remove it"
        ) from error
    tokens = made["input_ids"]
    mask = made["assistant_masks"] if assistant_only else [1] * len(tokens)
    if 1 not in mask:
        raise DataError(
            f"{row['place']}: the model's chat template marks no token of the assistant. Remove this conversation, or "
            "train on all turns: --set assistant_only_loss=false"
        )
    labels = [token if marked else _IGNORED for token, marked in zip(tokens, mask, strict=True)]
    return {"input_ids": tokens[:length], "labels": labels[:length], "whole": len(tokens)}


def _has_label(row: dict[str, Any]) -> bool:
    return any(label != _IGNORED for label in row["labels"])


def _counted(rows: Any) -> tuple[int, int]:
    """(tokens, tokens with a label)."""
    import pyarrow.compute as compute  # type: ignore[import-untyped, unused-ignore]

    tokens = trained = 0
    for batch in rows.with_format("arrow").iter(batch_size=1000):
        labels = compute.list_flatten(batch.column("labels"))
        tokens += len(labels)
        trained += compute.sum(compute.not_equal(labels, _IGNORED)).as_py() or 0
    return tokens, trained


CHATML_FRAMING: Final = Framing(
    {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": END_OF_TEXT},
)
"""The special tokens of ChatML, for a tokenizer that is trained here: the end of a turn ends generation."""

_PROBE: Final = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " One? "},
    {"role": "assistant", "content": " Two. "},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Four."},
)


def training_template(tokenizer: PreTrainedTokenizerBase, name: str, *, marked: bool = True) -> str:
    """The template with which `tokenizer` is trained: its own where that marks the assistant's turns, or one that does
    and is otherwise the same.

    Args:
        tokenizer: with the template that its model came with.
        name: what to call the model in a message.
        marked: whether the assistant's turns must be marked; otherwise its own will do as it is.

    Raises:
        DataError: it has no template, or one in which nobody has marked the assistant's turns.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    own: Any = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    if not own:
        raise DataError(
            f"{name}: its tokenizer has no chat template, which is usual for base models. Give the chat version of "
            "the model, such as --model NAME-Instruct"
        )
    if not marked or has_generation_markers(own):
        return str(own)
    try:
        return str(get_training_chat_template(tokenizer) or own)
    except ValueError:
        found = own.replace(LLAMA_TURN, LLAMA_MARKED)
    if found == own or _rendered(tokenizer, own) != _rendered(tokenizer, found):
        raise DataError(
            f"{name}: its chat template does not mark the assistant's turns. To train on all turns: "
            "--set assistant_only_loss=false. To train on the assistant's only: copy the model, put {% generation %} "
            "and {% endgeneration %} around them in its chat_template, and give that folder as --model"
        )
    return str(found)


def _rendered(tokenizer: PreTrainedTokenizerBase, template: str) -> Any:
    return tokenizer.apply_chat_template(list(_PROBE), chat_template=template, tokenize=False)
