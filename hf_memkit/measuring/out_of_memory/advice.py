"""What to change, by what is known: which memory ran out, in which phase or for what, and what is in use already.
`_OFFERED` is the whole of it: for each memory and place, the changes in the order in which they are offered.

A change is left out where it is on already, where it cannot touch that memory, or where the run would fail with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from hf_memkit.measuring.out_of_memory import gpu_changes as gpu
from hf_memkit.measuring.out_of_memory import ram_changes as ram
from hf_memkit.measuring.out_of_memory.change import Change
from hf_memkit.measuring.out_of_memory.failed_job import FailedJob
from hf_memkit.measuring.out_of_memory.message import Memory, OomMessage
from hf_memkit.measuring.out_of_memory.run_view import RunView
from hf_memkit.measuring.out_of_memory.suggestions import suggest
from hf_memkit.measuring.out_of_memory.traceback import Traced
from hf_memkit.measuring.record_types import ModulesRecord, RunRecord

Technique = Change | Callable[[FailedJob], Change | None]
"""A change, or what gives it for a job."""
Techniques = tuple[Technique, ...]

_LOSS: Final[Techniques] = (gpu.fused_loss, gpu.chunked_loss, gpu.batch, gpu.length)
_PREDICTIONS: Final[Techniques] = (gpu.small_predictions, gpu.accumulated, gpu.batch_metrics, gpu.only_loss)
_STATES: Final[Techniques] = (gpu.eight_bit, gpu.offload, gpu.adapters)

_ON_GPU: Final[Mapping[str, Techniques]] = {
    # what the frames show was being made
    "logits": _LOSS,
    "cross entropy": _LOSS,
    "attention": (gpu.attention, gpu.batch, gpu.length, gpu.checkpointing),
    "optimizer states": _STATES,
    "optimizer step": (gpu.fused_optimizer, *_STATES),
    "recomputation": (gpu.batch, gpu.length, gpu.eight_bit),
    "predictions of an evaluation": _PREDICTIONS,
    "generation": (gpu.vllm_share, gpu.eval_batch, gpu.generated_length),
    "vLLM": (gpu.vllm_share, gpu.vllm_server, gpu.vllm_split),  # its weights and its cache, which no batch sizes
    "gathered weights": (gpu.saved_shards, gpu.only_model),
    "merged adapters": (gpu.MERGE_LATER,),
    "larger than the GPU": (gpu.batch, gpu.fused_loss, gpu.attention, gpu.length),  # a smaller tensor, whatever it is
    "one large tensor": (gpu.batch, gpu.fused_loss, gpu.checkpointing, gpu.attention, gpu.length),
    # else the phase
    "load": (gpu.half_weights, gpu.four_bit, gpu.sharded_weights, gpu.old_processes, gpu.smaller_model),
    "dispatched": (gpu.four_bit, gpu.old_processes, gpu.ALL_ON_ONE_GPU, gpu.smaller_model),  # by a device_map
    "resume": (gpu.old_processes, gpu.saved_shards, gpu.fresh_optimizer),
    "optimizer": _STATES,  # activations are gone by then
    "evaluate": (gpu.eval_batch, *_PREDICTIONS),
    "generate": (gpu.vllm_share, gpu.eval_batch, gpu.generated_length),
    "save": (gpu.saved_shards, gpu.only_model),
    "best_model": (gpu.BEST_MODEL_LATER,),
    "merge": (gpu.MERGE_LATER,),
    "after": (gpu.NEW_PROCESS, gpu.eval_batch, gpu.saved_shards),
    # else
    "": (gpu.batch, gpu.checkpointing, gpu.eight_bit, gpu.length),
}

_IN_RAM: Final[Mapping[str, Techniques]] = {
    "optimizer states": (ram.less_offload, gpu.adapters, ram.more_ram),
    "optimizer step": (ram.less_offload, gpu.adapters, ram.more_ram),
    "predictions of an evaluation": (gpu.small_predictions, gpu.batch_metrics, gpu.only_loss, ram.more_ram),
    "gathered weights": (gpu.saved_shards, gpu.only_model, ram.more_ram),
    "merged adapters": (ram.more_ram,),
    "data loader": (ram.fewer_workers, ram.more_ram),
    "managed memory": (ram.unpaged_states, ram.more_for_wsl),
    "load": (gpu.half_weights, ram.straight_to_gpu, ram.one_copy_of_weights, ram.more_ram),
    "resume": (ram.FEWER_PROCESSES, gpu.fresh_optimizer, ram.more_ram),
    "data": (ram.fewer_map_processes, ram.smaller_map_batches, ram.streamed_data, ram.more_ram),
    "forward": (gpu.batch, gpu.checkpointing, gpu.length, ram.more_ram),  # a training on the CPU
    "backward": (gpu.batch, gpu.checkpointing, gpu.length, ram.more_ram),
    "optimizer": (ram.less_offload, gpu.adapters, ram.more_ram),
    "evaluate": (gpu.small_predictions, gpu.batch_metrics, gpu.only_loss, ram.fewer_workers, ram.more_ram),
    "save": (gpu.saved_shards, gpu.only_model, ram.more_ram),
    "best_model": (gpu.BEST_MODEL_LATER, ram.more_ram),
    "merge": (ram.more_ram,),
    "after": (gpu.NEW_PROCESS, gpu.saved_shards, gpu.small_predictions, ram.more_ram),
    "offload": (ram.less_offload, ram.fewer_workers, ram.more_ram),
    "": (ram.fewer_workers, ram.less_offload, ram.more_ram),
}

_OFFERED: Final[Mapping[Memory, Mapping[str, Techniques]]] = {
    "device": _ON_GPU,
    "host": _IN_RAM,
    "pinned": {
        "DeepSpeed": (ram.pageable_states, ram.more_for_wsl, ram.pageable_batches),
        "unsloth": (ram.torch_checkpointing, ram.more_for_wsl, ram.pageable_batches),
        "": (ram.pageable_batches, ram.pageable_states, ram.more_for_wsl),
    },
    "shared memory": {"nccl": (), "": (ram.no_workers,)},
    "disk": {
        "save": (ram.fewer_checkpoints, gpu.only_model),
        "load": (ram.CACHE_ELSEWHERE,),
        "data": (ram.CACHE_ELSEWHERE,),
        "": (ram.fewer_checkpoints, gpu.only_model, ram.CACHE_ELSEWHERE),
    },
    "kernel": {"": ()},
}
"""Memory → place, phase, or `""` for neither → what is offered, in this order."""

_ELSE: Final[Mapping[Memory, Techniques]] = {
    "device": (gpu.old_processes, gpu.fresh_optimizer, gpu.smaller_model),
    "host": (ram.more_ram,),
}
"""What is offered where all of the row is on already."""

_MOST: Final[Mapping[Memory, int]] = {"device": 3}
"""Changes at most; four for other memory, whose last one is more of it."""

_NOT_OF_THE_JOB: Final = (
    "xla", "tensorflow", "vllm-cache", "vllm-start", "deepspeed-mlock", "deepspeed-buffers", "deepspeed-buffer-size",
    "compiler-killed",
)  # fmt: skip
"""Forms whose fix is that of the cause alone."""


def changes_for(failed: FailedJob, cause: str) -> tuple[Change, ...]:
    """What to change, by the table, under the user's own names of the arguments."""
    memory = failed.message.memory
    if failed.message.form in _NOT_OF_THE_JOB or cause in ("index out of range", "corrupt size"):
        return ()
    techniques = _OFFERED[memory][_row(failed)]
    of_the_batch = failed.trace.place in ("logits", "cross entropy", "attention")
    if memory == "device" and failed.trace.phase == "evaluate" and of_the_batch:
        techniques = (gpu.eval_batch, *techniques)
    if memory == "device" and cause in ("context and libraries", "another process"):
        techniques = (gpu.vllm_share, *techniques)
    found = _applied(techniques, failed) or _applied(_ELSE.get(memory, ()), failed)
    return tuple(_renamed(change, failed.job) for change in found)[: _MOST.get(memory, 4)]


