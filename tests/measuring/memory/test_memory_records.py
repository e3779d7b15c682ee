from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hf_memkit.measuring.memory.records import RecordWriter, read_records


def test_a_line_a_record(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "new" / "memory-rank0.jsonl")
    assert writer.write("step", {"step": 1})
    assert writer.write("step", {"step": 2, "name": Path("x"), "odd": {1: (1, 2)}})
    lines = writer.path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    for record in read_records(writer.path):
        assert record["schema"] == 1 and record["kind"] == "step" and record["time"] > 1e9


def test_unreadable_lines_are_skipped_and_a_torn_tail_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'\n[1]\n\xff\xfe\n{"kind":"step","step":3}\n7\n{"schema":1,"kind":"st')
    assert read_records(path) == [{"kind": "step", "step": 3}]
    RecordWriter(path).write("step", {"step": 4})
    assert [record["step"] for record in read_records(path)] == [3, 4] and path.read_bytes().count(b"\n") == 7


def test_not_finite_is_null(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "r.jsonl")
    writer.write("evaluate", {"metrics": {"eval_loss": math.nan, "b": [math.inf, -math.inf, 1.0]}})

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(writer.path.read_text(), parse_constant=refuse)
    assert record["metrics"] == {"eval_loss": None, "b": [None, None, 1.0]}


def test_a_write_that_fails_is_counted_not_raised(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").mkdir()
    writer = RecordWriter(tmp_path / "r.jsonl")
    assert not writer.write("step", {}) and writer.lost == 1 and writer.last_error
    (tmp_path / "r.jsonl").rmdir()

    class Unprintable:
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert not writer.write("step", {"x": Unprintable()})
    assert writer.write("step", {"x": 1}) and writer.lost == 2


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_is_not_followed(tmp_path: Path, exists: bool) -> None:
    """Others may write into a folder on a shared machine."""
    (tmp_path / "out").mkdir()
    target, path = tmp_path / "notes.txt", tmp_path / "out" / "memory-rank0.jsonl"
    if exists:
        target.write_text("mine\n")
    path.symlink_to(target)
    writer = RecordWriter(path)
    assert not writer.write("run", {"start_step": 0}) and not writer.write("end", {"status": "finished"})
    assert writer.lost == 2 and "symbolic link" in str(writer.last_error)
    assert (target.read_text() == "mine\n") if exists else not target.exists()
    path.unlink()
    assert writer.write("step", {"step": 1}) and path.exists()
