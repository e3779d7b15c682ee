"""Finding messages. In: one message, or a log of any length. Out: each message with its numbers, line and rank.

A message may stand on one line or be wrapped over several (a terminal, a notebook, a paste); it may repeat (Python's
traceback, the same with a rank before it, the launcher's summary); several ranks may write at once.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Final, TextIO

from hf_memkit.common.terms import Phase
from hf_memkit.measuring.out_of_memory.figures import joined
from hf_memkit.measuring.out_of_memory.log_lines import LogLine, lines, same_prefix
from hf_memkit.measuring.out_of_memory.message import OomMessage, printable
from hf_memkit.measuring.out_of_memory.patterns import FORM_OF, FORMS, Form, heads, might_be
from hf_memkit.measuring.out_of_memory.traceback import BEGINS, FRAME, Traced, phase_of_progress, pins, trace, warned

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
_ALLOCATORS: Final = ("torch-device", "torch-cpu", "numpy")

_TAIL: Final = 200
"""Lines before a message that may be the frames of a traceback whose first line is missing."""

_PREFIXES: Final = 8
"""Different prefixes that the frames of one traceback may have."""

_LONGEST_PREFIX: Final = 200

_IGNORED: Final = 4
"""Lines behind a message that may take it back."""

# torch: _inductor/select_algorithm.py tries kernels and prints why one is not taken.
_HARMLESS: Final = re.compile(r"Ignoring this choice|select_algorithm\.py|(?i:skipping this (?:choice|config))")

# A SIGKILL that is not about memory: Slurm, LSF, PBS.
_OTHER_LIMIT: Final = re.compile(r"DUE TO (?:TIME LIMIT|PREEMPTION)|TERM_RUNLIMIT|walltime \S{1,20} exceeded limit")

_ALONE: Final = re.compile(r"(?:^|[\]%]) {0,4}Killed$")
_SOME_RANK: Final = re.compile(r"(?:\[|\b)(?:[Rr]ank|RANK|default)[ =:]{0,2}(\d{1,5})\b")
_TPU: Final = re.compile(r"\bTPU\b|\btpu_|torch_xla|libtpu|(?i:hbm)(?![a-z])")
_ERROR_NAME: Final = re.compile(r"(?:[\w.]{1,120}: )?$")

# Words that are a message only if nothing else stands in their line.
_BARE: Final = re.compile(
    r"([^\n]{0,120}?[\s:>|\])])"
    r"((?:\[\d{1,4}\] {0,4}[+-]? {0,8}(?:\d{1,10} )?Killed\b[^\n]*|Killed|MemoryError)\s{0,4})$"
)
_NEIGHBOURS: Final = 4

# A text in a line of source, as IPython and Rich number them: `     63         "CUDA out of memory.",`.
_QUOTED_IN_SOURCE: Final = re.compile(r"\s{0,8}(?:-{1,8}> ?|❱ ?)?\d{1,6}\s[^\n]{0,200}?(?:'|\"[^\"\n]{0,80})$")
_SOURCE: Final = re.compile(r"\s{0,8}(-{1,8}> ?|❱ ?)?(\d{1,6})(?![^\s│])")
# What Trainer logs at a step. TRL's has texts that the model wrote.
_LOGGED: Final = re.compile(r"\s{0,4}\{'(?:\w{1,60}': [\d.e+-]{1,30}, '){0,40}(?:loss|epoch|reward)': ")

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
    """Every out-of-memory message in `log`, in order of first occurrence, in linear time and bounded memory."""
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
    before: deque[LogLine] = deque(maxlen=_BEFORE)
    done: set[int] = set()  # lines that belong to a message already told
    while ahead:
        line = ahead.popleft()
        ahead.extend(islice(source, 1))
        if id(line) in done:
            done.discard(id(line))
        else:
            for message, rank, used in _in_line(line, ahead, before):
                done.update(id(other) for other in used)
                yield message, line.number, rank, partial(_trace_there, before, line, FORM_OF[message.form])
        before.append(line.beginning(_KEPT_OF_A_LINE))


def _trace_there(before: deque[LogLine], line: LogLine, form: Form) -> Traced:
    """What the traceback tells that the writer of `line` wrote before it; without one, what the job was doing."""
    traced = warned(line.text[:_KEPT_OF_A_LINE])
    if traced is None:
        framed = not form.ends and _may_hold_frames(before, line)
        traced = trace(_own_words([*before, line.beginning(_KEPT_OF_A_LINE)], line)) if framed else Traced()
    if traced == Traced():
        raws = [one.raw for one in _last(before)]
        traced = Traced(phase=form.phase or phase_of_progress([*raws, line.raw[:_KEPT_OF_A_LINE]]))
    elif traced.phase is None and form.phase is not None:
        traced = replace(traced, phase=form.phase)
    return traced


def _may_hold_frames(before: deque[LogLine], line: LogLine) -> bool:
    """Whether it is worth cleaning all lines: where every line is a message, that takes long."""
    return any(".py" in one.raw for one in _last(before, _TAIL)) or any(BEGINS in one.raw for one in (*before, line))


def _own_words(before: Iterable[LogLine], line: LogLine) -> list[str]:
    """The lines of the writer of `line`, without the prefix that the frames among them have."""
    texts = [one.text for one in before if one.same_writer(line)]
    found = (FRAME.search(text) for text in texts if "File" in text)
    before_frames = (
        one.string[: one.start()].removesuffix("  ") for one in found if one is not None
    )  # its indentation
    prefixes = dict.fromkeys(same_prefix(prefix) for prefix in before_frames if prefix.strip())
    for prefix in list(prefixes)[:_PREFIXES]:
        texts = [text[one.end() :] if (one := prefix.match(text)) is not None else text for text in texts]
    return texts


def _in_line(
    line: LogLine, ahead: deque[LogLine], before: deque[LogLine]
) -> Iterator[tuple[OomMessage, int | None, list[LogLine]]]:
    """The messages that begin in `line`, each with its rank and the lines after it that it goes on over."""
    beginning = ahead[0].raw[:120] if ahead else ""  # the first words may be wrapped too
    if not might_be(f"{line.raw} {beginning}"):
        return
    following = [other for other in ahead if other.number != line.number and other.same_writer(line)]
    harmless = any(_HARMLESS.search(other.raw) for other in (line, *following[:_IGNORED]))
    if harmless or _in_source(line, before, following):
        return
    line = _without_unknown_prefix(line, before, following)
    text, done = line.text, line.fresh
    until = line.cut if line.cut is not None else len(text)
    if line.cut is None and following:
        text = joined(text, following[0].text.strip()[:60])
    found = heads(text, line.fresh)
    logged = line.text.rfind("}") if _LOGGED.match(line.text) is not None else 0
    for position, (head, form) in enumerate(found):
        start = head.start()
        if not done <= start < until:
            continue
        if _QUOTED_IN_SOURCE.match(text[:start]) is not None or start < logged:
            continue
        if head[0].strip() == "Killed" and _ALONE.search(line.text.strip()) is None:
            continue  # the shell's word stands alone
        if form.name == "sigkill" and any(_OTHER_LIMIT.search(other.raw) for other in (*_last(before), *ahead)):
            continue  # a scheduler ended the job, for another reason
        later = (other.start() for other, _ in found[position + 1 :])
        again = next((other for other in later if other >= start + max(_OWN_WORDS, len(head[0]))), None)
        window, owners = _window(line, following, start, again)
        values, end = form.read(window) if form.read is not None else ({}, 0)
        end = max(end, len(head[0]))
        form = _exact(form, values, window[:end], before, line)
        rank = line.rank if line.rank is not None else _rank_in(text[:start])
        yield _message(form, values, window[:end]), rank, [other for begin, other in owners if begin < end]
        done = start + end


def _in_source(line: LogLine, before: deque[LogLine], following: list[LogLine]) -> bool:
    """Whether it is a line of source that IPython or Rich print with its number, around the one that they mark."""
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
    """The line from a word on that must stand alone, if its neighbours begin as what precedes it does."""
    found = _BARE.match(line.text) if line.cut is None and not line.fresh else None
    if found is None:
        return line
    near = [*_last(before, _NEIGHBOURS), *following[:_NEIGHBOURS]]
    alike = sum(same_prefix(found[1]).match(other.text) is not None for other in near)
    return LogLine(line.number, found[2]) if not found[1].strip() or alike >= min(2, len(near)) > 0 else line


def _last(before: deque[LogLine], count: int = _PROGRESS) -> Iterator[LogLine]:
    return islice(before, max(0, len(before) - count), None)


def _rank_in(prefix: str) -> int | None:
    """The rank that stands somewhere before a message."""
    found = _SOME_RANK.search(prefix[-200:])
    return int(found[1]) if found is not None else None


def _exact(form: Form, values: dict[str, Any], quote: str, before: deque[LogLine], line: LogLine) -> Form:
    """The form, where the words alone do not decide it."""
    if form.name == "cuda-raw":
        near = [other.raw for other in _last(before, _NEAR)]
        if any("pin_memory" in raw or "non_blocking" in raw for raw in near) and pins(_own_words(before, line)):
            return FORM_OF["pinned"]  # page-locked RAM that CUDA could not have, in the same words
    if form.name == "xla" and (_TPU.search(line.raw) or any(_TPU.search(other.raw) for other in _last(before))):
        return FORM_OF["xla-tpu"]
    if form.name in _ALLOCATORS and (values.get("requested_bytes", 0) is None or "allocate -" in quote):
        return replace(FORM_OF["no-size"], library=form.library, memory=form.memory)
    return form


def _window(
    line: LogLine, following: list[LogLine], start: int, again: int | None
) -> tuple[str, list[tuple[int, LogLine]]]:
    """The text from `start` to `again`, over the lines that may continue the message, and where each begins in it."""
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
        if might_be(words) and (found := heads(words)):
            text = joined(text, words[: found[0][0].start()])
            break
        text = joined(text, words)
        owners.append((len(text) - len(words), other))
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
    found = _DEVICE.search(quote)
    name = found[1].lower() if found is not None else "cuda" if form.library == "CUDA" else None
    return _DEVICE_TYPES.get(name, name) if name is not None else None


_DEVICE: Final = re.compile(
    r"(?i)\b(CUDA|CUBLAS|Allocation on device|HIP|XPU|NPU|MLU|HPU|MUSA|MTIA|MPS|GCU|SDAA|TPU)(?=[_ :(\]]|error|$)"
)
_DEVICE_TYPES: Final = {"hip": "rocm", "cublas": "cuda", "allocation on device": "cuda"}


def _weight(message: OomMessage) -> tuple[int, int, bool]:
    figures = sum(size is not None for size in (message.free_bytes, message.allocated_bytes, message.reserved_bytes))
    return _RANK_OF[message.form], -figures, message.requested_bytes is None


def _numbers(message: OomMessage) -> tuple[Any, ...]:
    """What makes two messages the same one."""
    return (
        message.form, message.device, message.requested_bytes, message.free_bytes, message.allocated_bytes,
        message.reserved_bytes, message.process_bytes, message.allowed_bytes, message.resident_bytes, message.pid,
        message.used_bytes,
    )  # fmt: skip
