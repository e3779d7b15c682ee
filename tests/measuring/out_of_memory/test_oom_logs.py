"""Messages in logs: lines, ranks, repetitions, several at once; and logs of any length and line length."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_memkit.cli import main
from hf_memkit.measuring.out_of_memory import explain_oom, find_messages
from hf_memkit.measuring.out_of_memory.log_lines import MAX_LINE
from tests.measuring.out_of_memory.oom_messages import EXAMPLES, THE_TEXT

_BY_NAME = {example.name: example for example in EXAMPLES}
SIZE = _BY_NAME["torch 2.2-2.9: size"].text
PIECES = _BY_NAME["torch 2.x: pieces"].text

TRACEBACK = f"""Step 41: loss 2.1
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    trainer.train()
  File "/x/torch/nn/functional.py", line 2248, in log_softmax
    ret = input.log_softmax(dim)
          ^^^^^^^^^^^^^^^^^^^^^^
{SIZE}
[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 9, in <module>
[rank0]:     trainer.train()
[rank0]: {SIZE}
[rank1]: {PIECES}
W0105 12:00:00.000 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 42 closing signal SIGTERM
E0105 12:00:01.000 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 2 (pid: 43)
"""


def test_lines_ranks_and_repetitions() -> None:
    errors = find_messages(TRACEBACK)
    assert [(one.line, one.rank, one.count, one.message.form) for one in errors] == [
        (8, 0, 2, "torch-device"),
        (13, 1, 1, "torch-device"),
        (15, None, 1, "sigkill"),
    ]
    assert [one.message.device for one in errors] == [0, 3, None]


def test_the_cause_is_explained_and_not_its_consequences() -> None:
    explanation = explain_oom("container exited with code 137\nRuntimeError: No executable batch size found, reached "
                              f"zero.\n{PIECES}")  # fmt: skip
    assert explanation.error is not None and explanation.error.line == 3
    assert [other.message.form for other in explanation.others] == ["sigkill", "accelerate-batch"]
    assert "Also in this log" in explanation.text() and "line 1" in explanation.text()


def test_ranks_that_write_at_once_keep_their_own_figures() -> None:
    one, two = SIZE.replace(". ", ".\n").splitlines(), PIECES.replace(". ", ".\n").splitlines()
    mixed = [line for pair in zip(one, two, strict=False) for line in (f"[rank0]: {pair[0]}", f"[rank1]: {pair[1]}")]
    by_rank = {one.rank: one.message for one in find_messages("\n".join(mixed))}
    assert {rank: message.device for rank, message in by_rank.items()} == {0: 0, 1: 3}
    assert {rank: message.free_bytes for rank, message in by_rank.items()} == {
        0: _BY_NAME["torch 2.2-2.9: size"].fields["free_bytes"],
        1: _BY_NAME["torch 2.x: pieces"].fields["free_bytes"],
    }


def test_a_saved_notebook_is_read_as_its_cell_shows() -> None:
    frames = [
        "\x1b[0;31mOutOfMemoryError\x1b[0m                          Traceback (most recent call last)",
        "\x1b[0;32m/x/torch/nn/functional.py\x1b[0m in \x1b[0;36mcross_entropy\x1b[0;34m(input, target)\x1b[0m\n"
        "\x1b[0;32m-> 3059\x1b[0;31m     \x1b[0mloss = f(input)\x1b[0m\n",
        f"\x1b[0;31mOutOfMemoryError\x1b[0m: {SIZE}",
    ]
    for indent in (None, 1):
        (error,) = find_messages(json.dumps({"cells": [{"outputs": [{"traceback": frames}]}]}, indent=indent))
        assert error.trace.place == "cross entropy" and error.message.free_bytes is not None


def test_a_log_that_powershell_wrote_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(f"step 1\r\n{SIZE}\r\n".encode("utf-16"))
    assert main(["explain", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["found"]["message"]["device"] == 0


def test_a_message_is_found_once_wherever_it_lies_in_a_line_without_end() -> None:
    bar = "  3%|#         | 3/100 [00:03<01:37,  1.00s/it]"
    for place in range(MAX_LINE - 3_000, MAX_LINE + 3_000, 411):
        line = (bar * (place // len(bar) + 1))[:place] + " " + PIECES + " " + bar * 100
        errors = find_messages(line)
        assert [(one.count, one.message.device, one.message.requested_bytes) for one in errors] == [(1, 3, 2 * 2**30)]
        assert errors[0].message.reserved_bytes == _BY_NAME["torch 2.x: pieces"].fields["reserved_bytes"]


def endless(size: int) -> Iterator[str]:
    """The lines of a log that is never in memory as a whole."""
    entry = {"loss": 2.5, "grad_norm": 1.0, "memory/peak_allocated_gib": 12.3}
    for number in range(size // 90):
        yield f"{ {'step': number, **entry} }\n"
        if number % 20_000 == 9:
            yield from ("progress " * (MAX_LINE // 9), "progress " * 9 + "\n")
    yield f"RuntimeError: CUDA out of memory. {THE_TEXT}\n"


def test_a_long_log_is_read_in_bounded_memory() -> None:
    pieces = endless(1_500_000)
    tracemalloc.start()
    errors = find_messages(SimpleNamespace(readline=lambda size=-1: next(pieces, "")))  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [one.message.device for one in errors] == [0]
    assert peak < 1_000_000


def test_a_log_of_nothing_but_different_messages_is_bounded() -> None:
    text = "\n".join(f"CUDA out of memory. Tried to allocate {number}.00 MiB" for number in range(1, 1_500))
    assert len(find_messages(text)) <= 1_001
