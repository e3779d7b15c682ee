"""Finds the out-of-memory messages in a text or a log of any length, each with its sizes, line and rank.

A terminal, a notebook or a forum may wrap a message over several lines. Logs repeat it (the traceback, the launcher's
summary), and several ranks may write at once.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, Final, NamedTuple, TextIO

from hf_memkit.common.answer.safe_text import printable
from hf_memkit.common.terms import Phase
from hf_memkit.measuring.out_of_memory.figures import join_lines
from hf_memkit.measuring.out_of_memory.log_lines import LogLine, Observer, lines, same_prefix
from hf_memkit.measuring.out_of_memory.matching import FORM_OF, heads, might_be, words_in
from hf_memkit.measuring.out_of_memory.message import OomMessage
from hf_memkit.measuring.out_of_memory.patterns import Form
from hf_memkit.measuring.out_of_memory.traceback import (
    BEGINS,
    FRAME,
    TracebackFacts,
    facts_of_warning,
    phase_of_progress,
    pins,
    trace,
)

_AHEAD: Final = 12
"""Maximum number of lines of one message."""

_REACH: Final = 2_500
"""Maximum number of characters of one message."""

_BEFORE: Final = 1_000
"""Lines kept before a message, for its traceback: Rich draws ten lines a frame, and other ranks write between."""

_NEAR: Final = 12
"""Lines before a message that may show what was being allocated."""

_PROGRESS: Final = 60
"""Lines searched for progress before a message without traceback: launchers name a killed process after some 30."""

_KEPT_OF_A_LINE: Final = 400

_TRACEBACK_SEARCHES: Final = 3
"""Repetitions of a message before which a traceback is searched."""

_MOST: Final = 1_000
"""Maximum number of different messages."""

_OWN_WORDS: Final = 24
"""Characters of a message before another may begin in the same line."""

_ALLOCATORS: Final = ("torch-device", "torch-cpu", "numpy")

_TAIL: Final = 200
"""Lines before a message in which frames are searched if the traceback's first line is missing."""

_PREFIXES: Final = 8
"""Maximum number of different prefixes before the frames of one traceback."""

_LONGEST_PREFIX: Final = 200

_IGNORED: Final = 4
"""Lines after a message that may show that it is harmless."""

# torch: _inductor/select_algorithm.py tries kernels and prints why one is not taken.
_HARMLESS: Final = re.compile(r"Ignoring this choice|select_algorithm\.py|(?i:skipping this (?:choice|config))")

# A SIGKILL that is not about memory: Slurm, LSF, PBS.
_OTHER_LIMIT: Final = re.compile(r"DUE TO (?:TIME LIMIT|PREEMPTION)|TERM_RUNLIMIT|walltime \S{1,20} exceeded limit")

_ALONE: Final = re.compile(r"(?:^|[\]%]) {0,4}Killed$")
_SOME_RANK: Final = re.compile(r"(?:\[|\b)(?:[Rr]ank|RANK|default)[ =:]{0,2}(\d{1,5})\b")
_TPU: Final = re.compile(r"\bTPU\b|\btpu_|torch_xla|libtpu|(?i:hbm)(?![a-z])")
_ERROR_NAME: Final = re.compile(r"(?:[\w.]{1,120}: )?$")

# A message only if the line has no other words.
_BARE: Final = re.compile(
    r"([^\n]{0,120}?[\s:>|\])])"
    r"((?:\[\d{1,4}\] {0,4}[+-]? {0,8}(?:\d{1,10} )?Killed\b[^\n]*|Killed|MemoryError)\s{0,4})$"
)
_NEIGHBOURS: Final = 4

# Text in a line of source, as IPython and Rich number them: `     63         "CUDA out of memory.",`.
_QUOTED_IN_SOURCE: Final = re.compile(r"\s{0,8}(?:-{1,8}> ?|❱ ?)?\d{1,6}\s[^\n]{0,200}?(?:'|\"[^\"\n]{0,80})$")
_SOURCE: Final = re.compile(r"\s{0,8}(-{1,8}> ?|❱ ?)?(\d{1,6})(?![^\s│])")
# What Trainer logs at a step. TRL's has texts that the model wrote.
_LOGGED: Final = re.compile(r"\s{0,4}\{'(?:\w{1,60}': [\d.e+-]{1,30}, '){0,40}(?:loss|epoch|reward)': ")

