"""`memkit plan --verify` on the command line: its refusals and its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.cli import main
from hf_memkit.common.answer.terminal import show_blocks
from hf_memkit.measuring.memory.records import SCHEMA
from hf_memkit.measuring.report.load import load_run
from hf_memkit.plan import wording
from hf_memkit.plan.answer import verified_blocks
from hf_memkit.plan.verify import Verified, measured
from tests.plan.made_plans import CHECKPOINTING, setup, typical_plan


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text("raise AssertionError('it ran')")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train.py", "--verify"), "--verify: this machine has no GPU"),
        (("train.py", "--verify", "--gpu", "L4"), "--verify: this machine has no GPU"),
        (
            ("train.py", "--verify", "--gpus-to-compare", "L4,T4"),
            "--verify: runs one setup on this machine's GPU; omit it, or --gpus-to-compare",
        ),
    ],
)
def test_an_impossible_verification_is_refused_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"memkit: error: {message}")


def records(folder: Path) -> Path:
    """The records of a run with 12 steps of 600 ms."""
    lines: list[dict[str, Any]] = [
        {
            "kind": "run", "rank": 0, "world_size": 1, "prediction": {},
            "hardware": {"device_type": "cuda", "device_name": "NVIDIA L4"}, "versions": {},
            "arguments": {"per_device_train_batch_size": 4},
        },
        *({"kind": "step", "step": step, "steps": 1, "step_time_ms": 600} for step in range(1, 13)),
        {"kind": "end", "status": "finished"},
    ]  # fmt: skip
    folder.mkdir()
    text = "".join(json.dumps({"schema": SCHEMA, "time": 1.0, **line}) + "\n" for line in lines)
    (folder / "memory-rank0.jsonl").write_text(text)
    return folder


def test_measurements_are_next_to_predictions(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would notice: figures that are not the maximum of all ranks, or of a step that is not timed; an empty column."""
    monkeypatch.setenv("COLUMNS", "100")
    for rank, gib in enumerate((10.5, 11.25)):
        path = records(folder / f"of {rank}") / "memory-rank0.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[0] |= {"rank": rank, "world_size": 2}
        lines[5] |= {"peak_allocated_gib": gib, "peak_reserved_gib": gib + 1, "alloc_retries": rank}
        (folder / "both").mkdir(exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "both" / f"memory-rank{rank}.jsonl").write_text(text)
    result = {
        "step_times_s": [9, 9, 9, 1.5, 1.25, 1.75, 1.0],
        "evaluated": True,
        "saved": None,
        "worst": "2 × 9 tokens",
    }
    judgement = setup(8, 1, 12.0, 1.4, CHECKPOINTING)
    passed = Verified(judgement, gpus=2, notes=("run by torchrun",), **measured(load_run(folder / "both"), result))
    assert (passed.peak_allocated_gib, passed.alloc_retries, passed.step_time_s) == (11.25, 1, 1.375)
    failed = Verified(judgement, failed="failed in [the] save", last_lines=("OSError: [b]full[/b]",))
    show_blocks(verified_blocks([passed, failed]))
    shown = capsys.readouterr().out.splitlines()
    assert [line.split() for line in shown[1:8]] == [
        ["8", "×", "1,", "checkpointing:", "ran", "here", "measured", "predicted"],
        ["peak", "allocated", "11.25", "GiB", "11.50", "GiB"],
        ["peak", "reserved", "12.25", "GiB", "11.50", "GiB"],
        ["outside", "the", "allocator", "–", "0.50", "GiB"],
        ["a", "step", "1.38", "s", "1.4", "s,", "1.26", "to", "1.82", "s"],
        ["allocator", "retries", "1", "0"],
        ["evaluation", "done"],
    ]
    assert "Note: run by torchrun." in shown and "failed in [the] save." in shown and "  OSError: [b]full[/b]" in shown


def test_a_plan_whose_setups_failed_proposes_nothing() -> None:
    from dataclasses import replace

    plan = typical_plan()
    plan = replace(plan, failed={each.candidate: "ran out of memory" for each in plan.ranked})
    verdict, details = wording.headline(plan)
    assert verdict == "NOTHING RAN ON RTX 3090" and "ran out of memory" in details
    assert not list(wording.headline_details(plan))
