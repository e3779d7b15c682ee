"""A tokenizer in, the chat template out that says which tokens are the assistant's.

The loss is taken over the assistant's turns, which a template marks with `{% generation %}`. Few models ship such a
template. TRL has one for many families (`trl/chat_template_utils.py`, told by the exact text of the model's own); that
of Llama 3.1 to 3.3 is marked here. For any other, nothing is guessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hf_memkit.errors import DataError
from hf_memkit.recipe.tasks.chat_markup import LLAMA_MARKED, LLAMA_TURN
from hf_memkit.recipe.tokenizer import END_OF_TEXT, Framing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["CHATML_FRAMING", "training_template"]

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
            f"{name}: its tokenizer has no chat template, as those of base models have none; give the model that was "
            "made for chat, such as --model NAME-Instruct"
        )
    if not marked or has_generation_markers(own):
        return str(own)
    try:
        return str(get_training_chat_template(tokenizer) or own)
    except ValueError:
        found = own.replace(LLAMA_TURN, LLAMA_MARKED)
    if found == own or _rendered(tokenizer, own) != _rendered(tokenizer, found):
        raise DataError(
            f"{name}: its chat template does not mark the assistant's turns, and neither TRL nor memkit knows where "
            "they are in it; put {% generation %} and {% endgeneration %} around them in the chat_template of a copy "
            "of the model, and give that folder as --model, or train on all turns: --set assistant_only_loss=false"
        )
    return str(found)


def _rendered(tokenizer: PreTrainedTokenizerBase, template: str) -> Any:
    return tokenizer.apply_chat_template(list(_PROBE), chat_template=template, tokenize=False)