_STOP: Final = re.compile(r"Traceback \(most recent call last\)|\bFile \"[^\"\n]{1,300}\", line \d|\b\w{1,60}Error: ")


@dataclass(frozen=True, slots=True)
class LoggedError:
    """One message of a log.

    Attributes:
        line: its first line, from 1.
        rank: the rank that wrote it, if known.
        count: how often it occurs.
        trace: what the traceback above it shows.
    """

    message: OomMessage
    line: int
    rank: int | None = None
    count: int = 1
    trace: TracebackFacts = field(default_factory=TracebackFacts)

    @property
    def phase(self) -> Phase | None:
        return self.trace.phase

    def to_json(self) -> dict[str, Any]:
        where = {"line": self.line, "rank": self.rank, "count": self.count, **self.trace.to_json()}
        return {**where, "message": self.message.to_json()}


def parse_message(text: str) -> OomMessage | None:
    """The out-of-memory message in `text`; of several, the one that says most about the cause. None without one."""
    error = most_telling([error for error in find_messages(text) if error.message.memory != "none"])
    return error.message if error is not None else None


def most_telling(errors: list[LoggedError]) -> LoggedError | None:
    """The message that says most about the cause: an error before a kill, one about memory before another, and one
    with sizes before one without."""

    def order(error: LoggedError) -> tuple[int, bool, int, bool, int]:
        message = error.message
        sizes = (message.free_bytes, message.allocated_bytes, message.reserved_bytes)
        known = sum(size is not None for size in sizes)
        other = message.memory == "none"
        return FORM_OF[message.form].rank, other, -known, message.requested_bytes is None, error.line

    return min(errors, key=order, default=None)


class Occurrence(NamedTuple):
    """A message at one place of a log.

    Attributes:
        continuation: the following lines that belong to the message.
        trace: reads the traceback above the message. Call it before the next line is read.
    """

    message: OomMessage
    line: int
    rank: int | None
    continuation: list[LogLine]
    trace: Callable[[], TracebackFacts]


def find_messages(log: str | TextIO, observe: Observer | None = None) -> list[LoggedError]:
    """Every out-of-memory message in `log`, and errors of engines, in order of first occurrence, in linear time and
    bounded memory. `observe` is given each block of lines, as in `log_lines.lines`."""
    kept: dict[tuple[Any, ...], list[LoggedError]] = {}
    for message, line, rank, _, read_trace in _scan(log, observe):
        identity = _identity(message)
        same = kept.get(identity, [])
        # torchrun's children print rank 0's traceback twice, with its rank and without.
        place = next((i for i, error in enumerate(same) if rank is None or error.rank in (None, rank)), None)
        if place is not None:
            error = same[place]
            if error.trace == TracebackFacts() and error.count < _TRACEBACK_SEARCHES:
                error = replace(error, trace=read_trace())
            same[place] = replace(error, rank=error.rank if error.rank is not None else rank, count=error.count + 1)
        elif len(same) < _MOST and (same or len(kept) < _MOST):
            kept[identity] = [*same, LoggedError(message, line, rank, trace=read_trace())]
    return sorted((error for same in kept.values() for error in same), key=lambda error: error.line)


def _scan(log: str | TextIO, observe: Observer | None) -> Iterator[Occurrence]:
    source = lines(log, words_in, observe)
    ahead: deque[LogLine] = deque(islice(source, _AHEAD))
    before: deque[LogLine] = deque(maxlen=_BEFORE)
    done: set[int] = set()  # id() of lines that belong to an earlier message
    while ahead:
        line = ahead.popleft()
        ahead.extend(islice(source, 1))
        if id(line) in done:
            done.discard(id(line))
        else:
            for occurrence in _in_line(line, ahead, before):
                done.update(map(id, occurrence.continuation))
                yield occurrence
        before.append(line.beginning(_KEPT_OF_A_LINE))


