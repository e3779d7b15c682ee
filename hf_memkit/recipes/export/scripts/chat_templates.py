"""Chat templates that mark the assistant's turns, on which the loss is computed. Few models have such a template. TRL
has one for many families (`trl/chat_template_utils.py`, selected by the exact text of the model's template); for Llama
3.1 to 3.3 it is here. Other templates are refused."""

from __future__ import annotations

from typing import Any, Final

CHATML: Final = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}"
    "{%- else -%}{{- message['content'] + '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""Plain ChatML with marked turns of the assistant, for tokenizers that are trained here."""

LLAMA_TURN: Final = (
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + "
    "'<|eot_id|>' }}"
)
"""The line that writes a turn in the templates of Llama 3.1, 3.2 and 3.3."""

LLAMA_MARKED: Final = (
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{%- if message['role'] == 'assistant' %}{%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endgeneration %}{%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}"
)
"""The same with marked turns of the assistant."""

_PROBE: Final = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " One? "},
    {"role": "assistant", "content": " Two. "},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Four."},
)


def training_template(tokenizer: Any, *, marked: bool = True) -> str:
    """The template to train with: the tokenizer's own if it marks the assistant's turns, or an equal one with marks.
    Ends the script if there is none.

    Args:
        tokenizer: with the template of its model.
        marked: whether the assistant's turns must be marked.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    name, own = tokenizer.name_or_path, tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    if not own:
        raise SystemExit(
            f"{name}: its tokenizer has no chat template; base models rarely have one. Give the chat version of the "
            "model, such as --model NAME-Instruct"
        )
    if not marked or has_generation_markers(own):
        return str(own)
    try:
        return str(get_training_chat_template(tokenizer) or own)
    except ValueError:
        with_marks = own.replace(LLAMA_TURN, LLAMA_MARKED)
    outputs = [
        tokenizer.apply_chat_template(list(_PROBE), chat_template=template, tokenize=False)
        for template in (own, with_marks)
    ]
    if with_marks == own or outputs[0] != outputs[1]:
        raise SystemExit(
            f"{name}: its chat template does not mark the assistant's turns. To train on all turns: "
            "--set assistant_only_loss=false. To train on the assistant's only: copy the model, put {% generation %} "
            "and {% endgeneration %} around them in its chat_template, and give that folder as --model"
        )
    return str(with_marks)
