"""Chat data: real files through the real datasets library; the forms that are read, and what spoilt ones are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_memkit.errors import DataError
from hf_memkit.recipe.tables import load_table
from hf_memkit.recipe.tasks import find_task
from hf_memkit.recipe.tasks.chat_made_up import made_up_conversations
from hf_memkit.recipe.tasks.chat_rows import EXAMPLE, conversation
from hf_memkit.setup import Setup

pytestmark = pytest.mark.usefixtures("cache")

USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Good day."}
GOOD = {"messages": [USER, ANSWER]}


def setup_for(source: Path | None, columns: dict[str, str] | None = None) -> Setup:
    data = {
        "source": str(source) if source else None, "columns": columns or {"messages": "messages"},
        "hub_id": "none/such", "hub_config": None, "hub_split": "train",
    }  # fmt: skip
    return Setup("tried").put_all("data", {key: (value, "tried") for key, value in data.items()})


def loaded(source: Path, columns: dict[str, str] | None = None) -> list[list[dict[str, Any]]]:
    rows = load_table(find_task("chat"), setup_for(source, columns)).rows
    return [json.loads(text) for text in rows["messages"]]


def refusal(source: Path) -> str:
    with pytest.raises(DataError) as caught:
        loaded(source)
    message = str(caught.value)
    assert "\n" not in message and "Traceback" not in message
    return message


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def said(**more: Any) -> dict[str, Any]:
    """A conversation whose answer is spoiled."""
    return {"messages": [USER, {**ANSWER, **more}]}


SPOILED: list[tuple[Any, str]] = [
    (
        {"text": "Hello"},
        "{}:2: columns here: 'text'; expected " + EXAMPLE + ", or columns conversations, prompt and "
        "completion, instruction and output",
    ),
    ({"messages": "Hello"}, "{}:2: messages: expected a list of messages, found 'Hello'; such as " + EXAMPLE),
    ({"messages": []}, "{}:2: messages: no messages; expected " + EXAMPLE),
    (
        {"messages": ["Hello"]},
        '{}:2: messages[0]: expected an object such as {{"role": "user", "content": "Hello"}}, found \'Hello\'',
    ),
    (
        {"messages": [{"content": "Hello"}]},
        "{}:2: messages[0]: no 'role'; keys here: 'content'; expected system, user, assistant, tool",
    ),
    (
        said(role="asistant"),
        "{}:2: messages[1].role: 'asistant' is not a role; did you mean 'assistant'?; expected "
        "system, user, assistant, tool",
    ),
    (
        said(content=" \n"),
        "{}:2: messages[1].content: empty; every message needs text. Fill it in, or remove the conversation",
    ),
    (said(content=None), "{}:2: messages[1].content: expected text, found null; such as " + EXAMPLE),
    (said(content=3), "{}:2: messages[1].content: expected text, found 3; such as " + EXAMPLE),
    (
        said(content=[{"type": "image_url", "image_url": "a.png"}]),
        '{}:2: messages[1].content[0]: expected {{"type": '
        '"text", "text": "…"}}, found \'image_url\'; a chat recipe trains on text only',
    ),
    (
        said(content="\ud800"),
        "{}:2: messages[1].content: half of a surrogate pair, which is not a character. Remove it",
    ),
    (
        said(weight=0),
        "{}:2: messages[1]: 'weight' is unsupported: memkit trains on all turns of the assistant. Remove the key; "
        "to train on later turns only, split the conversation there",
    ),
    ({"messages": [USER]}, "{}:2: no turn of the assistant to train on; expected " + EXAMPLE),
    (
        {"messages": [USER, USER, ANSWER]},
        "{}:2: message 2 is the user's, after the user's; expected assistant there; join both into one",
    ),
    (
        {"messages": [USER, ANSWER, {"role": "system", "content": "Be brief."}]},
        "{}:2: message 3 is the system's, after "
        "the assistant's; expected user or tool there; put the system message first",
    ),
    (
        {"messages": [ANSWER]},
        "{}:2: message 1 is the assistant's, and the conversation begins with it; expected system or user there",
    ),
    (
        {"messages": [{**USER, "tool_calls": [{"function": {"name": "add"}}]}, ANSWER]},
        "{}:2: messages[0]: 'tool_calls' belongs to the assistant only, and this turn is the user's. Remove it",
    ),
    (
        said(tool_calls="add"),
        '{}:2: messages[1].tool_calls: expected a list such as [{{"type": "function", "function": '
        '{{"name": "add", "arguments": {{"a": 1}}}}}}], found \'add\'',
    ),
    (
        said(tool_calls=[{"function": {"name": "add"}}, {"function": {}}]),
        '{}:2: messages[1].tool_calls[1]: no name of a function. Write {{"type": "function", "function": '
        '{{"name": "add", "arguments": {{"a": 1}}}}}}',
    ),
    ({**GOOD, "tools": 3}, "{}:2: tools: expected a list of functions as JSON schemas, found 3"),
    (
        {**GOOD, "conversations": [{"from": "human", "value": "Hello"}]},
        "{}:2: has both 'messages' and 'conversations'. Remove one",
    ),
    (
        {"prompt": "Hello", "completion": "Good day."},
        "{}:2: this row has prompt and completion, but {}:1 has messages. "
        "Train on one file for each form, or write all rows as messages",
    ),
    (
        {"prompt": "1", "completion": "2", "instruction": "3", "output": "4"},
        "{}:2: has prompt and completion and also instruction and output. Remove one of them",
    ),
    ("[1, 2]\n", '{}:2: expected an object such as {{"column": …}}, found an array'),
    (
        '{"messages": [\n',
        "{}:2: not JSON (Expecting value, column 15); expected one object a line, or one array of objects",
    ),
]


@pytest.mark.parametrize(("row", "message"), SPOILED)
def test_spoiled(tmp_path: Path, cache: Path, row: Any, message: str) -> None:
    path = written(tmp_path / "chats.jsonl", GOOD, row, GOOD)
    found = refusal(path)
    assert found == message.replace("{}", str(path)).replace("{{", "{").replace("}}", "}")
    assert not list(cache.rglob("*.arrow")), "nothing half-read is kept"
    assert [file.name for file in tmp_path.iterdir()] == ["chats.jsonl"], "nothing is written beside the file"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (GOOD, [USER, ANSWER]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
                       ANSWER]}, [USER, ANSWER]),
        ({"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good day."}]},
         [USER, ANSWER]),
        ({"conversations": [USER, ANSWER], "system": "Be brief."},
         [{"role": "system", "content": "Be brief."}, USER, ANSWER]),
        ({"prompt": "Hello", "completion": "Good day."}, [USER, ANSWER]),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
        ({"instruction": "Hello", "input": "", "output": "Good day."}, [USER, ANSWER]),
        ({"instruction": "Add.", "input": "1 2", "output": "3"},
         [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
                       {"role": "tool", "content": "3"}, ANSWER], "tools": [{"name": "add"}]},
         [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]},
          {"role": "tool", "content": "3"}, ANSWER]),
        ({"messages": [USER, ANSWER, USER]}, [USER, ANSWER, USER]),
    ],
)  # fmt: skip
def test_every_form_is_read(tmp_path: Path, row: Any, expected: list[dict[str, Any]]) -> None:
    assert loaded(written(tmp_path / "chats.jsonl", row, row)) == [expected, expected]


def test_parquet_and_another_name_of_the_column(tmp_path: Path) -> None:
    path = tmp_path / "chats.parquet"
    pq.write_table(pa.table({"chat": [[USER, ANSWER]], "id": [1]}), path)
    assert loaded(path, {"messages": "chat"}) == [[USER, ANSWER]]
    pq.write_table(pa.table({"messages": [[USER, ANSWER], [USER]]}), path)
    assert refusal(path).startswith(f"{path}: row 2: no turn of the assistant")


def test_a_folder_of_two_forms_names_both_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    written(first, GOOD)
    written(second, {"prompt": "Hello", "completion": "Good day."})
    assert refusal(tmp_path).startswith(f"{second}:1: this row has prompt and completion, but {first}:1 has messages")


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n")
    assert refusal(path) == (
        f"{path}: it has no rows; expected {find_task('chat').local_form}, such as {find_task('chat').example}"
    )


@pytest.mark.slow
def test_what_is_made_up_is_chat_too() -> None:
    rows = made_up_conversations()
    assert len(rows) > 300
    # What runs is resumed with the same examples, whatever libraries have put in the place of functions meanwhile.
    child = "import json, torch, transformers, trl; from hf_memkit.recipe.tasks import chat_made_up as made; "
    child += "print(json.dumps(made.made_up_conversations()))"
    again = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert json.loads(again.stdout.splitlines()[-1]) == rows
    for messages in rows:
        assert conversation({"messages": "messages"}, "here", {"messages": messages}) == messages
    table = load_table(find_task("chat"), setup_for(None))
    assert table.source.startswith("made-up examples") and len(table.rows) == len(rows)
