"""Two runs of a client, without and with memkit, compared: exit code, output, logs, and every byte of every file."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.measuring.memory.records import read_records, steps
from tests.clients.clients import STEPS

OURS = re.compile(r"memory-rank\d+\.jsonl|memory-report\.html")
"""What memkit writes into the output folder."""

SUMMARY_LINES = 24

TIMES = re.compile(r"_runtime$|_per_second$|^epoch_time$|_time$")
"""Log keys that say how long something took: no two runs agree on them."""


@dataclass(frozen=True)
class Ran:
    """What a script came to, in one of its processes."""

    folder: Path
    code: Any
    stdout: str
    stderr: str

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def records(self, rank: int = 0) -> list[dict[str, Any]]:
        return read_records(self.out / f"memory-rank{rank}.jsonl")

    def log_history(self) -> list[dict[str, Any]]:
        """From the last trainer_state.json that Trainer wrote: floats to the last bit."""
        paths = sorted(self.out.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime_ns)
        history: list[dict[str, Any]] = json.loads(paths[-1].read_text())["log_history"]
        return history


def ended(folder: Path, rank: int = 0) -> Ran:
    return Ran(folder, **json.loads((folder / f"ended-rank{rank}.json").read_text()))


def assert_same_results(without: Ran, having: Ran) -> None:
    """Nobody could tell from the results that memkit was there."""
    assert without.code == having.code == 0, without.stderr[-3000:] + having.stderr[-3000:]
    losses = [entry["loss"] for entry in without.log_history() if "loss" in entry]
    assert len(losses) >= 2 and losses == [entry["loss"] for entry in having.log_history() if "loss" in entry]
    assert len(set(losses)) > 1, "a loss that never changes proves nothing"
    assert plain(having.log_history()) == plain(without.log_history())
    assert files(having) == files(without)
    assert any(name.endswith((".safetensors", ".bin")) for name in files(without)), "no weights were saved"
    for name in sorted(files(without)):
        assert_same_file(without.out / name, having.out / name)


def assert_same_output(without: Ran, having: Ran, *, summaries: int = 1, before: Ran | None = None) -> None:
    """Standard output is the same but for our summary at the end of a training, and nothing new is complained of.

    `before`: a run in the same process whose complaints may come again.
    """
    own, all_lines = printed(without.stdout), printed(having.stdout)
    matcher = difflib.SequenceMatcher(None, own, all_lines, autojunk=False)
    changes = [(tag, own[a:b], all_lines[c:d]) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal"]
    assert [tag for tag, _, _ in changes] == ["insert"] * summaries, changes
    for _, _, lines in changes:
        assert len(lines) <= SUMMARY_LINES and all(len(line) <= 120 for line in lines), lines
    known = complaints(without.stderr) | (complaints(before.stderr) if before is not None else set())
    assert complaints(having.stderr) <= known, complaints(having.stderr) - known


def assert_complete(records: list[dict[str, Any]], *, evaluations: int, saves: int, trainings: int = 1) -> None:
    """Every event of each training has its record, in order, and nothing went wrong in measuring."""
    kinds = [record["kind"] for record in records]
    assert kinds[:2] == ["run", "modules"] and kinds[-1] == "end"
    counted = {"run": 1, "modules": 1, "step": STEPS, "evaluate": evaluations, "save": saves, "end": 1}
    assert Counter(kinds) == {kind: count * trainings for kind, count in counted.items() if count}
    assert {record["schema"] for record in records} == {1}
    run, modules, end = records[0], records[1], records[-1]
    assert (end["status"], end["steps"], end["step"]) == ("finished", STEPS, STEPS)
    assert end["reader_errors"] == {} and end["callback_errors"] == 0, end
    rows = modules["rows"]
    for name in ("parameters", "trainable_parameters"):
        assert sum(row[name] * row.get("repeats", 1) for row in rows) == run[name] > 0
    assert run["hardware"]["device_type"] == "cpu" and run["model_class"] and run["arguments"]["max_steps"] == STEPS
    for number, step in enumerate(steps(records), 1):
        assert (step["step"], step["steps"]) == (number, 1)
        assert step["step_time_ms"] > 0 and 0 < step["host_rss_gib"] <= end["peak_host_rss_gib"] + 1e-9
        assert not {"allocated_gib", "peak_allocated_gib", "phases", "categories"} & step.keys()  # a CPU cannot tell
        assert None not in step.values()


def assert_phases_and_categories(counted: Ran) -> None:
    """Over a count of every storage, which has what a GPU's allocator has."""
    assert counted.code == 0, counted.stderr[-3000:]
    records = counted.records()
    assert records[-1]["callback_errors"] == 0 and records[-1]["reader_errors"] == {}, records[-1]
    made = steps(records)
    assert len(made) == STEPS and "categories" in made[0]
    for step in made:
        peaks = {phase: numbers["peak_allocated_gib"] for phase, numbers in step["phases"].items()}
        assert set(peaks) == {"data", "forward", "backward", "optimizer"}
        assert max(peaks.values()) == pytest.approx(step["peak_allocated_gib"], abs=1e-9)
        assert min(peaks.values()) >= 0 and peaks["forward"] > peaks["data"]
        categories = step.get("categories", {"none_gib": step["peak_allocated_gib"]})
        assert sum(categories.values()) == pytest.approx(step["peak_allocated_gib"], abs=1e-8)
        assert min(categories.values()) >= 0
    for record in records:
        if record["kind"] in ("evaluate", "save"):
            assert set(record["phases"]) == {record["kind"]}, record


def files(ran: Ran) -> set[str]:
    """Names in the output folder, ours left out."""
    names = {str(path.relative_to(ran.out)) for path in ran.out.rglob("*") if path.is_file()}
    return {name for name in names if not OURS.fullmatch(name)}


def assert_same_file(without: Path, having: Path) -> None:
    if without.name == "trainer_state.json" or (without.suffix == ".json" and "result" in without.name):
        assert plain(json.loads(having.read_text())) == plain(json.loads(without.read_text())), having
    else:
        assert having.read_bytes() == without.read_bytes(), having


def plain(value: Any) -> Any:
    """Without times and without our keys."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if not (k.startswith("memory/") or TIMES.search(k))}
    return [plain(item) for item in value] if isinstance(value, list) else value


def printed(stdout: str) -> list[str]:
    """The lines of standard output; of log lines our numbers and the times are left out."""
    ours_or_time = r"'(?:memory/[^']*|\w*(?:_runtime|_per_second))': (?:'[^']*'|[\d.]+)(?:, )?"
    text = re.sub(ours_or_time, "", stdout).replace(", }", "}")
    return [line for line in text.splitlines() if not re.match(r"  \w+(_runtime|_per_second) +=", line)]


def complaints(stderr: str) -> set[str]:
    """Lines of standard error; of a progress bar only its name, of torch's log lines not when and by which process."""
    lines = {re.sub(r":\s+\d+(%\|| examples).*", "", line) for line in re.split(r"[\r\n]", stderr)}
    return {re.sub(r"^([IWE])\d{4} [\d:.]+ \d+ ", r"\1 ", line) for line in lines}
