"""One trace, judged in a process of its own: memory, time, and what tells whether the training is the same."""

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
from hf_memkit.plan.candidate_time import Pricing, priced
from hf_memkit.plan.judgement import Judged, judged, usable_bytes
from hf_memkit.plan.search import AT_ONCE
from hf_memkit.plan.traces import TraceFile
from hf_memkit.prediction.from_script import predicted_training
from hf_memkit.prediction.running_scripts import RanScript, ScriptJob, checked
from hf_memkit.prediction.trace.request import Device
from hf_memkit.prediction.trace.work import Work
from hf_memkit.prediction.traced_training import RunLength

LENGTHS: Final = ("optimizer steps", "optimizer steps an epoch", "rows an epoch")
"""What `lengths_of` gives."""


def lengths_of(run: RunLength) -> tuple[int | None, ...]:
    """`LENGTHS` of a run; those of an epoch count for one that reaches the end of it."""
    if run.steps is not None and run.steps_an_epoch is not None and run.steps < run.steps_an_epoch:
        return run.steps, None, None
    return run.steps, run.steps_an_epoch, run.rows_an_epoch


def of_trace(
    traced: TraceFile,
    device: Device,
    notes: tuple[str, ...],
    candidate: SetupCandidate,
    job: ScriptJob,
    pricing: Pricing,
) -> Judged:
    training = checked(job.script, traced.outcome())
    ran, enough = RanScript(training, device, notes), usable_bytes(job.machine)
    prediction, _training = predicted_training(ran, job, enough_bytes=enough)
    config = training.engine.config if training.engine is not None else {}
    on_cpu = ZeroSettings.from_config(config).optimizer.device != "none"
    known = training.without_trace()
    found = judged(candidate, prediction, job.machine, training=known, steps_on_cpu=on_cpu)
    work = training.trace.work
    if work is None or device != "cuda":
        return found
    found = replace(found, row_products=_row_products(work, training.arguments.per_device_train_batch_size))
    return priced(found, work, known, pricing, gpus=job.gpus)


def _row_products(work: Work, rows: int) -> frozenset[tuple[int, int, int]]:
    """Products whose two sides are the rows of a micro-batch, or some times as many (pairs, negatives beside them, the
    rows of other GPUs): (times, times, summed dimension). One trace may have one by chance, such as a classifier with
    as many classes; two micro-batches have the same one only if rows are compared."""
    shapes = {each.shape for each in work.operations if each.kind == "matmul" and len(each.shape) == 4}
    return frozenset(
        (m // rows, n // rows, k)
        for batch, m, n, k in shapes
        if batch == 1 and m % rows == n % rows == 0 and max(m, n) <= _MOST_TIMES * rows
    )


_MOST_TIMES: Final = 16
"""More are tokens. Eight GPUs, with pairs."""


def judging_pool() -> ProcessPoolExecutor:
    """Processes that put traces through the allocator: this one has other things to do. Ctrl-C is not theirs."""
    return ProcessPoolExecutor(
        AT_ONCE, mp_context=get_context("fork"), initializer=_in_the_pool, initargs=(os.getpid(),)
    )


def _in_the_pool(parent: int) -> None:
    """Else they would stay where this process is killed, and with them what ends when their copies of its pipes close:
    the process that runs the script."""
    watch(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
