"""From a script and a GPU to a plan: runs the search, with each trace judged in a process of its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context

from hf_memkit.errors import InputError, ScriptFailed
from hf_memkit.hardware import Machine
from hf_memkit.plan.calibration import stored
from hf_memkit.plan.candidate import Candidate
from hf_memkit.plan.choices import LeftOut, choices_for, of_batch
from hf_memkit.plan.judged import Judged, judged
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.pricing import Pricing, priced
from hf_memkit.plan.search import AT_ONCE, LIMIT_S, Search
from hf_memkit.plan.traces import ScriptTraces, Traced
from hf_memkit.prediction.from_script import predicted_training
from hf_memkit.prediction.running_scripts import RanScript, checked, name_of
from hf_memkit.prediction.trace_request import Device
from hf_memkit.prediction.work import Work
from hf_memkit.script_overrides import Overrides
from hf_memkit.user_script import UserScript

__all__ = ["plan_script"]


def plan_script(
    script: UserScript,
    machine: Machine,
    *,
    gpus: int = 1,
    environment: Mapping[str, str] | None = None,
    also: tuple[str, ...] = (),
    limit_s: float = LIMIT_S,
    said: Callable[[Judged], None] = lambda _: None,
    ram_is_given: bool = False,
) -> Plan:
    """The fastest setups of a script's training that fit.

    Args:
        script: which, with its arguments.
        machine: the machine in question, with its GPU.
        gpus: GPUs of it that train.
        environment: the variables that the script gets; None: this process's.
        also: other methods that may be proposed: names of optimizers (`optim`).
        limit_s: how long candidates are traced, from the script's own preparation on.
        said: is told of each candidate that is judged.
        ram_is_given: whether the machine's RAM is the one in question.

    Raises:
        InputError, ScriptFailed: the script as it stands cannot be predicted; as `predict_script`.
    """
    if machine.gpu is None:
        raise InputError("no GPU here and none named: --gpu NAME or --gpu 16GB")
    environment = dict(os.environ if environment is None else environment)
    calibration, warnings = stored(machine.gpu)
    pricing = Pricing.of(machine)
    if calibration is not None:
        pricing = Pricing.of(machine, calibration.of_kinds(), calibration.said())
    with ExitStack() as stack:
        traces = stack.enter_context(ScriptTraces(script, machine, environment, gpus=gpus))
        pool = stack.enter_context(_pool())
        traces.start()
        judge = _Judge(traces, pool, script, machine, gpus, environment, pricing, ram_is_given)
        as_it_is = judge.own()
        facts = as_it_is.facts
        assert facts is not None
        left_out: LeftOut = {}
        ways = choices_for(facts, machine, gpus=gpus, left_out=left_out, also=also)
        search = Search(judge, as_it_is.candidate, ways, of_batch(facts), said, limit_s)
        search.judged[as_it_is.candidate] = as_it_is
        said(as_it_is)
        search.run()
    own = as_it_is.candidate
    return Plan(
        name=name_of(script),
        machine=machine,
        gpus=gpus,
        own=as_it_is,
        traced=tuple(search.judged.values()),
        excluded=dict(search.excluded),
        left_out=left_out,
        sequences=own.micro_batch_size * own.accumulation * gpus,
        stopped=search.stopped,
        notes=(*traces.notes, *warnings),
        time_factors=dict(calibration.factors) if calibration is not None else {},
    )


@dataclass(slots=True)
class _Judge:
    """Traces a candidate, and has the trace judged in another process."""

    traces: ScriptTraces
    pool: ProcessPoolExecutor
    script: UserScript
    machine: Machine
    gpus: int
    environment: dict[str, str]
    pricing: Pricing
    ram_is_given: bool
    steps: int | None = None

    def own(self) -> Judged:
        """The script as it stands."""
        found = self._judged(Candidate(0, 0), Overrides({}, {}, {}))
        assert found.facts is not None
        arguments = found.facts["arguments"]
        self.steps = found.facts.get("steps")
        size, accumulation = arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]
        return replace(found, candidate=Candidate(size, accumulation))

    def __call__(self, candidate: Candidate) -> Judged:
        try:
            found = self._judged(candidate, replace(candidate.overrides, environment={}))
        except ScriptFailed as error:
            return Judged(candidate, why=f"the script fails with it: {error}")
        except InputError as error:
            return Judged(candidate, why=str(error))
        steps = (found.facts or {}).get("steps")
        if steps != self.steps:
            why = f"{steps} optimizer steps in place of {self.steps}: the last batch of an epoch is another"
            return replace(found, fits=False, why=why)
        return found

    def _judged(self, candidate: Candidate, overrides: Overrides) -> Judged:
        traced = self.traces.of(overrides)
        environment = {**self.environment, **candidate.environment}
        return self.pool.submit(
            _of_trace, traced, self.traces.device, self.traces.notes, candidate, self.script, self.machine,
            self.gpus, environment, self.pricing, self.ram_is_given,
        ).result()  # fmt: skip


def _of_trace(
    traced: Traced,
    device: Device,
    notes: tuple[str, ...],
    candidate: Candidate,
    script: UserScript,
    machine: Machine,
    gpus: int,
    environment: Mapping[str, str],
    pricing: Pricing,
    ram_is_given: bool,
) -> Judged:
    content = json.loads(traced.path.read_text()) if traced.path is not None else None
    ran = RanScript(checked(script, content, traced.why or None), device, notes)
    prediction, _training = predicted_training(
        ran, script, machine, gpus=gpus, nodes=1, environment=environment, ram_is_given=ram_is_given
    )
    about = ran.content["about"]
    found = judged(candidate, prediction, machine, facts=about["plan"])
    work = ran.content["trace"].get("work")
    if work is None or ran.device != "cuda":
        return found
    return priced(found, Work.from_json(work), about, pricing, gpus=gpus, accumulation=about["accumulation"])


def _pool() -> ProcessPoolExecutor:
    """Processes that put traces through the allocator: this one has other things to do. Ctrl-C is not theirs."""
    return ProcessPoolExecutor(
        AT_ONCE, mp_context=get_context("fork"), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
    )
