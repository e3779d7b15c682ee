"""Reading a run's folder: every state that a file can be found in gives what can be read of it, or one clear line."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.common.answer.page import page
from hf_memkit.common.errors import InputError
from hf_memkit.measuring.memory.records import RecordWriter, read_records, steps
from hf_memkit.measuring.report import rank_reader
from hf_memkit.measuring.report.answer import report_answer, report_json, text_report
from hf_memkit.measuring.report.load import RunReader, load_run
from hf_memkit.measuring.report.rank_reader import RankReader
from tests.conftest import ROOT
from tests.measuring.report import synthetic_records as made
from tests.record_shape import misfits


def test_what_tests_make_up_has_the_shape_of_records() -> None:
    records = [*made.healthy(60), *made.out_of_memory(), *made.on_a_cpu()]
    assert not [misfit for record in records for misfit in misfits(record)]
    assert len(misfits({"kind": "step", "step": "1", "nobody_knows_gib": 0.5})) == 2


def numbers_of_steps(folder: Path) -> list[int]:
    return [step["step"] for step in load_run(folder).first.steps]


def test_all_kinds_of_records_are_found(tmp_path: Path) -> None:
    run = load_run(made.write(tmp_path, made.healthy(100)) / "memory-rank0.jsonl")  # the file itself may be named
    rank = run.first
    assert len(rank.steps) == 100 and len(rank.evaluations) == len(rank.saves) == 2 and len(rank.modules) == 10
    assert rank.run["model_class"] == "GPT2LMHeadModel" and rank.end is not None
    assert (run.ending.kind, run.ending.step, run.notes) == ("finished", 100, ())


def test_a_file_cut_at_any_byte_is_read_up_to_there(tmp_path: Path) -> None:
    whole = (made.write(tmp_path / "whole", made.out_of_memory(6)) / "memory-rank0.jsonl").read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    folder = tmp_path / "cut"
    folder.mkdir()
    rng = random.Random(0)
    for cut in sorted({*rng.sample(range(len(whole)), 120), *ends, *(end + 1 for end in ends)}):
        (folder / "memory-rank0.jsonl").write_bytes(whole[:cut])
        complete = sum(end <= cut for end in ends)  # the newline itself is not needed
        if complete == 0:
            with pytest.raises(InputError, match="no record yet"):
                load_run(folder)
            continue
        run = load_run(folder)
        assert len(run.first.steps) == min(max(0, complete - 2), 6)
        assert text_report(run) and json.dumps(report_json(run))


def test_lines_that_are_no_records_are_counted_and_skipped(tmp_path: Path) -> None:
    records = made.healthy(4)
    folder = made.write(tmp_path, records[:4])
    rubbish = [b"{torn", b"\xff\xfe\x00", b"[1, 2]", b'"text"', b"{}", b"[" * 100_000, b'{"kind": 7}', b"", b"1e999"]
    with (folder / "memory-rank0.jsonl").open("ab") as file:
        file.write(b"\n".join(rubbish) + b"\n")
        file.write(b"x" * (2**24 + 2**21) + b"\n")  # no line that a recorder writes
    made.write(folder, records[4:])
    run = load_run(folder)
    assert len(run.first.steps) == 4 and run.ending.kind == "finished"
    assert len(run.notes) == 1 and run.notes[0].endswith(f"could not be read: {len(rubbish)}")


HOSTILE = [
    None, True, "text", [], {}, [[{}]], {"device": {"weights_gib": "x"}}, {"a": 5}, float("nan"), float("inf"), -1e300,
    10**400, "\ud800", -1, 0.5,
]  # fmt: skip


def spoilt(record: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """With hostile values instead of some, at any depth, and under an unknown name."""
    changed = {
        name: rng.choice(HOSTILE) if name != "kind" and rng.random() < 0.2
        else spoilt(value, rng) if isinstance(value, dict) else value
        for name, value in record.items()
    }  # fmt: skip
    return {**changed, "<new>": rng.choice(HOSTILE)}


def test_fields_of_any_type_never_break_a_view(tmp_path: Path) -> None:
    rng = random.Random(3)
    for seed in range(45):
        records = (made.out_of_memory, made.healthy, made.rehearsal)[seed % 3](5)
        run = load_run(made.write(tmp_path / str(seed), [spoilt(record, rng) for record in records]))
        assert text_report(run, modules=True) and (seed % 5 or page(report_answer(run), guide="report.md"))
        json.dumps(report_json(run), allow_nan=False).encode()


def test_a_resume_repeats_steps_and_a_new_start_forgets_them(tmp_path: Path) -> None:
    first, second = made.healthy(10)[:-1], made.healthy(8, seed=5)
    resumed = [r for r in second if r.get("step", 99) > 6 or r["kind"] == "run"]
    resumed[0]["start_step"] = 6
    folder = made.write(tmp_path, [*first, *resumed])
    run = load_run(folder)
    assert numbers_of_steps(folder) == [1, 2, 3, 4, 5, 6, 7, 8], "9 and 10 were given up with the first start"
    again = {step["step"]: step["tokens"] for step in resumed if step["kind"] == "step"}
    assert run.first.steps[-1]["tokens"] == again[8], "the last record of a step counts"
    assert run.ending.kind == "finished" and (run.first.earlier[0][1].kind, run.first.earlier[0][1].step) == (
        "killed",
        10,
    )
    assert any("earlier start" in note and "step 10" in note for note in run.notes)
    made.write(folder, made.healthy(2))
    assert numbers_of_steps(folder) == [1, 2]


def test_a_start_that_ran_out_of_memory_before_the_last_one_is_told(tmp_path: Path) -> None:
    failed = made.out_of_memory(4)
    folder = made.write(tmp_path, [*failed[:-1], *made.healthy(5)])  # auto_find_batch_size begins again without an end
    run = load_run(folder)
    assert run.ending.kind == "finished" and run.first.ooms == ()
    assert any("batch size 4" in note and "ran out of memory in backward of step 5" in note for note in run.notes)


def test_records_of_an_older_and_of_a_newer_memkit(tmp_path: Path) -> None:
    old = [{"schema": 1, "kind": "step", "step": n, "peak_allocated_gib": 2.0 + n} for n in (1, 2)]
    run = load_run(made.write(tmp_path / "old", old))
    assert run.ending.kind == "unknown" and "beginning of the records is missing" in run.notes[0]
    assert "Peak 4.0 GiB, in step 2" in text_report(run)
    newer = [{**record, "schema": 7, "new": 1} for record in made.healthy(3)] + [{"schema": 7, "kind": "dream"}]
    run = load_run(made.write(tmp_path / "new", newer))
    assert len(run.first.steps) == 3 and "newer memkit (schema 7" in run.notes[0]


def test_ranks_that_are_missing_or_left_over(tmp_path: Path) -> None:
    made.of_ranks(tmp_path, 3, 4)
    (tmp_path / "memory-rank1.jsonl").unlink()
    (tmp_path / "memory-rank2.jsonl").write_bytes(b"")
    run = load_run(tmp_path)
    assert [rank.rank for rank in run.ranks] == [0] and any(
        "2 of 3 ranks" in note and "1, 2" in note for note in run.notes
    )
    made.write(tmp_path, made.healthy(4), 0)  # one process now; rank 1's file is of another training
    made.write(tmp_path, [{**record, "time": 0} for record in made.healthy(2, rank=1, world_size=2)], 1)
    run = load_run(tmp_path)
    assert [rank.rank for rank in run.ranks] == [0] and run.notes[0].endswith("more processes: 1")


def test_the_rank_that_decides(tmp_path: Path) -> None:
    made.of_ranks(tmp_path, 3, 4)
    (tmp_path / "memory-rank2.jsonl").unlink()
    made.write(tmp_path, [{**r, "rank": 2, "world_size": 3} for r in made.out_of_memory(4)], 2)
    for rank in (0, 1):
        path = tmp_path / f"memory-rank{rank}.jsonl"
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))  # the launcher ended these
    run = load_run(tmp_path)
    assert (run.ending.kind, run.ended_by) == ("out of memory", 2)
    assert "on rank 2" in text_report(run).splitlines()[0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("nothing", "no such folder"),
        ("empty", r"no memory-rank\*.jsonl .*Trainer\(callbacks="),
        ("below", "memkit report .*/below/out"),
        ("recipe", "status 'running'.* memkit report .*/recipe --follow"),
        ("written", "memkit run .*/written"),
        ("torn", "hold no record yet"),
    ],
)
def test_a_folder_without_records_is_one_clear_line(tmp_path: Path, result: str, message: str) -> None:
    folder = tmp_path / result
    if result != "nothing":
        folder.mkdir()
    if result == "below":
        made.write(folder / "out", made.healthy(1))
    if result in ("recipe", "written"):
        status = result.replace("recipe", "running")
        (folder / "memkit-run.json").write_text(json.dumps({"status": status}))
    if result == "torn":
        (folder / "memory-rank0.jsonl").write_text('{"kind": "ru')
    with pytest.raises(InputError, match=message) as error:
        load_run(folder)
    assert str(error.value).count("\n") == 0


def test_a_growing_file_is_read_on_and_a_new_one_from_its_start(tmp_path: Path) -> None:
    records = made.healthy(6)
    reader = RunReader(tmp_path / "later")
    assert not reader.read() and reader.run() is None
    folder = made.write(tmp_path / "later", records[:4])
    assert reader.read() and not reader.read()
    path = folder / "memory-rank0.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(records[4])[:40])  # under way
    assert not reader.read()
    with path.open("a") as file:
        file.write(json.dumps(records[4])[40:] + "\n")
    assert reader.read()
    run = reader.run()
    assert run is not None and [step["step"] for step in run.first.steps] == [1, 2, 3]
    path.unlink()
    made.write(folder, records[:3])
    assert reader.read() and (run := reader.run()) is not None
    assert [step["step"] for step in run.first.steps] == [1]


def test_following_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job runs on this machine: a poll that reads 5,000 steps again takes its CPU."""
    writer = RecordWriter(tmp_path / "memory-rank0.jsonl")
    writer.write("run", {"start_step": 0})
    for step in range(1, 301):
        writer.write("step", {"step": step})
    reader, parsed = RankReader(writer.path), []
    plain = rank_reader._parse
    monkeypatch.setattr(rank_reader, "_parse", lambda line: parsed.append(line) or plain(line))
    assert reader.read() and len(parsed) == 301
    for step in range(301, 304):
        parsed.clear()
        assert not reader.read() and parsed == []
        writer.write("step", {"step": step})
        assert reader.read() and len(parsed) == 1 and len(reader.steps) == step


