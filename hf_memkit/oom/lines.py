"""A log, line by line. In: a text or an open file. Out: lines without colours and prefixes, each with number and rank.

Bounded in memory: a line is at most `MAX_LINE` characters; longer ones (a progress bar without line ends) come in
pieces that overlap, so that a message on a seam is whole in one of them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Final, TextIO

__all__ = ["MAX_LINE", "Line", "clean", "lines"]

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


class Line:
    """One line, or one piece of a long one.

    Attributes:
        number: as an editor counts, from 1.
        raw: as it stands in the log.
        fresh: heads that begin before this column have been seen in the piece before.
        cut: heads that begin behind this column are left to the next piece; None for the last piece.
    """

    __slots__ = ("_cleaned", "cut", "fresh", "number", "raw")

    def __init__(self, number: int, raw: str, fresh: int = 0, cut: int | None = None) -> None:
        self.number = number
        self.raw = raw
        self.fresh = fresh
        self.cut = cut
        self._cleaned: tuple[str, int | None] | None = None

    @property
    def text(self) -> str:
        """The line's own words."""
        return self._clean()[0]

    @property
    def rank(self) -> int | None:
        """The rank that a launcher wrote before it."""
        return self._clean()[1]

    def _clean(self) -> tuple[str, int | None]:
        # Only lines near a message are ever cleaned. Pieces keep their columns, which say who reports a message.
        if self._cleaned is None:
            whole = not self.fresh and self.cut is None
            self._cleaned = clean(self.raw) if whole else (self.raw, None)
        return self._cleaned


def lines(log: str | TextIO) -> Iterator[Line]:
    """The lines of `log`. A carriage return ends one too (a progress bar writes over itself), but is not counted."""
    stream = io.StringIO(log, newline="") if isinstance(log, str) else log
    number, carried = 1, ""
    while piece := stream.readline(MAX_LINE):
        ended = piece.endswith(("\n", "\r"))
        text = carried + piece.rstrip("\r\n")
        fresh = max(0, len(carried) - _OVERLAP // 2)
        if ended or len(piece) < MAX_LINE:
            yield Line(number, text, fresh, None)
            carried = ""
        else:
            yield Line(number, text, fresh, len(text) - _OVERLAP // 2)
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
