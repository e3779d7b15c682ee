"""Splits a log of any length into lines, without the prefixes of launchers, and with the rank that wrote each.

Launchers, schedulers, containers, loggers, notebooks and forums put a prefix before each line. `clean` removes
prefixes of known pieces in any order: dates, levels, names, brackets. A traceback shows any other prefix: the text
before `File "x.py", line 3, in f` precedes the next lines too, with other numbers (`same_prefix`).

A line has at most `MAX_LINE` characters. Longer ones (a progress bar without line ends) are read in pieces that
overlap, so that each message is whole in one of them.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, TextIO

MAX_LINE: Final = 65_536
OVERLAP: Final = 4_096
_BLOCK: Final = 65_536
"""Characters of a block of lines."""

_ESCAPE: Final = re.compile(  # as characters, and as text of syslog, JSON and editors
    r"(?:#033|\\033|\\x1b|\\u001b|\^\[|␛)\[[0-9;]{0,40}[mK]"
    r"|\x1b(?:\[[0-9;:?]{0,40}[ -/]{0,2}[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|[@-Z\\^_])"
)

_LINK: Final = re.compile(r"\[([^\]\n]{1,300})\]\((?:https?://|file:)[^)\n]{0,400}\)")
"""A path in a copied notebook cell or issue: `[trainer.py](https://localhost:8080/#)`."""

# A prefix of launchers, srun and loggers with a rank: the group that is a number.
_RANK: Final = re.compile(
    r"\s{0,4}(?:\[(?:rank|Rank|RANK|default|gpu|GPU):? ?(\d{1,5})\]:? ?(?:\[[^\]\n]{0,90}\] ?:? ?)?"
    r"|\[\d{1,5},(?:mpirank:)?(\d{1,5})[^\]\n]{0,60}\]<std(?:err|out)>: ?"  # mpirun --tag-output, SageMaker
    r"|\[(\d{1,5})\]: ?"  # srun, DeepSpeed
    r"|[Rr]ank ?(\d{1,5}): ?"
    r"|(\d{1,4}): )"  # srun --label
)
_LEVEL: Final = r"(?:ERROR|WARNING|WARN|INFO|CRITICAL|FATAL|DEBUG)"
_TIME: Final = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z| ?[+-]\d\d:?\d\d| UTC)?"
_DATE: Final = r"(?:\d{2,4}[-/.]\d\d[-/.]\d{2,4}|\d\d[-/]\d\d)"

# A piece ends with at most one space: further spaces are indentation. So no piece matches a line of source.
_PIECE: Final = re.compile(
    r"\((?:[^()\n]{0,80}\bpid=\d{1,10}[^)\n]{0,60}|raylet|autoscaler[^)\n]{0,40})\) ?"  # Ray, vLLM
    r"|[EWIF]\d{4} \d\d:\d\d:\d\d\.\d{1,9} {1,6}(?:\d{1,10} )?[\w./-]{1,120}:\d{1,6}\] ?"  # glog, torch's own
    rf"|(?:[A-Z][a-z]{{2}} )?[A-Z][a-z]{{2}} [ \d]\d {_TIME} [\w.-]{{1,80}} [\w./@-]{{1,60}}(?:\[\d{{1,10}}\])?: ?"
    rf"|(?:{_DATE}[T ,_]{{1,2}})?{_TIME}(?: ?[-|:](?= ))? ?"
    # [INFO], [pod/x-0/y], dmesg's time; not a shell's job number
    r"|\[(?!Errno|WinError|enforce )(?=[^\]\n]{0,120}[A-Za-z.:])[^\]\[\n'\"]{1,120}\](?:<std(?:err|out)>)?(?: ?:)? ?"
    rf"|(?:\[|- |\| )?{_LEVEL}\]?(?::[\w.]{{1,60}}:| {{0,8}}[-|:])? ?"
    rf"|[\w.]{{1,80}} - (?={_LEVEL})"  # logging's name before its level
    r"|[\w.<>]{1,80}:[\w.<>]{1,80}:\d{1,6} - ?"  # loguru
    r"|(?:[EWIF] )?[\w./-]{1,120}\.(?:cc|cpp|cu|h|py):\d{1,6}\] ?"
    r"|(?:[\w./:-]{1,80} {0,30})?\| "  # docker compose; loguru's bar
    r"|(?![\w.-]{0,80}(?:Error|Exception):)(?=[\w.-]{0,80}\d)[A-Za-z0-9][\w.-]{0,80}: "  # worker-0: node17: 10.0.0.1:
    r"|(?:<std(?:err|out)>:?|std(?:err|out) [FP]) ?"
    r"|\d{1,7}\.\d{1,4}s[ \t]{1,3}(?:\d{1,8}[ \t])?"  # Kaggle
    r"|> ?|E {3}(?= {0,12}\S)"  # a quotation, pytest
)
_BOX: Final = re.compile(r"\s{0,4}[│┃║|▌] {0,2}")
"""Boxes of Rich and notebooks."""
_BOX_END: Final = re.compile(r"\s{0,200}[│┃║]?\s{0,4}$")
_PIECES: Final = 8

_WRITER: Final = re.compile(
    r"(?<![\w.])[A-Za-z][\w./@]{0,60}?[-=\[/](?:\w{1,40}-)?\d{1,12}|(?<![\w.])[a-z]{1,40}\d{1,6}(?=: )"
)
"""A process or machine in a prefix without a rank: `trainer-1`, `pid=4321`, `python[4321]`, `node17: `."""


class CleanLine(NamedTuple):
    """A line without prefix; the rank, and the names of a process, container or machine in the prefix."""

    text: str
    rank: int | None = None
    writer: tuple[str, ...] = ()


@dataclass(eq=False)
class LogLine:
    """One line, or one piece of a long one; `number` counts from 1.

    Only messages that begin between the columns `fresh` and `cut` (None: the end) are of this piece: the pieces before
    and after it have the others. `words`: those of `matching.words_in` that it may have; None: any.
    """

    number: int
    raw: str
    fresh: int = 0
    cut: int | None = None
    words: tuple[str, ...] | None = None

    @property
    def text(self) -> str:
        """The line without prefix."""
        return self._clean.text

    @property
    def rank(self) -> int | None:
        """The rank in the prefix."""
        return self._clean.rank

    def same_writer(self, other: LogLine) -> bool:
        """Whether one process may have written both lines."""
        mine, theirs = self._clean.writer, other._clean.writer
        return self.rank == other.rank and (mine == theirs or not mine or not theirs)

    def beginning(self, length: int) -> LogLine:
        """The first characters of the line."""
        is_short = len(self.raw) <= length and not self.fresh and self.cut is None
        return self if is_short else LogLine(self.number, self.raw[:length])

    @cached_property
    def _clean(self) -> CleanLine:
        # Pieces of a line are not cleaned: `fresh` and `cut` are columns of the raw text.
        whole = not self.fresh and self.cut is None
        return clean(self.raw) if whole else CleanLine(self.raw)


def lines(
    log: str | TextIO, words_in: Callable[[str], tuple[str, ...]] | None = None, observe: Observer | None = None
) -> Iterator[LogLine]:
    """The lines of `log`. A carriage return (of a progress bar) ends a line too, but is not counted.

    Args:
        words_in: finds the words of a block of lines, which its lines then have.
        observe: is given each block, as a text and as lines with their ends.
    """
    stream = io.StringIO(log, newline="") if isinstance(log, str) else log
    number, carried = 1, ""
    for piece, words in _pieces(stream, words_in, observe):
        ended = piece.endswith(("\n", "\r"))
        text = carried + piece.rstrip("\r\n")
        fresh = max(0, len(carried) - OVERLAP // 2)
        if ended or len(piece) < MAX_LINE:
            if not carried and text.lstrip(" ").startswith(('{"', '"')):
                yield from (LogLine(number, inner) for inner in _of_json(text))
            else:
                yield LogLine(number, text, fresh, None, None if carried else words)
            carried = ""
        else:
            yield LogLine(number, text, fresh, len(text) - OVERLAP // 2)
            carried = text[-OVERLAP:]
        number += piece.endswith("\n")


Observer = Callable[[str, list[str]], None]

# torch: c10/cuda/CUDAException.cpp. The link to the documentation below an error repeats its code: no second error.
_POINTER: Final = re.compile(r"(?:\[\w: ]{1,20}\]:? ?)?Search for [`'](?:cuda|hip)\w{1,60}' in https?://[^\r\n]*")


def _pieces(
    stream: TextIO, words_in: Callable[[str], tuple[str, ...]] | None, observe: Observer | None
) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    """(a line with its end, or a piece of `MAX_LINE`; the words of its block). The last of a block may have others,
    with which the next block begins."""
    while True:
        block: list[str] = []
        size = 0
        while size < _BLOCK and (piece := stream.readline(MAX_LINE)):
            block.append(piece)
            size += len(piece)
        if not block:
            return
        text = "".join(block)
        if observe is not None:
            observe(text, block)
        if "Search for" in text:
            block = [_POINTER.sub("", piece) if _POINTER.match(piece) else piece for piece in block]
        words = words_in(text) if words_in is not None else None
        for piece in block[:-1]:
            yield piece, words
        yield block[-1], None


_ABOUT_A_LINE: Final = re.compile(rf"(?:std(?:out|err)|(?i:{_LEVEL})|\d{{4}}-\d\d-\d\dT?[\d:.,+Z -]{{0,30}})?$")
"""Other texts in a JSON line: the stream, the level, the time."""


def _of_json(text: str) -> list[str]:
    """The lines in a JSON object (docker, torchelastic, structured logs) or text (saved notebook); else the line."""
    try:
        texts = _texts(json.loads(text.strip().removesuffix(",")))
    except (ValueError, RecursionError):
        return [text]
    return [line for one in texts for line in one.splitlines()[:10_000]] or [text]


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for one in value.values() for text in _texts(one)]
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    return [value] if isinstance(value, str) and not _ABOUT_A_LINE.match(value) else []


def clean(text: str) -> CleanLine:
    """`text` without colours, links and prefixes."""
    text = _ESCAPE.sub("", text)
    if "](" in text:
        text = _LINK.sub(r"\1", text)
    rank: int | None = None
    start = 0
    for _ in range(_PIECES):
        piece = _RANK.match(text, start) or _PIECE.match(text, start) or _BOX.match(text, start)
        if piece is None or piece.end() == start:
            break
        if piece.re is _RANK and rank is None:
            rank = int(next(group for group in piece.groups() if group is not None))
        start = piece.end()
    box = _BOX_END.search(text, max(start, len(text) - 210))
    end = box.start() if box is not None else len(text)
    writer = tuple(_WRITER.findall(text[:start])) if start else ()
    return CleanLine(text[start:end], rank, writer)


def same_prefix(prefix: str) -> re.Pattern[str]:
    """Pattern of `prefix` before other lines: with other numbers, and at most as many spaces at the end (further
    spaces are the other line's indentation)."""
    words = prefix.rstrip()
    pattern = re.sub(r"\d+", r"\\d+", re.escape(words[:200]))
    pattern = re.sub(r"(?:\\\s)+", r"\\s*", pattern)
    return re.compile(rf"{pattern}\s{{0,{min(len(prefix) - len(words), 20)}}}")
