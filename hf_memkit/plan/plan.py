"""A plan: what was judged, ranked; the arguments of the best; why each other one is not it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from hf_memkit.catalog.hardware import Machine
from hf_memkit.common.units import format_gib
from hf_memkit.common.user_script import UserScript
from hf_memkit.plan.candidate import GROUPS, Group, SetupCandidate
from hf_memkit.plan.judgement import Judged
from hf_memkit.prediction.launch_command import Launched

PlanVerdict = Literal["fits", "tight", "nothing fits", "nothing ran", "unfinished"]
"""Of a whole plan. "unfinished": the search was stopped before it found a setup, which says nothing of the others."""

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
        also: names of the methods that were asked for.
        sequences: of one optimizer step, on all GPUs; 0: `own_sequences`, which it is then.
        stopped: whether the search was ended before it was through.
        stopped_by_hand: whether by Ctrl-C.
        notes: what a reader should know.
        failed: setups that were run here and failed, or that need as much as one that ran out of memory, and why: none
            is proposed (`verify.py`).
        script: what was planned; None: a model or a recipe, for which the user brings a script.
        launched: the user's launcher command, if the script was given by one.
        front_end: the command of a front end that was typed, such as `"axolotl"`; empty: none.
        typed: that command with its arguments.
    """

    name: str
    machine: Machine
    gpus: int
    own: Judged
    traced: tuple[Judged, ...]
    excluded: Mapping[SetupCandidate, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    sequences: int = 0
    stopped: bool = False
    stopped_by_hand: bool = False
    notes: tuple[str, ...] = ()
    failed: Mapping[SetupCandidate, str] = field(default_factory=dict)
    script: UserScript | None = None
    launched: Launched | None = None
    front_end: str = ""
    typed: tuple[str, ...] = ()

    @property
    def launch(self) -> str:
        """How the script is started, up to its arguments: `"torchrun --nproc_per_node 2 train.py"`, or by the user's
        own launcher, whose options hold more than a number of GPUs."""
        if self.launched is not None:
            return self._threads + shlex.join(self.launched.with_script(replace(self.launched.script, arguments=())))
        alone = "torchrun --nproc_per_node 1" if self.needs_launcher else "python"
        return f"{self._launcher or alone} {self._typed}"

    @property
    def needs_launcher(self) -> bool:
        """Whether one GPU takes a launcher too: without its variables DeepSpeed looks for MPI (deepspeed 0.19:
        comm/comm.py, `init_distributed`). `memkit run` sets them."""
        return self.proposed is not None and any(each.engine for each in self.proposed.candidate.choices)

    def launch_with(self, path: str) -> str:
        """The same with a plan file's settings: `"memkit run train.py --plan plan.yaml -- ARGUMENTS"`; of a launcher
        or a front end memkit starts the command itself, in whose environment there need be no memkit."""
        if self.typed:
            return f"memkit run --plan {shlex.quote(path)} -- {shlex.join(self.typed)}"
        if self.launched is not None:
            words = self.launched.with_script(replace(self.launched.script, arguments=()))
            return f"{self._threads}memkit run --plan {shlex.quote(path)} -- {shlex.join(words)} ARGUMENTS"
        memkit = f"{self._launcher} -m hf_memkit" if self._launcher else "memkit"
        return f"{memkit} run {self._typed} --plan {shlex.quote(path)} -- ARGUMENTS"

    @property
    def _launcher(self) -> str:
        """Of several processes, which DeepSpeed's settings work with too; empty: there is one."""
        return f"{self._threads}torchrun --nproc_per_node {self.gpus}" if self.gpus > 1 else ""

    @property
    def _threads(self) -> str:
        """torchrun and accelerate give each process one thread unless this sets more (torch 2.13: distributed/run.py),
        and the optimizer on the CPU would step as slowly."""
        on_cpu = self.gpus > 1 and (self.proposed or self.own).steps_on_cpu
        return f"OMP_NUM_THREADS=$(($(nproc) / {self.gpus})) " if on_cpu else ""

    @property
    def _typed(self) -> str:
        """The script as a shell takes it, or what stands for the user's."""
        if self.script is None:
            return "SCRIPT"
        return f"{'-m ' * self.script.is_module}{shlex.quote(self.script.target)}"

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
        """Those that were traced and train on as many sequences a step; of two that differ only in choices that
        change nothing, the plainer one. (LLaMA-Factory, say, turns checkpointing on whatever the argument says.)"""
        found = [each for each in self.traced if each is not self.own or not self.other_batch]
        return tuple(each for each in found if not any(_is_plainer(other, each) for other in found))

    @property
    def setups(self) -> int:
        """How many were judged, by a trace or by one that excludes them."""
        return len(self.traced) + len(self.excluded)

    @property
    def ranked(self) -> tuple[Judged, ...]:
        """Those that fit, the fastest first; where the time of one is not known it comes last, and one that swaps to a
        disk behind all."""
        fitting = [each for each in self.compared if each.fits]
        timed = sorted((each for each in fitting if each.is_priced), key=lambda each: each.seconds or 0.0)
        others = sorted(
            (each for each in fitting if not each.is_priced), key=lambda each: (each.swaps, each.needs_bytes)
        )
        return (*timed, *others)

    def best(self, group: Group) -> Judged | None:
        """The fastest of a group that fits, needs no change of code and has not failed; of those within the noise the
        one that is nearest to the script, then the fastest."""
        ranked = [each for each in self.ranked if each.candidate not in self.failed]
        found = [each for each in ranked if each.candidate.group == group and not each.candidate.code]
        return _nearest(found)

    @property
    def proposed(self) -> Judged | None:
        """What the first line says: the best of the same result; the best that is nearly the same where no other fits,
        or where every other takes more than half as long again; then the best other method. What the result of it is
        is said beside it."""
        same, near = self.best("same result"), self.best("nearly the same")
        if same is not None and same.swaps and not same.is_priced:  # how slow its disk is nobody knows
            return near or self.best("another method") or same
        if same is not None and near is not None and same.is_priced and near.is_priced:
            return near if _MUCH * (near.seconds or 0.0) < (same.seconds or 0.0) else same
        return same or near or self.best("another method")

    @property
    def verdict(self) -> PlanVerdict:
        """Of setups that need no change of code."""
        if self.proposed is not None:
            return "fits"
        if self.failed:
            return "nothing ran"
        return "unfinished" if self.stopped else "nothing fits" if self.tight is None else "tight"

    @property
    def tight(self) -> Judged | None:
        """Of those that are tight and need no change of code, the one that needs least."""
        tight = [each for each in self.compared if each.tight and not each.candidate.code]
        return min(tight, key=lambda each: each.needs_bytes, default=None)

    def faster(self) -> Judged | None:
        """What is clearly faster than what is proposed, and nearly the same."""
        proposed, other = self.proposed, self.best("nearly the same")
        if proposed is None or other is None or other is proposed or not proposed.seconds or not other.seconds:
            return None
        return other if other.seconds < _CLEARLY * proposed.seconds else None

    @property
    def with_code(self) -> tuple[Judged, ...]:
        """The best setup of each other code, the fastest first; of those within the noise the one with the fewest
        changes. Code that makes no other method is worth it where that is clearly faster than all of the same group,
        and of a nearer one, that need none."""
        ranked = [each for each in self.ranked if each.candidate.code and each.candidate not in self.failed]
        kinds = dict.fromkeys((each.candidate.code, each.candidate.group) for each in ranked)
        found = [_nearest([x for x in ranked if (x.candidate.code, x.candidate.group) == kind]) for kind in kinds]
        return tuple(each for each in found if each is not None and self._is_worth_code(each, found))

    def _is_worth_code(self, judged: Judged, others: Sequence[Judged | None]) -> bool:
        group = judged.candidate.group
        if group == "another method":
            return True
        nearer = GROUPS[: GROUPS.index(group) + 1]
        rivals = [self.best(each) for each in nearer]
        rivals += [each for each in others if each is not None and each.candidate.group in nearer[:-1]]
        times = [each.seconds for each in rivals if each is not None]
        return all(
            seconds and judged.seconds and judged.is_priced and judged.seconds < _CLEARLY * seconds
            for seconds in times
        )

    def smallest(self) -> Judged | None:
        """Of those that do not fit, the one that needs least."""
        traced = [each for each in self.compared if each.prediction is not None and not each.fits]
        return min(traced, key=lambda each: each.needs_bytes, default=None)

    def file(self, judged: Judged | None = None) -> dict[str, Any]:
        """What `memkit run --plan` reads: the settings of a setup (default: of what is proposed), and under `about`
        what they rest on. A LookupError where nothing fits."""
        best = judged or self.proposed
        if best is None:
            raise LookupError("no setup fits")
        about = {
            "script": self.name if self.script is not None else None,
            "setup": best.candidate.name,
            "gpu": self.machine.gpu.name if self.machine.gpu else None,
            "gpus": self.gpus,
            "sequences_a_step": self.sequences,
            **({"own_sequences_a_step": self.own_sequences} if self.other_batch else {}),
            "result": best.candidate.result or best.candidate.group,
            "prediction": best.prediction.to_json() if best.prediction is not None else None,
            "step_time_s": list(best.step_time.seconds) if best.step_time is not None else None,
        }
        return {**best.candidate.overrides.to_json(), "about": about}

    def lacking(self) -> str:
        """What the smallest of those that were tried needs, or why nothing is proposed that fits."""
        if self.failed:
            name, why = next((each.name, why) for each, why in self.failed.items())
            return f"the setups that fit failed when run here; {name}: {why}"
        least = self.smallest()
        if least is None:
            return "no setup could be traced"
        smallest = f"the smallest{' of them' * self.stopped}, {least.candidate.name}"
        if least.needs_bytes <= least.limit_bytes:
            return f"{smallest}: {least.why}"
        limit = f"at most {format_gib(least.limit_bytes)} fit on {self.machine.gpu.name}" if self.machine.gpu else ""
        return f"{smallest}, needs up to {format_gib(least.needs_bytes)}{'; ' * bool(limit)}{limit}"


def _is_plainer(one: Judged, other: Judged) -> bool:
    """Whether a setup takes the same memory and time with only some of the other's choices."""
    mine, others = set(one.candidate.choices), set(other.candidate.choices)
    return mine < others and _figures(one) == _figures(other) and one.step_time is not None


def _figures(judged: Judged) -> tuple[Any, ...]:
    candidate, found = judged.candidate, judged.prediction
    sizes = (found.peak_allocated_bytes, found.peak_reserved_bytes, found.host_rss_bytes) if found else None
    times = judged.step_time.seconds if judged.step_time is not None else None
    return candidate.micro_batch_size, candidate.accumulation, judged.needs_bytes, sizes, times


def _nearest(ranked: Sequence[Judged]) -> Judged | None:
    """Of setups, the fastest first, the one with the fewest changes of those that are as fast within the noise."""
    if not ranked or ranked[0].seconds is None or not ranked[0].is_priced:
        return ranked[0] if ranked else None
    fastest = ranked[0].seconds
    near = [each for each in ranked if each.is_priced and (each.seconds or 0.0) * _CLEARLY <= fastest]
    return min(near, key=lambda each: (len(each.candidate.choices), each.seconds))