def test_a_growing_file_gives_what_a_whole_one_does(tmp_path: Path) -> None:
    """Also where a record replaces blanks in a line that was read before, as on a full disk."""
    writer = RecordWriter(tmp_path / "memory-rank0.jsonl")
    reader = RankReader(writer.path)
    events = [
        lambda: writer.write("run", {"start_step": 0}),
        lambda: writer.write("step", {"step": 1}),
        lambda: writer._write_over_blanks("lost", {"step": 2, "write_error": "full"}),
        lambda: writer.write("step", {"step": 3}),
        lambda: writer.write("run", {"start_step": 3}),
        lambda: writer.write("step", {"step": 4}) and writer._write_over_blanks("lost", {"write_error": "full"}),
        lambda: writer._write_over_blanks("end", {"status": "failed", "step": 6}),
    ]
    for event in events:
        assert event()
        assert reader.read(), "there is something new"
        whole = RankReader(writer.path)
        whole.read()
        for name in ("run", "lost", "end", "last_step", "blanks"):
            assert [getattr(one, name) for one in reader.attempts] == [getattr(one, name) for one in whole.attempts]
        assert reader.steps == whole.steps and reader.unreadable == whole.unreadable == 0
        assert not reader.read()
    assert [one.end is not None for one in reader.attempts] == [False, True]


