"""Makes a plan for a script and a GPU: runs the search, and judges each trace in a separate process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from hf_memkit.catalog.gpu_rates import RATES, rates_of
from hf_memkit.catalog.hardware import Machine, named_gpu
from hf_memkit.catalog.host_rates import GivenHost
from hf_memkit.common.errors import InputError, ScriptFailed
from hf_memkit.common.user_files import user_path
from hf_memkit.common.user_script import UserScript
from hf_memkit.plan.candidate import SetupCandidate
from hf_memkit.plan.candidate_time import Speeds
from hf_memkit.plan.choices import (
    ADAPTERS,
    ON_DISK,
    ROWS_COMPARED,
    LeftOut,
    choices_for,
    of_batch,
    refused,
    smaller_evaluations,
    undivided,
    wrong_sequences,
)
from hf_memkit.plan.judge_trace import LENGTHS, judge_trace, judging_pool, lengths_of
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.search import Search
from hf_memkit.plan.time_limit import LIMIT_S, TimeLimit
from hf_memkit.plan.traces import ScriptTraces
from hf_memkit.prediction.running_scripts import ScriptJob, name_of
from hf_memkit.prediction.setup_as_script import SetupJob, as_script
from hf_memkit.prediction.traced_training import PlanFacts
from hf_memkit.setup.script_overrides import Overrides
from hf_memkit.setup.setup import Setup

_ROWS: Final = 64
"""Length of the made-up data of a setup without a script, in optimizer steps."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The user's options for plans.

    Attributes:
        gpus: GPUs that train on each machine.
        environment: environment variables of the script; None: those of this process.
        also: further methods to try: `"lora"`, `"qlora"`, and optimizers (values of `optim`).
        limit_s: seconds to trace candidates for each machine, counted from the script's own preparation. None:
            `LIMIT_S`, and longer while that pays (`time_limit.py`).
        on_judged: called with each candidate after its verdict.
        ram_is_given: whether the user named the machine's RAM, so that it decides verdicts.
        host: speeds of CPU and disk that the user gave; None if none.
        sequences: requested sequences per optimizer step, on all GPUs; None: as many as the script's.
        keeps: whether to read traces that earlier plans kept, and to keep new ones.
    """

    gpus: int = 1
    environment: Mapping[str, str] | None = None
    also: tuple[str, ...] = ()
    limit_s: float | None = None
    on_judged: Callable[[Judgement], None] = lambda _: None
    ram_is_given: bool = False
    host: GivenHost | None = None
    sequences: int | None = None
    keeps: bool = False

    def job(self, script: UserScript, machine: Machine) -> ScriptJob:
        variables = dict(os.environ if self.environment is None else self.environment)
        return ScriptJob(script, machine, self.gpus, environment=variables, ram_is_given=self.ram_is_given)


def plan_setup(setup: Setup, request: PlanRequest, *, trust_remote_code: bool = False) -> Plan:
    """A plan for a setup without a script. Its training data is made up, so the time of a whole run is unknown.

    Args:
        trust_remote_code: whether code from the model's repository may run.
    """
    with _as_script(setup, request, trust_remote_code=trust_remote_code) as (script, request):
        (plan,) = plan_gpus(script, [setup.sized_job.machine], request)
    name = str(setup.get("model.name", setup.preset))
    own, *traced = (replace(judgement, run_seconds=None) for judgement in (plan.own, *plan.traced))
    left_out = dict(plan.left_out)
    if "from_pretrained" in left_out.get(ADAPTERS["qlora"], ""):
        left_out[ADAPTERS["qlora"]] = "without a script it is a preset: --preset qlora"
    return replace(plan, name=name, own=own, traced=tuple(traced), left_out=left_out, script=None)


@contextlib.contextmanager
def _as_script(
    setup: Setup, request: PlanRequest, *, trust_remote_code: bool
) -> Iterator[tuple[UserScript, PlanRequest]]:
    """A script that trains the setup on made-up rows, and the request changed for it."""
    job = setup.sized_job
    sizes = {"per_device_train_batch_size": job.micro_batch_size, "gradient_accumulation_steps": job.accumulation}
    for name, value in sizes.items():
        setup = setup.put(f"arguments.{name}", value, "asked for")
    rows = _ROWS * max(job.micro_batch_size * job.accumulation * job.gpus, request.sequences or 0)
    training = SetupJob(setup, job.sequence_length, rows, trust_remote_code=trust_remote_code)
    variables = {**os.environ, **{name: str(value) for name, value in setup.section("environment").items()}}
    with as_script(training) as script:
        yield script, replace(request, gpus=job.gpus, environment=variables, ram_is_given=True, keeps=False)


_DEFAULTS: Final = PlanRequest()


def plan_gpus(script: UserScript, machines: Sequence[Machine], request: PlanRequest = _DEFAULTS) -> tuple[Plan, ...]:
    """A plan for each machine, in the order of `machines`; after Ctrl-C only those that were started. Machines whose
    GPUs run the same kernels share traces.

    Raises:
        InputError, ScriptFailed: the unchanged script fails or cannot be predicted.
    """
    if any(machine.gpu is None for machine in machines):
        raise InputError("this machine has no GPU; name one: --gpu NAME or --gpu 16GB")
    if request.sequences is not None and (line := wrong_sequences(request.sequences, request.gpus)):
        raise InputError(line)
    plans: dict[int, Plan] = {}
    by_kernels = sorted(range(len(machines)), key=lambda index: _kernels(machines[index]))
    with judging_pool() as pool:
        for _, group in itertools.groupby(by_kernels, key=lambda index: _kernels(machines[index])):
            indices = list(group)
            largest = max(
                (machines[index] for index in indices), key=lambda each: each.gpu.capacity_bytes if each.gpu else 0
            )
            with ScriptTraces(request.job(script, largest), keeps=request.keeps) as traces:
                traces.start()
                for index in indices:
                    speeds = Speeds.of(machines[index], request.host)
                    job = request.job(script, _with_free_disk(machines[index], speeds.given))
                    plan = _make_plan(_CandidateJudge(traces, pool, job, request, speeds))
                    plans[index] = replace(plan, machine=machines[index])
                    if plans[index].stopped_by_hand:
                        return tuple(plans[index] for index in sorted(plans))
    return tuple(plans[index] for index in range(len(machines)))


def _with_free_disk(machine: Machine, host: GivenHost) -> Machine:
    """The machine with the free space of the folder that DeepSpeed may swap to. If the folder is not here, its
    free space is unknown and does not count."""
    if host.nvme_path is None:
        return machine
    folder = user_path(host.nvme_path)
    free = shutil.disk_usage(folder).free if folder.is_dir() else sys.maxsize
    return replace(machine, disk_free_bytes=free, disk_path=str(folder))


def _kernels(machine: Machine) -> tuple[float, bool]:
    """The properties of a GPU that decide which kernels run: (compute capability, whether it has bf16)."""
    assert machine.gpu is not None
    return machine.gpu.capability or 0.0, machine.gpu.bf16


def nearest_setup(script: UserScript, machine: Machine, request: PlanRequest) -> Judgement | None:
    """The setup with the same batch that fits with the fewest changes; None if none fits. Raises as `plan_gpus`."""
    request = replace(request, limit_s=LIMIT_S)
    job = request.job(script, machine)
    with judging_pool() as pool, ScriptTraces(job) as traces:
        traces.start()
        return _new_search(_CandidateJudge(traces, pool, job, request, Speeds.of(machine)))[0].nearest()


def nearest_of_setup(setup: Setup, *, trust_remote_code: bool = False) -> Judgement | None:
    """`nearest_setup` of a setup without a script."""
    with _as_script(setup, _DEFAULTS, trust_remote_code=trust_remote_code) as (script, request):
        return nearest_setup(script, setup.sized_job.machine, request)


def _new_search(judge: _CandidateJudge) -> tuple[Search, Judgement, LeftOut]:
    """(a search that has not begun, the judgement of the unchanged script, why some choices are impossible)."""
    unchanged, request = judge.judge_unchanged(), judge.request
    own = unchanged.training
    assert own is not None
    left_out: LeftOut = {}
    alternatives = choices_for(
        own, judge.job.machine, judge.job.environment, gpus=request.gpus, left_out=left_out, also=request.also,
        nvme_path=judge.speeds.given.nvme_path,
    )  # fmt: skip
    per_gpu = _requested_sequences(request.sequences, own.facts) // request.gpus
    group, why = of_batch(own.facts.batch)
    if group == "another method":
        left_out["another micro-batch"] = why
    search = Search(
        judge, unchanged.candidate, alternatives, (group, why), request.on_judged, TimeLimit(request.limit_s),
        judge.cancel, functools.partial(smaller_evaluations, own), per_gpu,
    )  # fmt: skip
    search.judgements[unchanged.candidate] = unchanged
    return search, unchanged, left_out


def _requested_sequences(sequences: int | None, facts: PlanFacts) -> int:
    """The requested sequences per optimizer step; 0 if none were requested. Refuses more than the data has
    rows, and any number if another batch is another method for this training."""
    if sequences is None:
        return 0
    option, rows = f"--sequences-per-step {sequences}", facts.length.rows
    if rows is not None and sequences > rows:
        raise InputError(f"{option}: the script trains on {rows:,} rows; give {rows} or fewer")
    group, why = of_batch(facts.batch)
    if group == "another method":
        raise InputError(f"{option}: {why}; change the batch in the script, then plan again")
    return sequences


def _make_plan(judge: _CandidateJudge) -> Plan:
    request = judge.request
    search, unchanged, left_out = _new_search(judge)
    try:
        request.on_judged(unchanged)
        if search.per_gpu and (baseline := search.script_with_requested_batch()) != search.own:
            search.judgements[baseline] = judge.judge_baseline(baseline)
            request.on_judged(search.judgements[baseline])
        search.run()
    except KeyboardInterrupt:  # before `run`, which handles its own
        search.stopped = search.stopped_by_hand = True
    for judgement in search.judgements.values():
        if judgement.is_other:
            left_out.setdefault(_name_of_difference(judgement, unchanged), judgement.why)
    tried = {choice.name for candidate in search.judgements for choice in candidate.choices}
    hint = "" if search.stopped_by_hand else "; --limit SECONDS gives it more time"
    also = tuple(ADAPTERS.get(method, method) for method in request.also)
    for name in also:
        if name not in tried:
            left_out.setdefault(name, f"the search ended before it{hint}")
    folder = judge.speeds.given.nvme_path
    if folder is not None and not search.stopped and not any(map(_is_on_disk, search.judgements)):
        left_out.setdefault(ON_DISK, "a setup that keeps more on the GPU fits and is faster")
    return Plan(
        name=name_of(judge.job.script),
        machine=judge.job.machine,
        gpus=request.gpus,
        own=unchanged,
        traced=tuple(judgement for judgement in search.judgements.values() if not judgement.is_other),
        excluded=dict(search.excluded),
        left_out=left_out,
        also=also,
        sequences=request.sequences or 0,
        stopped=search.stopped,
        stopped_by_hand=search.stopped_by_hand,
        notes=(
            *judge.traces.notes,
            *judge.speeds.warnings,
            *_gpu_variant_notes(judge.job.machine),
            *_own_batch_notes(unchanged),
            *_folder_notes(folder, search.judgements),
        ),
        script=judge.job.script,
    )


def _gpu_variant_notes(machine: Machine) -> Iterator[str]:
    """A note if the GPU also exists as a slower PCIe version."""
    gpu = machine.gpu
    if gpu is None or gpu.here or rates_of(gpu.name) not in RATES.values():
        return
    if (other := named_gpu(f"{gpu.name} PCIe").name) != gpu.name:
        yield f'times are those of the {gpu.name} as a module (SXM); of the PCIe version: --gpu "{other}"'


def _name_of_difference(other: Judgement, own: Judgement) -> str:
    """The micro-batch or the choice that makes `other` another training."""
    candidate = other.candidate
    if other.why == ROWS_COMPARED:
        return "another micro-batch"
    if lengths_of(other.facts.length) != lengths_of(own.facts.length) or not candidate.choices:
        return f"{candidate.micro_batch_size} × {candidate.accumulation}"
    return candidate.choices[-1].name


def _own_batch_notes(own: Judgement) -> Iterator[str]:
    """Notes on problems of the script's own batch."""
    if own.training is None:
        return
    if not own.fits and own.training.arguments.auto_find_batch_size:
        yield "auto_find_batch_size: a run takes a smaller batch until one fits; memkit predict says which"
    batch = own.training.facts.batch
    if batch.scaled_by_accumulation and own.candidate.accumulation > 1:
        yield f"gradients are {own.candidate.accumulation} times as large as without accumulation: {undivided(batch)}"


