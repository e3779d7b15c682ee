"""A plan: all judged candidates, ranked; which one is proposed; and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, Literal

from hf_memkit.catalog.hardware import Gpu, Machine
from hf_memkit.common.commands import command
from hf_memkit.common.user_script import UserScript
from hf_memkit.plan.candidate import Candidate
from hf_memkit.plan.judgement import Judgement
from hf_memkit.prediction.launch_command import Launched
from hf_memkit.setup.techniques.registry import GROUPS, Group

PlanVerdict = Literal["fits", "tight", "nothing fits", "nothing ran", "unfinished"]
"""Verdict of a plan. "unfinished": the search was stopped before it found a setup that fits."""

_MUCH_SLOWER: Final = 1.5
"""If the same result takes more than this many times as long, the plan proposes a setup with nearly the same result:
most users prefer other draws of dropout to an engine that keeps states in RAM. Assumed."""

_CLEARLY_FASTER: Final = 0.97
"""A faster setup takes less than this share of the other's time: runs differ by 3 % (published/ranking.json)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Attributes:
        name: of the script, model or recipe.
        machine: the machine to train on.
        gpus: number of its GPUs that train.
        nodes: number of such machines.
        own: the script's own setup.
        traced: all traced setups, with the script's own.
        excluded: candidates excluded without a trace → name of the setup that excludes them.
        left_out: choices that no candidate has → why.
        also: names of the further methods that the user requested.
        sequences: per optimizer step, on all GPUs; 0 becomes `own_sequences`.
        stopped: whether the search was stopped before it was complete.
        stopped_by_hand: whether Ctrl-C stopped it.
        notes: remarks for the user.
        failed: setups that failed when run here, or that need as much memory as one that ran out of it → why. They are
            not proposed (`verify.py`).
        script: the planned script; None for a model or a recipe.
        launched: the user's launcher command; None if the user gave only a script.
        front_end: command of the front end in the user's command line, such as `"axolotl"`; empty without one.
        typed: the front end's command with its arguments.
    """

    name: str
    machine: Machine
    gpus: int
    own: Judgement
    traced: tuple[Judgement, ...]
    excluded: Mapping[Candidate, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    sequences: int = 0
    stopped: bool = False
    stopped_by_hand: bool = False
    notes: tuple[str, ...] = ()
    failed: Mapping[Candidate, str] = field(default_factory=dict)
    script: UserScript | None = None
    launched: Launched | None = None
    front_end: str = ""
    typed: tuple[str, ...] = ()
    nodes: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequences", self.sequences or self.own_sequences)

    @property
    def gpu(self) -> Gpu:
        assert self.machine.gpu is not None
        return self.machine.gpu

    @property
    def ranks(self) -> int:
        """GPUs of all machines."""
        return self.gpus * self.nodes

    @property
    def batches(self) -> int:
        """Micro-batches that are trained on at a time."""
        return self.ranks // self.gpus_per_batch

    @property
    def gpus_per_batch(self) -> int:
        """GPUs that share each micro-batch, by context or tensor parallelism."""
        return self.own.training.ranks_per_batch if self.own.training is not None else 1

    @property
    def launch(self) -> str:
        """The command that starts the script, without its arguments: `"torchrun --nproc_per_node 2 train.py"`, or the
        user's own launcher command, whose options contain more than the number of GPUs."""
        if self.launched is not None:
            return self._threads + command(*self.launched.with_script(replace(self.launched.script, arguments=())))
        alone = "torchrun --nproc_per_node 1" if self.needs_launcher else "python"
        return f"{self._launcher or alone} {self._quoted_script}"

    @property
    def needs_launcher(self) -> bool:
        """Whether even one GPU needs a launcher: without its environment variables DeepSpeed looks for MPI (deepspeed
        0.19: comm/comm.py, `init_distributed`). `memkit run` sets them."""
        return self.proposed is not None and bool(self.proposed.candidate.engine)

    def launch_with(self, path: str) -> str:
        """The command that starts the script with the settings of a plan file: `"memkit run train.py --plan plan.yaml
        -- ARGUMENTS"`. memkit itself starts a launcher or front end, whose environment may have no memkit."""
        if self.typed:
            return command("memkit", "run", "--plan", path, "--", *self.typed)
        if self.launched is not None:
            words = self.launched.with_script(replace(self.launched.script, arguments=()))
            return self._threads + command("memkit", "run", "--plan", path, "--", *words, "ARGUMENTS")
        memkit = f"{self._launcher} -m hf_memkit" if self._launcher else "memkit"
        return f"{memkit} run {self._quoted_script} {command('--plan', path, '--', 'ARGUMENTS')}"

    @property
    def _launcher(self) -> str:
        """The launcher of several processes, which also works with DeepSpeed; empty for one GPU."""
        if self.ranks == 1:
            return ""
        several = f"--nnodes {self.nodes} --node_rank RANK --master_addr HOST " if self.nodes > 1 else ""
        return f"{self._threads}torchrun {several}--nproc_per_node {self.gpus}"

    @property
    def _threads(self) -> str:
        """The variable that gives each process its share of the CPU cores, for an optimizer on the CPU: torchrun and
        accelerate give one thread by default (torch 2.13: distributed/run.py)."""
        on_cpu = self.gpus > 1 and (self.proposed or self.own).steps_on_cpu
        return f"OMP_NUM_THREADS=$(($(nproc) / {self.gpus})) " if on_cpu else ""

    @property
    def _quoted_script(self) -> str:
        """The script, quoted for a shell; `SCRIPT` if the user has yet to bring one."""
        if self.script is None:
            return "SCRIPT"
        return f"{'-m ' * self.script.is_module}{command(self.script.target)}"

    @property
    def own_sequences(self) -> int:
        """Sequences per optimizer step of the unchanged script, on all GPUs."""
        return self.own.candidate.micro_batch_size * self.own.candidate.accumulation * self.batches

    @property
    def other_batch(self) -> bool:
        """Whether the user requested another number of sequences: then the script's own setup is not ranked."""
        return self.sequences != self.own_sequences

    @property
    def compared(self) -> tuple[Judgement, ...]:
        """The traced setups with the requested sequences per step. If choices have no effect, only the setup without
        them: LLaMA-Factory, for example, ignores the argument for checkpointing and always turns it on."""
        setups = [each for each in self.traced if each is not self.own or not self.other_batch]
        return tuple(each for each in setups if not any(_is_plainer(other, each) for other in setups))

    @property
    def rate_unit(self) -> str:
        """The unit of `rate`: tokens, or samples where batches have no tokens."""
        return "tokens/s" if any(each.tokens for each in self.traced) else "samples/s"

    def rate(self, judgement: Judgement) -> float | None:
        """Speed on all GPUs in `rate_unit`; None if unknown."""
        if not judgement.is_priced or not judgement.seconds:
            return None
        if self.rate_unit == "tokens/s":
            return judgement.tokens_per_second
        return (self.own_sequences if judgement is self.own else self.sequences) / judgement.seconds

    @property
    def setups(self) -> int:
        """Number of candidates that were traced or excluded."""
        return len(self.traced) + len(self.excluded)

    @property
    def ranked(self) -> tuple[Judgement, ...]:
        """The setups that fit, the fastest first; then those without a known time, the ones that swap to disk last."""
        fitting = [each for each in self.compared if each.fits]
        timed = sorted((each for each in fitting if each.is_priced), key=lambda each: each.mean_seconds or 0.0)
        others = sorted(
            (each for each in fitting if not each.is_priced), key=lambda each: (each.swaps, each.needs_bytes)
        )
        return (*timed, *others)

    def best(self, group: Group) -> Judgement | None:
        """The fastest setup of a group that fits, needs no change of code and did not fail; of equals the simplest."""
        ranked = [each for each in self.ranked if each.candidate not in self.failed]
        return _simplest([each for each in ranked if each.candidate.group == group and not each.candidate.code])

    @property
    def proposed(self) -> Judgement | None:
        """The setup that the plan proposes: the best with the same result; the best with nearly the same result if no
        other fits or the other is much slower; else the best other method."""
        same, near = self.best("same result"), self.best("nearly the same")
        if same is not None and same.swaps and not same.is_priced:  # the speed of its disk is unknown
            return near or self.best("another method") or same
        if same is not None and near is not None and same.is_priced and near.is_priced:
            return near if _MUCH_SLOWER * (near.mean_seconds or 0.0) < (same.mean_seconds or 0.0) else same
        return same or near or self.best("another method")

    @property
    def verdict(self) -> PlanVerdict:
        """The verdict on setups that need no change of code."""
        if self.proposed is not None:
            return "fits"
        if self.failed:
            return "nothing ran"
        if self.stopped:
            return "unfinished"
        return "nothing fits" if self.tight is None else "tight"

    @property
    def tight(self) -> Judgement | None:
        """Of those that are tight and need no change of code, the one that needs least."""
        tight = [each for each in self.compared if each.tight and not each.candidate.code]
        return min(tight, key=lambda each: each.needs_bytes, default=None)

    def faster(self) -> Judgement | None:
        """The best setup with nearly the same result, if it is clearly faster than the proposed one."""
        proposed, other = self.proposed, self.best("nearly the same")
        if proposed is None or other is None or other is proposed:
            return None
        if not proposed.mean_seconds or not other.mean_seconds:
            return None
        return other if other.mean_seconds < _CLEARLY_FASTER * proposed.mean_seconds else None

    @property
    def with_code(self) -> tuple[Judgement, ...]:
        """The best setup for each change of code, the fastest first. Except for another method, it must be worth its
        effort: clearly faster than all without code, in its group and in those nearer to the script's result."""
        ranked = [each for each in self.ranked if each.candidate.code and each.candidate not in self.failed]
        kinds = dict.fromkeys((each.candidate.code, each.candidate.group) for each in ranked)
        best = [_simplest([x for x in ranked if (x.candidate.code, x.candidate.group) == kind]) for kind in kinds]
        return tuple(each for each in best if each is not None and self._is_worth_code(each, best))

    def _is_worth_code(self, judgement: Judgement, others: Sequence[Judgement | None]) -> bool:
        group = judgement.candidate.group
        if group == "another method":
            return True
        groups = GROUPS[: GROUPS.index(group) + 1]
        rivals = [self.best(name) for name in groups]
        rivals += [each for each in others if each is not None and each.candidate.group in groups[:-1]]
        own_s = judgement.mean_seconds
        times = [each.mean_seconds for each in rivals if each is not None]
        return all(
            seconds and own_s and judgement.is_priced and own_s < _CLEARLY_FASTER * seconds for seconds in times
        )

    def smallest(self) -> Judgement | None:
        """The setup that needs least memory of those that do not fit."""
        traced = [each for each in self.compared if each.prediction is not None and not each.fits]
        return min(traced, key=lambda each: each.needs_bytes, default=None)

    def file(self, judgement: Judgement | None = None) -> dict[str, Any]:
        """The content of a plan file for `memkit run --plan`: the settings of a setup, and a description under
        `about`.

        Args:
            judgement: of the setup. Default: the proposed one.

        Raises:
            LookupError: nothing fits.
        """
        best = judgement or self.proposed
        if best is None:
            raise LookupError("no setup fits")
        about = {
            "script": self.name if self.script is not None else None,
            "setup": best.candidate.name,
            "gpu": self.gpu.name,
            "gpus": self.ranks,
            **({"gpus_per_batch": self.gpus_per_batch} if self.gpus_per_batch > 1 else {}),
            "sequences_a_step": self.sequences,
            **({"own_sequences_a_step": self.own_sequences} if self.other_batch else {}),
            "result": best.candidate.result or best.candidate.group,
            "prediction": best.prediction.to_json() if best.prediction is not None else None,
            "step_time_s": list(best.step_time.seconds) if best.step_time is not None else None,
        }
        return {**best.candidate.overrides.to_json(), "about": about}


_figures: Final = attrgetter(
    "candidate.micro_batch_size", "candidate.accumulation", "needs_bytes", "prediction.peak_allocated_bytes",
    "prediction.peak_reserved_bytes", "prediction.host_rss_bytes", "step_time.seconds",
)  # fmt: skip


def _is_plainer(one: Judgement, other: Judgement) -> bool:
    """Whether a setup has the same memory and time as another one with only some of its choices."""
    if one.step_time is None or other.step_time is None:
        return False
    is_subset = set(one.candidate.choices) < set(other.candidate.choices)
    return is_subset and bool(_figures(one) == _figures(other))


def _simplest(ranked: Sequence[Judgement]) -> Judgement | None:
    """The setup with the fewest changes among those that are not clearly slower than the first, the fastest."""
    if not ranked or ranked[0].mean_seconds is None or not ranked[0].is_priced:
        return ranked[0] if ranked else None
    fastest = ranked[0].mean_seconds
    equal = [each for each in ranked if each.is_priced and (each.mean_seconds or 0.0) * _CLEARLY_FASTER <= fastest]
    return min(equal, key=lambda each: (len(each.candidate.choices), each.mean_seconds))