def test_two_runs_that_write_into_one_folder(tmp_path: Path) -> None:
    """Finds: the end of the first closes the second, or its steps count as the second's."""
    first, second = (RecordWriter(tmp_path / "memory-rank0.jsonl") for _ in range(2))
    here = made.hosted_here(pid=os.getpid())
    first.write("run", {"start_step": 0, "host": {**here, "pid": os.getppid()}})
    first.write("step", {"step": 1, "peak_allocated_gib": 9.0})
    second.write("run", {"start_step": 0, "host": here})
    second.write("step", {"step": 1, "peak_allocated_gib": 1.0})
    assert load_run(tmp_path).first.earlier[0][1].kind == "running"
    first.write("step", {"step": 2, "peak_allocated_gib": 9.0})
    first.write("evaluate", {"step": 2, "metrics": {"eval_loss": 9.0}})
    first.write("end", {"status": "finished", "step": 2})
    run = load_run(tmp_path)
    assert run.ending.kind == "running" and run.ending.step == 1 and run.first.end is None
    assert [step["peak_allocated_gib"] for step in run.first.steps] == [1.0] and not run.first.evaluations
    assert steps(read_records(first.path)) == list(run.first.steps)
    ((_, ending),) = run.first.earlier
    assert (ending.kind, ending.step) == ("finished", 2)
    assert any("at the same time" in note for note in run.notes)
    second.write("end", {"status": "failed", "step": 1})
    assert load_run(tmp_path).ending.kind == "failed"
    ids = {record["run_id"] for record in read_records(first.path)}
    assert len(ids) == 2 and None not in ids


