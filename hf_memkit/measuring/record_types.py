"""The records of a training: which there are, and what each of their fields is. Types, field by field.

`memory-rank{R}.jsonl` has one JSON object a line, and each is one of `RECORDS`. Whoever writes records, reads them or
makes them for a test goes by these classes; what a report takes from a file of unknown origin
(`measuring/report/sanitize.py`) follows from them.

A field's unit is the end of its name: `_gib` (2**30 bytes), `_ms`; `time` and `process_started` are seconds since the
epoch, `bytes` are bytes, other numbers are counts. What is not known is absent, never null nor zero, so a reader must
expect any field to be missing (`total=False`). `Absent:` in a field's words says when, if that is not plain from them,
and `Source:` where a number comes from. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypedDict

from hf_memkit.common.terms import Phase, Place


class CategorySizes(TypedDict, total=False):
    """Bytes by what they hold; at a peak they add up to it."""

    weights_gib: float
    """Parameters and buffers of the model."""
    gradients_gib: float
    """Gradients."""
    optimizer_gib: float
    """The optimizer's states, and fp32 copies of weights."""
    activations_gib: float
    """What forward keeps for backward."""
    loss_gib: float
    """Logits and what the loss makes of them."""
    buffers_gib: float
    """Communication buckets, gathered and prefetched parameters, workspaces."""
    other_gib: float
    """Memory of no known category."""


class PhasePeaks(TypedDict, total=False):
    """The highest values within one phase."""

    peak_allocated_gib: float
    """The highest allocated."""
    peak_reserved_gib: float
    """The highest reserved."""


class Counters(TypedDict, total=False):
    """Counters at one moment. A number that a device cannot give is absent, never zero."""

    allocated_gib: float
    """Tensors on the GPU, in blocks of the allocator (CUDA rounds to 512 bytes). Source: torch's allocator."""
    reserved_gib: float
    """Memory that the allocator has taken from the driver; it returns little of it. Source: torch's allocator."""
    fragmentation_gib: float
    """Reserved minus allocated: free memory inside the allocator's segments. Source: the two above."""
    alloc_retries: int
    """How often the allocator freed its cache and retried, since the process started. Source: torch's allocator."""
    allocator_ooms: int
    """How often an allocation failed, since the process started. Source: torch's allocator."""
    device_used_gib: float
    """All memory used on the GPU, read together with the allocator's counters. Source: NVML. Absent: between two
    readings."""
    outside_allocator_gib: float
    """This process outside the allocator: CUDA context, NCCL, libraries. Source: NVML. Absent: between two
    readings."""
    other_processes_gib: float
    """Other processes on the GPU. Source: NVML. Absent: between two readings."""
    host_rss_gib: float
    """RSS of this process. Source: `/proc/self/statm`, elsewhere psutil."""
    host_available_gib: float
    """Available RAM, within the container's limit (cgroup 1 and 2). Source: psutil and `/sys/fs/cgroup`."""
    pinned_gib: float
    """Page-locked RAM of torch's own allocator, cached blocks included. Source: `torch.cuda.host_memory_stats`.
    Absent: between two readings."""
    disk_swap_gib: float
    """This process's ZeRO-Infinity files. Source: the folder of `nvme_path`. Absent: between two readings."""
    capacity_gib: float
    """GPU memory. Source: torch."""


class Peaks(TypedDict, total=False):
    """The highest values since the last recorded boundary."""

    peak_allocated_gib: float
    """The highest allocated. Source: torch's peak counters."""
    peak_reserved_gib: float
    """The highest reserved. Source: torch's peak counters."""
    phases: dict[Phase, PhasePeaks]
    """The same for each phase. Absent: with `phases=False`, and for a model compiled as one graph."""


class Measured(Counters, Peaks, total=False):
    """Counters now, and the highest values until now."""