def _applied(techniques: Techniques, failed: FailedJob) -> list[Change]:
    """The changes that remain for this job. Two values for one setting are no advice; two commands are."""
    found: dict[str, Change] = {}
    for technique in techniques:
        change = technique if isinstance(technique, Change) else technique(failed)
        if change is not None:
            found.setdefault(change.assignment if change.key == "command" else change.key, change)
    return list(found.values())


def _row(failed: FailedJob) -> str:
    """The row of the table for that memory: the place, else the phase, else neither."""
    message, rows = failed.message, _OFFERED[failed.message.memory]
    in_a_step = failed.trace.place is None and failed.trace.phase in (None, "forward", "backward")
    if message.memory == "pinned":
        return next((library for library in rows if library in failed.trace.in_use), "")
    if message.memory == "shared memory":
        return "nccl" if message.form.startswith("nccl") else ""
    if message.memory == "host":
        if message.form == "bitsandbytes-managed":
            return "managed memory"
        if message.form.startswith("dataloader") or (failed.recorded and failed.trace.phase == "data"):
            return "data loader"
        if in_a_step and failed.uses("offload"):
            return "offload"
    if message.memory == "device" and failed.trace.place == "generation" and failed.trace.library == "vLLM":
        return "vLLM"
    if message.form == "dispatched":
        return "dispatched"
    if message.memory == "device" and in_a_step and failed.larger_by > 1:
        return "larger than the GPU"
    if failed.large_and_unknown:
        return "one large tensor"
    return next((row for row in (failed.trace.place, failed.trace.phase) if row is not None and row in rows), "")


def _renamed(change: Change, job: RunView) -> Change:
    """The change under the name that the user's file has for the argument."""
    section, _, name = change.key.partition(".")
    own = job.names.get(name) if section == "arguments" else None
    return replace(change, key=f"arguments.{own}") if own is not None else change


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
