"""One row of a table in, its conversation out: messages as chat templates take them, checked.

Four forms of a row are read, told apart by their columns: `messages`, ShareGPT's `conversations`, a `prompt` with its
`completion`, and Alpaca's `instruction`, `input` and `output`. A conversation is what templates and models expect: a
system message only at the beginning, then user and assistant in turn, tools after the assistant that called them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from hf_memkit.errors import DataError, did_you_mean
from hf_memkit.recipe.text_readers import name_of, whole_characters

EXAMPLE: Final = '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]}'

FORMS: Final[Mapping[str, tuple[str, ...]]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt and completion": ("prompt", "completion"),
    "instruction and output": ("instruction", "output"),
}
"""Form → the columns that a row of it has, in the order in which they are looked for."""

Message = dict[str, Any]

_ROLES: Final = ("system", "user", "assistant", "tool")
_SPEAKERS: Final[Mapping[str, str]] = {"human": "user", "gpt": "assistant", **{role: role for role in _ROLES}}
"""What ShareGPT's `from` says → role."""

_FOLLOWS: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""Role ("": the beginning) → those that may come next. Templates of Llama 2, Mistral and Gemma refuse all else."""

_WEIGHTED: Final = ("weight", "train")
"""Keys with which other trainers leave single messages out of the loss."""


def form_of(columns: Mapping[str, str], where: str, row: Mapping[str, Any]) -> str:
    """The form of a row, by the columns that it has.

    Raises:
        DataError: it has none of the forms, or several that say different things.
    """
    if columns["messages"] in row:
        if columns["messages"] != "conversations" and row.get("conversations") and row[columns["messages"]]:
            raise DataError(f"{where}: has both {columns['messages']!r} and 'conversations'. Remove one")
        return "messages"
    found = [form for form, needed in FORMS.items() if form != "messages" and all(key in row for key in needed)]
    if len(found) > 1:
        raise DataError(f"{where}: has {' and also '.join(found)}. Remove one of them")
    if not found:
        there = ", ".join(map(repr, row)) or "none"
        others = ", ".join(form for form in FORMS if form != "messages")
        raise DataError(f"{where}: columns here: {there}; expected {EXAMPLE}, or columns {others}")
    return found[0]


def conversation(columns: Mapping[str, str], where: str, row: Mapping[str, Any]) -> list[Message]:
    """The messages of a row, each with its `role` and its `content`.

    Args:
        columns: `messages` → the name of that column.
        where: the row's place, with which errors begin.
        row: as it was read.

    Raises:
        DataError: it is no conversation that can be trained on.
    """
    form = form_of(columns, where, row)
    if form == "messages":
        messages = _listed(f"{where}: {columns[form]}", row[columns[form]])
    else:
        messages = _MAKERS[form](where, row)
    _check_order(where, messages)
    return messages


def _from_conversations(where: str, row: Mapping[str, Any]) -> list[Message]:
    return _with_system(where, row, _listed(f"{where}: conversations", row["conversations"]))


def _from_prompt(where: str, row: Mapping[str, Any]) -> list[Message]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*_listed(f"{where}: prompt", prompt), *_listed(f"{where}: completion", completion)]
    turns = (("user", "prompt"), ("assistant", "completion"))
    return _with_system(
        where, row, [{"role": role, "content": _text(f"{where}: {key}", row[key])} for role, key in turns]
    )


def _from_instruction(where: str, row: Mapping[str, Any]) -> list[Message]:
    question = _text(f"{where}: instruction", row["instruction"])
    if row.get("input") not in (None, ""):
        question += "\n\n" + _text(f"{where}: input", row["input"])
    answer = _text(f"{where}: output", row["output"])
    return _with_system(where, row, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


_MAKERS: Final[Mapping[str, Callable[[str, Mapping[str, Any]], list[Message]]]] = {
    "conversations": _from_conversations,
    "prompt and completion": _from_prompt,
    "instruction and output": _from_instruction,
}


def _with_system(where: str, row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """With the row's column `system` before it, which ShareGPT's and Alpaca's forms may have."""
    if row.get("system") in (None, ""):
        return messages
    return [{"role": "system", "content": _text(f"{where}: system", row["system"])}, *messages]


