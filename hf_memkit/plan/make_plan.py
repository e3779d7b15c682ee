"""From a script and a GPU to a plan: runs the search, with each trace judged in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from hf_memkit.plan.candidate_time import Pricing
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
from hf_memkit.plan.judge_trace import LENGTHS, judging_pool, lengths_of, of_trace
from hf_memkit.plan.judgement import Judged
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.search import Search
from hf_memkit.plan.time_limit import LIMIT_S, TimeLimit
from hf_memkit.plan.traces import ScriptTraces
from hf_memkit.prediction.running_scripts import ScriptJob, name_of
from hf_memkit.prediction.setup_as_script import SetupTraining, as_script
from hf_memkit.prediction.traced_training import PlanFacts
from hf_memkit.setup.script_overrides import Overrides
from hf_memkit.setup.setup import Setup

_ROWS: Final = 64
"""Optimizer steps' worth of rows that mean nothing."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the user wants planned, beside the script and the machines.

    Attributes:
        gpus: GPUs that train on each machine.
        environment: variables of the script; None: this process's.
        also: further methods to try: `"lora"`, `"qlora"`, and optimizers (values of `optim`).
        limit_s: seconds to trace candidates for each machine, counted from the script's own preparation. None:
            `LIMIT_S`, and longer while that pays (`time_limit.py`).
        on_judged: called with each candidate after its verdict.
        ram_is_given: whether the user named the machine's RAM, so that it decides verdicts.
        host: speeds of CPU and disk that the user gave; None: none.
        sequences: sequences of an optimizer step on all GPUs together; None: as many as the script's.
        keeps: whether to read traces that earlier plans kept, and to keep new ones.
    """

    gpus: int = 1
    environment: Mapping[str, str] | None = None
    also: tuple[str, ...] = ()
    limit_s: float | None = None
    on_judged: Callable[[Judged], None] = lambda _: None
    ram_is_given: bool = False
    host: GivenHost | None = None
    sequences: int | None = None
    keeps: bool = False

    def job(self, script: UserScript, machine: Machine) -> ScriptJob:
        variables = dict(os.environ if self.environment is None else self.environment)
        return ScriptJob(script, machine, self.gpus, environment=variables, ram_is_given=self.ram_is_given)


def plan_setup(setup: Setup, request: PlanRequest, *, trust_remote_code: bool = False) -> Plan:
    """A plan for a setup without a script, with made-up rows of its full length; the length of the whole training is
    unknown. `trust_remote_code`: whether the model's own code may run."""
    with _as_script(setup, request, trust_remote_code=trust_remote_code) as (script, request):
        (found,) = plan_gpus(script, [setup.sized_job.machine], request)
    name = str(setup.get("model.name", setup.preset))
    own, *traced = (replace(each, run_seconds=None) for each in (found.own, *found.traced))
    left_out = dict(found.left_out)
    if "from_pretrained" in left_out.get(ADAPTERS["qlora"], ""):
        left_out[ADAPTERS["qlora"]] = "without a script it is a preset: --preset qlora"
    return replace(found, name=name, own=own, traced=tuple(traced), left_out=left_out, script=None)


@contextlib.contextmanager
def _as_script(
    setup: Setup, request: PlanRequest, *, trust_remote_code: bool
) -> Iterator[tuple[UserScript, PlanRequest]]:
    """A script that trains the setup on made-up rows, and the request for a plan of it."""
    job = setup.sized_job
    sizes = {
        "per_device_train_batch_size": job.micro_batch_size,
        "gradient_accumulation_steps": job.accumulation,
    }
    for name, value in sizes.items():
        setup = setup.put(f"arguments.{name}", value, "asked for")
    rows = _ROWS * max(job.micro_batch_size * job.accumulation * job.gpus, request.sequences or 0)
    training = SetupTraining(setup, job.sequence_length, rows, trust_remote_code=trust_remote_code)
    variables = {**os.environ, **{name: str(each) for name, each in setup.section("environment").items()}}
    with as_script(training) as script:
        yield script, replace(request, gpus=job.gpus, environment=variables, ram_is_given=True, keeps=False)


_DEFAULTS: Final = PlanRequest()


