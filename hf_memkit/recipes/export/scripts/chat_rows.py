"""Conversations: rows of messages, in one of four forms.

A row has `messages`, ShareGPT's `conversations`, a `prompt` with its `completion`, or Alpaca's `instruction`, `input`
and `output`. Conversations follow the rules of templates and models: a system message only at the beginning, then user
and assistant in turn, tools after the assistant that called them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from datasets import Dataset, Features, Value

from hf_memkit.recipes.export.scripts.rows import Source, describe

EXAMPLE: Final = '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]}'

FORMS: Final = {"conversations": ("conversations",), "prompt": ("prompt", "completion"),
                "instruction": ("instruction", "output")}  # fmt: skip
"""Form other than `messages` → its columns."""

ROLES: Final = {
    "human": "user",
    "gpt": "assistant",
    **{role: role for role in ("system", "user", "assistant", "tool")},
}
"""Name of a role in ShareGPT or chat templates → its name in chat templates."""

FOLLOWS: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}  # fmt: skip
"""Role ("": the beginning) → roles that may follow. Templates of Llama 2, Mistral and Gemma refuse all others."""


def read(source: Source) -> Dataset:
    """The conversations, as `messages` and, if any has them, `tools`."""
    source = dataclasses.replace(source, example=EXAMPLE)
    rows, column = source.load(), str(source.data["columns"]["messages"])
    columns_of_forms = {"messages": (column,), **FORMS}
    forms = [form for form, names in columns_of_forms.items() if set(names) <= set(rows.column_names)]
    if not forms:
        source.refuse(
            f"columns here: {', '.join(map(repr, rows.column_names))}; expected {EXAMPLE}, or columns "
            f"{', '.join(' and '.join(names) for names in FORMS.values())}"
        )
    if len(forms) > 1:
        source.refuse(f"has columns of several forms: {' and '.join(forms)}. Write all rows in one of them")
    kept_columns = [name for name in ("tools",) if name in rows.column_names]
    features = Features({"messages": [{"role": Value("string"), "content": Value("string")}]})
    if _has_further_keys(rows, column):
        features = Features({"messages": rows.features[column]})
    try:
        return rows.map(
            _row_with_messages,
            fn_kwargs={"form": forms[0], "column": column},
            with_indices=True,
            features=Features({**features, **{name: rows.features[name] for name in kept_columns}}),
            remove_columns=[name for name in rows.column_names if name not in ("messages", *kept_columns)],
        )
    except RowError as error:
        source.refuse(str(error), error.row)


class RowError(ValueError):
    """A mistake in a row."""

    row = 0


def _has_further_keys(rows: Dataset, column: str) -> bool:
    """Whether messages may have keys other than a role and a text, such as tool calls."""
    if column not in rows.column_names:
        return False
    inner = getattr(rows.features[column], "feature", None)
    if isinstance(inner, Mapping) and all(isinstance(value, Value) for value in inner.values()):
        return bool(set(inner) - {"role", "content", "from", "value"})
    return any(
        isinstance(message, Mapping) and set(message) - {"role", "content", "from", "value"}
        for messages in rows[column]
        if isinstance(messages, list)
        for message in messages
    )


def _row_with_messages(row: dict[str, Any], number: int, form: str, column: str) -> dict[str, Any]:
    try:
        return {"messages": conversation(row, form, column)}
    except RowError as error:
        error.row = number
        raise


def conversation(row: Mapping[str, Any], form: str = "messages", column: str = "messages") -> list[dict[str, Any]]:
    """The messages of a row. Raises RowError if it is no conversation that can be trained on."""
    if form == "prompt" and isinstance(row["prompt"], list) and isinstance(row["completion"], list):
        messages = _messages("prompt", row["prompt"]) + _messages("completion", row["completion"])
    elif form in ("messages", "conversations"):
        name = column if form == "messages" else form
        messages = _messages(name, row[name])
    else:
        question, answer = FORMS[form]
        prompt = _text(question, row[question])
        if form == "instruction" and row.get("input"):
            prompt += "\n\n" + _text("input", row["input"])
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": _text(answer, row[answer])}]
    if row.get("system") and form != "messages":
        messages = [{"role": "system", "content": _text("system", row["system"])}, *messages]
    previous = ""
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in FOLLOWS[previous]:
            after = f"after the {previous}'s" if previous else "and the conversation begins with it"
            expected = " or ".join(FOLLOWS[previous])
            hint = "; join both into one" if role == previous else ""
            if role == "system" != previous:
                hint = "; put it first"
            raise RowError(f"message {number} is the {role}'s, {after}; expected {expected} there{hint}")
        previous = role
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError(f"no turn of the assistant to train on; expected {EXAMPLE}")
    return messages


def _messages(where: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RowError(f"{where}: expected a list of messages, found {describe(value)}; such as {EXAMPLE}")
    return [_message(f"{where}[{number}]", message) for number, message in enumerate(value)]


def _message(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RowError(f"{where}: expected an object with role and content, found {describe(value)}: {EXAMPLE}")
    fields = {key: item for key, item in value.items() if item is not None}
    role = fields.pop("role", None) or fields.pop("from", None)
    content = fields.pop("content", None) or fields.pop("value", None)
    for key in ("weight", "train"):  # other trainers exclude messages from the loss with these
        if key in fields:
            raise RowError(f"{where}: {key!r}: not supported: memkit trains on all answers. Remove the key")
    if role not in ROLES:
        raise RowError(f"{where}.role: {describe(role)} is not a role; expected {', '.join(ROLES)}")
    if "tool_calls" in fields and ROLES[role] != "assistant":
        raise RowError(f"{where}: 'tool_calls' in a turn of the {role}: only for the assistant. Remove it")
    text = "" if content is None and fields.get("tool_calls") else _text(f"{where}.content", content)
    return {"role": ROLES[role], "content": text, **fields}


def _text(where: str, value: Any) -> str:
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]  # as OpenAI's format has them
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            shown = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
            raise RowError(f"{where}: expected text, found {describe(shown)}; such as {EXAMPLE}")
    text = "".join(part["text"] for part in parts)
    if not text.strip():
        raise RowError(f"{where}: empty; every message needs text. Fill it in, or remove the conversation")
    return text