def _listed(where: str, value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise DataError(f"{where}: expected a list of messages, found {name_of(value)}; such as {EXAMPLE}")
    if not value:
        raise DataError(f"{where}: no messages; expected {EXAMPLE}")
    return [_message(f"{where}[{number}]", each) for number, each in enumerate(value)]


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(
            f'{where}: expected an object such as {{"role": "user", "content": "Hello"}}, found {name_of(value)}'
        )
    said = {key: item for key, item in value.items() if item is not None}
    for key in _WEIGHTED:
        if key in said:
            raise DataError(
                f"{where}: {key!r} is unsupported: memkit trains on all turns of the assistant. Remove the key; "
                "to train on later turns only, split the conversation there"
            )
    if "role" not in said and "from" in said:
        role, content = _role(f"{where}.from", said.pop("from"), _SPEAKERS), said.pop("value", None)
    else:
        if "role" not in said:
            there = ", ".join(map(repr, value)) or "none"
            raise DataError(f"{where}: no 'role'; keys here: {there}; expected {', '.join(_ROLES)}")
        role = _role(f"{where}.role", said.pop("role"), {name: name for name in _ROLES})
        content = said.pop("content", None)
    calls = said.get("tool_calls")
    if calls is not None:
        _check_calls(where, role, calls)
    text = "" if calls and content is None else _text(f"{where}.content", content, may_be_empty=bool(calls))
    return {"role": role, "content": text, **said}


def _role(where: str, value: Any, known: Mapping[str, str]) -> str:
    if not isinstance(value, str) or value not in known:
        hint = did_you_mean(value, known) if isinstance(value, str) else ""
        raise DataError(f"{where}: {name_of(value)} is not a role{hint}; expected {', '.join(known)}")
    return known[value]


def _check_calls(where: str, role: str, calls: Any) -> None:
    if role != "assistant":
        raise DataError(
            f"{where}: 'tool_calls' belongs to the assistant only, and this turn is the {role}'s. Remove it"
        )
    example = '{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}'
    if not isinstance(calls, list):
        raise DataError(f"{where}.tool_calls: expected a list such as [{example}], found {name_of(calls)}")
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not function.get("name"):
            raise DataError(f"{where}.tool_calls[{number}]: no name of a function. Write {example}")


def _text(where: str, value: Any, *, may_be_empty: bool = False) -> str:
    if isinstance(value, list):  # the parts of a message, as OpenAI's format has them
        value = "".join(_part(f"{where}[{number}]", part) for number, part in enumerate(value))
    if not isinstance(value, str):
        raise DataError(f"{where}: expected text, found {name_of(value)}; such as {EXAMPLE}")
    if not may_be_empty and (not value or value.isspace()):
        raise DataError(f"{where}: empty; every message needs text. Fill it in, or remove the conversation")
    return whole_characters(where, value)


def _part(where: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else part
    if kind == "text":
        raise DataError(f'{where}: no text in this part. Write {{"type": "text", "text": "…"}}')
    raise DataError(
        f'{where}: expected {{"type": "text", "text": "…"}}, found {name_of(kind)}; a chat recipe trains on text only'
    )


def _check_order(where: str, messages: list[Message]) -> None:
    before = ""
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in _FOLLOWS[before]:
            at = f"{where}: message {number + 1} is the {role}'s, "
            at += f"after the {before}'s" if before else "and the conversation begins with it"
            hint = "; join both into one" if role == before else ""
            if role == "system":
                hint = "; put the system message first"
            raise DataError(f"{at}; expected {' or '.join(_FOLLOWS[before])} there{hint}")
        before = role
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no turn of the assistant to train on; expected {EXAMPLE}")


def as_json(messages: list[Message]) -> str:
    """Messages as a table keeps them: their further keys differ from row to row, and a column has one type."""
    return json.dumps(messages, ensure_ascii=False)