def plan_gpus(script: UserScript, machines: Sequence[Machine], request: PlanRequest = _DEFAULTS) -> tuple[Plan, ...]:
    """The fastest setups of a script's training that fit: a plan for each machine, in their order, but those that
    Ctrl-C leaves out. GPUs of one compute capability share traces. Refuses a script that cannot be predicted as it
    stands."""
    if any(machine.gpu is None for machine in machines):
        raise InputError("this machine has no GPU; name one: --gpu NAME or --gpu 16GB")
    if request.sequences is not None and (line := wrong_sequences(request.sequences, request.gpus)):
        raise InputError(line)
    found: dict[int, Plan] = {}
    with judging_pool() as pool:
        for _, group in itertools.groupby(
            sorted(range(len(machines)), key=lambda at: _kind(machines[at])), key=lambda at: _kind(machines[at])
        ):
            numbers = list(group)
            largest = max(
                (machines[at] for at in numbers), key=lambda each: each.gpu.capacity_bytes if each.gpu else 0
            )
            with ScriptTraces(request.job(script, largest), keeps=request.keeps) as traces:
                traces.start()
                for at in numbers:
                    pricing = Pricing.of(machines[at], request.host)
                    job = request.job(script, _with_disk(machines[at], pricing.given))
                    judge = _Judge(traces, pool, job, request, pricing)
                    found[at] = replace(_planned(judge), machine=machines[at])
                    if found[at].stopped_by_hand:
                        return tuple(found[each] for each in sorted(found))
    return tuple(found[at] for at in range(len(machines)))


def _with_disk(machine: Machine, host: GivenHost) -> Machine:
    """With what is free in the folder that is swapped to. Where there is no such folder nobody knows, and the disk is
    not weighed."""
    if host.nvme_path is None:
        return machine
    folder = user_path(host.nvme_path)
    free = shutil.disk_usage(folder).free if folder.is_dir() else sys.maxsize
    return replace(machine, disk_free_bytes=free, disk_path=str(folder))


def _kind(machine: Machine) -> tuple[float, bool]:
    """What decides which kernels run."""
    assert machine.gpu is not None
    return machine.gpu.capability or 0.0, machine.gpu.bf16


def nearest_setup(script: UserScript, machine: Machine, request: PlanRequest) -> Judged | None:
    """The setup of the same batch that fits with the fewest changes, traced; None: none was found. Refuses as
    `plan_gpus`."""
    request = replace(request, limit_s=LIMIT_S)
    job = request.job(script, machine)
    with judging_pool() as pool, ScriptTraces(job) as traces:
        traces.start()
        return _search(_Judge(traces, pool, job, request, Pricing.of(machine)))[0].nearest()


def nearest_of_setup(setup: Setup, *, trust_remote_code: bool = False) -> Judged | None:
    """As `nearest_setup`, of what a setup comes to."""
    with _as_script(setup, _DEFAULTS, trust_remote_code=trust_remote_code) as (script, request):
        return nearest_setup(script, setup.sized_job.machine, request)


def _search(judge: _Judge) -> tuple[Search, Judged, LeftOut]:
    """(a search that has not begun, the script as it stands, what no candidate has)."""
    as_it_is, request = judge.own(), judge.request
    own = as_it_is.training
    assert own is not None
    left_out: LeftOut = {}
    ways = choices_for(
        own, judge.job.machine, judge.job.environment, gpus=request.gpus, left_out=left_out, also=request.also,
        nvme_path=judge.pricing.given.nvme_path,
    )  # fmt: skip
    per_gpu, (group, why) = _asked_for(request.sequences, own.facts) // request.gpus, of_batch(own.facts.batch)
    if group == "another method":
        left_out["another micro-batch"] = why
    evaluation = functools.partial(smaller_evaluations, own)
    limit = TimeLimit(request.limit_s)
    search = Search(
        judge, as_it_is.candidate, ways, (group, why), request.on_judged, limit, judge.end, evaluation, per_gpu
    )
    search.judged[as_it_is.candidate] = as_it_is
    return search, as_it_is, left_out


def _asked_for(sequences: int | None, facts: PlanFacts) -> int:
    """The sequences of an optimizer step that are asked for; 0: none. Refuses more than the data's rows, and another
    number where that is another method for the loss."""
    if sequences is None:
        return 0
    option, rows = f"--sequences-per-step {sequences}", facts.length.rows
    if rows is not None and sequences > rows:
        raise InputError(f"{option}: the script trains on {rows:,} rows; give {rows} or fewer")
    group, why = of_batch(facts.batch)
    if group == "another method":
        raise InputError(f"{option}: {why}; change the batch in the script, then plan again")
    return sequences


