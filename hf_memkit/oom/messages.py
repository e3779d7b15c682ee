"""Finding messages. In: one message, or a log of any length. Out: each message with its numbers, line and rank.

A message may stand on one line or be wrapped over several (a terminal, a notebook, a paste); it may repeat (Python's
traceback, the same with a rank before it, the launcher's summary); several ranks may write at once. Lines are read
without colours and prefixes, bounded in memory: one is at most `MAX_LINE` characters; longer ones (a progress bar
without line ends) come in pieces that overlap, so that a message on a seam is whole in one of them.
"""

from __future__ import annotations

import io
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, Final, TextIO

from hf_memkit.oom.message import OomMessage, printable
from hf_memkit.oom.patterns import FORM_OF, FORMS, Form, heads, might_be
from hf_memkit.oom.traceback import BEGINS, Traced, phase_of_progress, trace
from hf_memkit.terms import Phase

__all__ = ["MAX_LINE", "FoundMessage", "find_messages", "most_telling", "parse_message"]

MAX_LINE: Final = 65_536
_OVERLAP: Final = 4_096

_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-9;:?]{0,40}[ -/]{0,2}[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|[@-Z\\^_])")

# What launchers, Ray, srun and loggers put before each line. The first group that is a number is the rank.
_RANK: Final = re.compile(
    r"\s{0,4}(?:\[(?:rank|default)(\d{1,5})\]:? ?(?:\[[^\]\n]{0,90}\] ?:? ?)?"  # torch, torchrun --tee
    r"|\[\d{1,5},(\d{1,5})\]<std(?:err|out)>: ?"  # mpirun --tag-output
    r"|\[(\d{1,5})\]: ?"  # srun, DeepSpeed
    r"|[Rr]ank ?(\d{1,5}): ?"
    r"|(\d{1,4}): )"  # srun --label
)
_NO_RANK: Final = re.compile(
    r"\s{0,4}(?:\((?:[\w.+-]{1,60} )?pid=\d{1,10}[^)\n]{0,60}\) ?"  # Ray
    r"|\[[^\]\n]{0,60}\d\d:\d\d:\d\d[^\]\n]{0,60}\] ?:? ?"  # [2026-01-31 12:00:00,000]
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]{0,10}Z? {0,3}(?:[-|:] )?"
    r"|\[ {0,6}\d{1,10}\.\d{6}\] ?"  # dmesg
    r"|(?:\[|- |\| )?(?:ERROR|WARNING|INFO|CRITICAL|FATAL)\]?(?: [-|:]|:)? {1,3}"
    r"|[│┃║|▌] {0,2})"  # a box that Rich or a notebook draws
)
_BOX_END: Final = re.compile(r"\s{0,200}[│┃║]?\s{0,4}$")


@dataclass(eq=False)
class LogLine:
    """One line, or one piece of a long one.

    Attributes:
        number: as an editor counts, from 1.
        raw: as it stands in the log.
        fresh: heads that begin before this column have been seen in the piece before.
        cut: heads that begin behind this column are left to the next piece; None for the last piece.
    """

    number: int
    raw: str
    fresh: int = 0
    cut: int | None = None

    @property
    def text(self) -> str:
        """The line's own words."""
        return self._cleaned[0]

    @property
    def rank(self) -> int | None:
        """The rank that a launcher wrote before it."""
        return self._cleaned[1]

    @cached_property
    def _cleaned(self) -> tuple[str, int | None]:
        # Only lines near a message are ever cleaned. Pieces keep their columns, which say who reports a message.
        whole = not self.fresh and self.cut is None
        return clean(self.raw) if whole else (self.raw, None)