def _trace_above(before: deque[LogLine], line: LogLine, form: Form) -> TracebackFacts:
    """What the traceback before `line` shows; without one, the phase by the last progress bar."""
    own_line = line.beginning(_KEPT_OF_A_LINE)
    facts = facts_of_warning(line.text[:_KEPT_OF_A_LINE]) or TracebackFacts()
    if facts == TracebackFacts() and not form.ends and _may_hold_frames(before, line):
        facts = trace(_own_words([*before, own_line], line))
    if facts == TracebackFacts():
        progress = phase_of_progress([*(each.raw for each in _last(before)), own_line.raw])
        return TracebackFacts(phase=form.phase or progress)
    return replace(facts, phase=facts.phase or form.phase)


def _may_hold_frames(before: deque[LogLine], line: LogLine) -> bool:
    """Whether a traceback may be near: a cheap test before all lines are cleaned."""
    return any(".py" in one.raw for one in _last(before, _TAIL)) or any(BEGINS in one.raw for one in (*before, line))


def _own_words(before: Iterable[LogLine], line: LogLine) -> list[str]:
    """The lines of the writer of `line`, without the prefix that its frames have."""
    texts = [one.text for one in before if one.same_writer(line)]
    frames = (frame for text in texts if "File" in text and (frame := FRAME.search(text)) is not None)
    before_frames = (frame.string[: frame.start()].removesuffix("  ") for frame in frames)  # its indentation
    prefixes = dict.fromkeys(same_prefix(prefix) for prefix in before_frames if prefix.strip())
    for prefix in list(prefixes)[:_PREFIXES]:
        texts = [text[one.end() :] if (one := prefix.match(text)) is not None else text for text in texts]
    return texts


def _in_line(line: LogLine, ahead: deque[LogLine], before: deque[LogLine]) -> Iterator[Occurrence]:
    """The messages that begin in `line`."""
    next_words = ahead[0].raw[:120] if ahead else ""  # the first words may be wrapped
    whole = f"{line.raw} {next_words}"
    if not (might_be(whole) if line.words is None else might_be(whole, line.words)):
        return
    following = [other for other in ahead if other.number != line.number and other.same_writer(line)]
    harmless = any(_HARMLESS.search(other.raw) for other in (line, *following[:_IGNORED]))
    if harmless or _in_source(line, before, following):
        return

    original = line
    line = _without_unknown_prefix(line, before, following)
    text = line.text
    done = line.fresh
    until = line.cut if line.cut is not None else len(text)
    if line.cut is None and following:
        text = join_lines(text, following[0].text.strip()[:60])
    beginnings = heads(text, line.fresh)
    logged = line.text.rfind("}") if _LOGGED.match(line.text) is not None else 0

    for position, (head, form) in enumerate(beginnings):
        start = head.start()
        if not done <= start < until:
            continue
        if _QUOTED_IN_SOURCE.match(text[:start]) is not None or start < logged:
            continue
        if head[0].strip() == "Killed" and _ALONE.search(line.text.strip()) is None:
            continue  # a shell writes nothing else in the line
        if form.name == "sigkill" and any(_OTHER_LIMIT.search(other.raw) for other in (*_last(before), *ahead)):
            continue  # a scheduler ended the job for another reason

        own_end = start + max(_OWN_WORDS, len(head[0]))
        later = (other.start() for other, _ in beginnings[position + 1 :])
        again = next((begin for begin in later if begin >= own_end), None)
        window, owners = _window(line, following, start, again)
        values, end = form.read(window) if form.read is not None else ({}, 0)
        end = max(end, len(head[0]))
        form = _exact(form, values, window[:end], before, line)

        rank = line.rank
        if rank is None and (named := _SOME_RANK.search(text[max(0, start - 200) : start])) is not None:
            rank = int(named[1])
        continuation = [other for begin, other in owners if begin < end]
        read_trace = partial(_trace_above, before, original, form)
        yield Occurrence(_message(form, values, window[:end]), line.number, rank, continuation, read_trace)
        done = start + end


def _in_source(line: LogLine, before: deque[LogLine], following: list[LogLine]) -> bool:
    """Whether it is one of the numbered lines of source that IPython and Rich print around a failed line."""
    own = _SOURCE.match(line.text)
    if own is None or own[1] is not None:
        return own is not None
    above = (other for other in reversed(before) if other.same_writer(line))
    for step, others in ((-1, islice(above, _NEAR)), (1, iter(following))):
        for distance, other in enumerate(others, 1):
            near = _SOURCE.match(other.text)
            if near is None or int(near[2]) != int(own[2]) + step * distance:
                break
            if near[1] is not None:
                return True
    return False


