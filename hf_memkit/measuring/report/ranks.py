"""The ranks of a run beside each other: their peaks, and the shares that an engine gave to each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hf_memkit.common.answer.answer import NONE, AnswerBlock, Lines, Table, View
from hf_memkit.common.units import GIB, format_size
from hf_memkit.measuring.report.load import Run
from hf_memkit.measuring.report.summary import Summary, summarise_ranks

_ON_TERMINAL: Final = 8
"""Maximum number of ranks on a terminal."""

_SHARED: Final = ("weights", "gradients", "optimizer")
_UNEVEN: Final = 0.05
"""Assumed: shares that differ by less need no sentence."""

# torch 2.13.0: distributed/fsdp/_fully_shard/_fsdp_param.py: dimension 0, as torch.chunk; weights alone are padded.
_WHY: Final = {
    "FSDP2": " It divides the rows of each weight, and the last ranks get what is left, or none. Their weights are "
    "padded; gradients and states are not."
}


def engine_of(run: Run) -> str:
    """The engine that divides a model over the ranks: `FSDP2`, `FSDP`, `ZeRO-3`; empty for other runs."""
    record = run.first.run
    name = str(record.get("engine") or "")
    stage = record.get("arguments", {}).get("deepspeed_stage")
    if name.startswith("DeepSpeed"):
        return f"ZeRO-{stage}" if stage in (1, 2, 3) else ""
    return {"FSDP2": "FSDP2", "FullyShardedDataParallel": "FSDP"}.get(name, "")


def by_rank(run: Run) -> Iterator[AnswerBlock]:
    """A row for each rank, the highest peak first; with an engine that divides the model, its shares too."""
    if len(run.ranks) < 2:
        return
    ranks = sorted(summarise_ranks(run), key=lambda one: -(one.peak.gib if one.peak else 0.0))
    rows = []
    for one in ranks:
        figures = (one.peak.gib if one.peak else None, one.reserved_gib, one.host.get("rss_gib"))
        cells = ["–" if gib is None else f"{gib:.2f}" for gib in figures]
        rows.append([str(one.rank), *cells, run.of(one.rank).ending.kind])
    columns = (">rank", ">peak GiB", ">reserved GiB", ">host GiB", "ended")
    yield Table(columns, rows, rows_shown=_ON_TERMINAL, heading="By rank", name="ranks", views=View.FULL)
    if engine := engine_of(run):
        yield from _shares(run, ranks, engine)


def _shares(run: Run, ranks: list[Summary], engine: str) -> Iterator[AnswerBlock]:
    """What each rank holds after an optimizer step, and what it gathers at its peak. On a terminal, only where ranks
    differ."""
    if not any(one.held for one in ranks):
        return
    recorded = {one.rank for one in ranks if any("held" in step for step in run.of(one.rank).steps)}
    held = {one.rank: {name: _held_gib(one, name) for name in _SHARED} for one in ranks if one.rank in recorded}
    rows = []
    for one in sorted(ranks, key=lambda one: one.rank):
        shares = [_size(size) for size in held[one.rank].values()] if one.rank in held else [NONE] * len(_SHARED)
        rows.append([str(one.rank), *shares, _size(one.categories.get("buffers", 0.0))])
    columns = (">rank", *(f">{name}" for name in _SHARED), ">gathered")
    caption = "Held after the optimizer step; gathered: parameters and other buffers of collectives, at the peak"
    heading = f"{engine} by rank"
    views = View.FULL if len({tuple(shares) for _, *shares in rows}) > 1 else View.PAGE
    yield Table(columns, rows, caption, rows_shown=_ON_TERMINAL, heading=heading, name="shares", views=views)
    total = {rank: sum(sizes.values()) for rank, sizes in held.items()}
    most, least = max(total, key=lambda rank: total[rank]), min(total, key=lambda rank: total[rank])
    if total[most] - total[least] > _UNEVEN * total[most]:
        what = "of weights, gradients and optimizer states"
        first, last = _size(total[most]), _size(total[least]) or "none"
        yield Lines([f"Uneven: rank {most} holds {first} {what}, rank {least} {last}.{_WHY.get(engine, '')}"])


def _size(gib: float) -> str:
    return format_size(gib * GIB) if gib else ""


def _held_gib(summary: Summary, category: str) -> float:
    """GiB of a category in all places."""
    return sum(sizes.get(category, 0.0) for sizes in summary.held.values())