def _planned(judge: _Judge) -> Plan:
    request = judge.request
    search, as_it_is, left_out = _search(judge)
    try:
        request.on_judged(as_it_is)
        if search.per_gpu and (first := search.with_its_batch()) != search.own:
            search.judged[first] = judge.first_of(first)
            request.on_judged(search.judged[first])
        search.run()
    except KeyboardInterrupt:  # between the two: the script as it stands is judged
        search.stopped = search.stopped_by_hand = True
    for each in search.judged.values():
        if each.is_other:
            left_out.setdefault(_what_differs(each, as_it_is), each.why)
    tried = {choice.name for each in search.judged for choice in each.choices}
    longer = "" if search.stopped_by_hand else "; --limit SECONDS gives it more time"
    also = tuple(ADAPTERS.get(each, each) for each in request.also)
    for name in also:
        if name not in tried:
            left_out.setdefault(name, f"the search ended before it{longer}")
    folder = judge.pricing.given.nvme_path
    if folder is not None and not search.stopped and not any(_is_on_disk(each) for each in search.judged):
        left_out.setdefault(ON_DISK, "a setup that keeps more on the GPU fits and is faster")
    return Plan(
        name=name_of(judge.job.script),
        machine=judge.job.machine,
        gpus=request.gpus,
        own=as_it_is,
        traced=tuple(each for each in search.judged.values() if not each.is_other),
        excluded=dict(search.excluded),
        left_out=left_out,
        also=also,
        sequences=request.sequences or 0,
        stopped=search.stopped,
        stopped_by_hand=search.stopped_by_hand,
        notes=(
            *judge.traces.notes,
            *judge.pricing.warnings,
            *_about_variant(judge.job.machine),
            *_about_own(as_it_is),
            *_about_folder(folder, search.judged),
        ),
        script=judge.job.script,
    )


def _about_variant(machine: Machine) -> Iterator[str]:
    """That a GPU's name is one of two, of which the other is slower."""
    gpu = machine.gpu
    if gpu is None or gpu.here or rates_of(gpu.name) not in RATES.values():
        return
    if (other := named_gpu(f"{gpu.name} PCIe").name) != gpu.name:
        yield f'times are those of the {gpu.name} as a module (SXM); of the PCIe version: --gpu "{other}"'


def _what_differs(other: Judged, own: Judged) -> str:
    """The name of what makes it another training: its micro-batch, by the steps that it comes to, or a choice."""
    candidate = other.candidate
    if other.why == ROWS_COMPARED:
        return "another micro-batch"
    if lengths_of(other.facts.length) != lengths_of(own.facts.length) or not candidate.choices:
        return f"{candidate.micro_batch_size} × {candidate.accumulation}"
    return candidate.choices[-1].name


def _about_own(own: Judged) -> Iterator[str]:
    """What is wrong with the script's own batch."""
    if own.training is None:
        return
    if not own.fits and own.training.arguments.auto_find_batch_size:
        yield "auto_find_batch_size: a run takes a smaller batch until one fits; memkit predict says which"
    batch = own.training.facts.batch
    if batch.scaled_by_accumulation and own.candidate.accumulation > 1:
        yield f"gradients are {own.candidate.accumulation} times as large as without accumulation: {undivided(batch)}"


def _is_on_disk(candidate: SetupCandidate) -> bool:
    return any(each.engine == ON_DISK for each in candidate.choices)


def _about_folder(folder: str | None, judged: Mapping[SetupCandidate, Judged]) -> Iterator[str]:
    """Whether its disk was looked at, if it was asked for."""
    if folder is not None and not user_path(folder).is_dir() and any(map(_is_on_disk, judged)):
        yield f"--nvme-path {folder}: no such folder here, so the free space of its disk is not checked"