def lines(log: str | TextIO) -> Iterator[LogLine]:
    """The lines of `log`. A carriage return ends one too (a progress bar writes over itself), but is not counted."""
    stream = io.StringIO(log, newline="") if isinstance(log, str) else log
    number, carried = 1, ""
    while piece := stream.readline(MAX_LINE):
        ended = piece.endswith(("\n", "\r"))
        text = carried + piece.rstrip("\r\n")
        fresh = max(0, len(carried) - _OVERLAP // 2)
        if ended or len(piece) < MAX_LINE:
            yield LogLine(number, text, fresh, None)
            carried = ""
        else:
            yield LogLine(number, text, fresh, len(text) - _OVERLAP // 2)
            carried = text[-_OVERLAP:]
        number += piece.endswith("\n")


def clean(text: str) -> tuple[str, int | None]:
    """`text` without colours, and without the prefixes before a line's own words; and the rank that they name."""
    text = _ESCAPE.sub("", text)
    rank: int | None = None
    start = 0
    for _ in range(6):
        found = _RANK.match(text, start) or _NO_RANK.match(text, start)
        if found is None or found.end() == start:
            break
        if found.re is _RANK and rank is None:
            rank = int(next(group for group in found.groups() if group is not None))
        start = found.end()
    end = _BOX_END.search(text, max(start, len(text) - 210))
    return text[start : end.start() if end is not None else len(text)], rank


_AHEAD: Final = 12
"""Lines that one message may be wrapped over."""

_REACH: Final = 2_500
"""Characters that one message may have."""

_BEFORE: Final = 1_000
"""Lines before a message that are kept: its traceback, which Rich draws with ten lines a frame, and the lines of other
ranks between."""

_NEAR: Final = 12
"""Lines before a message that may say what was being allocated."""

_PROGRESS: Final = 60
"""Lines before a message without a traceback that may tell what the job was doing: launchers write about 30 of their
own before they name the process that was killed."""

_KEPT_OF_A_LINE: Final = 400

_LOOKED_AT: Final = 3
"""How often a repeated message is looked up in the lines before it, until they hold a traceback."""

_MOST: Final = 1_000
"""Different messages that are kept; a log with more of them says nothing new."""

_OWN_WORDS: Final = 24
"""Where a second head may begin: behind the first one's own words."""

_RANK_OF: Final = {form.name: form.rank for form in FORMS}
_STOP: Final = re.compile(r"Traceback \(most recent call last\)|\bFile \"[^\"\n]{1,300}\", line \d|\b\w{1,60}Error: ")


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """One message of a log, however often it is repeated. `line`: its first line, from 1; `rank`: which rank wrote it,
    if the log tells; `count`: how often it occurs; `trace`: what the traceback above it shows."""

    message: OomMessage
    line: int
    rank: int | None = None
    count: int = 1
    trace: Traced = field(default_factory=Traced)

    @property
    def phase(self) -> Phase | None:
        return self.trace.phase

    def to_json(self) -> dict[str, Any]:
        where = {"line": self.line, "rank": self.rank, "count": self.count, **self.trace.to_json()}
        return {**where, "message": self.message.to_json()}


def parse_message(text: str) -> OomMessage | None:
    """The out-of-memory message in `text`; of several, the one that says most about the cause. None without one."""
    found = most_telling(find_messages(text))
    return found.message if found is not None else None


def most_telling(found: list[FoundMessage]) -> FoundMessage | None:
    """The message that says most about the cause: with sizes before without, an error before a kill."""
    return min(found, key=lambda one: (_weight(one.message), one.line), default=None)


def find_messages(log: str | TextIO) -> list[FoundMessage]:
    """Every out-of-memory message in `log` (a text, or a file opened with `newline=""`), in order of first occurrence.

    Takes linear time and bounded memory.
    """
    kept: dict[tuple[Any, ...], list[FoundMessage]] = {}
    for message, line, rank, trace_there in _scan(log):
        same = kept.setdefault(_numbers(message), [])
        # Rank 0's traceback is printed twice by torchrun's children, with its rank and without.
        place = next((i for i, one in enumerate(same) if rank is None or one.rank in (None, rank)), None)
        if place is not None:
            one = same[place]
            same[place] = replace(
                one,
                rank=one.rank if one.rank is not None else rank,
                trace=trace_there() if one.trace == Traced() and one.count < _LOOKED_AT else one.trace,
                count=one.count + 1,
            )
        elif len(kept) <= _MOST and len(same) < _MOST:
            same.append(FoundMessage(message, line, rank, trace=trace_there()))
        if len(kept) > _MOST and not same:
            del kept[_numbers(message)]
    return sorted((one for same in kept.values() for one in same), key=lambda one: one.line)


def _scan(log: str | TextIO) -> Iterator[tuple[OomMessage, int, int | None, Callable[[], Traced]]]:
    source = lines(log)
    ahead: deque[LogLine] = deque(islice(source, _AHEAD))
    before: deque[str] = deque(maxlen=_BEFORE)
    done: set[int] = set()  # lines that belong to a message already told
    while ahead:
        line = ahead.popleft()
        ahead.extend(islice(source, 1))
        if id(line) in done:
            done.discard(id(line))
        else:
            for message, used in _in_line(line, ahead, before):
                done.update(id(other) for other in used)
                yield message, line.number, line.rank, partial(_trace_there, before, line)
        before.append(line.raw[:_KEPT_OF_A_LINE])


def _trace_there(before: deque[str], line: LogLine) -> Traced:
    """What the traceback tells that the rank of `line` wrote before it."""
    kept = [*before, line.raw[:_KEPT_OF_A_LINE]]
    if not any(BEGINS in raw for raw in kept):  # in most logs; to clean them all where every line is a message is slow
        return Traced(phase=phase_of_progress(kept[-_PROGRESS:]))
    cleaned = map(clean, kept)
    return trace(text for text, rank in cleaned if rank == line.rank)


def _in_line(line: LogLine, ahead: deque[LogLine], before: deque[str]) -> Iterator[tuple[OomMessage, list[LogLine]]]:
    """The messages that begin in `line`, each with the lines after it that it goes on over."""
    beginning = ahead[0].raw[:120] if ahead else ""  # the first words may be wrapped too
    if not might_be(f"{line.raw} {beginning}"):
        return
    following = [other for other in ahead if other.rank == line.rank and other.number != line.number]
    text, done = line.text, line.fresh
    until = line.cut if line.cut is not None else len(text)
    if line.cut is None and following:
        text += " " + following[0].text[:60]
    found = heads(text, line.fresh)
    for position, (head, form) in enumerate(found):
        start = head.start()
        if not done <= start < until:
            continue
        if head[0].strip() == "Killed" and line.text.strip() != "Killed":
            continue  # the shell's word stands alone
        later = (other.start() for other, _ in found[position + 1 :])
        again = next((other for other in later if other >= start + _OWN_WORDS), None)
        window, owners = _window(line, following, start, again)
        values, end = form.read(window) if form.read is not None else ({}, 0)
        end = max(end, len(head[0]))
        if form.name == "cuda-raw" and any("pin_memory" in raw for raw in list(before)[-_NEAR:]):
            form = FORM_OF["pinned"]  # page-locked RAM that CUDA could not have, in the same words
        yield _message(form, values, window[:end]), [other for begin, other in owners if begin < end]
        done = start + end


def _window(
    line: LogLine, following: list[LogLine], start: int, again: int | None
) -> tuple[str, list[tuple[int, LogLine]]]:
    """The text from `start` on, over the lines that may continue the message, and where each of them begins in it.

    `again`: where the next message begins in `line`, if there is one.
    """
    end = len(line.text) if again is None else min(again, len(line.text))
    text = line.text[start : min(start + _REACH, end)]
    owners: list[tuple[int, LogLine]] = []
    for other in following if end == len(line.text) else ():
        words = other.text.strip()[: _REACH - len(text)]
        if not words or _STOP.search(words):
            break
        if might_be(words) and (found := heads(words)):
            text += " " + words[: found[0][0].start()]
            break
        owners.append((len(text) + 1, other))
        text += " " + words
    return text, owners


def _message(form: Form, values: dict[str, Any], quote: str) -> OomMessage:
    fields = {**form.fixed, **values}
    device_type = fields.pop("device_type", None) or _device_type(form, quote)
    if isinstance(fields.get("process_name"), str):
        fields["process_name"] = printable(fields["process_name"], 60)
    return OomMessage(form.name, form.library, form.memory, printable(quote), device_type, **fields)


def _device_type(form: Form, quote: str) -> str | None:
    if form.memory not in ("device", "kernel"):
        return None
    kinds = {"HIP": "rocm", "XPU": "xpu", "NPU": "npu", "CUDA": "cuda", "CUBLAS": "cuda"}
    return next((kind for name, kind in kinds.items() if quote.upper().startswith(name)), None)


def _weight(message: OomMessage) -> tuple[int, int]:
    figures = sum(size is not None for size in (message.free_bytes, message.allocated_bytes, message.reserved_bytes))
    return _RANK_OF[message.form], -figures


def _numbers(message: OomMessage) -> tuple[Any, ...]:
    """What makes two messages the same one."""
    return (
        message.form, message.device, message.requested_bytes, message.free_bytes, message.allocated_bytes,
        message.reserved_bytes, message.process_bytes, message.allowed_bytes, message.resident_bytes, message.pid,
    )  # fmt: skip
