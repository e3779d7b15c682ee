"""What to change. In: a failed job, or a run's records. Out: rows of the catalogue (`hf_memkit/setup/techniques/`) as
changes to that job, without what is on already, cannot touch the memory that ran out, or would make the run fail.

From a message alone, a row's `offered` says where it is proposed, and in which order. With records, what saves most
comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, cast, get_args

from hf_memkit.measuring.out_of_memory.change import Change
from hf_memkit.measuring.out_of_memory.conditions import ADAPTED, ESTIMATES, WHEN, by_share
from hf_memkit.measuring.out_of_memory.failed_job import FailedJob
from hf_memkit.measuring.out_of_memory.message import Memory, OomMessage
from hf_memkit.measuring.out_of_memory.run_view import RunView
from hf_memkit.measuring.out_of_memory.traceback import Feature, Traced
from hf_memkit.measuring.record_types import ModulesRecord, RunRecord
from hf_memkit.setup.techniques.registry import CATALOGUE, Technique

_FEATURES: Final = frozenset(get_args(Feature))

_SAME_ADVICE: Final[Mapping[str, str]] = {
    "cross entropy": "logits", "optimizer states": "optimizer", "optimizer step": "optimizer",
    "generate": "generation", "gathered weights": "save", "merged adapters": "merge", "backward": "forward",
}  # fmt: skip
"""Places and phases with the advice of another."""

_HALF: Final = ("half", "fewer", "smaller")

_MOST: Final[Mapping[Memory, int]] = {"device": 3}
"""Changes at most; four for other memory, whose last one is more of it."""

_NOT_OF_THE_JOB: Final = (
    "xla", "tensorflow", "vllm-cache", "vllm-start", "deepspeed-mlock", "deepspeed-buffers", "deepspeed-buffer-size",
    "compiler-killed",
)  # fmt: skip
"""Forms whose fix is that of the cause alone."""

_NOTICED: Final = 0.002
"""Share of the GPU. Less is within the allocator's rounding: its segments have 2 to 20 MiB each."""


def change_for(row: Technique, failed: FailedJob) -> Change | None:
    """The row as a change to this job; None where it does not apply."""
    device, given = failed.message.device_type, [name for name in row.unless if name not in _FEATURES]
    if row.devices and device not in row.devices and (device is not None or failed.ranked):
        return None
    if failed.uses(*row.unless) or any(map(failed.argument, given)):
        return None
    if row.only_with and not failed.uses(*row.only_with):
        return None
    if row.name in WHEN and not WHEN[row.name](failed):
        return None
    change: Change | None = Change.of(row)
    if failed.ranked and row.name not in ESTIMATES:
        change = by_share(failed, Change.of(row), row.frees)
    elif (adapt := (ESTIMATES if failed.ranked else ADAPTED).get(row.name)) is not None:
        change = adapt(failed, Change.of(row))
    return _with_current(change, failed) if change is not None else None


