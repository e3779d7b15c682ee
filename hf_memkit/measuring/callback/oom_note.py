"""The note below the traceback of an out-of-memory error, from the exception and its record."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from hf_memkit.common.commands import command
from hf_memkit.common.terms import CATEGORIES, at
from hf_memkit.common.units import GIB, format_size

if TYPE_CHECKING:
    from hf_memkit.measuring.out_of_memory import Explanation, OomMessage, Verdict


_MARK: Final = "memkit: "

_SIZES: Final = ("requested", "free", "capacity", "reserved", "allocated")

_WITH_CALLBACK: Final = "For advice measured on this job, add callbacks=[MemoryReportCallback()] to the Trainer."


@dataclass(frozen=True)
class OomNote:
    """A note in parts.

    Attributes:
        happened: the error in one line.
        why: its cause; empty if unknown.
        helps: changes that help, a line each.
        more: where the records are, or how to get some.
        general: whether the changes are generic, because the job is unknown.
    """

    happened: str
    why: str
    helps: tuple[str, ...]
    more: str = ""
    general: bool = False

    def text(self) -> str:
        """The whole note, as lines."""
        return "\n".join(part for part in (f"{_MARK}{self.happened}", self.details()) if part)

    def details(self) -> str:
        """Cause, changes and where to read more."""
        heading = "Generic fixes:" if self.general else "What helps most:"
        helps = [heading, *(f"  {n}. {line}" for n, line in enumerate(self.helps, 1))]
        return "\n".join(line for line in (self.why, *(helps if self.helps else ()), self.more) if line)


def chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, its causes and contexts."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [current.__cause__, current.__context__]


def frames(error: BaseException) -> Iterator[FrameType]:
    """The finished frames of `error` and of the errors in its chain. Up to Python 3.12 reading the variables
    (`f_locals`) of a running frame keeps them alive until it returns."""
    running: set[int] = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    for link in chain(error):
        traceback = link.__traceback__
        while traceback is not None:
            if id(traceback.tb_frame) not in running:
                yield traceback.tb_frame
            traceback = traceback.tb_next


def out_of_memory(error: BaseException) -> tuple[BaseException, OomMessage | None] | None:
    """The out-of-memory error of any library in the chain of `error`, with its parsed message if its form is known."""
    import torch

    from hf_memkit.measuring.out_of_memory import parse_message

    for link in chain(error):
        if isinstance(link, RuntimeError | MemoryError):
            message = parse_message(str(link))
            if message is not None or isinstance(link, torch.OutOfMemoryError | MemoryError):
                return link, message
    return None


def advice_from_text(error: BaseException) -> OomNote | None:
    """A note from the text of an out-of-memory error only; None for other errors."""
    from hf_memkit.measuring.out_of_memory import explain_oom, judge

    match = out_of_memory(error)
    if match is None:
        return None
    oom, message = match
    if message is None:
        return OomNote(f"out of memory: {type(oom).__name__}.", "", ())
    verdict = judge(message, own=os.getpid())
    traced = "".join(traceback.format_exception(type(oom), oom, oom.__traceback__, chain=False))
    general = tuple(map(str, explain_oom(traced).changes))
    return OomNote(
        f"out of memory. {_sizes(verdict.figures)}".rstrip(),
        _cause(verdict),
        _settings(verdict) + general,
        _WITH_CALLBACK if general else "",
        general=True,
    )


def note_from_record(
    record: Mapping[str, Any], run: Mapping[str, Any], explanation: Explanation, path: Path
) -> OomNote:
    """A note for a training, from its `oom` and `run` records, their explanation and the records' file."""
    verdict = explanation.verdict
    figures = {**record, **verdict.figures} if verdict is not None else record
    sizes = {name: record.get("categories", {}).get(f"{name}_gib", 0.0) for name in CATEGORIES}
    least = sum(sizes.values()) / 100
    names = sorted((name for name in sizes if sizes[name] > least), key=lambda name: -sizes[name])[:3]
    largest = f"Largest: {', '.join(f'{name} {_size(sizes[name])}' for name in names)}." if names else ""
    return OomNote(
        happened=" ".join(part for part in (_moment(record, run), _sizes(figures), largest) if part),
        why=_cause(verdict) if verdict is not None else "",
        helps=tuple(map(str, explanation.changes)) or (_settings(verdict) if verdict is not None else ()),
        more=f"Recorded in {path}. For details, type: {command('memkit', 'explain', path.parent)}",
    )


def add_note(error: BaseException, advice: OomNote) -> None:
    """Add the note, unless the exception already has one."""
    if not any(str(note).startswith(_MARK) for note in getattr(error, "__notes__", ())):
        error.add_note(advice.text())


def _moment(record: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    words = f"out of memory {at(record['phase'], record['step'])}"
    accumulated = run.get("arguments", {}).get("gradient_accumulation_steps", 1)
    if record["phase"] in ("forward", "backward") and "micro_batch" in record and accumulated > 1:
        words += f", micro-batch {record['micro_batch']} of {accumulated}"
    if "samples" in record and "longest_sequence" in record:
        words += f" ({record['samples']} samples, longest sequence {record['longest_sequence']} tokens)"
    return f"{words}."


def _sizes(figures: Mapping[str, Any]) -> str:
    sizes = {name: _size(figures[f"{name}_gib"]) for name in _SIZES if figures.get(f"{name}_gib") is not None}
    sentences = []
    if "requested" in sizes:
        sentences.append(f"Requested: {sizes['requested']}.")
    if "free" in sizes:
        of = f" of {sizes['capacity']}" if "capacity" in sizes else ""
        sentences.append(f"Free: {sizes['free']}{of}.")
    if "reserved" in sizes and "allocated" in sizes:
        sentences.append(f"PyTorch held {sizes['reserved']}, {sizes['allocated']} of it in tensors.")
    elif "allocated" in sizes:
        sentences.append(f"PyTorch's tensors held {sizes['allocated']}.")
    return " ".join(sentences)


def _cause(verdict: Verdict) -> str:
    return verdict.why if verdict.cause == "unknown" else f"Cause: {verdict.cause}. {verdict.why}"


def _settings(verdict: Verdict) -> tuple[str, ...]:
    return tuple(str(remedy) for remedy in verdict.settings if remedy.helps)


def _size(gib: float) -> str:
    return format_size(gib * GIB)
