"""One trace, judged in a process of its own: memory, time, and what tells whether the training is the same."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, Final

from hf_memkit.ended_with_parent import watch
from hf_memkit.hardware import Machine
from hf_memkit.plan.candidate import SetupCandidate
from hf_memkit.plan.judged import Judged, judged, usable_bytes
from hf_memkit.plan.pricing import Pricing, priced
from hf_memkit.plan.search import AT_ONCE
from hf_memkit.plan.traces import TraceFile
from hf_memkit.prediction.from_script import predicted_training
from hf_memkit.prediction.running_scripts import RanScript, checked
from hf_memkit.prediction.trace_request import Device
from hf_memkit.prediction.work import Work
from hf_memkit.user_script import UserScript
from hf_memkit.zero.settings import ZeroSettings

LENGTHS: Final = ("optimizer steps", "optimizer steps an epoch", "rows an epoch")
"""What `lengths_of` gives."""


def lengths_of(facts: Mapping[str, Any]) -> tuple[int | None, ...]:
    """`LENGTHS` of a run; those of an epoch count for one that reaches the end of it."""
    steps, an_epoch = facts.get("steps"), facts.get("steps_an_epoch")
    if steps is not None and an_epoch is not None and steps < an_epoch:
        return steps, None, None
    return steps, an_epoch, facts.get("rows_an_epoch")


def of_trace(
    traced: TraceFile,
    device: Device,
    notes: tuple[str, ...],
    candidate: SetupCandidate,
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
        ran, script, machine, gpus=gpus, nodes=1, environment=environment, ram_is_given=ram_is_given,
        enough_bytes=usable_bytes(machine),
    )  # fmt: skip
    about = ran.content["about"]
    config = (about.get("deepspeed") or {}).get("config", {})
    on_cpu = ZeroSettings.from_config(config).optimizer.device != "none"
    found = judged(candidate, prediction, machine, facts=about["plan"], steps_on_cpu=on_cpu)
    if ran.content["trace"].get("work") is None or ran.device != "cuda":
        return found
    work = Work.from_json(ran.content["trace"]["work"])
    found = replace(found, facts={**about["plan"], "row_products": _row_products(work, about["plan"])})
    return priced(found, work, about, pricing, gpus=gpus, accumulation=about["accumulation"])


def _row_products(work: Work, facts: Mapping[str, Any]) -> frozenset[tuple[int, int, int]]:
    """Products whose two sides are the rows of a micro-batch, or some times as many (pairs, negatives beside them, the
    rows of other GPUs): (times, times, summed dimension). One trace may have one by chance, such as a classifier with
    as many classes; two micro-batches have the same one only if rows are compared."""
    rows = facts["arguments"]["per_device_train_batch_size"]
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
