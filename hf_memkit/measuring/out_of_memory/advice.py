"""Selects changes to a failed job from the catalogue (`hf_memkit/setup/techniques/`).

Omits what is on already, does not free the memory that ran out, or makes the run fail. Without records, a row's
`offered` gives places and order; with records, the largest saving comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, cast, get_args

from hf_memkit.measuring.out_of_memory.change import Change
from hf_memkit.measuring.out_of_memory.conditions import ADAPTED, ESTIMATES, WHEN, by_share
from hf_memkit.measuring.out_of_memory.failed_job import FailedJob
from hf_memkit.measuring.out_of_memory.known_messages import NOT_OF_THE_JOB
from hf_memkit.measuring.out_of_memory.message import Memory, OomMessage
from hf_memkit.measuring.out_of_memory.run_view import RunView
from hf_memkit.measuring.out_of_memory.traceback import Feature, TracebackFacts
from hf_memkit.measuring.record_types import ModulesRecord, RunRecord
from hf_memkit.setup.techniques.registry import CATALOGUE, Technique

_FEATURES: Final = frozenset(get_args(Feature))

_SAME_ADVICE: Final[Mapping[str, str]] = {
    "cross entropy": "logits", "optimizer states": "optimizer", "optimizer step": "optimizer",
    "generate": "generation", "gathered weights": "save", "merged adapters": "merge", "backward": "forward",
}  # fmt: skip
"""Places and phases with the same advice as another."""

_HALF: Final = ("half", "fewer", "smaller")

_NOTICED: Final = 0.002
"""A smaller share of the GPU is within the allocator's rounding: its segments have 2 to 20 MiB each."""


def change_for(row: Technique, failed: FailedJob) -> Change | None:
    """The row as a change to this job; None if it does not apply."""
    device = failed.message.device_type
    if row.devices and device not in row.devices and (device is not None or failed.ranked):
        return None
    if failed.uses(*row.unless) or any(failed.argument(name) for name in row.unless if name not in _FEATURES):
        return None
    if row.only_with and not failed.uses(*row.only_with):
        return None
    if row.name in WHEN and not WHEN[row.name](failed):
        return None

    change: Change | None = Change.of(row)
    adapt = (ESTIMATES if failed.ranked else ADAPTED).get(row.name)
    if adapt is not None:
        change = adapt(failed, Change.of(row))
    elif failed.ranked:
        change = by_share(failed, Change.of(row), row.frees)
    return _with_current(change, failed) if change is not None else None


