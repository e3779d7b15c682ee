"""Every form of message: its numbers and its cause, alone, cut off, wrapped, and with what logs put around it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import get_args

import pytest

from hf_memkit.measuring.out_of_memory import OomMessage, explain_oom, find_messages, judge, parse_message
from hf_memkit.measuring.out_of_memory.engine_failures import FailureCause
from hf_memkit.measuring.out_of_memory.figures import _WHOLE, join_lines
from hf_memkit.measuring.out_of_memory.known_messages import Cause
from hf_memkit.measuring.out_of_memory.patterns import FORMS
from tests.fewer import some
from tests.measuring.out_of_memory.oom_messages import EXAMPLES, LINES, NOT_MESSAGES, Example, Line

NAMES = [example.name for example in EXAMPLES]
_TEXTS = {"form", "library", "memory", "quote"}


def numbers(message: OomMessage) -> dict[str, object]:
    """What a message gives, without its texts; processes as (pid, bytes)."""
    values = {field.name: getattr(message, field.name) for field in fields(message) if field.name not in _TEXTS}
    values["processes"] = tuple((process.pid, process.size_bytes) for process in message.processes)
    return {name: value for name, value in values.items() if value is not None and value != ()}


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_a_message_gives_its_numbers_and_its_cause(example: Example) -> None:
    message = parse_message(example.text)
    assert message is not None and message.form == example.form
    assert numbers(message) == example.fields
    verdict = judge(message)
    assert verdict.cause == example.cause and verdict.why.endswith(".")
    assert not any(setting.reason.endswith(".") for setting in (*verdict.settings, *verdict.no_help))
    content = verdict.to_json()
    assert set(content) == {"cause", "why", "settings", "no_help", "figures"}
    assert all(name.endswith("_gib") and size >= 0 for name, size in content["figures"].items())


@pytest.mark.parametrize("line", LINES, ids=[line.text[:60] for line in LINES])
def test_other_words_are_the_same_message(line: Line) -> None:
    for text in (
        line.text,
        f"step 1\n{line.text}\nstep 2",
        "\n".join(f"x-1  | {one}" for one in line.text.splitlines()),
    ):
        (error,) = find_messages(text)
        assert (error.message.form, error.message.memory, error.phase) == (line.form, line.memory, line.phase)
        assert numbers(error.message) == line.fields
        assert judge(error.message).why


def test_the_tables_have_every_form_and_every_cause() -> None:
    assert {example.form for example in (*EXAMPLES, *LINES)} == {form.name for form in FORMS}
    causes = {example.cause for example in EXAMPLES} | {
        judge(find_messages(line.text)[0].message).cause for line in LINES
    }
    of_memory = set(get_args(Cause)) - set(get_args(FailureCause))
    assert causes | {"index out of range"} == of_memory, "which another line of the log shows"
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("text", NOT_MESSAGES)
def test_what_is_no_message_is_not_taken_for_one(text: str) -> None:
    assert find_messages(text) == []
    assert explain_oom(text).error is None


WRAPPINGS: dict[str, Callable[[str], str]] = {
    "rank": lambda text: "\n".join(f"[rank3]: {line}" for line in text.splitlines()),
    "torchrun tee": lambda text: "\n".join(f"[default3]:{line}" for line in text.splitlines()),
    "mpirun": lambda text: "\n".join(f"[1,3]<stderr>: {line}" for line in text.splitlines()),
    "srun": lambda text: "\n".join(f"3: {line}" for line in text.splitlines()),
    "colours": lambda text: "\n".join(f"\x1b[1;31m{line}\x1b[0m\x1b[K" for line in text.splitlines()),
    "progress bar": lambda text: f"  3%|▎         | 3/100 [00:03<01:37,  1.00s/it]\r{text}\r\n",
    "box": lambda text: "\n".join(f"│ {line:<400} │" for line in text.splitlines()),
    "windows": lambda text: text.replace("\n", "\r\n") + "\r\n",
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_what_a_log_puts_around_a_message_changes_no_number(wrapping: str) -> None:
    for example in EXAMPLES:
        errors = [one for one in find_messages(WRAPPINGS[wrapping](example.text)) if one.message.form == example.form]
        assert errors and numbers(errors[0].message) == example.fields, (wrapping, example.name)
        if wrapping in ("rank", "torchrun tee", "mpirun", "srun") and example.form != "torch-device":
            assert errors[0].rank == 3


@pytest.mark.parametrize("prefix", some(["", "[rank1]:", "[rank1]: ", "trainer-1  | "], "[rank1]: "))
def test_a_message_that_is_broken_inside_its_words_gives_the_same_numbers(prefix: str) -> None:
    for example in EXAMPLES:
        if example.form not in ("torch-device", "torch-mps") or "NPU" in example.text or "\n" in example.text:
            continue
        for width in range(50, 110, 3):
            pieces = [example.text[at : at + width] for at in range(0, len(example.text), width)]
            for lines in (pieces, [piece.strip() for piece in pieces]):
                message = parse_message("\n".join(prefix + line for line in lines))
                assert message is not None and numbers(message) == example.fields, (example.name, width)


def test_lines_are_joined_by_a_blank_unless_a_word_or_a_size_is_broken() -> None:
    whole = {"has a to": "tal capacity", "12.8": "1 MiB is free", "12.": "81 MiB", "GPU 1": "2 has"}
    apart = {"of which": "12.81 MiB", "exit code: 13": "7 files", "memory in": "use", "is": "free"}
    for first, second in whole.items():
        assert join_lines(first, second) == first + second
    for first, second in apart.items():
        assert join_lines(first, second) == f"{first} {second}"
    assert not {first + second for first in _WHOLE for second in _WHOLE} & _WHOLE, "two whole words that make a third"


@pytest.mark.slow
def test_a_message_cut_off_anywhere_never_raises_and_never_invents_a_size() -> None:
    for example in EXAMPLES:
        sizes = {value for value in example.fields.values() if isinstance(value, int) and value > 2**20}
        for end in range(len(example.text)):
            for one in find_messages(example.text[:end]):
                judge(one.message)
                if re.search(r"\d$", example.text[:end]) is None:  # a number that is cut in half is another number
                    read = (one.message.requested_bytes, one.message.capacity_bytes, one.message.allowed_bytes)
                    sizes_read = {size for size in read if size is not None and size > 2**20}
                    assert sizes_read <= sizes, (example.name, example.text[:end])


def test_strange_texts_never_raise() -> None:
    for text in (
        "CUDA out of memory. Tried to allocate 99999999999999999999.99 GiB. GPU 0 has a total capacity of 1 bytes",
        "CUDA out of memory. Tried to allocate 0 bytes (GPU 0; 0 bytes total capacity; 0 bytes already allocated; "
        "0 bytes free; 0 bytes reserved in total by PyTorch)",
        "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 1.00 GiB total capacity; 9.00 GiB already allocated; "
        "1.00 GiB free; 2.00 GiB reserved in total by PyTorch)",
        "\x00\x1b[31mCUDA out of memory. Tried to allocate 1.00 GiB\x1b]0;title\x07 [bold red]x[/bold red]\u202e",
    ):
        explanation = explain_oom(text)
        assert explanation.error is not None
        assert all(character.isprintable() or character == "\n" for character in explanation.text())


@pytest.mark.slow
def test_the_libraries_of_this_machine_say_it_so() -> None:
    script = """
import numpy, torch
for fails in (
    lambda: torch.empty(2**46), lambda: numpy.zeros((2**30, 2**20)), lambda: bytearray(2**50),
):
    try:
        fails()
    except Exception as error:
        print(f"{type(error).__module__}.{type(error).__qualname__}: {error}".removeprefix("builtins."))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    requested = {one.message.form: one.message.requested_bytes for one in find_messages(done.stdout)}
    assert requested == {"torch-cpu": 2**48, "numpy": 2**53, "memory-error": None}, done.stdout + done.stderr
