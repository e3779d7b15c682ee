"""What to do next: findings of the diagnosis, and changes that save memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_memkit.measuring.out_of_memory import Change, suggest
from hf_memkit.measuring.record_types import ProposedChange
from hf_memkit.measuring.report.diagnosis import Finding, diagnose
from hf_memkit.measuring.report.load import RankRun, Run
from hf_memkit.measuring.report.sanitize import text
from hf_memkit.measuring.report.summary import Summary


@dataclass(frozen=True, slots=True)
class Advice:
    """
    Attributes:
        findings: (rank, finding), each kind once, from the rank where it began first.
        changes: empty if there is headroom.
    """

    findings: tuple[tuple[int, Finding], ...]
    changes: tuple[Change, ...]

    def to_json(self) -> dict[str, Any]:
        findings = [{"rank": rank, **finding.to_json()} for rank, finding in self.findings]
        return {"findings": findings, "changes": [change.to_json() for change in self.changes]}


def advise(run: Run, summary: Summary) -> Advice:
    """Findings of all ranks, and changes if memory ran out or nearly did."""
    findings = [(one.rank, finding) for one in run.ranks for finding in diagnose(one.steps, one.run, ooms=one.ooms)]
    findings.sort(key=lambda each: each[1].first_step)
    first: dict[str, int] = {}
    for rank, finding in findings:
        first.setdefault(finding.kind, rank)
    return Advice(tuple(each for each in findings if first[each[1].kind] == each[0]), _changes(run, summary))


def finding_sentence(run: Run, rank: int, finding: Finding) -> str:
    """`Leak since step 40: why. Fix.`"""
    where = f" on rank {rank}" if len(run.ranks) > 1 else ""
    why, fix = (text(part, 400).strip().rstrip(".") for part in (finding.why, finding.fix))
    return f"{finding.kind.capitalize()} since step {finding.first_step}{where}: {why}. {fix[:1].upper()}{fix[1:]}."


def _changes(run: Run, summary: Summary) -> tuple[Change, ...]:
    for rank in run.ranks:
        if rank.ooms and (rank.ending.kind == "out of memory" or rank.last is rank.ooms[-1]):
            recorded = tuple(map(_recorded, rank.ooms[-1].get("changes", ())))
            return recorded or _suggested(rank, rank.ooms[-1])
    rank = run.of(summary.rank)
    if not summary.tight or not rank.steps:
        return ()
    detailed = [step for step in rank.steps if step.get("categories")]
    return _suggested(rank, max(detailed or rank.steps, key=lambda step: step.get("peak_allocated_gib", 0.0)))


def _suggested(rank: RankRun, moment: Mapping[str, Any]) -> tuple[Change, ...]:
    return tuple(suggest(rank.run, moment, modules={"rows": list(rank.modules)}))


def _recorded(change: ProposedChange) -> Change:
    """The change in a record, which may contain anything."""
    basis, value = change.get("basis"), change.get("value")
    return Change(
        text(change.get("key", "?"), 120),
        text(value, 120) if isinstance(value, str) else value,
        text(change.get("reason", ""), 400),
        text(change.get("cost", ""), 300),
        change.get("saves_gib"),
        text(basis, 200) if basis else None,
        change.get("current"),
    )