def test_memory_stays_bounded_and_no_peak_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "memory-rank0.jsonl"
    peak_at = 31_234
    with path.open("w") as file:
        for step in range(1, 50_002):
            peak = 99.0 if step == peak_at else 5.0
            file.write(f'{{"kind":"step","step":{step},"steps":1,"peak_allocated_gib":{peak},"samples":2}}\n')
    reader = RankReader(path)
    assert reader.read()
    kept = list(reader.steps.values())
    assert len(kept) <= 20_000 and sum(step["steps"] for step in kept) == 50_001
    window = max(kept, key=lambda step: step["peak_allocated_gib"])
    assert window["peak_allocated_gib"] == 99 and window["step"] - window["steps"] < peak_at <= window["step"]
    assert all(step["samples"] == 2 for step in kept)


def test_neither_torch_nor_transformers_is_needed(tmp_path: Path) -> None:
    # Its process is gone: how it ended is looked up too.
    made.write(tmp_path, made.healthy(5, host=made.hosted_here(pid=2**22 + 1, process_started=0, oom_kills=0))[:-1])
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from hf_memkit.measuring.report.load import load_run\n"
        "from hf_memkit.measuring.report.answer import text_report, write_page\n"
        f"run = load_run({str(tmp_path)!r}); print(text_report(run)); assert 'plotly' not in sys.modules\n"
        f"write_page(run, {str(tmp_path / 'page.html')!r}); assert 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "after step 5" in done.stdout, done.stderr


def test_sizes_that_auto_find_batch_size_gave_up_are_told(tmp_path: Path) -> None:
    """An error that was caught is recorded only in the next run."""
    tried = [made.run_record(), made.run_record(after_oom={"step": 1, "phase": "forward", "train_batch_size": 4})]
    last = made.healthy(5, after_oom={"step": 1, "phase": "backward", "train_batch_size": 3})
    run = load_run(made.write(tmp_path, [*tried, *last]))
    (note,) = run.notes
    assert "earlier starts in this folder: 2" in note
    assert "(batch size 3) ran out of memory in backward of step 1" in note
    assert [ending.kind for _, ending in run.first.earlier] == ["out of memory"] * 2