def _with_current(change: Change, failed: FailedJob) -> Change | None:
    """The change with the present value, and with half of it where it asks for that; None below 2, and if it is on."""
    section, _, name = change.key.partition(".")
    current = failed.argument(name)
    if section != "arguments" or change.current is not None:
        return change
    if current == change.value:
        return None
    if isinstance(current, bool):
        return change
    if change.value in _HALF and isinstance(current, int):
        return replace(change, value=current // 2, current=current) if current >= 2 else None
    shown = (int, float) if change.value in _HALF else (str, int, float)
    return replace(change, current=current) if current and isinstance(current, shown) else change


def changes_for(failed: FailedJob, cause: str) -> tuple[Change, ...]:
    """What to change where no records give figures, under the user's own names of the arguments."""
    memory = failed.message.memory
    if failed.message.form in _NOT_OF_THE_JOB or cause in ("index out of range", "corrupt size"):
        return ()
    first = []
    if memory == "device" and cause in ("context and libraries", "another process"):
        first.append("smaller-vllm-share")
    of_batch = failed.trace.place in ("logits", "cross entropy", "attention")
    if memory == "device" and failed.trace.phase == "evaluate" and of_batch:
        first.append("small-evaluation-batch")
    rows = [*map(CATALOGUE.__getitem__, first), *_offered(memory, _place(failed))]
    changes = _applied(rows, failed) or _applied(_offered(memory, "else"), failed)
    return tuple(_renamed(change, failed.job) for change in changes)[: _MOST.get(memory, 4)]


def _offered(memory: Memory, place: str) -> list[Technique]:
    """What is proposed for this memory and place, in order. A row that is offered for `host` is for all places."""
    key = place if memory == "device" else f"{memory}/{place}"
    turns = [(row.offered.get(key, row.offered.get(memory)), row) for row in CATALOGUE.values()]
    return [row for turn, row in sorted(turns, key=lambda each: each[0] or 0) if turn is not None]


def _applied(rows: Iterable[Technique], failed: FailedJob) -> list[Change]:
    """The changes that remain for this job. Two values for one setting are no advice; two commands are."""
    by_key: dict[str, Change] = {}
    for row in rows:
        if row.name == "global-batch" and failed.trace.phase == "evaluate":
            row = CATALOGUE["small-evaluation-batch"]
        if (change := change_for(row, failed)) is not None:
            by_key.setdefault(change.assignment if change.key == "command" else change.key, change)
    return list(by_key.values())


def _place(failed: FailedJob) -> str:
    """What the memory was for: the place, else the phase, else anything."""
    message, trace = failed.message, failed.trace
    in_a_step = trace.place is None and trace.phase in (None, "forward", "backward")
    if message.memory == "pinned":
        return next((library for library in ("DeepSpeed", "unsloth") if library in trace.in_use), "anything")
    if message.memory == "shared memory":
        return "NCCL" if message.form.startswith("nccl") else "anything"
    if message.memory == "host":
        if message.form == "bitsandbytes-managed":
            return "managed memory"
        if message.form.startswith("dataloader") or (failed.recorded and trace.phase == "data"):
            return "data loader"
        if in_a_step and failed.uses("offload"):
            return "offload"
    if message.memory == "device" and trace.place == "generation" and trace.library == "vLLM":
        return "vLLM"
    if message.form == "dispatched":
        return "dispatched"
    if message.memory == "device" and in_a_step and failed.larger_by > 1:
        return "larger than the GPU"
    if failed.large_and_unknown:
        return "one large tensor"
    prefix = "" if message.memory == "device" else f"{message.memory}/"
    known = {key for row in CATALOGUE.values() for key in row.offered}
    places = [_SAME_ADVICE.get(each, each) for each in (trace.place, trace.phase) if each is not None]
    return next((each for each in places if prefix + each in known), "anything")


def _renamed(change: Change, job: RunView) -> Change:
    """The change under the name that the user's file has for the argument."""
    section, _, name = change.key.partition(".")
    own = job.names.get(name) if section == "arguments" else None
    return replace(change, key=f"arguments.{own}") if own is not None else change


def suggest(
    run: RunRecord, moment: Mapping[str, Any], *, modules: ModulesRecord | None = None, limit: int = 3
) -> list[Change]:
    """The changes that save most for this job, largest first; changes to what is trained come last.

    If the largest have no figure, the last place goes to a change with a measured saving, if there is one.

    Args:
        run: the `run` record.
        moment: an `OomRecord`, or the `StepRecord` of the highest peak; `cause` in it selects the kind of change.
        modules: the `modules` record, which gives the saving of an 8-bit optimizer.
        limit: maximum number of changes.
    """
    job = RunView(run, moment, modules)
    if job.cause == "kernel resources":
        return []
    in_ram = job.cause in ("host memory", "shared memory")
    memory: Memory = "host" if in_ram else "device"
    message = OomMessage("record", "PyTorch", memory, device_type=job.hardware.get("device_type"))
    failed = FailedJob(message, Traced(phase=cast(Any, job.phase)), job, ranked=True)
    proposals = [
        (row.group == "another method", -change.at_most_gib, change)
        for row in CATALOGUE.values()
        if row.settings and row.in_ram_only is in_ram and (change := change_for(row, failed)) is not None
        and change.at_most_gib is not None and not _too_little(job, change.at_most_gib)
    ]  # fmt: skip
    chosen: dict[str, Change] = {}
    for _, _, change in sorted(proposals, key=lambda proposal: proposal[:2]):
        chosen.setdefault(change.key, change)  # two values for one setting are no advice
    changes = list(chosen.values())
    first, measured = changes[:limit], [change for change in changes if change.saves_gib is not None]
    if len(first) > 1 and measured and measured[0] not in first:
        return [*first[:-1], measured[0]]  # it is the one to count on
    return first


def _too_little(job: RunView, at_most_gib: float) -> bool:
    """Whether a change costs something and saves nothing noticeable, such as smaller states of a few adapters."""
    capacity = job.hardware.get("capacity_gib")
    return capacity is not None and bool(job.categories) and 0 < at_most_gib < _NOTICED * capacity


def changes_for_run(
    run: RunRecord,
    moment: Mapping[str, Any],
    message: OomMessage | None,
    cause: str | None,
    modules: ModulesRecord | None = None,
    phase: Any = None,
) -> list[Change]:
    """What to change in a job with records: with measured savings, and outside the GPU by the table too."""
    measured = suggest(run, {**moment, "cause": cause} if cause is not None else moment, modules=modules)
    if message is None or message.memory == "device" or cause not in ("host memory", "shared memory"):
        return measured
    by_key = {change.key: change for change in measured}
    table = changes_for(FailedJob(message, Traced(phase=phase), RunView(run, moment)), cause)
    return [by_key.get(change.key, change) for change in table]


def grows_with_the_batch(trace: Traced) -> bool:
    """Whether a smaller batch may shrink the allocation; False if it depends on the model alone."""
    model_only = ("optimizer states", "optimizer step", "gathered weights", "merged adapters")
    phases = ("load", "resume", "save", "optimizer", "best_model", "merge")
    return trace.place not in model_only if trace.place else trace.phase not in phases
