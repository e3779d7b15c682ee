"""A plan: what was judged, ranked; the arguments of the best; why each other one is not it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hf_memkit.hardware import Machine
from hf_memkit.plan.candidate import Group, SetupCandidate
from hf_memkit.plan.judged import FULL_SHARE, Judged
from hf_memkit.units import GIB, format_gib

__all__ = ["Plan"]

_MUCH: Final = 1.5
"""Times as long: then a result that is nearly the same is what most would want, such as other draws of dropout in the
place of an engine that keeps states in RAM. Assumed."""

_CLEARLY: Final = 0.97
"""Of the time of another: 3 % is the noise of repeated runs (published/ranking.json)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Attributes:
        name: of the script, model or recipe.
        machine: what it is for.
        gpus: of that machine, that train.
        own: the script's own setup.
        traced: all that were traced, the script's own among them.
        excluded: candidates that were not, with the name of the one that excludes each.
        left_out: what no candidate has, and why.
        sequences: of one optimizer step, on all GPUs; 0: `own_sequences`, which it is then.
        stopped: whether the search was ended before it was through.
        stopped_by_hand: whether by Ctrl-C.
        notes: what a reader should know.
        failed: setups that were run here and failed, or that need as much as one that ran out of memory, and why: none
            is proposed (`verify.py`).
        time_factors: of a calibration, with which times are computed (`calibration.py`).
    """

    name: str
    machine: Machine
    gpus: int
    own: Judged
    traced: tuple[Judged, ...]
    excluded: Mapping[SetupCandidate, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    sequences: int = 0
    stopped: bool = False
    stopped_by_hand: bool = False
    notes: tuple[str, ...] = ()
    failed: Mapping[SetupCandidate, str] = field(default_factory=dict)
    time_factors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequences", self.sequences or self.own_sequences)

    @property
    def own_sequences(self) -> int:
        """Of one optimizer step of the script as it stands."""
        return self.own.candidate.micro_batch_size * self.own.candidate.accumulation * self.gpus

    @property
    def other_batch(self) -> bool:
        """Whether other sequences than the script's own were asked for: then its own setup is not ranked."""
        return self.sequences != self.own_sequences

    @property
    def compared(self) -> tuple[Judged, ...]:
        """Those that were traced and train on as many sequences a step."""
        return tuple(each for each in self.traced if each is not self.own) if self.other_batch else self.traced

    @property
    def setups(self) -> int:
        """How many were judged, by a trace or by one that excludes them."""
        return len(self.traced) + len(self.excluded)

    @property
    def ranked(self) -> tuple[Judged, ...]:
        """Those that fit, the fastest first; where the time of one is not known it comes last."""
        fitting = [each for each in self.compared if each.fits]
        timed = sorted((each for each in fitting if each.is_priced), key=lambda each: each.seconds or 0.0)
        others = sorted((each for each in fitting if not each.is_priced), key=lambda each: each.needs_bytes)
        return (*timed, *others)

    def best(self, group: Group) -> Judged | None:
        """The fastest of a group that fits, needs no change of code and has not failed; of those within the noise the
        one that is nearest to the script, then the fastest."""
        ranked = [each for each in self.ranked if each.candidate not in self.failed]
        found = [each for each in ranked if each.candidate.group == group and not each.candidate.code]
        if not found:
            return None
        fastest = found[0].seconds
        if fastest is None or not found[0].is_priced:
            return found[0]
        near = [each for each in found if each.is_priced and (each.seconds or 0.0) * _CLEARLY <= fastest]
        return min(near, key=lambda each: (len(each.candidate.choices), each.seconds))

    @property
    def proposed(self) -> Judged | None:
        """What the first line says: the best of the same result; the best that is nearly the same where no other fits,
        or where every other takes more than half as long again; then the best other method. What the result of it is
        is said beside it."""
        same, near = self.best("same result"), self.best("nearly the same")
        if same is not None and near is not None and same.is_priced and near.is_priced:
            return near if _MUCH * (near.seconds or 0.0) < (same.seconds or 0.0) else same
        return same or near or self.best("another method")

    def faster(self) -> Judged | None:
        """What is clearly faster than what is proposed, and nearly the same."""
        proposed, other = self.proposed, self.best("nearly the same")
        if proposed is None or other is None or other is proposed or not proposed.seconds or not other.seconds:
            return None
        return other if other.seconds < _CLEARLY * proposed.seconds else None

    def smallest(self) -> Judged | None:
        """Of those that do not fit, the one that needs least."""
        traced = [each for each in self.compared if each.prediction is not None]
        return min(traced, key=lambda each: each.needs_bytes, default=None)

    def why(self, judged: Judged) -> str:
        """Why a setup is not the one that is proposed."""
        if not judged.fits:
            return judged.why
        if judged is self.own and self.other_batch:
            return f"the script's own {self.own_sequences} sequences an optimizer step"
        if judged.candidate in self.failed:
            return self.failed[judged.candidate]
        best = self.proposed
        if best is None or judged is best:
            return ""
        if judged.candidate.code:
            return "needs a change of the script"
        if not judged.is_priced:
            return "its time is not known"
        if judged.seconds and best.seconds:
            share = judged.seconds / best.seconds - 1
            if share > 0.005:
                return f"{share:.0%} slower"
            return "as fast" if judged.candidate.group == best.candidate.group else f"{-share:.0%} faster"
        return ""

    def to_json(self) -> dict[str, Any]:
        best, ranked = self.proposed, self.ranked
        return {
            "name": self.name,
            "gpu": self.machine.gpu.to_json() if self.machine.gpu else None,
            "gpus": self.gpus,
            "sequences_a_step": self.sequences,
            "own_sequences_a_step": self.own_sequences,
            "full_share": FULL_SHARE,
            "best": best.candidate.name if best else None,
            "setups": [self._row(each) for each in (*ranked, *(each for each in self.traced if each not in ranked))],
            "excluded": [{"name": each.name, "group": each.group, "by": by} for each, by in self.excluded.items()],
            "left_out": dict(self.left_out),
            "setups_judged": self.setups,
            "stopped": self.stopped,
            "notes": list(self.notes),
        }

    def _row(self, judged: Judged) -> dict[str, Any]:
        candidate = judged.candidate
        time = judged.step_time
        return {
            "name": candidate.name,
            "group": candidate.group,
            "result": candidate.result,
            "micro_batch_size": candidate.micro_batch_size,
            "accumulation": candidate.accumulation,
            "overrides": candidate.overrides.to_json(),
            "code": candidate.code,
            "fits": judged.fits,
            "why": self.why(judged),
            "peak_gib": judged.needs_bytes / GIB if judged.prediction is not None else None,
            "step_time_s": list(time.seconds) if time is not None else None,
            "time_rests_on": time.rests_on if time is not None else None,
            "time_not_known_of": list(time.unknown) if time is not None else [],
            "tokens_per_second": judged.tokens_per_second,
            "run_s": list(judged.run_seconds) if judged.run_seconds else None,
            "prediction": judged.prediction.to_json() if judged.prediction is not None else None,
        }

    def file(self, judged: Judged | None = None) -> dict[str, Any]:
        """What `memkit run --plan` reads: the settings of a setup (default: of what is proposed), and under `about`
        what they rest on.

        Raises:
            LookupError: nothing fits.
        """
        best = judged or self.proposed
        if best is None:
            raise LookupError("no setup fits")
        about = {
            "setup": best.candidate.name,
            "gpu": self.machine.gpu.name if self.machine.gpu else None,
            "gpus": self.gpus,
            "sequences_a_step": self.sequences,
            **({"own_sequences_a_step": self.own_sequences} if self.other_batch else {}),
            "result": best.candidate.result or best.candidate.group,
            "prediction": best.prediction.to_json() if best.prediction is not None else None,
            "step_time_s": list(best.step_time.seconds) if best.step_time is not None else None,
            **({"time_factors": dict(self.time_factors)} if self.time_factors else {}),
        }
        return {**best.candidate.overrides.to_json(), "about": about}

    def lacking(self) -> str:
        """What would be needed where nothing fits, or why nothing is proposed that does."""
        if self.failed:
            name, why = next((each.name, why) for each, why in self.failed.items())
            return f"what fits failed when it ran here; {name}: {why}"
        least = self.smallest()
        if least is None:
            return "no setup could be traced"
        gpu = self.machine.gpu
        if gpu is not None and least.needs_bytes <= FULL_SHARE * gpu.capacity_bytes:
            return f"the leanest, {least.candidate.name}: {least.why}"
        of = f"; 92 % of {gpu.name} are {format_gib(int(FULL_SHARE * gpu.capacity_bytes))}" if gpu else ""
        return f"the leanest, {least.candidate.name}, needs up to {format_gib(least.needs_bytes)}{of}"
