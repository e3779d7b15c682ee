"""Reads the records of all ranks of a run."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_memkit.common.answer.safe_text import printable
from hf_memkit.common.commands import command
from hf_memkit.common.errors import InputError
from hf_memkit.common.resources import REPOSITORY
from hf_memkit.measuring.memory.records import SCHEMA
from hf_memkit.measuring.record_types import (
    EndRecord,
    EvaluateRecord,
    ModuleFigures,
    OomRecord,
    RunRecord,
    SaveRecord,
    StepRecord,
)
from hf_memkit.measuring.report.ending import Ending, Here, judge_ending, judge_replaced
from hf_memkit.measuring.report.rank_reader import Attempt, RankReader
from hf_memkit.measuring.report.sanitize import few

_FILE: Final = re.compile(r"memory-rank(\d{1,7})\.jsonl")

_DECIDING: Final = ("out of memory", "failed", "killed", "interrupted", "finished", "running", "unknown")
"""The first of these endings among the ranks is that of the run: if one rank fails, the launcher ends the others, and
if one has finished, the others soon will."""


@dataclass(frozen=True, slots=True)
class RankRun:
    """One rank's last training, with the records of each kind in order.

    Attributes:
        steps: the last record of each step; its field `steps` says how many steps it contains.
        last: the last record of any kind.
        earlier: the earlier starts, each with its ending.
    """

    rank: int
    path: Path
    run: RunRecord
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluateRecord, ...]
    saves: tuple[SaveRecord, ...]
    ooms: tuple[OomRecord, ...]
    modules: tuple[ModuleFigures, ...]
    end: EndRecord | None
    ending: Ending
    last: Mapping[str, Any]
    earlier: tuple[tuple[Attempt, Ending], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A run.

    Attributes:
        ranks: in order, at least one.
        ending: that of the rank `ended_by`, which decides (`_DECIDING`).
        notes: limits of the records: missing ranks, unreadable lines, a newer schema.
    """

    folder: Path
    ranks: tuple[RankRun, ...]
    ending: Ending
    ended_by: int
    notes: tuple[str, ...]

    @property
    def first(self) -> RankRun:
        """The first rank, for facts that all ranks share."""
        return self.ranks[0]

    def of(self, rank: int) -> RankRun:
        """The rank with this number."""
        return next(one for one in self.ranks if one.rank == rank)


class RunReader:
    """Reads a run's files as they grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.readers: dict[int, RankReader] = {}

    def read(self) -> bool:
        """Reads what is new in all files; returns whether anything is. Raises InputError if one cannot be read."""
        try:
            for path in self.folder.iterdir():
                match = _FILE.fullmatch(path.name)
                if match is not None and path.is_file():
                    self.readers.setdefault(int(match[1]), RankReader(path))
            return sum(reader.read() for reader in self.readers.values()) > 0
        except (FileNotFoundError, NotADirectoryError):
            return False  # not written yet, or deleted
        except OSError as error:
            raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from error

    def run(self) -> Run | None:
        """The run as read so far; None without a record."""
        here = Here()
        readers = sorted((rank, reader) for rank, reader in self.readers.items() if reader.attempts)
        if not readers:
            return None
        ranks = tuple(_rank_run(rank, reader, here) for rank, reader in readers)
        size = max(ranks, key=lambda rank: rank.run.get("time", 0.0)).run.get("world_size")
        current = tuple(rank for rank in ranks if size is None or rank.rank < size) or ranks
        decides = min(current, key=lambda rank: _DECIDING.index(rank.ending.kind))
        unreadable = sum(reader.unreadable for reader in self.readers.values())
        newest = max(reader.newest_schema for _, reader in readers)
        notes = _notes(current, len(ranks) - len(current), unreadable, newest)
        return Run(self.folder, current, decides.ending, decides.rank, tuple(notes))


def load_run(run_dir: str | Path) -> Run:
    """Reads the complete lines of a folder's `memory-rank*.jsonl`; raises InputError if there is no record."""
    folder = Path(run_dir)
    if _FILE.fullmatch(folder.name) and folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        what = "a file, not a folder" if folder.exists() else "no such folder"
        raise InputError(f"{printable(run_dir)}: {what}; give a Trainer's output_dir")
    reader = RunReader(folder)
    reader.read()
    run = reader.run()
    if run is not None:
        return run
    follow = command("memkit", "report", folder, "--follow")
    if reader.readers:
        raise InputError(f"{printable(folder)}: its memory-rank*.jsonl hold no record yet; if the job runs: {follow}")
    raise InputError(f"{printable(folder)}: no memory-rank*.jsonl in it; {_what_to_do(folder, follow)}")