def _without_unknown_prefix(line: LogLine, before: deque[LogLine], following: list[LogLine]) -> LogLine:
    """The line without a prefix before `Killed` or `MemoryError` that its neighbours have too."""
    bare = _BARE.match(line.text) if line.cut is None and not line.fresh else None
    if bare is None:
        return line
    near = [*_last(before, _NEIGHBOURS), *following[:_NEIGHBOURS]]
    alike = sum(same_prefix(bare[1]).match(other.text) is not None for other in near)
    return LogLine(line.number, bare[2]) if not bare[1].strip() or alike >= min(2, len(near)) > 0 else line


def _last(before: deque[LogLine], count: int = _PROGRESS) -> Iterator[LogLine]:
    return islice(before, max(0, len(before) - count), None)


def _exact(form: Form, values: dict[str, Any], quote: str, before: deque[LogLine], line: LogLine) -> Form:
    """The form; the lines near it decide where several have the same words."""
    if form.name == "cuda-raw":
        near = [other.raw for other in _last(before, _NEAR)]
        if any("pin_memory" in raw or "non_blocking" in raw for raw in near) and pins(_own_words(before, line)):
            return FORM_OF["pinned"]
    if form.name == "xla" and (_TPU.search(line.raw) or any(_TPU.search(other.raw) for other in _last(before))):
        return FORM_OF["xla-tpu"]
    if form.name in _ALLOCATORS and (values.get("requested_bytes", 0) is None or "allocate -" in quote):
        return replace(FORM_OF["no-size"], library=form.library, memory=form.memory)
    return form


def _window(
    line: LogLine, following: list[LogLine], start: int, again: int | None
) -> tuple[str, list[tuple[int, LogLine]]]:
    """(text from `start` to `again`, with lines that may continue the message; where each of these begins in it)."""
    end = len(line.text) if again is None else min(again, len(line.text))
    text = line.text[start : min(start + _REACH, end)]
    prefix = _ERROR_NAME.sub("", line.text[:start]).strip() if start <= _LONGEST_PREFIX else ""
    shape = same_prefix(prefix) if prefix else None
    owners: list[tuple[int, LogLine]] = []
    for other in following if end == len(line.text) else ():
        words = other.text.strip()[: _REACH - len(text)]
        if shape is not None and (same := shape.match(words)) is not None:
            words = words[same.end() :].strip()
        if not words or _STOP.search(words):
            break
        if might_be(words) and (beginnings := heads(words)):
            text = join_lines(text, words[: beginnings[0][0].start()])
            break
        text = join_lines(text, words)
        owners.append((len(text) - len(words), other))
    return text, owners


def _message(form: Form, values: dict[str, Any], quote: str) -> OomMessage:
    fields = {**form.fixed, **values}
    device_type = fields.pop("device_type", None) or _device_type(form, quote)
    if isinstance(fields.get("process_name"), str):
        fields["process_name"] = printable(fields["process_name"], 60)
    quote = printable(" ".join(quote.split()), 600)
    return OomMessage(form.name, form.library, form.memory, quote, device_type, **fields)


def _device_type(form: Form, quote: str) -> str | None:
    if form.memory not in ("device", "kernel"):
        return None
    if (named := _DEVICE.search(quote)) is not None:
        name = named[1].lower()
        return _DEVICE_TYPES.get(name, name)
    return "cuda" if form.library == "CUDA" else None


_DEVICE: Final = re.compile(
    r"(?i)\b(CUDA|CUBLAS|Allocation on device|HIP|XPU|NPU|MLU|HPU|MUSA|MTIA|MPS|GCU|SDAA|TPU)(?=[_ :(\]]|error|$)"
)
_DEVICE_TYPES: Final = {"hip": "rocm", "cublas": "cuda", "allocation on device": "cuda"}


_identity: Final = attrgetter(
    "form", "device", "requested_bytes", "free_bytes", "allocated_bytes", "reserved_bytes", "process_bytes",
    "allowed_bytes", "resident_bytes", "pid", "used_bytes",
)  # fmt: skip
"""Of a message: equal for its repetitions."""
