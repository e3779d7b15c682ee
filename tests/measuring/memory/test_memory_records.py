from __future__ import annotations

import json
import math
from pathlib import Path

from hf_memkit.measuring.memory.records import RecordWriter, read_records, steps


def test_a_line_a_record(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "new" / "memory-rank0.jsonl")
    assert writer.write("step", {"step": 1})
    assert writer.write("step", {"step": 2, "name": Path("x"), "odd": {1: (1, 2)}})
    lines = writer.path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    for record in read_records(writer.path):
        assert record["schema"] == 1 and record["kind"] == "step" and record["time"] > 1e9


def test_unreadable_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'\n[1]\n\xff\xfe\n{"kind":"step","step":3}\n7\n')
    assert read_records(path) == [{"kind": "step", "step": 3}]


def test_not_finite_is_null(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "r.jsonl")
    writer.write("evaluate", {"metrics": {"eval_loss": math.nan, "b": [math.inf, -math.inf, 1.0]}})

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(writer.path.read_text(), parse_constant=refuse)
    assert record["metrics"] == {"eval_loss": None, "b": [None, None, 1.0]}


def test_a_resume_gives_up_the_steps_beyond_its_start() -> None:
    records = [
        {"kind": "run", "start_step": 0},
        {"kind": "step", "step": 1, "n": "a"},
        {"kind": "step", "step": 2, "n": "a"},
        {"kind": "step", "step": 3, "n": "a"},
        {"kind": "run", "start_step": 1},
        {"kind": "step", "step": 2, "n": "b"},
        {"kind": "evaluate", "step": 2},
    ]
    assert [(r["step"], r["n"]) for r in steps(records)] == [(1, "a"), (2, "b")]


def test_a_new_training_in_the_same_folder_leaves_out_the_old_one() -> None:
    records = [
        {"kind": "run", "start_step": 0},
        *({"kind": "step", "step": n, "n": "old"} for n in (1, 2, 3)),
        {"kind": "run", "start_step": 0},
        {"kind": "step", "step": 1, "n": "new"},
    ]
    assert [(r["step"], r["n"]) for r in steps(records)] == [(1, "new")]


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