def _with_current(change: Change, failed: FailedJob) -> Change | None:
    """The change with the current value, and with half of that for `half`; None if it is on or cannot be halved."""
    section, _, name = change.key.partition(".")
    if section != "arguments" or change.current is not None:
        return change
    current = failed.argument(name)
    if isinstance(current, Mapping) and isinstance(change.value, Mapping):
        return change if any(current.get(key) != value for key, value in change.value.items()) else None
    if current == change.value:
        return None
    if isinstance(current, bool):
        return change
    is_halved = change.value in _HALF
    if is_halved and isinstance(current, int):
        return replace(change, value=current // 2, current=current) if current >= 2 else None
    shown = (int, float) if is_halved else (str, int, float)
    return replace(change, current=current) if current and isinstance(current, shown) else change


def changes_for(failed: FailedJob, cause: str) -> tuple[Change, ...]:
    """The changes to a job without records, under the user's names of the arguments."""
    memory = failed.message.memory
    if failed.message.form in NOT_OF_THE_JOB or cause in ("index out of range", "corrupt size"):
        return ()
    rows = _rows_for(memory, _place(failed))
    of_batch = failed.trace.place in ("logits", "cross entropy", "attention")
    if memory == "device" and failed.trace.phase == "evaluate" and of_batch:
        rows = [CATALOGUE["small-evaluation-batch"], *rows]
    if memory == "device" and cause in ("context and libraries", "another process"):
        rows = [CATALOGUE["smaller-vllm-share"], *rows]
    changes = _changes_from(rows, failed) or _changes_from(_rows_for(memory, "else"), failed)
    most = 3 if memory == "device" else 4  # the last of which is more RAM or disk
    return tuple(_under_own_name(change, failed.job) for change in changes[:most])


def _rows_for(memory: Memory, place: str) -> list[Technique]:
    """The rows for this memory and place, in order. `host` alone means all places in RAM."""
    key = place if memory == "device" else f"{memory}/{place}"
    turns = [(row.offered.get(key, row.offered.get(memory)), row) for row in CATALOGUE.values()]
    return [row for turn, row in sorted(turns, key=lambda each: each[0] or 0) if turn is not None]


def _changes_from(rows: Iterable[Technique], failed: FailedJob) -> list[Change]:
    """The rows that apply as changes: one for each setting, and all commands."""
    by_key: dict[str, Change] = {}
    for row in rows:
        if row.name == "global-batch" and failed.trace.phase == "evaluate":
            row = CATALOGUE["small-evaluation-batch"]
        if (change := change_for(row, failed)) is not None:
            by_key.setdefault(change.setting, change)
    return list(by_key.values())


def _place(failed: FailedJob) -> str:
    """The key of `offered`: the place of the allocation, else the phase, else `anything`."""
    message = failed.message
    trace = failed.trace
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
    if failed.large_without_frame:
        return "one large tensor"
    prefix = "" if message.memory == "device" else f"{message.memory}/"
    known = {key for row in CATALOGUE.values() for key in row.offered}
    places = [_SAME_ADVICE.get(each, each) for each in (trace.place, trace.phase) if each is not None]
    return next((each for each in places if prefix + each in known), "anything")


def _under_own_name(change: Change, job: RunView) -> Change:
    """The change under the argument's name in the user's file."""
    section, _, name = change.key.partition(".")
    theirs = job.names.get(name) if section == "arguments" else None
    return replace(change, key=f"arguments.{theirs}") if theirs is not None else change


def suggest(
    run: RunRecord, moment: Mapping[str, Any], *, modules: ModulesRecord | None = None, limit: int = 3
) -> list[Change]:
    """The changes with the largest savings for this job, largest first; other methods of training come last.

    One of the `limit` changes has a measured saving, if there is any.

    Args:
        run: the `run` record.
        moment: an `OomRecord`, or the `StepRecord` of the highest peak; its `cause` selects the kind of change.
        modules: the `modules` record, which gives the saving of an 8-bit optimizer.
        limit: maximum number of changes.
    """
    job = RunView(run, moment, modules)
    if job.cause == "kernel resources":
        return []
    in_ram = job.cause in ("host memory", "shared memory")
    memory: Memory = "host" if in_ram else "device"
    message = OomMessage("record", "PyTorch", memory, device_type=job.hardware.get("device_type"))
    failed = FailedJob(message, TracebackFacts(phase=cast(Any, job.phase)), job, ranked=True)

    # Too small to matter, such as smaller states of a few adapters; unknown without categories.
    negligible_gib = _NOTICED * job.hardware.get("capacity_gib", 0.0) if job.categories else 0.0
    same_method: list[Change] = []
    other_methods: list[Change] = []
    for row in CATALOGUE.values():
        if not row.settings or row.in_ram_only is not in_ram:
            continue
        change = change_for(row, failed)
        if change is None or change.at_most_gib is None or 0 < change.at_most_gib < negligible_gib:
            continue
        (other_methods if row.group == "another method" else same_method).append(change)

    chosen: dict[str, Change] = {}  # one value for each setting
    for changes in (same_method, other_methods):
        for change in sorted(changes, key=lambda change: -(change.at_most_gib or 0.0)):
            chosen.setdefault(change.setting, change)
    first = list(chosen.values())[:limit]
    measured = next((change for change in chosen.values() if change.saves_gib is not None), None)
    if len(first) > 1 and measured is not None and measured not in first:
        return [*first[:-1], measured]
    return first


def changes_for_run(
    run: RunRecord,
    moment: Mapping[str, Any],
    message: OomMessage | None,
    cause: str | None,
    modules: ModulesRecord | None = None,
    phase: Any = None,
) -> list[Change]:
    """The changes to a job with records; for memory outside the GPU, the catalogue's order with measured savings."""
    measured = suggest(run, {**moment, "cause": cause} if cause is not None else moment, modules=modules)
    if message is None or message.memory == "device" or cause not in ("host memory", "shared memory"):
        return measured
    by_key = {change.key: change for change in measured}
    changes = changes_for(FailedJob(message, TracebackFacts(phase=phase), RunView(run, moment)), cause)
    return [by_key.get(change.key, change) for change in changes]


def grows_with_the_batch(trace: TracebackFacts) -> bool:
    """Whether the allocation may depend on the batch, not on the model alone."""
    model_only = ("optimizer states", "optimizer step", "gathered weights", "merged adapters")
    phases = ("load", "resume", "save", "optimizer", "best_model", "merge")
    return trace.place not in model_only if trace.place else trace.phase not in phases
