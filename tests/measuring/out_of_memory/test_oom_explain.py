"""`memkit explain` and `explain_oom`: what a person reads, what a program reads, exit codes, hostile texts."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.cli import main
from hf_memkit.common.units import GIB
from hf_memkit.measuring.out_of_memory import explain_oom, explain_records
from tests.conftest import ROOT
from tests.measuring.out_of_memory.oom_messages import EXAMPLES, THE_TEXT

TEXT = f"RuntimeError: CUDA out of memory. {THE_TEXT}"

RUN: dict[str, Any] = {
    "schema": 1, "kind": "run", "time": 1.0, "rank": 0, "world_size": 1, "start_step": 0,
    "versions": {"transformers": "5.23.0", "torch": "2.13.0"},
    "hardware": {"device_name": "NVIDIA A100-SXM4-40GB", "device_type": "cuda", "ram_gib": 250.0},
    "arguments": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "optim": "adamw_torch_fused"},
    "model_type": "gpt2", "parameters": 10**9, "trainable_parameters": 10**9,
}  # fmt: skip
OOM: dict[str, Any] = {
    "schema": 1, "kind": "oom", "time": 2.0, "step": 17, "phase": "backward", "micro_batch": 1, "samples": 8,
    "longest_sequence": 977, "error_type": "OutOfMemoryError",
    "error": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB of which 300.00 "
    "MiB is free. Including non-PyTorch memory, this process has 39.00 GiB memory in use. Of the allocated memory "
    "38.00 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated.",
    "categories": {"weights_gib": 3.73, "gradients_gib": 3.73, "optimizer_gib": 7.45, "activations_gib": 19.0,
                   "loss_gib": 4.0, "other_gib": 0.09},
}  # fmt: skip


def write(folder: Path, *records: dict[str, Any], rank: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"memory-rank{rank}.jsonl").write_text(lines)
    return folder


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["explain", *arguments])
    return code, capsys.readouterr().out


def test_a_log_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"Step 1\nStep 2\r{TEXT}\n")
    code, out = explained(capsys, str(log))
    assert code == 0 and len(out.splitlines()) <= 60, "more than one screen"
    for part in (
        "(line 2)",
        "Cause: fragmentation",
        "3.87 GiB cached",
        "max_split_size_mb:1024",
        "MemoryReportCallback",
    ):
        assert part in " ".join(out.split())
    code, printed = explained(capsys, str(log), "--json")
    content = json.loads(printed)
    assert code == 0 and len(content) == 1
    assert set(content[0]) == {"found", "verdict", "others", "changes", "job", "next", "failure"}
    assert content[0]["found"]["message"]["cached_bytes"] == round(14.21 * GIB) - round(10.34 * GIB)
    assert content[0]["found"]["line"] == 2 and content[0]["found"]["message"]["device"] == 0
    (no_help,) = content[0]["verdict"]["no_help"]
    assert "empty_cache" in no_help["key"] and "empty_cache" in out and not no_help["helps"]
    assert all(change["saves_gib"] is None for change in content[0]["changes"]), "no record, no figure"


def test_every_message_is_explained_on_one_screen() -> None:
    for example in EXAMPLES:
        for width in (40, 80, 100):
            lines = explain_oom(example.text).text(width).splitlines()
            assert len(lines) <= (60 if width >= 80 else 110), (example.name, len(lines))
            assert width < 80 or max(map(len, lines)) <= width, (example.name, max(lines, key=len))


def test_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ((), ("-",)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe broken\n" + TEXT.encode())))
        code, out = explained(capsys, *arguments)
        assert code == 0 and "Cause: fragmentation" in out


def test_nothing_to_explain(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    for text, sentence in (("all is well\n", "No known message found"), ("", "is empty")):
        log.write_text(text)
        code, out = explained(capsys, str(log))
        assert code == 1 and sentence in out
    log.write_bytes(os.urandom(100_000))
    assert explained(capsys, str(log))[0] in (0, 1)


def test_wrong_input(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    for arguments, part in (
        ((), "standard input"),
        ((str(tmp_path / "no.log"),), "no.log"),
        ((str(tmp_path),), "memory-rank"),
    ):
        assert main(["explain", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("memkit: error: ") and error.count("\n") == 1 and part in error


def test_a_run_gets_changes_with_its_own_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    end = {"schema": 1, "kind": "end", "time": 3.0, "status": "failed", "error": OOM["error"], "step": 16, "steps": 16}
    folder = write(tmp_path / "out", RUN, OOM, end)
    code, out = explained(capsys, str(folder))
    assert code == 0 and len(out.splitlines()) <= 60
    for part in ("in backward, step 17, rank 0, with sequences of 977 tokens", "Cause: size",
                 "per_device_train_batch_size: 8 → 4   saves 11.50 GiB",
                 "gradient_accumulation_steps 1 → 2"):  # fmt: skip
        assert " ".join(part.split()) in " ".join(out.split()), out
    assert "Predicted" not in out and "Generic" not in out
    later = "memkit predict"
    assert later in " ".join(out.split()), "16 steps had fitted"
    write(tmp_path / "first", RUN, {**OOM, "step": 1}, end)
    assert later not in " ".join(explained(capsys, str(tmp_path / "first"))[1].split())
    write(folder, {**RUN, "prediction": {"peak_allocated_gib": 36.5}}, OOM, end)
    assert "36.50 GiB" in explained(capsys, str(folder))[1]
    content = json.loads(explained(capsys, str(folder), "--json")[1])
    assert content[0]["job"]["phase"] == "backward" and 1 <= len(content[0]["changes"]) <= 3


def test_several_ranks_are_one_screen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for rank in range(4):
        records = {**RUN, "rank": rank, "world_size": 4}, {**OOM, "step": 17 + rank % 2}
        folder = write(tmp_path / "out", *records, rank=rank)
    code, out = explained(capsys, str(folder))
    assert code == 0 and out.count("Cause:") == 1 and len(out.splitlines()) <= 60
    assert [f"rank {n + 1}" in line for n, line in enumerate(out.splitlines()[-3:])] == [True] * 3
    assert len(json.loads(explained(capsys, str(folder), "--json")[1])) == 4


@pytest.mark.parametrize(("left", "cause"), [(0.1, "host memory"), (100.0, "unknown")])
def test_a_run_that_was_killed(capsys: pytest.CaptureFixture[str], tmp_path: Path, left: float, cause: str) -> None:
    host = {"hostname": socket.gethostname(), "boot_id": "an earlier one", "pid": 4321, "process_started": 1.0}
    step = {"schema": 1, "kind": "step", "time": 2.0, "step": 5, "host_available_gib": left}
    arguments = {"dataloader_num_workers": 8}
    folder = write(tmp_path / "out", {**RUN, "host": host, "arguments": arguments}, step)
    code, out = explained(capsys, str(folder))
    assert code == 0 and f"Cause: {cause}" in out and "Process 4321" in out and "step 5" in out
    assert ("1. dataloader_num_workers: 8 → 4" in out) is (cause == "host memory")


def test_a_record_without_the_errors_text_speaks_by_its_counters() -> None:
    record = {**OOM, "error": "", "requested_gib": 3.0, "free_gib": 0.5, "capacity_gib": 16.0, "allocated_gib": 9.0,
              "reserved_gib": 14.0}  # fmt: skip
    explanation = explain_records(RUN, record)
    assert explanation.verdict is not None and explanation.verdict.cause == "fragmentation"
    assert explanation.changes[0].key == "environment.PYTORCH_ALLOC_CONF"


def test_a_hostile_log_reaches_the_terminal_as_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J[bold red]x[/bold red]\u202eabc\x9b31m\x00"
    log = tmp_path / "evil.log"
    log.write_text(
        f"{evil} CUDA out of memory. Tried to allocate 2.00 GiB {evil * 300}\n"
        f"[1.0] Out of memory: Killed process 12 ({evil[:20]}) total-vm:1kB, anon-rss:5kB\n{evil} MemoryError\n"
        f"RuntimeError: CUDA error: out of memory {evil}\n"
    )
    for arguments in ((str(log),), (str(log), "--json")):
        _, out = explained(capsys, *arguments)
        assert all(character.isprintable() or character == "\n" for character in out)
        assert len(out) < 20_000
    record = {**OOM, "error": f"{OOM['error']} {evil}", "phase": evil, "step": evil}
    text = explain_records({**RUN, "rank": evil}, record).text()
    assert all(character.isprintable() or character == "\n" for character in text)


def test_it_starts_without_torch_and_reads_a_pipe_to_its_end(tmp_path: Path) -> None:
    """In a new process: nothing heavy is imported, and a large log comes through a pipe."""
    script = (
        "import sys; from hf_memkit.cli import main; code = main(['explain']); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    log = "\n".join(["step 1 loss 2.0 memory/peak 3.1"] * 50_000) + f"\n{TEXT}\n"
    done = subprocess.run(
        [sys.executable, "-c", script], input=log, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "line 50001" in done.stdout


@pytest.mark.parametrize("before", [[], [RUN, OOM]], ids=["alone", "after one that ran out"])
def test_a_run_that_did_not_run_out_is_sent_to_its_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, before: list[dict[str, Any]]
) -> None:
    """Only the last training of a folder counts."""
    end = {"schema": 1, "kind": "end", "time": 5.0, "status": "finished", "step": 16, "steps": 16}
    folder = write(tmp_path / "out", *before, {**RUN, "time": 4.0}, end)
    code, out = explained(capsys, str(folder))
    assert code == 1 and "no out-of-memory error" in out and f"memkit report {folder}" in out
    assert "Give the whole log" not in out, "there is no log"
    assert json.loads(explained(capsys, str(folder), "--json")[1])[0]["found"] is None
