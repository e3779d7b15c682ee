"""Section `report` of the GPU benchmark, on a CPU: what agrees and what does not, and the path of its cases."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report_cases, report_child, report_overhead, report_section
from benchmarks.agreement import agree, agree_out_of_memory, verdict
from tests.conftest import ROOT
from tests.fewer import first
from tests.memory.live_storages import LiveStorages

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 120.00 GiB is "
    "free. 16.00 GiB allowed; Of the allocated memory 14.50 GiB is allocated by PyTorch, and 500.00 MiB is reserved "
    "by PyTorch but unallocated."
)


def a_step(number: int, **changed: Any) -> dict[str, Any]:
    return {
        "step": number, "peak_allocated_gib": 10.0, "peak_reserved_gib": 12.0, "allocated_gib": 4.0,
        "phases": {"forward": {"peak_allocated_gib": 9.0}, "backward": {"peak_allocated_gib": 10.0}},
        "categories": {"weights_gib": 1.0, "activations_gib": 8.5, "other_gib": 0.5},
        "held": {"device": {"weights_gib": 1.0, "optimizer_gib": 2.0}},
        **changed,
    }  # fmt: skip


def truth(number: int, **changed: Any) -> dict[str, Any]:
    return {
        "step": number, "peak_allocated_gib": 10.0, "peak_reserved_gib": 12.5, "allocated_gib": 4.0,
        "weights_gib": 1.0, "optimizer_gib": 2.0, **changed,
    }  # fmt: skip


def test_what_agrees_holds() -> None:
    result = agree([a_step(n) for n in (1, 2, 3, 4)], [truth(n) for n in (1, 2, 3, 4)])
    assert result["compared_steps"] == result["looked_at_steps"] == 2  # the first two are left out
    assert result["other_share"] == 0.05 and result["peak_reserved_gap_gib"] == -0.5
    assert {value for name, value in result.items() if name.endswith("_error")} == {0.0}
    assert verdict(result, report_section.NEEDED) == {"status": "holds"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"peak_allocated_gib": 9.7},
        {"allocated_gib": 4.1},
        {"phases": {"forward": {"peak_allocated_gib": 9.7}}},
        {"categories": {"weights_gib": 1.0, "activations_gib": 8.0, "other_gib": 0.5}},
        {"held": {"device": {"weights_gib": 1.1}}},
        {"held": {"device": {"optimizer_gib": 1.0}}},
        {"peak_allocated_gib": float("nan")},
    ],
    ids=str,
)
def test_one_step_that_is_off_is_enough(wrong: dict[str, Any]) -> None:
    rows = [truth(n) for n in (3, 4, 5)]
    result = agree([a_step(3), a_step(4, **wrong), a_step(5)], rows)
    assert verdict(result, report_section.NEEDED)["status"] == "does not hold"


def test_what_was_not_compared_does_not_hold() -> None:
    result = agree([{"step": 3, "peak_allocated_gib": 10.0}], [truth(3)])
    judged = verdict(result, report_section.NEEDED)
    assert judged["status"] == "does not hold" and "no categories_error" in judged["why"]
    assert verdict(agree([], []), report_section.NEEDED)["status"] == "does not hold"


def test_an_out_of_memory_record_is_checked_against_its_message() -> None:
    oom = {
        "kind": "oom", "phase": "backward", "error": MESSAGE, "requested_gib": 2.0, "allocated_gib": 14.5,
        "categories": {"weights_gib": 4.5, "other_gib": 10.0}, "changes": [{"key": "arguments.optim"}],
    }  # fmt: skip
    records = [oom, {"kind": "end", "status": "failed"}]

    def wrong(records: list[dict[str, Any]] = records, output: str = "arguments.optim", code: int = 1) -> list[str]:
        found: list[str] = agree_out_of_memory(records, output, code, ("forward", "backward"))["wrong"]
        return found

    assert wrong() == []
    assert wrong(code=0) and wrong(output="") and wrong(records[:1]) and wrong([])
    for change in ({"phase": "data"}, {"requested_gib": 3.0}, {"allocated_gib": 20.0}, {"changes": []}, {"error": ""}):
        assert len(wrong([{**oom, **change}, records[1]])) == 1, change


def test_another_process_is_looked_for_in_the_gpu_s_use() -> None:
    rows = [{"step": n, "neighbour": n >= 5} for n in range(1, 11)]
    made = [{"step": n, "device_used_gib": 3.0 if n < 5 else 7.4} for n in (2, 4, 6, 8)]
    assert report_section.judge_neighbour(rows, made, ["another process"]) == []
    assert report_section.judge_neighbour(rows, made, ["leak"]) == ["findings: ['leak']"]
    assert "rose by 0.00 GiB" in report_section.judge_neighbour(
        rows, [{**step, "device_used_gib": 3.0} for step in made], ["another process"]
    )[0]  # fmt: skip
    assert "0 after" in report_section.judge_neighbour(rows, made[:2], ["another process"])[0]


def test_cases_have_names_of_their_own_and_say_what_they_need() -> None:
    cases = report_cases.cases()
    assert len({case.name for case in cases}) == len(cases)
    assert [case.name for case in cases if "bitsandbytes" in case.needs] == ["8-bit optimizer", "paged 8-bit"]
    for case in cases:  # they travel to the child as JSON
        again = report_cases.Case(**json.loads(json.dumps(asdict(case))))
        assert asdict(again) == {**asdict(case), "phases": list(case.phases), "needs": list(case.needs)}
        assert (case.does == "run out") == (case.cap_gib is not None) == bool(case.phases)
    missing = report_cases.Case("x", needs=("no_such_package",))
    refused = report_section.measure(missing, on_cpu=True, max_steps=3)
    assert refused == {"status": "refused", "why": "no_such_package is not installed"}


@pytest.mark.slow
@pytest.mark.parametrize("name", first(["lora", "accumulation"]))
def test_a_training_case_in_this_process(name: str, tmp_path: Path) -> None:
    case = next(case for case in report_cases.cases() if case.name == name)
    report_child.run(case, tmp_path, {"on_cpu": True, "max_steps": 4})
    judged = report_section.judge(case, tmp_path, 0, "", on_cpu=True)
    assert judged["status"] == "holds" and judged["compared_steps"] == 3 and judged["findings"] == []
    on_a_gpu = report_section.judge(case, tmp_path, 0, "", on_cpu=False)
    assert on_a_gpu["status"] == "does not hold" and "no phases_error" in on_a_gpu["why"]
    assert report_section.judge(case, tmp_path, 1, "ImportError: x", on_cpu=True)["status"] == "failed"


@pytest.mark.exhaustive
def test_running_out_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The exception that nobody catches, its note and its record: the path that a GPU takes, with a made-up error."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--section", "report", "--rehearse"]
    ran = subprocess.run(
        [*command, "--only", "runs out in optimizer", "--out", str(tmp_path)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    (row,) = json.loads((tmp_path / "report-rehearsal.json").read_text())["cases"]
    assert row["status"] == "holds", row["why"]
    assert row["oom"]["phase"] == "optimizer" and row["steps"] == 2
    assert any("Tried to allocate 96.00 MiB" in line for line in row["printed"])


class CountedGpu(LiveStorages):
    """The CPU's storages, counted, under the names that `torch.cuda` has for it."""

    def is_available(self) -> bool:
        return True

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.high

    max_memory_reserved = max_memory_allocated

    def mem_get_info(self) -> tuple[int, int]:
        return 2**30 - self.allocated, 2**30

    def reset_peak_memory_stats(self) -> None:
        self.reset_peak()

    def empty_cache(self) -> None:
        return None


