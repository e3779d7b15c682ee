"""What to change so that this job fits. In: a `run` record and the record of a moment. Out: one to three changes.

A change is never proposed that is in force already, that the engine refuses, or that saves nothing in the phase where
it failed. Figures come from the records or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from hf_memkit.oom import suggestions_batch as of_batch
from hf_memkit.oom import suggestions_other as of_other
from hf_memkit.oom import suggestions_states as of_states
from hf_memkit.oom.change import Change, Proposal
from hf_memkit.oom.job_view import Job
from hf_memkit.record_types import ModulesRecord, RunRecord

__all__ = ["suggest"]

Rule = Callable[[Job], Iterator[Proposal]]

_DEVICE: Final[tuple[Rule, ...]] = (
    of_states.allocator,
    of_batch.batch,
    of_batch.checkpointing,
    of_batch.fused_loss,
    of_batch.eager_attention,
    of_batch.half_precision,
    of_states.fused_optimizer,
    of_states.eight_bit,
    of_states.paged,
    of_states.base_weights,
    of_states.sharding,
    of_states.offload,
    of_states.adapters,
    of_batch.sequence_length,
    of_other.evaluation_batch,
    of_other.gathered_predictions,
    of_other.only_loss,
    of_other.saving,
)
_HOST: Final[tuple[Rule, ...]] = (of_other.loader, of_other.buffers_in_ram, of_other.pinned_batches)

_HOST_CAUSES: Final = ("host memory", "shared memory")
_NOTHING_TO_SAVE: Final = ("kernel resources",)

_NOTICED: Final = 0.002
"""Of the card. Less than that is within what the allocator rounds up to: its segments have 2 to 20 MiB each."""


def suggest(
    run: RunRecord,
    moment: Mapping[str, Any],
    *,
    modules: ModulesRecord | None = None,
    limit: int = 3,
) -> list[Change]:
    """The changes that would save most for this job, most first; those that change what is trained come last.

    Where the largest have no figure, the last place goes to one whose saving was measured, if there is one.

    Args:
        run: the `run` record.
        moment: an `OomRecord`, or the `StepRecord` of the highest peak, of which the cause may be told (`cause`).
        modules: the `modules` record, from which the saving of an 8-bit optimizer follows.
        limit: how many at most.
    """
    job = Job(run, moment, modules)
    if job.cause in _NOTHING_TO_SAVE:
        return []
    rules = _HOST if job.cause in _HOST_CAUSES else _DEVICE
    proposals = [proposal for rule in rules for proposal in rule(job) if not _too_little(job, proposal)]
    proposals.sort(key=lambda proposal: (proposal.last, -proposal.at_most_gib))
    chosen: dict[str, Change] = {}
    for proposal in proposals:
        chosen.setdefault(proposal.change.key, proposal.change)  # two values for one setting are no advice
    changes = list(chosen.values())
    return _with_a_figure(changes[:limit], [change for change in changes[limit:] if change.saves_gib is not None])


def _too_little(job: Job, proposal: Proposal) -> bool:
    """A change of the states of a few adapters, say: it costs something and makes no room."""
    capacity = job.hardware.get("capacity_gib")
    if not isinstance(capacity, int | float) or not job.measured:
        return False
    return 0 < proposal.at_most_gib < _NOTICED * capacity


def _with_a_figure(first: list[Change], others: list[Change]) -> list[Change]:
    """`first`, with one change among them whose saving this run has measured, if there is any: it is the one to count
    on."""
    if len(first) < 2 or not others or any(change.saves_gib is not None for change in first):
        return first
    return [*first[:-1], others[0]]
