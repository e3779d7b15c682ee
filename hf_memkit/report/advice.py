"""What to do next. In: a run and its figures. Out: findings over the steps, and changes that would make room.

The findings are those of the diagnosis, the changes those of `hf_memkit.oom`: this only asks them, and says for which
rank an answer holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_memkit.oom import suggest
from hf_memkit.record_types import ProposedChange, StepRecord
from hf_memkit.report.diagnosis import diagnose
from hf_memkit.report.finding import Finding
from hf_memkit.report.load import RankRun, Run
from hf_memkit.report.sanitize import number, text
from hf_memkit.report.summary import Summary

__all__ = ["Advice", "advise", "change_sentence", "finding_sentence"]


@dataclass(frozen=True, slots=True)
class Advice:
    """Attributes:
    findings: (rank, finding): each kind once, of the rank where it began first.
    changes: what makes room, as the record contract has a change; empty where there is room.
    """

    findings: tuple[tuple[int, Finding], ...]
    changes: tuple[ProposedChange, ...]

    def to_json(self) -> dict[str, Any]:
        findings = [{"rank": rank, **finding.to_json()} for rank, finding in self.findings]
        return {"findings": findings, "changes": list(self.changes)}


def advise(run: Run, summary: Summary) -> Advice:
    """Findings of all ranks, and changes if memory ran out or nearly did."""
    found = [(rank.rank, finding) for rank in run.ranks for finding in diagnose(rank.steps, rank.run, ooms=rank.ooms)]
    found.sort(key=lambda each: each[1].first_step)
    first: dict[str, int] = {}
    for number_of_rank, finding in found:
        first.setdefault(finding.kind, number_of_rank)
    findings = [each for each in found if first[each[1].kind] == each[0]]
    return Advice(tuple(findings), _changes(run, summary))


def finding_sentence(run: Run, rank: int, finding: Finding) -> str:
    """`Leak since step 40: why. Fix.`"""
    where = f" on rank {rank}" if len(run.ranks) > 1 else ""
    why, fix = (text(part, 400).strip().rstrip(".") for part in (finding.why, finding.fix))
    return f"{finding.kind.capitalize()} since step {finding.first_step}{where}: {why}. {fix[:1].upper()}{fix[1:]}."


def change_sentence(change: ProposedChange) -> str:
    """`key = value: reason. Saves 1.2 GiB (basis). Costs: cost.` A key of TrainingArguments goes by its name alone."""
    value = change.get("value")
    shown = "" if value is None else f" = {text(value, 80)}"
    key = text(change.get("key", "?"), 80).removeprefix("arguments.")
    parts = [f"{key}{shown}: {text(change.get('reason', ''), 300).rstrip('.')}."]
    saves = number(change, "saves_gib")
    if saves is not None:
        basis = f" ({text(change['basis'], 160)})" if change.get("basis") else ""
        parts.append(f"Saves {saves:.2f} GiB{basis}.")
    if change.get("cost"):
        parts.append(f"Costs: {text(change['cost'], 200).rstrip('.')}.")
    return " ".join(parts)


def _changes(run: Run, summary: Summary) -> tuple[ProposedChange, ...]:
    for rank in run.ranks:
        if rank.ooms and (rank.ending.kind == "out of memory" or rank.last is rank.ooms[-1]):
            recorded = tuple(rank.ooms[-1].get("changes", ()))
            return recorded or _suggested(rank, rank.ooms[-1])
    if summary.near:
        rank = next(rank for rank in run.ranks if rank.rank == summary.rank)
        moment = _highest_step(rank)
        return _suggested(rank, moment) if moment else ()
    return ()


def _highest_step(rank: RankRun) -> StepRecord:
    """The step with the highest peak, of those that were looked at closely if there are any."""
    looked = [step for step in rank.steps if step.get("categories")]
    return max(looked or rank.steps, key=lambda step: number(step, "peak_allocated_gib") or 0.0, default=StepRecord())


def _suggested(rank: RankRun, moment: Mapping[str, Any]) -> tuple[ProposedChange, ...]:
    return tuple(change.to_json() for change in suggest(rank.run, moment, modules={"rows": list(rank.modules)}))
