"""Record the exception that ends a training, while its frames and tensors exist: `oom` and `end` records, advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from hf_memkit.common.terms import Phase
from hf_memkit.common.units import GIB
from hf_memkit.measuring.callback.oom_note import OomNote, frames, note_from_record, out_of_memory
from hf_memkit.measuring.memory.error_barrier import ErrorBarrier
from hf_memkit.measuring.memory.recorder import RunRecorder
from hf_memkit.measuring.memory.records import read_records
from hf_memkit.measuring.memory.snapshot import write_snapshot
from hf_memkit.measuring.out_of_memory import OomMessage, explain_records
from hf_memkit.measuring.record_types import ModulesRecord, OomRecord, RunRecord, Status

_LONGEST_ERROR: Final = 4000

# Trainer has no event for the start of an evaluation or a save; its methods are in the traceback.
_PHASE_OF_METHOD: Final[dict[str, Phase]] = {
    "evaluate": "evaluate",
    "evaluation_loop": "evaluate",
    "prediction_step": "evaluate",
    "_save_checkpoint": "save",
}


def record_exception(
    error: BaseException,
    recorder: RunRecorder,
    barrier: ErrorBarrier,
    *,
    global_step: int,
    snapshot: bool,
    ctrl_c: bool,
) -> OomNote | None:
    """Write the `end` record, and before it an `oom` record if memory ran out; returns the note on such an error.

    Args:
        barrier: catches errors of measuring.
        global_step: finished optimizer steps.
        snapshot: write the allocator's state too.
        ctrl_c: Ctrl-C was pressed, so that any error but out-of-memory follows from it.
    """
    advice = None
    match = barrier.call("out of memory?", out_of_memory, error)
    if match is not None:
        oom, message = match
        record: dict[str, Any] = {"error_type": type(oom).__name__, "error": str(oom)[:_LONGEST_ERROR]}
        record |= barrier.call("oom record", recorder.oom_fields) or {}
        record |= barrier.call("oom message", _message_sizes, message) or {}
        record["phase"] = barrier.call("phase", _phase, error) or record.get("phase", recorder.tracker.phase)
        record |= barrier.call("evaluation", _evaluation, error) or {}
        record["step"] = global_step + (record["phase"] not in ("evaluate", "save"))
        if snapshot:
            record |= barrier.call("snapshot", _snapshot, recorder.writer.path) or {}
        advice = barrier.call("advice", _advise, record, recorder, message)
        recorder.writer.write("oom", record)
    stopped = isinstance(error, KeyboardInterrupt | SystemExit) or (ctrl_c and match is None)
    status: Status = "interrupted" if stopped else "failed"
    barrier.call("end", recorder.end, status, error)
    return advice


def _message_sizes(message: OomMessage | None) -> dict[str, float]:
    sizes = {name: getattr(message, f"{name}_bytes", None) for name in ("requested", "free", "capacity", "process")}
    return {f"{name}_gib": size / GIB for name, size in sizes.items() if size is not None}


def _phase(error: BaseException) -> Phase | None:
    from transformers import Trainer

    for frame in frames(error):
        phase = _PHASE_OF_METHOD.get(frame.f_code.co_name)
        if phase is not None and isinstance(frame.f_locals.get("self"), Trainer):
            return phase
    return None


def _evaluation(error: BaseException) -> dict[str, bool]:
    """Whether the failed evaluation kept predictions (transformers 5.23: trainer.py, `evaluation_loop`)."""
    for frame in frames(error):
        only_loss = frame.f_locals.get("prediction_loss_only")
        if frame.f_code.co_name == "evaluation_loop" and isinstance(only_loss, bool):
            return {"prediction_loss_only": only_loss}
    return {}


def _snapshot(records: Path) -> dict[str, str]:
    path = records.with_name(records.name.replace("memory-", "memory-snapshot-")).with_suffix(".json")
    write_snapshot(path)
    return {"snapshot": path.name}


def _advise(record: dict[str, Any], recorder: RunRecorder, message: OomMessage | None) -> OomNote:
    """The advice; adds `cause` and `changes` to `record`."""
    path = recorder.writer.path
    records = read_records(path) if path.exists() else []
    of_run = [known for known in records if known.get("run_id") == recorder.writer.run_id]
    kinds = {known["kind"]: known for known in of_run if "kind" in known}
    run = cast(RunRecord, kinds.get("run", {}))
    modules = cast(ModulesRecord | None, kinds.get("modules"))
    explanation = explain_records(run, cast(OomRecord, record), modules=modules)
    if explanation.verdict is not None and (message is not None or explanation.verdict.cause != "unknown"):
        record["cause"] = explanation.verdict.cause
    else:  # words of a later version
        explanation = replace(explanation, verdict=None)
    record["changes"] = [change.to_json() for change in explanation.changes]
    return note_from_record(record, run, explanation, path)
