"""Judges candidates: traces each, predicts it in a separate process, and checks that the training stays the same."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Final, Self

from hf_memkit.common.ended_with_parent import watch
from hf_memkit.common.errors import InputError, ScriptFailed
from hf_memkit.deepspeed.settings import ZeroSettings
from hf_memkit.plan.candidate import Candidate
from hf_memkit.plan.candidate_time import Speeds, with_times
from hf_memkit.plan.choices import ON_DISK, ROWS_COMPARED
from hf_memkit.plan.judgement import Judgement, judge_prediction
from hf_memkit.plan.refused_settings import refused
from hf_memkit.plan.search import PARALLEL_TRACES
from hf_memkit.plan.traces import ScriptTraces
from hf_memkit.prediction.from_script import predict_traced
from hf_memkit.prediction.running_scripts import ScriptJob, training_of
from hf_memkit.prediction.trace.request import Device
from hf_memkit.prediction.trace.work import Work
from hf_memkit.prediction.traced_training import RunLength
from hf_memkit.prediction.waiting_script import TraceFile
from hf_memkit.setup.script_overrides import Overrides

_ROWS: Final = "rows an epoch"

_LARGEST_MULTIPLE: Final = 16
"""Of a micro-batch's rows in a product: eight GPUs with pairs of rows. A larger multiple is a number of tokens."""


def lengths_of(run: RunLength) -> dict[str, int | None]:
    """The lengths of a run that its batches decide; those of an epoch are None if the run ends within the first."""
    ends_early = run.steps is not None and run.steps_an_epoch is not None and run.steps < run.steps_an_epoch
    return {
        "optimizer steps": run.steps,
        "optimizer steps an epoch": None if ends_early else run.steps_an_epoch,
        _ROWS: None if ends_early else run.rows_an_epoch,
    }


@dataclass(slots=True)
class TraceJudge:
    """Traces the script with other settings, and judges each trace in a process of `pool`."""

    traces: ScriptTraces
    pool: ProcessPoolExecutor
    job: ScriptJob
    speeds: Speeds
    made_up_rows: bool = False  # then the length of a run is unknown
    _disk_lock: threading.Lock = field(default_factory=threading.Lock)

    def judge(self, candidate: Candidate, overrides: Overrides) -> Judgement:
        """The judgement of a candidate, whose traced settings are `overrides`. Raises as `judge_trace`."""
        if candidate.engine == ON_DISK:
            with self._disk_lock:
                if not self.speeds.disk_tried:
                    self.speeds = self.speeds.with_disk()
        traced = self.traces.of(overrides)
        job = replace(self.job, environment={**self.job.environment, **candidate.environment})
        future = self.pool.submit(
            judge_trace, traced, self.traces.script.device, self.traces.script.notes, candidate, job, self.speeds
        )  # fmt: skip
        judgement = future.result()
        return replace(judgement, run_seconds=None) if self.made_up_rows else judgement

    def judge_unchanged(self) -> Judgement:
        """The judgement of the unchanged script."""
        judgement = self.judge(Candidate(0, 0), Overrides())
        assert judgement.training is not None
        arguments = judgement.training.arguments
        batch = Candidate(arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps)
        return replace(judgement, candidate=batch)

    def cancel(self) -> None:
        """Ends all tracing and judging; threads that wait for it get CancelledError or BrokenProcessPool."""
        self.traces.script.end()
        for process in list((self.pool._processes or {}).values()):
            process.kill()


