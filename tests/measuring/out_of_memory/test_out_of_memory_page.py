"""docs/out-of-memory.md is true to the code: its example, its table of messages, its names."""

from __future__ import annotations

import re
from typing import Final

from hf_memkit.measuring.out_of_memory import explain_oom, parse_message, suggest
from hf_memkit.measuring.out_of_memory.cause import judge
from hf_memkit.measuring.out_of_memory.patterns import FORMS
from tests.conftest import ROOT
from tests.measuring.out_of_memory.test_oom_changes import oom, run

PAGE: Final = (ROOT / "docs" / "out-of-memory.md").read_text(encoding="utf-8")


def test_the_example_is_what_the_command_prints() -> None:
    block = re.search(r'^\$ echo "(.+)" \| memkit explain\n(.*?)^```', PAGE, re.M | re.S)
    assert block is not None
    assert block[2] == explain_oom(block[1]).text() + "\n"


def test_every_message_of_the_table_has_the_cause_that_stands_beside_it() -> None:
    table = PAGE.split("## Messages and their causes")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| ([a-z ]+) \| .+ \|$", table, re.M)
    forms = set()
    for messages, cause in rows:
        if cause == "cause":
            continue
        for text in re.findall(r"`([^`]+)`", messages):
            message = parse_message(text)
            assert message is not None, text
            assert judge(message).cause == cause, text
            forms.add(message.form)
    assert forms and forms <= {form.name for form in FORMS}


def test_the_changes_of_the_page_are_those_that_are_proposed() -> None:
    table = PAGE.split("## Changes, and what each works on")[1].split("\n## ")[0]
    records = (
        run(),
        run(arguments={"bf16": False}),
        run(model_type="llama"),
        run(world_size=4, hardware={"ram_gib": 1.0}),
        run(arguments={"optim": "adamw_bnb_8bit"}),
    )
    proposed = [change for record in records for change in suggest(record, oom(), limit=99)]
    for change in proposed:
        shown = str(change.value) if change.key in ("arguments.optim", "arguments.deepspeed") else change.key
        assert shown.removesuffix(".json").rpartition(".")[2] in table, change.key