@dataclass(slots=True)
class _Judge:
    """Traces a candidate, and has the trace judged in another process."""

    traces: ScriptTraces
    pool: ProcessPoolExecutor
    job: ScriptJob
    request: PlanRequest
    pricing: Pricing
    as_it_is: Judged = field(init=False)
    first: Judged = field(init=False)  # to whose steps all others are held
    _looking: threading.Lock = field(default_factory=threading.Lock)

    def own(self) -> Judged:
        """The script as it stands."""
        found = self._judged(SetupCandidate(0, 0), Overrides({}, {}, {}))
        assert found.training is not None
        arguments = found.training.arguments
        size, accumulation = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
        self.as_it_is = self.first = replace(found, candidate=SetupCandidate(size, accumulation))
        return self.as_it_is

    def first_of(self, candidate: SetupCandidate) -> Judged:
        """The script with another batch: all others are held to as many steps as it makes."""
        found = self._tried(candidate)
        if self._compares_rows(found):
            raise InputError(f"--sequences-per-step: {ROWS_COMPARED}; change the batch in the script, then plan again")
        if found.training is not None:
            self.first = found
        return found

    def _tried(self, candidate: SetupCandidate) -> Judged:
        settings = {key: value for each in candidate.choices for key, value in each.settings.items()}
        assert self.as_it_is.training is not None
        if why := refused(settings, self.as_it_is.training.arguments, self.job.machine, self.job.gpus):
            return Judged(candidate, why=why)
        try:
            return self._judged(candidate, replace(candidate.overrides, environment={}))
        except ScriptFailed as error:
            return Judged(candidate, why=f"the script fails with it: {error}")
        except InputError as error:
            return Judged(candidate, why=str(error))

    def __call__(self, candidate: SetupCandidate) -> Judged:
        if _is_on_disk(candidate):
            with self._looking:
                if not self.pricing.looked_at_disk:
                    self.pricing = self.pricing.with_disk()
        found = self._tried(candidate)
        if found.training is None:
            return found
        attention = candidate.overrides.model.get("attn_implementation")
        has = found.facts.model.attention
        if attention not in (None, has):  # with every micro-batch: no other is tried
            why = f"no option sets the attention of the script's model, which stays {has}"
            return replace(found, prediction=None, fits=False, why=why, is_other=True)
        why, said = self._other_epoch(found)
        why = why or self._other_training(found)
        if why:
            return replace(found, fits=False, why=why, is_other=True)
        return replace(found, candidate=candidate.with_result(said)) if said else found

    def _other_epoch(self, found: Judged) -> tuple[str, str]:
        """(how its steps differ from the script's; how only the rows of its last batches do). Empty: they do not."""
        steps, wanted = lengths_of(found.facts.length), lengths_of(self.first.facts.length)
        if steps == wanted:
            return "", ""
        made, own, what = next(each for each in zip(steps, wanted, LENGTHS, strict=True) if each[0] != each[1])
        counted = f"{made} {what} instead of {own}: " if None not in (made, own) else ""
        said = f"{counted}the last batch of an epoch differs"
        return ("", said) if what == LENGTHS[-1] else (said, "")

    def _other_training(self, found: Judged) -> str:
        """How it is another training than the script's, of as many steps; empty: it is the same."""
        if found.facts.schedule != self.first.facts.schedule:
            return "the script computes its learning rate, or another of its arguments, from what this changes"
        if self._compares_rows(found):
            return ROWS_COMPARED
        is_same = found.facts.rows_digest == self.as_it_is.facts.rows_digest
        return "" if is_same else "it changes the rows of the training data"

    def _compares_rows(self, found: Judged) -> bool:
        """Whether both it and the script, in another micro-batch, multiply its rows with one another."""
        of_two = found, self.as_it_is
        sizes = {each.training.arguments.per_device_train_batch_size for each in of_two if each.training is not None}
        return len(sizes) == 2 and bool(found.row_products & self.as_it_is.row_products)

    def end(self) -> None:
        """Ends what is being traced and judged: those who wait for it get CancelledError or BrokenProcessPool."""
        self.traces.end()
        for process in list((self.pool._processes or {}).values()):
            process.kill()

    def _judged(self, candidate: SetupCandidate, overrides: Overrides) -> Judged:
        traced = self.traces.of(overrides)
        job = replace(self.job, environment={**self.job.environment, **candidate.environment})
        return self.pool.submit(
            of_trace, traced, self.traces.device, self.traces.notes, candidate, job, self.pricing
        ).result()
