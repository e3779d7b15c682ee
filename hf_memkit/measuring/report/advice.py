"""What to do next: findings of the diagnosis, and changes that save memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_memkit.common.answer.answer import Item
from hf_memkit.common.answer.safe_text import printable, sentence
from hf_memkit.measuring.out_of_memory import Change, suggest
from hf_memkit.measuring.record_types import ProposedChange
from hf_memkit.measuring.report.diagnosis import Finding, diagnose
from hf_memkit.measuring.report.load import RankRun, Run
from hf_memkit.measuring.report.summary import Summary


def findings_of(run: Run) -> list[tuple[int, Finding]]:
    """The findings with their ranks: each kind once, from the rank where it began first."""
    findings = [(one.rank, finding) for one in run.ranks for finding in diagnose(one.steps, one.run, ooms=one.ooms)]
    findings.sort(key=lambda pair: pair[1].first_step)
    first_rank: dict[str, int] = {}
    for rank, finding in findings:
        first_rank.setdefault(finding.kind, rank)
    return [(rank, finding) for rank, finding in findings if first_rank[finding.kind] == rank]


def item_of_finding(run: Run, rank: int, finding: Finding) -> Item:
    """`Leak since step 40`, why and the fix."""
    where = f" on rank {rank}" if len(run.ranks) > 1 else ""
    why, fix = (sentence(printable(part, 400).strip()) for part in (finding.why, finding.fix))
    return Item(f"{why} {fix}", f"{finding.kind.capitalize()} since step {finding.first_step}{where}")


def changes_of(run: Run, summary: Summary) -> tuple[Change, ...]:
    """The changes that save memory; empty if there is headroom."""
    for rank in run.ranks:
        if rank.ooms and (rank.ending.kind == "out of memory" or rank.last is rank.ooms[-1]):
            recorded = tuple(map(_read_change, rank.ooms[-1].get("changes", ())))
            return recorded or _suggest_changes(rank, rank.ooms[-1])
    rank = run.of(summary.rank)
    if not summary.tight or not rank.steps:
        return ()
    detailed = [step for step in rank.steps if step.get("categories")]
    return _suggest_changes(rank, max(detailed or rank.steps, key=lambda step: step.get("peak_allocated_gib", 0.0)))


def _suggest_changes(rank: RankRun, moment: Mapping[str, Any]) -> tuple[Change, ...]:
    return tuple(suggest(rank.run, moment, modules={"rows": list(rank.modules)}))


def _read_change(change: ProposedChange) -> Change:
    """The change in a record, which may contain anything."""
    value = change.get("value")
    basis = change.get("basis")
    return Change(
        key=printable(change.get("key", "?"), 120),
        value=printable(value, 120) if isinstance(value, str) else value,
        reason=printable(change.get("reason", ""), 400),
        cost=printable(change.get("cost", ""), 300),
        saves_gib=change.get("saves_gib"),
        basis=printable(basis, 200) if basis else None,
        current=change.get("current"),
    )
