"""Makes a plan for a script and a GPU: runs the search, and judges each trace in a separate process."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hf_memkit.catalog.gpu_rates import RATES, rates_of
from hf_memkit.catalog.hardware import Machine, named_gpu
from hf_memkit.catalog.host_rates import GivenHost
from hf_memkit.common.errors import InputError
from hf_memkit.common.user_files import user_path
from hf_memkit.common.user_script import UserScript
from hf_memkit.plan.candidate import Candidate
from hf_memkit.plan.candidate_time import Speeds
from hf_memkit.plan.choices import (
    ADAPTERS,
    ON_DISK,
    ROWS_COMPARED,
    LeftOut,
    choices_for,
    of_batch,
    smaller_evaluations,
    undivided,
)
from hf_memkit.plan.compiled import with_compiled
from hf_memkit.plan.judge_trace import CandidateJudge, TraceJudge, judging_pool, lengths_of
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.search import Search
from hf_memkit.plan.time_limit import LIMIT_S, TimeLimit
from hf_memkit.plan.traces import ScriptTraces
from hf_memkit.prediction.running_scripts import ScriptJob, name_of
from hf_memkit.prediction.setup_as_script import SetupJob, as_script
from hf_memkit.prediction.waiting_script import WaitingScript
from hf_memkit.setup.setup import Setup

_ROWS: Final = 64
"""Length of the made-up data of a setup without a script, in optimizer steps."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The user's options for plans.

    Attributes:
        gpus, nodes: GPUs that train on each machine, and machines.
        environment: environment variables of the script; None: those of this process.
        also: further methods to try: `"lora"`, `"qlora"`, and optimizers (values of `optim`).
        limit_s: seconds to trace candidates for each machine, counted from the script's own preparation. None:
            `LIMIT_S`, and longer while that pays (`time_limit.py`).
        on_judged: called with each candidate after its verdict.
        ram_is_given: whether the user named the machine's RAM, so that it decides verdicts.
        host: speeds of CPU and disk that the user gave; None if none.
        sequences: requested sequences per optimizer step, on all GPUs; None: as many as the script's.
        keeps: whether to read traces that earlier plans kept, and to keep new ones.
        on_restart: called with the reason before the script starts again from its first line.
        on_slow: called with a candidate whose trace takes long, before it begins, and with the seconds.
        made_up_rows: whether memkit made up the training data, so that the length of a run is unknown.
    """

    gpus: int = 1
    nodes: int = 1
    environment: Mapping[str, str] | None = None
    also: tuple[str, ...] = ()
    limit_s: float | None = None
    on_judged: Callable[[Judgement], None] = lambda _: None
    ram_is_given: bool = False
    host: GivenHost | None = None
    sequences: int | None = None
    keeps: bool = False
    on_restart: Callable[[str], None] = lambda _: None
    on_slow: Callable[[Candidate, float], None] = lambda *_: None
    made_up_rows: bool = False
    began: float = field(default_factory=time.time)  # as in `ScriptRequest`

    def job(self, script: UserScript, machine: Machine) -> ScriptJob:
        variables = dict(os.environ if self.environment is None else self.environment)
        return ScriptJob(
            script, machine, self.gpus, self.nodes, environment=variables, ram_is_given=self.ram_is_given,
            began=self.began,
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        """GPUs of all machines."""
        return self.gpus * self.nodes


def plan_setup(setup: Setup, request: PlanRequest, *, trust_remote_code: bool = False) -> Plan:
    """A plan for a setup without a script. Its training data is made up, so the time of a whole run is unknown.

    Args:
        trust_remote_code: whether code from the model's repository may run.
    """
    with _as_script(setup, request, trust_remote_code=trust_remote_code) as (script, request):
        (plan,) = plan_gpus(script, [setup.sized_job.machine], request)
    name = str(setup.get("model.name", setup.preset))
    left_out = dict(plan.left_out)
    if "from_pretrained" in left_out.get(ADAPTERS["qlora"], ""):
        left_out[ADAPTERS["qlora"]] = "without a script it is a preset: --preset qlora"
    return replace(plan, name=name, left_out=left_out, script=None)


@contextlib.contextmanager
def _as_script(
    setup: Setup, request: PlanRequest, *, trust_remote_code: bool
) -> Iterator[tuple[UserScript, PlanRequest]]:
    """A script that trains the setup on made-up rows, and the request changed for it."""
    job = setup.sized_job
    sizes = {"per_device_train_batch_size": job.micro_batch_size, "gradient_accumulation_steps": job.accumulation}
    for name, value in sizes.items():
        setup = setup.put(f"arguments.{name}", value, "asked for")
    rows = _ROWS * max(job.micro_batch_size * job.accumulation * job.processes, request.sequences or 0)
    training = SetupJob(setup, job.sequence_length, rows, trust_remote_code=trust_remote_code)
    variables = {**os.environ, **{name: str(value) for name, value in setup.section("environment").items()}}
    with as_script(training) as script:
        yield (
            script,
            replace(
                request,
                gpus=job.gpus,
                nodes=job.nodes,
                environment=variables,
                ram_is_given=True,
                keeps=False,
                made_up_rows=True,
            ),
        )


_DEFAULTS: Final = PlanRequest()


def plan_gpus(script: UserScript, machines: Sequence[Machine], request: PlanRequest = _DEFAULTS) -> tuple[Plan, ...]:
    """A plan for each machine, in the order of `machines`; after Ctrl-C only those that were started. Machines whose
    GPUs run the same kernels share traces.

    Raises:
        InputError, ScriptFailed: the unchanged script fails or cannot be predicted.
    """
    plans: dict[int, Plan] = {}
    by_kernels: dict[tuple[float, bool], list[int]] = {}
    for index, machine in enumerate(machines):
        by_kernels.setdefault(_kernels(machine), []).append(index)
    with judging_pool() as pool:
        for _, indices in sorted(by_kernels.items()):
            largest = max((machines[index] for index in indices), key=_capacity)
            with WaitingScript(request.job(script, largest), request.on_restart) as waiting:
                traces = ScriptTraces(waiting, keeps=request.keeps)
                for index in indices:
                    speeds = Speeds.of(machines[index], request.host)
                    job = request.job(script, _with_free_disk(machines[index], speeds.given))
                    plan = _make_plan(TraceJudge(traces, pool, job, speeds, request.made_up_rows), request)
                    plans[index] = replace(plan, machine=machines[index])
                    if plan.stopped_by_hand:
                        return tuple(plan for _, plan in sorted(plans.items()))
    return tuple(plan for _, plan in sorted(plans.items()))


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


def _capacity(machine: Machine) -> int:
    return machine.gpu.capacity_bytes if machine.gpu is not None else 0


def nearest_setup(waiting: WaitingScript) -> Judgement | None:
    """The setup of a waiting script with the same batch that fits with the fewest changes; None if none fits. Raises
    as `plan_gpus`."""
    job = waiting.job
    request = PlanRequest(gpus=job.gpus, nodes=job.nodes, ram_is_given=job.ram_is_given, limit_s=LIMIT_S)
    with judging_pool() as pool:
        judge = CandidateJudge.of(TraceJudge(ScriptTraces(waiting), pool, job, Speeds.of(job.machine)))
        return _new_search(judge, request, {}).nearest()


def nearest_of_setup(setup: Setup, *, trust_remote_code: bool = False) -> Judgement | None:
    """`nearest_setup` of a setup without a script."""
    with (
        _as_script(setup, _DEFAULTS, trust_remote_code=trust_remote_code) as (script, request),
        WaitingScript(request.job(script, setup.sized_job.machine)) as waiting,
    ):
        return nearest_setup(waiting)


def _new_search(judge: CandidateJudge, request: PlanRequest, left_out: LeftOut) -> Search:
    """A search that has not begun, except for the judgement of the unchanged script.

    Args:
        left_out: receives the names of impossible choices, with the reason.
    """
    unchanged, job = judge.unchanged, judge.tracer.job
    own = unchanged.training
    assert own is not None
    choices = choices_for(
        own, job.machine, job.environment, gpus=request.ranks, left_out=left_out, also=request.also,
        nvme_path=judge.tracer.speeds.given.nvme_path,
    )  # fmt: skip
    group, effect = of_batch(own.facts.batch)
    fixed = effect if group == "another method" else ""
    if fixed:
        left_out["another micro-batch"] = fixed
    batches = request.ranks // own.ranks_per_batch
    if request.sequences is not None:
        _refuse_sequences(request.sequences, batches, own.facts.length.rows, fixed)
    search = Search(
        judge, unchanged.candidate, choices, (group, effect), request.on_judged, TimeLimit(request.limit_s),
        judge.tracer.cancel, functools.partial(smaller_evaluations, own), (request.sequences or 0) // batches,
    )  # fmt: skip
    search.judgements[unchanged.candidate] = unchanged
    return search


def _refuse_sequences(sequences: int, batches: int, rows: int | None, fixed: str) -> None:
    """Refuses sequences per optimizer step that the training cannot have.

    Args:
        batches: micro-batches that are trained on at a time, on all GPUs; their sizes are equal.
        rows: of the data; None: unknown.
        fixed: why another number than the script's is another method; empty if it is not.
    """
    option = f"--sequences-per-step {sequences}"
    if sequences % batches:
        below = sequences // batches * batches
        near = f"{below} or {below + batches}" if below else str(batches)
        raise InputError(f"{option}: must be a multiple of {batches}, the batches of all GPUs; write {near}")
    if rows is not None and sequences > rows:
        raise InputError(f"{option}: the script trains on {rows:,} rows; give {rows} or fewer")
    if fixed:
        raise InputError(f"{option}: {fixed}; change the batch in the script, then plan again")


def _make_plan(tracer: TraceJudge, request: PlanRequest) -> Plan:
    judge = CandidateJudge.of(tracer)
    left_out: LeftOut = {}
    search = _new_search(judge, request, left_out)
    _run(search, judge)

    also = tuple(ADAPTERS.get(method, method) for method in request.also)
    _add_reasons(left_out, search, judge, also)
    folder = judge.tracer.speeds.given.nvme_path
    plan = Plan(
        name=name_of(tracer.job.script),
        machine=tracer.job.machine,
        gpus=request.gpus,
        nodes=request.nodes,
        own=judge.unchanged,
        traced=tuple(judgement for judgement in search.judgements.values() if not judgement.is_other),
        excluded=dict(search.excluded),
        left_out=left_out,
        also=also,
        sequences=request.sequences or 0,
        stopped=search.stopped,
        stopped_by_hand=search.stopped_by_hand,
        notes=(
            *tracer.traces.script.notes,
            *(judge.unchanged.training.notices if judge.unchanged.training is not None else ()),
            *tracer.speeds.warnings,
            *_gpu_variant_notes(tracer.job.machine),
            *_own_batch_notes(judge.unchanged),
            *_folder_notes(folder, search.judgements),
        ),
        script=tracer.job.script,
    )
    return with_compiled(plan, search, request.on_slow)


def _run(search: Search, judge: CandidateJudge) -> None:
    """Runs the search. With a requested batch, the script with that batch comes first."""
    try:
        search.on_judged(judge.unchanged)
        if search.per_gpu and (baseline := search.script_with_requested_batch()) != search.own:
            search.judgements[baseline] = judge.judge_baseline(baseline)
            search.on_judged(search.judgements[baseline])
        search.run()
    except KeyboardInterrupt:  # before `run`, which handles its own
        search.stopped = search.stopped_by_hand = True


def _add_reasons(left_out: LeftOut, search: Search, judge: CandidateJudge, also: Sequence[str]) -> None:
    """Adds choices that make another training, requested methods not tried, and swapping to a disk if not needed."""
    for judgement in search.judgements.values():
        if judgement.is_other:
            left_out.setdefault(_name_of_difference(judgement, judge.unchanged), judgement.why)

    tried = {choice.name for candidate in search.judgements for choice in candidate.choices}
    hint = "" if search.stopped_by_hand else "; --limit SECONDS gives it more time"
    for name in also:
        if name not in tried:
            left_out.setdefault(name, f"the search ended before it{hint}")

    swaps = any(candidate.engine == ON_DISK for candidate in search.judgements)
    if judge.tracer.speeds.given.nvme_path is not None and not search.stopped and not swaps:
        left_out.setdefault(ON_DISK, "a setup that keeps more on the GPU fits and is faster")


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


def _folder_notes(folder: str | None, candidates: Iterable[Candidate]) -> Iterator[str]:
    """A note if the plan uses a swap folder whose free space is unknown."""
    swaps = any(candidate.engine == ON_DISK for candidate in candidates)
    if folder is not None and swaps and not user_path(folder).is_dir():
        yield f"--nvme-path {folder}: no such folder here, so the free space of its disk is not checked"