class InputSizes(TypedDict, total=False):
    """What went through the model, by the shape of its main input."""

    samples: int
    """Sequences, images …"""
    tokens: int
    """Size of the main input, with padding. Absent: for input other than text."""
    longest_sequence: int
    """Tokens of the longest sequence. Absent: for input other than text."""


class CompilationCounts(TypedDict, total=False):
    """What torch.compile did since the training began. Source: the counters of `torch._dynamo`."""

    graphs: int
    """Compiled graphs."""
    graph_breaks: int
    """Places at which torch ended a graph; again for each compilation."""
    graph_break_reasons: list[str]
    """The first few, with file and line. Absent: none."""
    recompilations: int
    """Compilations of a function after its first, because its inputs changed."""
    recompile_reasons: list[str]
    """The first few, with the function's file and line. Absent: none."""
    given_up: int
    """Functions that reached torch's limit of recompilations, and run uncompiled since."""
    compile_time_ms: float
    """Time spent compiling."""


class Compiled(TypedDict, total=False):
    """What a record has if torch compiled. Absent: in `step`, `evaluate` and `save`, if torch neither compiled a graph
    nor gave up since the last record; in `oom` and `end`, if it did not at all."""

    compilation: CompilationCounts
    """Figures since the training began."""
    compiled_graphs: int
    """Graphs compiled since the last record. Absent: in `oom` and `end`."""


class _Record(TypedDict, total=False):
    """What every record has."""

    schema: int
    """Version of this format."""
    kind: str
    """Kind of record."""
    time: float
    """When it was written."""
    run_id: str
    """The training that wrote it: the `run` record starts a new one. Absent: written by an earlier memkit."""


class HostFacts(TypedDict, total=False):
    """Machine and process; a report uses them to check whether the process is still running."""

    hostname: str
    """Host name."""
    boot_id: str
    """Boot ID of the machine. Absent: except on Linux."""
    pid: int
    """Process ID."""
    process_started: float
    """Start time of the process. It moves if the clock is set."""
    process_start_ticks: int
    """Start time of the process, in clock ticks since the boot. Absent: except on Linux."""
    oom_kills: int
    """The control group's count of killed processes at the start. Absent: without cgroup 2."""


class HardwareFacts(TypedDict, total=False):
    """The machine, and the GPU used for training."""

    device_name: str
    """GPU name as torch gives it; architecture of a CPU."""
    device_type: str
    """`cuda`, `xpu`, `mps`, `cpu`."""
    device_count: int
    """GPUs visible to the process. Absent: on a CPU."""
    capacity_gib: float
    """GPU memory. Absent: on a CPU."""
    allocator_cap_fraction: float
    """The allocator's cap, as a share of GPU memory. Absent: for an allocator without a cap."""
    allocator_settings: str
    """`PYTORCH_ALLOC_CONF`, under whichever of its names. Absent: not set."""
    cpu_count: int
    """Logical cores."""
    ram_gib: float
    """Installed RAM."""
    ram_limit_gib: float
    """The cgroup's limit. Absent: without one."""


class AfterOom(TypedDict, total=False):
    """The attempt before this one, which ran out of memory; `auto_find_batch_size` does not report it."""

    step: int
    """The step under way."""
    phase: str
    """What it was doing."""
    train_batch_size: int
    """Its micro-batch."""


class PredictedFigures(TypedDict, total=False):
    """A prediction as `memkit predict --json` prints it: the fields that a report compares with measurements."""

    peak_allocated_gib: float
    """The highest allocated."""
    peak_reserved_gib: float | list[float]
    """The highest reserved: `[low, high]`."""
    phases: dict[Phase, PhasePeaks]
    """Peaks of each phase."""
    categories: CategorySizes
    """At the peak."""
    step_time_ms: float | list[float]
    """Time of an optimizer step: `[low, middle, high]`. Source: a plan."""


