"""Records when disks, folders and processes fail."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from hf_memkit.measuring.memory.records import RecordWriter, read_records
from tests.conftest import ROOT

CHILD = """
import itertools, sys
from hf_memkit.measuring.memory.records import RecordWriter
writer = RecordWriter(sys.argv[1])
writer.write("run", {"start_step": 0})
print("ready", flush=True)
for step in itertools.count(1):
    writer.write("step", {"step": step, "phases": {"forward": {"peak_allocated_gib": step / 7}}, "pad": "x" * 3000})
"""


def parses(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_killed_at_fifteen_random_moments(tmp_path: Path) -> None:
    """Each child goes on in the file of the one before. A kill tears the last line at most: no other is lost."""
    path = tmp_path / "memory-rank0.jsonl"
    moments = random.Random(4)
    for _ in range(15):
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", CHILD, str(path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(moments.random() / 50)
        child.kill()
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
    lines = path.read_bytes().split(b"\n")
    torn = [number for number, line in enumerate(lines) if line and not parses(line)]
    records = read_records(path)
    assert len(records) + len(torn) + lines.count(b"") == len(lines)
    assert all(number + 1 == len(lines) or b'"kind":"run"' in lines[number + 1] for number in torn)
    starts = [number for number, record in enumerate(records) if record["kind"] == "run"]
    assert len(starts) == 15
    for start, end in zip(starts, [*starts[1:], len(records)], strict=True):
        assert [record["step"] for record in records[start + 1 : end]] == list(range(1, end - start))


def test_the_file_stays_open_and_is_closed_with_its_writer(tmp_path: Path) -> None:
    before = open_files()
    writer = RecordWriter(tmp_path / "r.jsonl")
    for step in range(5):
        assert writer.write("step", {"step": step})
    assert open_files() == before + 1
    writer.close()
    assert open_files() == before
    assert writer.write("step", {"step": 5}) and open_files() == before + 1
    del writer  # as after a training that raised
    assert open_files() == before
    assert [r["step"] for r in read_records(tmp_path / "r.jsonl")] == [0, 1, 2, 3, 4, 5]


def test_a_forked_process_and_its_parent(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "r.jsonl")
    writer.write("step", {"step": 1})
    child = os.fork()
    if child == 0:
        written = writer.write("step", {"step": 2})
        writer.close()
        os._exit(0 if written else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert writer.write("step", {"step": 3})
    assert [r["step"] for r in read_records(writer.path)] == [1, 2, 3]