def _what_to_do(folder: Path, follow: str) -> str:
    """What to type for a folder without records. `follow`: the command that waits for them."""
    inside = sorted({path.parent for path in folder.glob("*/memory-rank*.jsonl")})
    if inside:
        more = f" (and {len(inside) - 1} more)" if len(inside) > 1 else ""
        return f"a folder below has records: {command('memkit', 'report', inside[0])}{more}"
    status = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads((folder / "memkit-run.json").read_bytes())
        status = printable(content.get("status", "unknown"), 40) if isinstance(content, dict) else None
    if status is not None:
        start = command("memkit", "run", folder)
        again = f"if not, start it: {start}, or its recipe with --resume or --overwrite"
        return f"this recipe run has status {status!r}, and recorded no step. If its process runs: {follow}; {again}"
    return "to record one: memkit run SCRIPT, or Trainer(callbacks=[MemoryReportCallback()])"


def _rank_run(rank: int, reader: RankReader, here: Here) -> RankRun:
    *earlier, last = reader.attempts
    next_runs = [attempt.run for attempt in reader.attempts[1:]]
    return RankRun(
        rank=rank,
        path=reader.path,
        run=last.run,
        steps=tuple(reader.steps[step] for step in sorted(reader.steps)),
        evaluations=tuple(reader.evaluations),
        saves=tuple(reader.saves),
        ooms=tuple(last.ooms),
        modules=tuple(reader.modules),
        end=last.end,
        ending=judge_ending(last, here),
        last=last.last,
        earlier=tuple((one, judge_replaced(one, after, here)) for one, after in zip(earlier, next_runs, strict=True)),
    )


def _notes(ranks: tuple[RankRun, ...], left_over: int, unreadable: int, newest_schema: int) -> list[str]:
    """Limits of the records.

    Args:
        left_over: files of an earlier training with more processes.
        unreadable: lines that could not be read.
        newest_schema: the highest version of the format in the files.
    """
    notes = []
    size = max((rank.run.get("world_size") or 1 for rank in ranks), default=1)
    missing = sorted(set(range(min(size, 100_000))) - {rank.rank for rank in ranks})
    if missing:
        alone = f"; these figures are of rank {ranks[0].rank}, and others may differ" if len(ranks) == 1 else ""
        notes.append(f"records of {len(missing)} of {size} ranks are missing: {few(missing)}{alone}")
    without_end = [rank.rank for rank in ranks if rank.end is None]
    if without_end and len(without_end) < len(ranks):
        notes.append(f"ranks that have recorded no exit yet: {few(without_end)}")
    if left_over:
        notes.append(f"ignored files of an earlier training with more processes: {left_over}")
    if newest_schema > SCHEMA:
        notes.append(
            f"written by a newer memkit (schema {newest_schema}; this version reads {SCHEMA}): some may be missing. "
            f"Run: pip install --upgrade git+{REPOSITORY}"
        )
    if unreadable:
        notes.append(f"lines that could not be read: {unreadable}")
    if any(not rank.run for rank in ranks):
        notes.append("the beginning of the records is missing: model, arguments and machine are unknown")

    first = ranks[0]
    if first.earlier:
        attempt, ending = first.earlier[-1]
        arguments = attempt.run.get("arguments", {})
        # The last attempt of auto_find_batch_size had another batch than the arguments say.
        batch = first.run.get("after_oom", {}).get("train_batch_size", arguments.get("per_device_train_batch_size"))
        of = f" (batch size {printable(batch, 20)})" if batch is not None else ""
        notes.append(f"earlier starts in this folder: {len(first.earlier)}; the last{of} {ending.why}")
    if any(attempt.overlaps or ending.kind == "running" for rank in ranks for attempt, ending in rank.earlier):
        notes.append(
            "several trainings wrote into this folder at the same time: the figures are of the one that started last. "
            "Give each a separate output_dir, or they overwrite each other's checkpoints"
        )

    ends = [rank.end for rank in ranks if rank.end is not None]
    if lost := sum(end.get("lost_records", 0) for end in ends):
        why = next((f" ({printable(end['write_error'], 80)})" for end in ends if end.get("write_error")), "")
        notes.append(f"records that could not be written during training: {lost}{why}")
    return notes
