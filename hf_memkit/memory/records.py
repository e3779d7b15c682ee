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
from typing import Any, Final

__all__ = ["SCHEMA", "RecordWriter", "read_records", "steps"]

SCHEMA: Final = 1

_logger = logging.getLogger(__name__)


class RecordWriter:
    """Appends records to one file. A write that fails is counted in `lost`, never raised.

    Each write opens the file, appends one line and closes it. No open file is left behind by a training that raises,
    and a folder that was deleted meanwhile, or a line that a full disk cut short, is mended by the next write.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.lost = 0
        self.last_error: str | None = None

    def write(self, kind: str, fields: Mapping[str, Any]) -> bool:
        """Appends one record; True if it reached the file."""
        try:
            record = {"schema": SCHEMA, "kind": kind, "time": time.time(), **fields}
            line = json.dumps(_plain(record), allow_nan=False, separators=(",", ":"))
            self._append(line.encode() + b"\n")
        except Exception as error:  # a disk, a permission, a value with a broken __str__: none may stop a training
            self.lost += 1
            self.last_error = f"{type(error).__name__}: {error}"
            if self.lost == 1:
                _logger.warning("memkit could not write %s (%s); training goes on", self.path, self.last_error)
            return False
        return True

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # torn: a process was killed in the middle of its last line
                    line = b"\n" + line
            file.write(line)


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
    """The last record of each step, in order of steps.

    After a resume steps may repeat. A `run` record whose `start_step` is 0 begins another training in the same folder:
    the steps before it belong to the one that was given up.
    """
    last: dict[int, dict[str, Any]] = {}
    for record in records:
        if record.get("kind") == "run" and record.get("start_step") == 0:
            last.clear()
        elif record.get("kind") == "step" and isinstance(record.get("step"), int):
            last[record["step"]] = dict(record)
    return [last[step] for step in sorted(last)]


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
