"""Records on disk, one JSON object a line (`hf_memkit.measuring.record_types`), in `memory-rank{R}.jsonl`. Standard
library only: a report reads records where torch is not installed."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from hf_memkit.common.secrets import masked_json
from hf_memkit.measuring.record_types import MEAN_OF_STEPS, StepRecord

SCHEMA: Final = 1

Step = TypeVar("Step")

SPARE: Final = 2048
"""Bytes of blanks, which JSON allows, at the end of a `run` record's line. Overwriting them needs no disk space."""
_KEPT: Final = ("status", "step", "steps", "error_type", "error", "lost_records", "write_error")
"""Fields kept of a record that does not fit there."""

_logger = logging.getLogger(__name__)


class RecordWriter:
    """Appends records to one file. A failed write is counted in `lost`, never raised.

    The file stays open between writes, each of which is one `write` call of one whole line, so that a kill leaves
    whole lines and at most one incomplete last line. Every write checks that the file exists: a deleted one is created
    again. A line that a full disk cut short is ended by the next write.

    On a full disk the blanks of the `run` record become a `lost` record, and at last the `end`. Other records are
    lost.

    Each `run` record starts a new `run_id`, which all records until the next have: two processes may write into one
    file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.lost = 0
        self.last_error: str | None = None
        self.owed: Mapping[str, Any] | None = None
        """The `end` record, if it could not be written."""
        self.run_id: str | None = None
        """Of the last `run` record."""
        self._descriptor: int | None = None
        self._torn = False
        self._failing = False
        self._spare: tuple[int, int] | None = None

    def write(self, kind: str, fields: Mapping[str, Any]) -> bool:
        """Write one record; returns whether it reached the file."""
        if kind == "run":
            self.run_id = os.urandom(4).hex()
        if kind == "end" and self.lost:
            fields = {**fields, "lost_records": self.lost, "write_error": self.last_error}
        try:
            line = _line(self._record(kind, fields))
            self._append(line[:-1] + b" " * SPARE + b"\n" if kind == "run" else line)
        except Exception as error:  # disk, permissions, a value with a broken __str__: no error may stop a training
            self.lost += 1
            strerror = error.strerror if isinstance(error, OSError) else None
            self.last_error = strerror or f"{type(error).__name__}: {error}"
            if self.lost == 1:
                _logger.warning("memkit could not write %s (%s); training goes on", self.path, self.last_error)
            if kind == "end":
                written = self._write_over_blanks("end", fields)
                self.owed = None if written else fields
                return written
            if strerror and not self._failing:
                self._failing = True
                self._write_over_blanks("lost", {"step": fields.get("step"), "write_error": strerror})
            return False
        self._failing = False
        if kind == "run" and self._descriptor is not None:
            self._spare = os.fstat(self._descriptor).st_ino, os.lseek(self._descriptor, 0, os.SEEK_CUR) - 1 - SPARE
        return True

    def close(self) -> None:
        """Close the file. A later write opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:  # `close` is not called after a training that raised
        try:
            self.close()
        except Exception:
            return

    def _append(self, line: bytes) -> None:
        descriptor = self._open_file()
        left = b"\n" + line if self._torn else line
        while left:  # once, except on a full disk, which writes a part before it fails
            written = os.write(descriptor, left)
            if not written:
                raise OSError("nothing was written")
            self._torn = left[written - 1 : written] != b"\n"
            left = left[written:]

    def _write_over_blanks(self, kind: str, fields: Mapping[str, Any]) -> bool:
        """Write a record over the blanks; returns whether that succeeded."""
        if self._spare is None:
            return False
        inode, at = self._spare
        few = {name: text[:200] if isinstance(text := fields[name], str) else text for name in _KEPT if name in fields}
        try:
            lines = (b"\n" + _line(self._record(kind, values))[:-1] for values in (fields, few))
            line = next(line for line in lines if len(line) <= SPARE)
            with self.path.open("r+b", buffering=0) as file:  # O_APPEND would write at the end
                if os.fstat(file.fileno()).st_ino != inode:
                    return False
                file.seek(at)
                return file.write(line.ljust(SPARE)) == SPARE
        except Exception:  # also StopIteration: an error in another alphabet takes six bytes a letter
            return False

    def _open_file(self) -> int:
        if self._descriptor is not None:
            # A deleted file has no links. (A forked process shares the file: both append.)
            if os.fstat(self._descriptor).st_nlink:
                return self._descriptor
            self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Windows has O_BINARY and needs it. Python's descriptors are not inherited by other programs (PEP 446).
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
        try:
            descriptor = self._descriptor = os.open(self.path, flags, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:  # another file would get the records
                raise OSError(error.errno, "it is a symbolic link: remove it") from None
            raise
        size = os.lseek(descriptor, 0, os.SEEK_END)
        if size:  # was a process killed in the middle of its last line?
            os.lseek(descriptor, size - 1, os.SEEK_SET)
        self._torn = size > 0 and os.read(descriptor, 1) != b"\n"
        return descriptor

    def _record(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        if kind != "step":  # numbers only
            fields = masked_json(fields)
        of_run = {} if self.run_id is None else {"run_id": self.run_id}
        return {"schema": SCHEMA, "kind": kind, "time": round(time.time(), 3), **of_run, **fields}


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records of one file in the order written. Lines that do not parse are skipped."""
    records = []
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def steps(records: Iterable[Mapping[str, Any]]) -> list[StepRecord]:
    """The last record of each step of the training as it was resumed, in order of steps."""
    last: dict[int, StepRecord] = {}
    run_id = None
    for record in records:
        if record.get("kind") == "run" and isinstance(record.get("start_step"), int):
            last, run_id = kept_steps(last, record["start_step"]), record.get("run_id")
        elif record.get("kind") == "step" and isinstance(record.get("step"), int) and record.get("run_id") == run_id:
            last[record["step"]] = cast(StepRecord, dict(record))
    return [last[step] for step in sorted(last)]


def kept_steps(steps: Mapping[int, Step], start_step: int) -> dict[int, Step]:
    """The earlier steps that a start at `start_step` continues: later ones are trained again after a resume, and a
    start at 0 is another training in the same folder."""
    return {step: record for step, record in steps.items() if step <= start_step}


def merge_steps(
    first: Mapping[str, Any], second: Mapping[str, Any], *, highest: Iterable[str] = (), lowest: Iterable[str] = ()
) -> StepRecord:
    """One `step` record for two. Peaks and the longest sequence are maxima, times and sizes means, counters the last
    value, except for names in `highest` or `lowest`; `categories` and `held` are those of the higher peak."""
    weights = max(1, first.get("steps", 1)), max(1, second.get("steps", 1))
    fields = {**first, **second}
    for name in first.keys() & second.keys():
        a, b = first[name], second[name]
        if name.startswith("peak_") or name == "longest_sequence" or name in highest:
            fields[name] = max(a, b)
        elif name in lowest:
            fields[name] = min(a, b)
        elif name in MEAN_OF_STEPS:
            fields[name] = (a * weights[0] + b * weights[1]) / sum(weights)
        elif name == "phases":
            fields[name] = {phase: _maxima(a.get(phase, {}), b.get(phase, {})) for phase in {**a, **b}}
    if first.get("peak_allocated_gib", 0.0) > second.get("peak_allocated_gib", 0.0):
        fields |= {name: first[name] for name in ("categories", "held") if name in first}
    return cast(StepRecord, {**fields, "steps": sum(weights)})


def _maxima(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: max(first.get(name, value), second.get(name, value)) for name, value in {**first, **second}.items()}


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        text = _encode(record)
    except (TypeError, ValueError):  # not plain, or not finite: rare, and cleaning is much slower than writing
        text = _encode(_plain(record))
    return text.encode() + b"\n"


def _plain(value: Any) -> Any:
    """`value` as JSON: floats that are not finite become null, unknown objects their text."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)
