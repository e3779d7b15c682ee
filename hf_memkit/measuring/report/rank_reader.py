"""Reads one records file as it grows: the last training in it, and the starts before.

A file may have any size and contain anything: it is read in blocks, lines that do not parse are counted, and
neighbouring step records are merged if there are more than any chart shows. Several processes may write into it at the
same time: each training's records have its `run_id`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path
from typing import Any, Final

from hf_memkit.measuring.memory.records import SCHEMA, SPARE, kept_steps, merge_steps
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
"""Bytes. The longest record, a table of modules, has about a hundred bytes per module."""

_MOST: Final = 20_000
"""Maximum of step records: ten times what a chart draws. A recorder writes a few thousand per training."""


@dataclass(slots=True)
class Attempt:
    """One start of the training: a `run` record, and the records with its `run_id`; without one, those up to the next
    `run` record.

    Attributes:
        blanks: where the blanks of its `run` record begin in the file, which another record may replace.
        overlaps: whether it has records after the next start: two processes trained at the same time.
        lost: says that records could not be written.
        last: the last record of any other kind.
        last_step: the last step that this start finished and recorded.
    """

    run: RunRecord = field(default_factory=RunRecord)
    ooms: list[OomRecord] = field(default_factory=list)
    end: EndRecord | None = None
    lost: LostRecord | None = None
    last: Mapping[str, Any] = field(default_factory=dict)
    last_step: int | None = None
    blanks: int | None = None
    overlaps: bool = False


class RankReader:
    """Reads one rank's file; each `read` continues after the one before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self.attempts: list[Attempt] = []
        self.steps: dict[int, StepRecord] = {}
        self.evaluations: list[EvaluateRecord] = []
        self.saves: list[SaveRecord] = []
        self.modules: list[ModuleFigures] = []
        self.unreadable = 0
        self.newest_schema = 0
        self._offset = 0
        self._seen = (0, 0, 0)

    def read(self) -> bool:
        """Whether there are new records. Raises OSError if the file cannot be read.

        Only what is new is read: the lines after the last one, and the blanks of `run` records, which another record
        replaces on a full disk. A shorter file, or one with another inode, is another file: it is read from the start.
        """
        status = self.path.stat()
        if status.st_size < self._offset or status.st_ino != self._seen[0]:
            self._reset()
        if (seen := (status.st_ino, status.st_size, status.st_mtime_ns)) == self._seen:
            return False
        self._seen = seen
        before = self._offset
        with self.path.open("rb", buffering=0) as file:
            for start, line in self._lines(file):
                self._add(line, start)
            may_write = [each for each in self.attempts if each is self.attempts[-1] or each.overlaps]
            replaced = [self._read_blanks(file, each) for each in may_write if each.end is None]
        return self._offset > before or any(replaced)

    def _read_blanks(self, file: RawIOBase, attempt: Attempt) -> bool:
        """Read the record that has replaced the attempt's blanks; returns whether it is new."""
        if attempt.blanks is None:
            return False
        file.seek(attempt.blanks)
        line = file.read(SPARE) or b""
        record = _parse(line) if line.startswith(b"\n{") else None
        kind = record.get("kind") if record is not None else None
        if record is None or kind not in ("lost", "end") or record == attempt.lost:
            return False
        attempt.lost, attempt.end = (record, None) if kind == "lost" else (None, record)
        return True

    def _lines(self, file: RawIOBase) -> Iterator[tuple[int, bytes]]:
        """(place in the file, line): complete lines after the last one. A last line without a newline may be
        incomplete, so it must parse."""
        file.seek(self._offset)
        rest, too_long = b"", False
        while block := file.read(_BLOCK):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                start = self._offset
                self._offset += len(line) + 1
                if too_long:
                    too_long = False
                    self.unreadable += 1
                else:
                    yield start, line
            if len(rest) > _LONGEST_LINE:
                self._offset += len(rest)
                rest, too_long = b"", True
        if not too_long and rest.endswith(b"}") and _parse(rest) is not None:
            self._offset += len(rest)
            yield self._offset - len(rest), rest

    def _add(self, line: bytes, start: int) -> None:
        """Add the record in the line at the place `start`."""
        if not line.strip():
            return
        record = _parse(line)
        if record is None or not isinstance(record.get("kind"), str):
            self.unreadable += 1
            return
        self.newest_schema = max(self.newest_schema, record.get("schema") or SCHEMA)

        kind = record["kind"]
        if kind == "run" or not self.attempts:
            self.attempts.append(Attempt())
        attempt = self._attempt_of(record)
        if kind == "lost":  # it precedes records that were written earlier
            attempt.lost = record
            return
        attempt.last = record
        if kind == "run":
            attempt.run = record
            attempt.blanks = start + len(line.rstrip(b" "))
            self._drop_after(record.get("start_step"))
        elif kind == "oom":
            attempt.ooms.append(record)
        elif kind == "end":
            attempt.end = record
        elif kind == "step" and "step" in record:
            attempt.last_step = record["step"]
        if attempt is not self.attempts[-1]:
            attempt.overlaps = True
            return
        if kind == "step" and "step" in record:
            self.steps[record["step"]] = record
            if len(self.steps) > _MOST:
                self.steps = {r["step"]: r for r in halve_steps([self.steps[s] for s in sorted(self.steps)])}
        elif kind == "evaluate":
            self.evaluations.append(record)
        elif kind == "save":
            self.saves.append(record)
        elif kind == "modules":
            self.modules = record.get("rows", [])

    def _attempt_of(self, record: Mapping[str, Any]) -> Attempt:
        """The attempt with the record's `run_id`; else the last one."""
        run_id, last = record.get("run_id"), self.attempts[-1]
        if record["kind"] == "run" or run_id in (None, last.run.get("run_id")):
            return last
        return next((each for each in self.attempts if each.run.get("run_id") == run_id), last)

    def _drop_after(self, start_step: int | None) -> None:
        """Drops records after the step from which a start continues: that training was abandoned."""
        if start_step is None:
            return
        self.steps = kept_steps(self.steps, start_step)
        self.evaluations = [r for r in self.evaluations if r.get("step", 0) <= start_step and start_step]
        self.saves = [r for r in self.saves if r.get("step", 0) <= start_step and start_step]
        if start_step == 0:
            self.modules = []


def halve_steps(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Merges each two neighbours into one record, with the worse figures of the host."""
    pairs = [
        merge_steps(
            *steps[i : i + 2], highest=("host_rss_gib", "pinned_gib", "disk_swap_gib"), lowest=("host_available_gib",)
        )
        for i in range(0, len(steps) - 1, 2)
    ]
    return pairs if len(steps) % 2 == 0 else [*pairs, steps[-1]]


def _parse(line: bytes) -> Any:
    """The checked record; None if the line is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return clean_record(record) if isinstance(record, dict) else None
