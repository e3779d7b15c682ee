"""Records on disk: JSON lines, one object a line. In: plain values. Out: `memory-rank{R}.jsonl`, and back.

Standard library only: a report reads records where torch is not installed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

__all__ = ["SCHEMA", "RecordWriter", "not_given_up", "read_records", "steps"]

SCHEMA: Final = 1

Step = TypeVar("Step")

_logger = logging.getLogger(__name__)


class RecordWriter:
    """Appends records to one file. A write that fails is counted in `lost`, never raised.

    The file stays open between writes, each of which is one `write` call of one whole line, so that a kill leaves
    whole lines and at most one torn tail. Every write looks whether the file is still there: one that was deleted,
    alone or with its folder, is made anew. A line that a full disk cut short is ended by the next write.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.lost = 0
        self.last_error: str | None = None
        self._descriptor: int | None = None
        self._torn = False

    def write(self, kind: str, fields: Mapping[str, Any]) -> bool:
        """Appends one record; True if it reached the file."""
        try:
            self._append(_line({"schema": SCHEMA, "kind": kind, "time": round(time.time(), 3), **fields}))
        except Exception as error:  # a disk, a permission, a value with a broken __str__: none may stop a training
            self.lost += 1
            self.last_error = f"{type(error).__name__}: {error}"
            if self.lost == 1:
                _logger.warning("memkit could not write %s (%s); training goes on", self.path, self.last_error)
            return False
        return True

    def close(self) -> None:
        """Closes the file. A later write opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:  # after a training that raised, nobody calls `close`
        try:
            self.close()
        except Exception:
            return

    def _append(self, line: bytes) -> None:
        descriptor = self._opened()
        if self._torn:
            line = b"\n" + line
        written = os.write(descriptor, line)
        if written:
            self._torn = line[written - 1 : written] != b"\n"
        if written < len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")

    def _opened(self) -> int:
        if self._descriptor is not None:
            # A file whose last name is gone is nobody's any more. (A forked process shares the file: both append.)
            if os.fstat(self._descriptor).st_nlink:
                return self._descriptor
            self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Windows has O_BINARY and needs it. Python's descriptors are not inherited by other programs (PEP 446).
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        descriptor = self._descriptor = os.open(self.path, flags, 0o666)
        size = os.lseek(descriptor, 0, os.SEEK_END)
        if size:  # was a process killed in the middle of its last line?
            os.lseek(descriptor, size - 1, os.SEEK_SET)
        self._torn = size > 0 and os.read(descriptor, 1) != b"\n"
        return descriptor


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records of one file in the order written. Lines that do not parse are skipped."""
    records = []
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def steps(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The last record of each step that was not given up, in order of steps."""
    last: dict[int, dict[str, Any]] = {}
    for record in records:
        if record.get("kind") == "run" and isinstance(record.get("start_step"), int):
            last = not_given_up(last, record["start_step"])
        elif record.get("kind") == "step" and isinstance(record.get("step"), int):
            last[record["step"]] = dict(record)
    return [last[step] for step in sorted(last)]


def not_given_up(steps: Mapping[int, Step], start_step: int) -> dict[int, Step]:
    """Those of the steps recorded before that a start at `start_step` goes on from.

    Later ones belong to what was given up: after a resume they are trained again, and a start at 0 is another training
    in the same folder.
    """
    return {step: record for step, record in steps.items() if step <= start_step}


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        text = _encode(record)
    except (TypeError, ValueError):  # not plain, or not finite: rare, and much slower to clean than to write
        text = _encode(_plain(record))
    return text.encode() + b"\n"


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: a float that is not finite becomes null, anything unknown its text."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)