class RunRecord(_Record, Measured, total=False):
    """The start of a training: model, arguments, machine. Its line ends with 2 KiB of blanks; on a full disk `lost`
    or `end` replaces them. Counters and peaks are those of the phase `load`."""

    start_step: int
    """Finished steps that training continues from; later ones in the file are discarded."""
    rank: int
    """Rank of the process."""
    world_size: int
    """Processes that train together."""
    host: HostFacts
    """Machine and process."""
    versions: dict[str, str]
    """Versions of memkit, Python and the packages that affect memory, by name."""
    hardware: HardwareFacts
    """The machine."""
    arguments: dict[str, Any]
    """TrainingArguments that affect memory, under the names of current transformers; `deepspeed_stage`,
    `deepspeed_offload_optimizer` and `deepspeed_offload_param` from its configuration, `fsdp_config` as in effect."""
    model_class: str
    """Class of the model."""
    model_type: str
    """`model_type` of its config. Absent: without a config."""
    vocabulary: int
    """Vocabulary size. Absent: for a model without one."""
    weights_dtypes: dict[str, int]
    """Number of parameters by dtype."""
    attention: str
    """Attention implementation in the config."""
    engine: str
    """Class that wraps the model for training. `FSDP2`: torch's `fully_shard` changed the
    model in place. Absent: else where the callback was given to the Trainer, not attached."""
    optimizer_classes: list[str]
    """From the outer wrapper to the optimizer itself."""
    parameters: int
    """Number of parameters, before ZeRO-3 or FSDP2 splits them."""
    trainable_parameters: int
    """Number of trainable parameters."""
    facts: dict[str, Any]
    """The user's `run_facts`. A recipe adds its `recipe`, `variant`, `setup` and, in a rehearsal,
    `target_prediction`."""
    prediction: PredictedFigures
    """The callback's `prediction`, or that of the plan of `memkit run --plan`."""
    after_oom: AfterOom
    """The attempt before. Absent: except after an OOM that `auto_find_batch_size` caught."""
    train_batch_size: int
    """Current micro-batch size. Absent: without `after_oom`."""


ModuleFigures = TypedDict(
    "ModuleFigures",
    {
        "name": str, "class": str, "parameters": int, "trainable_parameters": int, "bytes": int,
        "places": dict[str, int], "repeats": int,
    },
    total=False,
)  # fmt: skip
"""One module, or a row of equal ones; the figures are those of one.

name: Name in the model; for equal layers `h.0…47`.
class: Class of the module.
parameters: Its own, before ZeRO-3 partitioning; a shared tensor counts in the first module that has it.
trainable_parameters: Trainable ones.
bytes: Held by this process.
places: The same bytes by place: `device`, `host`, `pinned`; `elsewhere` for another accelerator.
repeats: Number of equal modules. Absent: one.
"""


class ModulesRecord(_Record, total=False):
    """The table by module, after `run`."""

    rows: list[ModuleFigures]
    """One row a module, in the model's order."""


class StepRecord(_Record, InputSizes, Measured, Compiled, total=False):
    """One optimizer step, or several: the first 5 000 have a record each, later records cover 2, 4, 8 … steps, so that
    the file grows with the logarithm of the run's length; a step in which torch compiled has its own. In those, peaks
    and `longest_sequence` are maxima; times, sizes and `recomputed_layers` are means; counters are the last. Counters
    are read at the end of the step, after gradients are freed."""

    step: int
    """The last step covered."""
    steps: int
    """Number of steps covered."""
    step_time_ms: float
    """Wall time, with waiting for data, without logs, evaluations and saves."""
    micro_batches: int
    """Forward passes accumulated."""
    recomputed_layers: float
    """Layers recomputed in backward. Absent: where no layer can be."""
    categories: CategorySizes
    """At the step's peak. Absent: except for steps recorded in detail (the first three, every tenth, fewer from step
    10 000 on, fewer where that costs too much, and each with a larger micro-batch than before). Such a step has its
    own record."""
    held: dict[Place, CategorySizes]
    """Held after the optimizer step, gradients included, by place; needs no allocator. Absent: as `categories`."""


