"""Whole processes that run out of memory: what a user sees on the screen and finds in the folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.measuring.memory.records import read_records, steps
from tests.measuring.callback.dying_script import OOM
from tests.run.conftest import Started

SCRIPT = Path(__file__).with_name("dying_script.py")
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}


def records(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [record for record in read_records(folder / f"memory-rank{rank}.jsonl") if record["kind"] != "modules"]


@pytest.mark.slow
def test_a_script_that_exits_catches_and_dies(tmp_path: Path) -> None:
    """A child leaves by sys.exit; then an error is caught; then one is not."""
    script = ["-m", "tests.measuring.callback.dying_script", str(tmp_path), "catches"]
    code, stdout, stderr = Started(script, tmp_path, UNBUFFERED).ended()
    assert code == 1, stderr
    shown = stderr[stderr.rindex(f"torch.OutOfMemoryError: {OOM}") :]
    assert "\nmemkit: out of memory in forward of step 3" in shown and f"memkit explain {tmp_path / 'died'}" in shown
    assert stderr.count("memkit: out of memory") == 1
    lines = records(tmp_path / "died")
    assert [record["kind"] for record in lines] == ["run", "step", "step", "oom", "end"]
    assert lines[-1]["status"] == "failed" and lines[-1]["error_type"] == "OutOfMemoryError"
    assert "GPT2LMHeadModel" in stdout and "Out of memory in forward of step 3" in stdout  # the summary
    assert (tmp_path / "died" / "memory-report.html").read_text().lower().startswith("<!doctype html>")
    assert "caught without a note" in stdout  # an exception that the script catches is not reported
    assert "exit code of the other: 3" in stdout
    for name, word in (("caught", "caught"), ("exited", "exit")):
        lines = records(tmp_path / name)
        assert [record["kind"] for record in lines] == ["run", "step", "end"]
        assert lines[-1]["status"] == "failed" and word in lines[-1]["error"]


@pytest.mark.slow
def test_two_ranks_of_which_one_runs_out_of_memory(tmp_path: Path) -> None:
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(SCRIPT),
        str(tmp_path),
        "ranks",
    ]
    code, stdout, stderr = Started(torchrun, tmp_path, UNBUFFERED).ended()
    assert code == 1
    (note,) = re.findall(r"^.*memkit: out of memory.*$", stderr, re.MULTILINE)
    assert "in forward of step 20" in note
    first, second = records(tmp_path, 0), records(tmp_path, 1)
    assert [record["kind"] for record in second][-2:] == ["oom", "end"] and second[-2]["step"] == 20
    assert len(steps(second)) == 19 and len(steps(first)) >= 18
    assert not any(record["kind"] == "oom" for record in first)  # it lost its peer, or torchrun was quicker
    page = (tmp_path / "memory-report.html").read_text()  # by rank 1: nobody tells rank 0
    assert "Out of memory in forward of step 20 on rank 1" in page and not list(tmp_path.glob("*.tmp"))
    assert stdout.count("Out of memory in forward of step 20 on rank 1") == 1
    # What rank 0 showed at its logging steps, without a collective: it has heard of both.
    last = stdout[stdout.rindex("'loss'") :]
    assert re.search(r"'memory/ranks_heard': '?2\b", last)
    for key in ("host_rss_mean_gib", "host_rss_max_gib", "host_rss_max_rank"):
        assert f"'memory/{key}'" in last