def _is_on_disk(candidate: SetupCandidate) -> bool:
    return any(choice.engine == ON_DISK for choice in candidate.choices)


def _folder_notes(folder: str | None, candidates: Iterable[SetupCandidate]) -> Iterator[str]:
    """A note if the plan uses a swap folder whose free space is unknown."""
    if folder is not None and not user_path(folder).is_dir() and any(map(_is_on_disk, candidates)):
        yield f"--nvme-path {folder}: no such folder here, so the free space of its disk is not checked"


@dataclass(slots=True)
class _CandidateJudge:
    """Traces candidates, and judges each trace in a process of `pool`."""

    traces: ScriptTraces
    pool: ProcessPoolExecutor
    job: ScriptJob
    request: PlanRequest
    speeds: Speeds
    unchanged: Judgement = field(init=False)  # the script without any change
    baseline: Judgement = field(init=False)  # every candidate must have the same number of steps as this one
    _disk_lock: threading.Lock = field(default_factory=threading.Lock)

    def judge_unchanged(self) -> Judgement:
        """The judgement of the unchanged script, which all others are compared with."""
        judgement = self._trace_and_judge(SetupCandidate(0, 0), Overrides({}, {}, {}))
        assert judgement.training is not None
        arguments = judgement.training.arguments
        size, accumulation = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
        self.unchanged = self.baseline = replace(judgement, candidate=SetupCandidate(size, accumulation))
        return self.unchanged

    def judge_baseline(self, candidate: SetupCandidate) -> Judgement:
        """The judgement of the script with the requested batch. All later candidates must have as many steps."""
        judgement = self._try(candidate)
        if self._compares_rows(judgement):
            raise InputError(f"--sequences-per-step: {ROWS_COMPARED}; change the batch in the script, then plan again")
        if judgement.training is not None:
            self.baseline = judgement
        return judgement

    def _try(self, candidate: SetupCandidate) -> Judgement:
        """The judgement of a candidate; without a prediction if a rule, the script or a library refuses it."""
        settings = {key: value for choice in candidate.choices for key, value in choice.settings.items()}
        assert self.unchanged.training is not None
        if why := refused(settings, self.unchanged.training.arguments, self.job.machine, self.job.gpus):
            return Judgement(candidate, why=why)
        try:  # variables set up the allocator, which the trace does not depend on
            return self._trace_and_judge(candidate, replace(candidate.overrides, environment={}))
        except ScriptFailed as error:
            return Judgement(candidate, why=f"the script fails with it: {error}")
        except InputError as error:
            return Judgement(candidate, why=str(error))

    def __call__(self, candidate: SetupCandidate) -> Judgement:
        if _is_on_disk(candidate):
            with self._disk_lock:
                if not self.speeds.disk_tried:
                    self.speeds = self.speeds.with_disk()
        judgement = self._try(candidate)
        if judgement.training is None:
            return judgement
        wanted, actual = candidate.overrides.model.get("attn_implementation"), judgement.facts.model.attention
        if wanted not in (None, actual):  # without a prediction, so that no other micro-batch is tried
            why = f"no option sets the attention of the script's model, which stays {actual}"
            return replace(judgement, prediction=None, fits=False, why=why, is_other=True)
        why, last_batch = self._compare_lengths(judgement)
        why = why or self._compare_training(judgement)
        if why:
            return replace(judgement, fits=False, why=why, is_other=True)
        return replace(judgement, candidate=candidate.with_batch_result(last_batch)) if last_batch else judgement

    def _compare_lengths(self, judgement: Judgement) -> tuple[str, str]:
        """(why its number of steps differs from the baseline's, how only the rows of its last batches differ); both
        empty if nothing differs."""
        lengths, wanted = lengths_of(judgement.facts.length), lengths_of(self.baseline.facts.length)
        if lengths == wanted:
            return "", ""
        length, own, label = next(row for row in zip(lengths, wanted, LENGTHS, strict=True) if row[0] != row[1])
        counts = f"{length} {label} instead of {own}: " if None not in (length, own) else ""
        difference = f"{counts}the last batch of an epoch differs"
        return ("", difference) if label == LENGTHS[-1] else (difference, "")

    def _compare_training(self, judgement: Judgement) -> str:
        """Why a candidate with the right number of steps is another training; empty if it is the same."""
        if judgement.facts.schedule != self.baseline.facts.schedule:
            return "the script computes its learning rate, or another of its arguments, from what this changes"
        if self._compares_rows(judgement):
            return ROWS_COMPARED
        is_same = judgement.facts.rows_digest == self.unchanged.facts.rows_digest
        return "" if is_same else "it changes the rows of the training data"

    def _compares_rows(self, judgement: Judgement) -> bool:
        """Whether the loss compares the rows of a micro-batch: the candidate and the unchanged script, with different
        micro-batches, have a common product of rows with rows."""
        trainings = [each.training for each in (judgement, self.unchanged) if each.training is not None]
        sizes = {training.arguments.per_device_train_batch_size for training in trainings}
        return len(sizes) == 2 and bool(judgement.row_products & self.unchanged.row_products)

    def cancel(self) -> None:
        """Ends all tracing and judging; threads that wait for it get CancelledError or BrokenProcessPool."""
        self.traces.end()
        for process in list((self.pool._processes or {}).values()):
            process.kill()

    def _trace_and_judge(self, candidate: SetupCandidate, overrides: Overrides) -> Judgement:
        traced = self.traces.of(overrides)
        job = replace(self.job, environment={**self.job.environment, **candidate.environment})
        return self.pool.submit(
            judge_trace, traced, self.traces.device, self.traces.notes, candidate, job, self.speeds
        ).result()
