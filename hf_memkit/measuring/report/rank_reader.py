"""One records file, read as it grows. In: the file. Out: what the last training in it recorded, and the earlier ones.
A file may be of any size and hold anything: it is read in blocks, a line that does not parse is counted, and of more
step records than any chart shows, neighbours are merged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hf_memkit.measuring.memory.records import SCHEMA, kept_steps, merge_steps
from hf_memkit.measuring.record_types import (
    EndRecord,
    EvaluateRecord,
    LostRecord,
    ModuleFigures,
    OomRecord,
    RunRecord,
    SaveRecord,
    StepRecord,
)
from hf_memkit.measuring.report.sanitize import clean_record

_BLOCK: Final = 2**20
_LONGEST_LINE: Final = 2**24
"""Bytes. The longest record, a table of modules, has some hundred bytes a module."""

_MOST: Final = 20_000
"""Records of a kind that are kept: ten times what a chart draws. A recorder writes a few thousand a training."""

_MOST_STARTS: Final = 1000
"""Starts that are kept: a job that a scheduler starts again and again has no end otherwise."""


@dataclass(slots=True)
class Attempt:
    """One start of the training: from its `run` record, if it has one, to the next. `lost`: where records could not be
    written. `last`: the last record of any other kind. `last_step`: the last step that this start finished and
    recorded."""

    run: RunRecord = field(default_factory=RunRecord)
    ooms: list[OomRecord] = field(default_factory=list)
    end: EndRecord | None = None
    lost: LostRecord | None = None
    last: Mapping[str, Any] = field(default_factory=dict)
    last_step: int | None = None


class RankReader:
    """Reads one rank's file; `read` takes what has been written since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset_micro_batch()

    def _reset_micro_batch(self) -> None:
        self.attempts: list[Attempt] = []
        self.steps: dict[int, StepRecord] = {}
        self.evaluations: list[EvaluateRecord] = []
        self.saves: list[SaveRecord] = []
        self.modules: list[ModuleFigures] = []
        self.unreadable = 0
        self.newest_schema = 0
        self._offset = 0
        self._seen = (0, 0)

    def read(self) -> bool:
        """True if there was something new. OSError where the file cannot be read. A file that became shorter is
        another one; one that was changed and got no line at its end may have one in place of blanks, as on a full
        disk. Both are read from the start."""
        status = self.path.stat()
        if status.st_size < self._offset:
            self._reset_micro_batch()
        if (seen := (status.st_size, status.st_mtime_ns)) == self._seen:
            return False
        self._seen, before, known = seen, self._offset, self.attempts
        self._take_new()
        if self._offset > before:
            self._seen = (0, 0)  # a line in place of blanks may have come too: the next look reads from the start
            return True
        self._reset_micro_batch()
        self._take_new()
        self._seen = seen
        return self.attempts != known

    def _take_new(self) -> None:
        for line in self._lines():
            self._take(line)

    def _lines(self) -> Iterator[bytes]:
        """Whole lines after the last one read. A last line without its end is taken only if it is whole: it may be
        under way."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            rest, too_long = b"", False
            while block := file.read(_BLOCK):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    self._offset += len(line) + 1
                    if too_long:
                        too_long = False
                        self.unreadable += 1
                    else:
                        yield line
                if len(rest) > _LONGEST_LINE:
                    self._offset += len(rest)
                    rest, too_long = b"", True
            if not too_long and rest.endswith(b"}") and _parsed(rest) is not None:
                self._offset += len(rest)
                yield rest

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        record = _parsed(line)
        if record is None or not isinstance(record.get("kind"), str):
            self.unreadable += 1
            return
        self.newest_schema = max(self.newest_schema, record.get("schema") or SCHEMA)
        kind = record["kind"]
        if kind == "run" or not self.attempts:
            self.attempts = [*self.attempts[1 - _MOST_STARTS :], Attempt()]
        attempt = self.attempts[-1]
        if kind == "lost":  # it stands before the records that were written before it
            attempt.lost = record
            return
        attempt.last = record
        if kind == "run":
            attempt.run = record
            self._begin(record.get("start_step"))
        elif kind == "step" and "step" in record:
            self._step(attempt, record)
        elif kind == "evaluate":
            _keep(self.evaluations, record)
        elif kind == "save":
            _keep(self.saves, record)
        elif kind == "modules":
            self.modules = record.get("rows", [])
        elif kind == "oom":
            attempt.ooms.append(record)
        elif kind == "end":
            attempt.end = record

    def _begin(self, start_step: int | None) -> None:
        """Steps after the one that a start goes on from belong to a training that was given up."""
        if start_step is None:
            return
        self.steps = kept_steps(self.steps, start_step)
        self.evaluations = [r for r in self.evaluations if r.get("step", 0) <= start_step and start_step]
        self.saves = [r for r in self.saves if r.get("step", 0) <= start_step and start_step]
        if start_step == 0:
            self.modules = []

    def _step(self, attempt: Attempt, record: StepRecord) -> None:
        attempt.last_step = record["step"]
        self.steps[record["step"]] = record
        if len(self.steps) > _MOST:
            kept = halved([self.steps[s] for s in sorted(self.steps)])
            self.steps = {r["step"]: r for r in kept}


def halved(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Each two neighbours as one record, of which the host's figures are the worst."""
    pairs = [
        merge_steps(
            *steps[i : i + 2], highest=("host_rss_gib", "pinned_gib", "disk_swap_gib"), lowest=("host_available_gib",)
        )
        for i in range(0, len(steps) - 1, 2)
    ]
    return pairs if len(steps) % 2 == 0 else [*pairs, steps[-1]]


def _parsed(line: bytes) -> Any:
    """The record, clean; None if the line is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return clean_record(record) if isinstance(record, dict) else None


def _keep(records: list[Any], record: Any) -> None:
    """Adds a record; of too many, the one with the higher peak of each two neighbours stays."""
    records.append(record)
    if len(records) > _MOST:
        pairs = zip(records[0:-1:2], records[1:-1:2], strict=True)  # _MOST is even: the newest has no partner
        records[:-1] = [max(pair, key=lambda r: r.get("peak_allocated_gib", 0.0)) for pair in pairs]