@dataclass(slots=True)
class CandidateJudge:
    """Judges candidates, and compares their training with the script's.

    Attributes:
        tracer: judges them without a comparison.
        unchanged: the judgement of the unchanged script.
        baseline: every candidate must have as many steps as this one: the script with the requested batch.
    """

    tracer: TraceJudge
    unchanged: Judgement
    baseline: Judgement

    @classmethod
    def of(cls, tracer: TraceJudge) -> Self:
        """Judges the unchanged script, which all others are compared with."""
        unchanged = tracer.judge_unchanged()
        return cls(tracer, unchanged, unchanged)

    def judge_baseline(self, candidate: Candidate) -> Judgement:
        """The judgement of the script with the requested batch. All later candidates must have as many steps."""
        judgement = self._judge(candidate)
        if self._compares_rows(judgement):
            raise InputError(f"--sequences-per-step: {ROWS_COMPARED}; change the batch in the script, then plan again")
        if judgement.training is not None:
            self.baseline = judgement
        return judgement

    def __call__(self, candidate: Candidate) -> Judgement:
        judgement = self._judge(candidate)
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

    def _judge(self, candidate: Candidate) -> Judgement:
        """The judgement of a candidate; without a prediction if a rule, the script or a library refuses it."""
        job = self.tracer.job
        assert self.unchanged.training is not None
        if why := refused(candidate.settings, self.unchanged.training.arguments, job.machine, job.gpus * job.nodes):
            return Judgement(candidate, why=why)
        try:  # variables set up the allocator, which the trace does not depend on
            return self.tracer.judge(candidate, replace(candidate.overrides, environment={}))
        except ScriptFailed as error:
            return Judgement(candidate, why=f"the script fails with it: {error}")
        except InputError as error:
            return Judgement(candidate, why=str(error))

    def _compare_lengths(self, judgement: Judgement) -> tuple[str, str]:
        """(why its number of steps differs from the baseline's, how only its last rows differ); empty if neither."""
        lengths, wanted = lengths_of(judgement.facts.length), lengths_of(self.baseline.facts.length)
        label = next((label for label in lengths if lengths[label] != wanted[label]), "")
        if not label:
            return "", ""
        known = None not in (lengths[label], wanted[label])
        counts = f"{lengths[label]} {label} instead of {wanted[label]}: " if known else ""
        difference = f"{counts}the last batch of an epoch differs"
        return ("", difference) if label == _ROWS else (difference, "")

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


def judge_trace(
    traced: TraceFile, device: Device, notes: tuple[str, ...], candidate: Candidate, job: ScriptJob,
    speeds: Speeds,
) -> Judgement:  # fmt: skip
    """A judgement of a traced candidate.

    Raises:
        ScriptFailed: the script fails with this candidate's settings.
        InputError: memkit cannot predict the training.
    """
    training = training_of(job.script, traced.outcome())
    training = replace(training, notes=(*notes, *training.notes))
    gpu = job.machine.gpu
    enough = gpu.capacity_bytes if gpu is not None else 0
    prediction = predict_traced(training, job, enough_bytes=enough).prediction
    config = training.engine.config if training.engine is not None else {}
    on_cpu = ZeroSettings.from_config(config).optimizer.device != "none"
    if training.fsdp is not None:
        on_cpu = training.fsdp.cpu_offload
    summary = training.without_trace()
    judgement = judge_prediction(candidate, prediction, training=summary, steps_on_cpu=on_cpu)
    work = training.trace.work
    if work is None or device != "cuda":
        return judgement
    row_products = _row_products(work, training.arguments.per_device_train_batch_size)
    return with_times(
        replace(judgement, row_products=row_products), work, summary, speeds, gpus=job.gpus, nodes=job.nodes
    )


def _row_products(work: Work, rows: int) -> frozenset[tuple[int, int, int]]:
    """Matrix products with the rows of the micro-batch on both sides, as in a contrastive loss: (multiple of the rows,
    multiple of the rows, summed dimension). Multiples above 1 come from pairs, extra negatives and the rows of other
    GPUs. One trace may have such a product by chance, such as a classifier with as many classes as rows; traces of two
    micro-batches share one only if the loss compares rows."""
    shapes = {each.shape for each in work.operations if each.kind == "matmul" and len(each.shape) == 4}
    return frozenset(
        (m // rows, n // rows, k)
        for batch, m, n, k in shapes
        if batch == 1 and m % rows == n % rows == 0 and max(m, n) <= _LARGEST_MULTIPLE * rows
    )


def judging_pool() -> ProcessPoolExecutor:
    """Processes that judge traces in parallel to this one, and ignore Ctrl-C."""
    return ProcessPoolExecutor(
        PARALLEL_TRACES, mp_context=get_context("fork"), initializer=_start_process, initargs=(os.getpid(),)
    )


def _start_process(parent: int) -> None:
    # A pool process holds copies of its parent's pipes. It must end if the parent is killed: the process that runs the
    # script ends only when all copies are closed.
    watch(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
