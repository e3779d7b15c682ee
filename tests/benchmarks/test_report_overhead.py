"""The overhead benchmark's path, with few steps, and its stopwatch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import report_overhead
from benchmarks.overhead_arms import PARTS, Arm, Timings
from benchmarks.stopwatch import Stopwatch, watching

now_s = [0.0]


def inner() -> None:
    now_s[0] += 0.004


def outer() -> None:
    now_s[0] += 0.002
    inner()


def test_time_counts_once_and_for_the_part_that_took_it() -> None:
    stopwatch = Stopwatch(clock=lambda: now_s[0])
    this = sys.modules[__name__]
    before = (this.outer, this.inner)
    with watching(stopwatch, {"outer": [f"{__name__}:outer"], "inner": [f"{__name__}:inner"]}):
        this.outer()  # before the first step: does not count
        stopwatch.lap()
        this.outer()
        stopwatch.lap()
        this.inner()
        stopwatch.lap()
        this.inner()  # after the last
    assert (this.outer, this.inner) == before
    assert stopwatch.calls == 6 and len(stopwatch.laps_us) == 2
    assert stopwatch.parts_us == pytest.approx({"outer": 2000, "inner": 8000})
    assert stopwatch.laps_us == pytest.approx([6000, 4000])


def test_a_function_that_is_gone_is_an_error() -> None:
    for name in (
        "hf_memkit.measuring.memory.records:RecordWriter.gone",
        "hf_memkit.measuring.memory.records:RecordWriter.gone_*",
    ):
        with pytest.raises(AttributeError, match="gone"), watching(Stopwatch(), {"part": [name]}):
            pass


def test_an_arm_is_compared_with_its_own_baseline_round_by_round() -> None:
    skipped = [1e6] * report_overhead.WARM_UP
    nothing = [Timings([*skipped, 100.0, 102.0, 98.0]), Timings([*skipped, 200.0])]
    other = [Timings([*skipped, 107.0], [*skipped, 6.0]), Timings([*skipped, 203.0], [*skipped, 4.0])]
    row = report_overhead.summarize(
        Arm("other", "", lambda *_: other[0]), {"nothing": nothing, "other": other}
    )  # one round is twice as slow, for everybody
    assert row["added_us"] == 5.0 and row["added_us_range"] == [3.0, 7.0]
    assert row["inside_us"] == 5.0 and row["step_us"] == 155.0
    assert "–" in report_overhead.table([{"arm": "nothing", "step_us": 1.0}])


@pytest.mark.exhaustive
def test_it_runs_and_writes_its_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rounds", "1", "--steps", "4", "--long-steps", "30", "--width", "16", "--length", "8"]
    names = ["memkit", "memkit-allocator", "memkit-no-phases", "counters"]
    assert report_overhead.main([*arguments, "--only", *names, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("report_overhead-*.json")
    evidence = json.loads(path.read_text())
    rows = {row["arm"]: row for row in evidence["arms"]}
    assert list(rows) == ["nothing", *names]
    for name in names:
        assert 0 < rows[name]["inside_us"] < rows[name]["step_us"], name
    assert evidence["model"]["parameter_tensors"] == 148
    assert evidence["long"]["steps"] == 30 and evidence["long"]["file_bytes"] > 0
    assert set(evidence["parts_us"]) == set(PARTS) and all(spent > 0 for spent in evidence["parts_us"].values())
    assert evidence["versions"]["torch"] and evidence["hardware"]["ram_gib"] > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