@pytest.mark.parametrize("name", ["plain", "checkpointing"])
def test_two_trainings_agree_where_every_storage_is_counted(name: str, tmp_path: Path) -> None:
    """The comparison that a GPU makes, with real trainings and real sizes: nothing is left between the two, and peaks,
    phases, categories and what is held agree."""
    case = next(case for case in report_cases.cases() if case.name == name)
    with CountedGpu() as gpu:
        report_child.run(case, tmp_path, {"on_cpu": True, "max_steps": 5}, gpu=gpu, readers=[gpu])
    judged = report_section.judge(case, tmp_path, 0, "", on_cpu=False)
    assert judged["status"] == "holds", judged
    assert judged["looked_at_steps"] >= 1 and judged["held_weights_error"] < 1e-6 > judged["held_optimizer_error"]
    assert judged["left_gib"] == 0 and 0 <= judged["other_share"] < 1


@pytest.mark.slow
def test_the_overhead_case_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_overhead, "WARM_UP", 2)
    case = next(case for case in report_cases.cases() if case.does == "overhead")
    report_child.run(case, tmp_path, {"on_cpu": True, "max_steps": 3})
    judged = report_section.judge(case, tmp_path, 0, "", on_cpu=True)
    assert judged["status"] == "holds" and judged["share_of_step"] > 0
    assert [row["arm"] for row in judged["arms"]] == ["nothing", "memkit", "memkit-no-phases", "counters"]
    assert all(row["first_steps_us"] > 0 and row["step_us"] > 0 for row in judged["arms"])
