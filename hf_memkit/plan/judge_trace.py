"""Judges one trace in a separate process: its memory, its time, and signs that it is another training."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Final

from hf_memkit.common.ended_with_parent import watch
from hf_memkit.deepspeed.settings import ZeroSettings
from hf_memkit.plan.candidate import SetupCandidate
from hf_memkit.plan.candidate_time import Speeds, with_times
from hf_memkit.plan.judgement import Judgement, judge_prediction
from hf_memkit.plan.search import PARALLEL_TRACES
from hf_memkit.plan.traces import TraceFile
from hf_memkit.prediction.from_script import predict_traced
from hf_memkit.prediction.running_scripts import ScriptJob, training_of
from hf_memkit.prediction.trace.request import Device
from hf_memkit.prediction.trace.work import Work
from hf_memkit.prediction.traced_training import RunLength

LENGTHS: Final = ("optimizer steps", "optimizer steps an epoch", "rows an epoch")
"""Labels of what `lengths_of` returns."""


def lengths_of(run: RunLength) -> tuple[int | None, ...]:
    """The `LENGTHS` of a run; those of an epoch are None if the run ends before its first epoch does."""
    if run.steps is not None and run.steps_an_epoch is not None and run.steps < run.steps_an_epoch:
        return run.steps, None, None
    return run.steps, run.steps_an_epoch, run.rows_an_epoch


def judge_trace(
    traced: TraceFile, device: Device, notes: tuple[str, ...], candidate: SetupCandidate, job: ScriptJob,
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
    summary = training.without_trace()
    judgement = judge_prediction(candidate, prediction, training=summary, steps_on_cpu=on_cpu)
    work = training.trace.work
    if work is None or device != "cuda":
        return judgement
    row_products = _row_products(work, training.arguments.per_device_train_batch_size)
    return with_times(replace(judgement, row_products=row_products), work, summary, speeds, gpus=job.gpus)


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


_LARGEST_MULTIPLE: Final = 16
"""Eight GPUs with pairs of rows; a larger multiple is a number of tokens."""


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