class EvaluateRecord(_Record, Measured, Compiled, total=False):
    """A finished evaluation."""

    step: int
    """Finished steps."""
    metrics: dict[str, float]
    """Trainer's metrics."""


class SaveRecord(_Record, Measured, Compiled, total=False):
    """A finished save."""

    step: int
    """Finished steps."""
    checkpoint: str
    """Name of its folder."""


class ProposedChange(TypedDict, total=False):
    """A change to the job, as in `hf_memkit.measuring.out_of_memory.Change`."""

    key: str
    """Setting, as `section.name`."""
    value: Any
    """New value."""
    reason: str
    """Reason, with figures of the records."""
    cost: str
    """Its cost, in words."""
    saves_gib: float
    """Memory saved on the GPU. Absent: null, where no record of this run gives the figure."""
    basis: str
    """How the saving follows from the records. Absent: null with it."""
    current: Any
    """Current value. Absent: null, where unknown."""


class OomRecord(_Record, InputSizes, Measured, Compiled, total=False):
    """An out-of-memory error. Sizes of inputs are those of the current forward pass."""

    step: int
    """Current step."""
    phase: Phase
    """Current phase."""
    micro_batch: int
    """Number of the micro-batch in the step, from 1."""
    inputs: dict[str, list[int]]
    """Shapes by name."""
    error_type: str
    """Class of the error."""
    error: str
    """Its text."""
    prediction_loss_only: bool
    """Whether the evaluation kept no predictions. Absent: except where an evaluation failed."""
    requested_gib: float
    """Requested, from the message."""
    free_gib: float
    """Free on the GPU, from the message."""
    process_gib: float
    """Used by this process on the GPU, from the message."""
    cause: str
    """As `memkit explain` names it."""
    categories: CategorySizes
    """Adding up to `allocated_gib`."""
    held: dict[Place, CategorySizes]
    """Held memory by place."""
    changes: list[ProposedChange]
    """Changes that would save most."""
    snapshot: str
    """Name of the snapshot file. Absent: not requested."""


class LostRecord(_Record, total=False):
    """Replaces a run's blanks: later records could not be written."""

    step: int
    """Step of the first lost record. Absent: it had none."""
    write_error: str
    """Why."""


Status = Literal["finished", "interrupted", "failed"]


class EndRecord(_Record, Compiled, total=False):
    """The end of a training. Without one it is running or was killed; `host` of its `run` record tells which."""

    status: Status
    """`finished`, `interrupted` (by Ctrl-C, by `sys.exit` or on request) or `failed`."""
    error_type: str
    """Class of the error. Absent: no error, or one that the script caught."""
    error: str
    """Its text."""
    lost_records: int
    """Records that could not be written. Absent: none."""
    write_error: str
    """Error of the last one."""
    step: int
    """Finished steps."""
    steps: int
    """Steps since this start."""
    recomputed_layers: int
    """Layers recomputed in total. Absent: where no layer can be."""
    optimizer_classes: list[str]
    """From the outer wrapper to the optimizer itself."""
    optimizer_states: dict[str, dict[str, int]]
    """Number of tensors by dtype, for each state."""
    peak_allocated_gib: float
    """The highest of the run."""
    peak_reserved_gib: float
    """The highest of the run."""
    peak_host_rss_gib: float
    """The highest of the run."""
    reader_errors: dict[str, str]
    """The first message of each reader that failed."""
    callback_errors: int
    """How often measuring went wrong."""
    callback_error_messages: list[str]
    """The first few."""


RECORDS: Final[Mapping[str, type]] = {
    "run": RunRecord,
    "modules": ModulesRecord,
    "step": StepRecord,
    "evaluate": EvaluateRecord,
    "save": SaveRecord,
    "oom": OomRecord,
    "lost": LostRecord,
    "end": EndRecord,
}
"""By `kind`, in the order in which a file has them."""

MEAN_OF_STEPS: Final = ("step_time_ms", "samples", "tokens", "micro_batches", "recomputed_layers")
"""Fields of a step record that are means where it stands for several."""
