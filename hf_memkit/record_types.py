"""The records of a training: which there are, and what each of their fields is. Types, field by field.

`memory-rank{R}.jsonl` has one JSON object a line, and each is one of `RECORDS`. Whoever writes records, reads them or
makes them for a test goes by these classes; what a report takes from a file of unknown origin (`report/sanitize.py`)
and the tables in docs/measuring.md and docs/design.md (`scripts/record_docs.py`) follow from them.

A field's unit is the end of its name: `_gib` (2**30 bytes), `_ms`; `time` and `process_started` are seconds since the
epoch, `bytes` are bytes, other numbers are counts. What is not known is absent, never null nor zero, so that a reader
must do without any field (`total=False`). `Absent:` in a field's words says when, if that is not plain from them, and
`Source:` where a number comes from. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypedDict

from hf_memkit.terms import Phase, Place

__all__ = [
    "MEAN_OF_STEPS",
    "RECORDS",
    "AfterOom",
    "CategorySizes",
    "Counters",
    "EndRecord",
    "EvaluateRecord",
    "HardwareFacts",
    "HostFacts",
    "InputSizes",
    "LostRecord",
    "Measured",
    "ModuleFigures",
    "ModulesRecord",
    "OomRecord",
    "Peaks",
    "PhasePeaks",
    "PredictedFigures",
    "ProposedChange",
    "RunRecord",
    "SaveRecord",
    "Status",
    "StepRecord",
]


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
    """What cannot be told apart."""


class PhasePeaks(TypedDict, total=False):
    """The highest values within one phase."""

    peak_allocated_gib: float
    """The highest allocated."""
    peak_reserved_gib: float
    """The highest reserved."""


class Counters(TypedDict, total=False):
    """What readers say of one moment. A number that a device cannot give is absent, never zero."""

    allocated_gib: float
    """Tensors on the card, in blocks of the allocator (CUDA rounds to 512 bytes). Source: torch's allocator."""
    reserved_gib: float
    """What the allocator has taken from the driver; it gives back little of it by itself. Source: torch's
    allocator."""
    fragmentation_gib: float
    """Reserved less allocated: free, but inside the allocator's segments. Source: the two above."""
    alloc_retries: int
    """How often the allocator had to drop its cache to go on, since the process began. Source: torch's allocator."""
    allocator_ooms: int
    """How often the allocator could not go on, since the process began. Source: torch's allocator."""
    device_used_gib: float
    """Everything on the card, read together with the allocator's counters. Source: NVML. Absent: between two looks."""
    outside_allocator_gib: float
    """This process beside the allocator: CUDA context, NCCL, libraries. Source: NVML. Absent: between two looks."""
    other_processes_gib: float
    """Other processes on the card. Source: NVML. Absent: between two looks."""
    host_rss_gib: float
    """This process in RAM. Source: `/proc/self/statm`, elsewhere psutil."""
    host_available_gib: float
    """What is left, within the limit of the container (cgroup 1 and 2). Source: psutil and `/sys/fs/cgroup`."""
    pinned_gib: float
    """Page-locked RAM of torch's own allocator, cached blocks included. Source: `torch.cuda.host_memory_stats`.
    Absent: between two looks."""
    disk_swap_gib: float
    """This process's files of ZeRO-Infinity. Source: the folder of `nvme_path`. Absent: between two looks."""
    capacity_gib: float
    """The card's memory. Source: torch."""


class Peaks(TypedDict, total=False):
    """The highest values since the last boundary that was recorded."""

    peak_allocated_gib: float
    """The highest allocated. Source: torch's peak counters."""
    peak_reserved_gib: float
    """The highest reserved. Source: torch's peak counters."""
    phases: dict[Phase, PhasePeaks]
    """The same of each phase. Absent: with `phases=False`, and where the model is one compiled graph."""


class Measured(Counters, Peaks, total=False):
    """Counters now, and the highest values until now."""


class InputSizes(TypedDict, total=False):
    """What went through the model, by the shape of its main input."""

    samples: int
    """Sequences, pictures …"""
    tokens: int
    """Size of the main input, padding included. Absent: where the input is no text."""
    longest_sequence: int
    """Tokens of the longest. Absent: where the input is no text."""


class _Record(TypedDict, total=False):
    """What every record has."""

    schema: int
    """Version of this contract."""
    kind: str
    """Which record it is."""
    time: float
    """When it was written."""


class HostFacts(TypedDict, total=False):
    """Where a process runs: by this a report tells whether it still does."""

    hostname: str
    """Name of the machine."""
    boot_id: str
    """Which boot of it. Absent: not on Linux."""
    pid: int
    """Number of the process."""
    process_started: float
    """When it began."""
    oom_kills: int
    """The control group's count of killed processes at the start. Absent: without cgroup 2."""


class HardwareFacts(TypedDict, total=False):
    """The machine, and the card that is trained on."""

    device_name: str
    """As torch names the card; of a CPU its architecture."""
    device_type: str
    """`cuda`, `xpu`, `mps`, `cpu`."""
    device_count: int
    """Cards that the process sees. Absent: on a CPU."""
    capacity_gib: float
    """The card's memory. Absent: on a CPU."""
    allocator_cap_fraction: float
    """The share of it that the allocator may take. Absent: of an allocator without a cap."""
    allocator_settings: str
    """`PYTORCH_ALLOC_CONF`, under whichever of its names. Absent: not set."""
    cpu_count: int
    """Logical cores."""
    ram_gib: float
    """RAM of the machine."""
    ram_limit_gib: float
    """The cgroup's limit. Absent: without one."""


class AfterOom(TypedDict, total=False):
    """The attempt that ran out of memory before this one, of which `auto_find_batch_size` tells nobody."""

    step: int
    """The step under way."""
    phase: str
    """What it was doing."""
    train_batch_size: int
    """Its micro-batch."""


class PredictedFigures(TypedDict, total=False):
    """A prediction as `memkit predict --json` prints it: of its fields those that a report lays beside what was
    measured."""

    peak_allocated_gib: float
    """The highest allocated."""
    peak_reserved_gib: float | list[float]
    """The highest reserved: `[low, high]`."""
    phases: dict[Phase, PhasePeaks]
    """Peaks of each phase."""
    categories: CategorySizes
    """At the peak."""
    step_time_ms: float | list[float]
    """What an optimizer step takes: `[low, middle, high]`. Source: a plan."""


class RunRecord(_Record, Measured, total=False):
    """The start of a training: what it is, on what. Its line ends with 2 KiB of blanks, in whose place `lost` or `end`
    stands where the disk has no room for more. Counters and peaks are those of the phase `load`."""

    start_step: int
    """Finished steps that it goes on from; later ones in the file are given up."""
    rank: int
    """Number of the process."""
    world_size: int
    """Processes that train together."""
    host: HostFacts
    """Where the process runs."""
    versions: dict[str, str]
    """Of memkit, Python and the packages that decide memory, by name."""
    hardware: HardwareFacts
    """The machine."""
    arguments: dict[str, Any]
    """Those of TrainingArguments that decide memory, under the names of today's transformers; `deepspeed_stage`,
    `deepspeed_offload_optimizer` and `deepspeed_offload_param` from its configuration."""
    model_class: str
    """Class of the model."""
    model_type: str
    """Of its config. Absent: without one."""
    vocabulary: int
    """Size of the vocabulary. Absent: of a model without one."""
    weights_dtypes: dict[str, int]
    """Parameters by type."""
    attention: str
    """The implementation of attention that the config names."""
    engine: str
    """Class that wraps the model for training. Absent: where the callback was given to the Trainer, not attached."""
    optimizer_classes: list[str]
    """From the outer wrapper to the optimizer itself."""
    parameters: int
    """Parameters, whole ones under ZeRO-3."""
    trainable_parameters: int
    """Those that are trained."""
    facts: dict[str, Any]
    """What the user gave (`run_facts`)."""
    prediction: PredictedFigures
    """What the user gave (`prediction`), or the plan of `memkit run --plan`."""
    after_oom: AfterOom
    """The attempt before. Absent: except after an OOM that `auto_find_batch_size` caught."""
    train_batch_size: int
    """The micro-batch now. Absent: without `after_oom`."""


ModuleFigures = TypedDict(
    "ModuleFigures",
    {
        "name": str,
        "class": str,
        "parameters": int,
        "trainable_parameters": int,
        "bytes": int,
        "places": dict[str, int],
        "repeats": int,
    },
    total=False,
)
"""One module, or equal ones in a row, of which the figures are those of one.

name: In the model; of equal layers `h.0…47`.
class: Of the module.
parameters: Of its own, whole ones under ZeRO-3; each tensor counts in the first module that has it.
trainable_parameters: Those that are trained.
bytes: What this process holds of them.
places: The same bytes by place: `device`, `host`, `pinned`, of another accelerator `elsewhere`.
repeats: How many equal ones. Absent: one.
"""


class ModulesRecord(_Record, total=False):
    """The table by module, after `run`."""

    rows: list[ModuleFigures]
    """One a module, in the order of the model."""


class StepRecord(_Record, InputSizes, Measured, total=False):
    """One optimizer step, or several: the first 5 000 of a training have a record each, later ones stand for 2, 4, 8 …
    steps, so that a file grows with the logarithm of the run's length. Then peaks and `longest_sequence` are maxima,
    times, sizes and `recomputed_layers` means, counters the last. Counters are those at the step's end, after the
    gradients were dropped."""

    step: int
    """The last one it stands for."""
    steps: int
    """How many."""
    step_time_ms: float
    """By the host's clock, waiting for data included, logs, evaluations and saves not."""
    micro_batches: int
    """Forwards that were accumulated."""
    recomputed_layers: float
    """How often a layer was computed again in backward. Absent: no layer can be."""
    categories: CategorySizes
    """At the step's peak. Absent: except where a step was watched closely (the first three, every tenth, from step
    10 000 on fewer, never more often than its cost allows, and each with a larger micro-batch than any before). Such a
    step has a record of its own."""
    held: dict[Place, CategorySizes]
    """What lives after the optimizer's step, the gradients included, by place; needs no allocator. Absent: as
    `categories`."""


class EvaluateRecord(_Record, Measured, total=False):
    """An evaluation that has ended."""

    step: int
    """Finished steps."""
    metrics: dict[str, float]
    """What Trainer computed."""


class SaveRecord(_Record, Measured, total=False):
    """A save that has ended."""

    step: int
    """Finished steps."""
    checkpoint: str
    """Name of its folder."""


class ProposedChange(TypedDict, total=False):
    """A change to the job, as `hf_memkit.oom.Change` has it."""

    key: str
    """What to set, `section.name`."""
    value: Any
    """What to set it to."""
    reason: str
    """Why, with what the records say."""
    cost: str
    """What it costs, in words."""
    saves_gib: float
    """What it saves on the device. Absent: null, where no record of this run gives the figure."""
    basis: str
    """How that follows from the records. Absent: null with it."""
    current: Any
    """What it is set to. Absent: null, where it is not known."""


class OomRecord(_Record, InputSizes, Measured, total=False):
    """The moment memory ran out. Sizes of inputs are those of the forward under way."""

    step: int
    """The one under way."""
    phase: Phase
    """What training was doing."""
    micro_batch: int
    """Which of the step, from 1."""
    inputs: dict[str, list[int]]
    """Shapes by name."""
    error_type: str
    """Class of the error."""
    error: str
    """Its text."""
    prediction_loss_only: bool
    """Whether the evaluation kept no predictions. Absent: except where an evaluation failed."""
    requested_gib: float
    """What the message says was asked for."""
    free_gib: float
    """What it says was free on the card."""
    process_gib: float
    """All that it says this process held there."""
    cause: str
    """As `memkit explain` names it."""
    categories: CategorySizes
    """Adding up to `allocated_gib`."""
    held: dict[Place, CategorySizes]
    """What lives, by place."""
    changes: list[ProposedChange]
    """What would save most."""
    snapshot: str
    """Name of the file. Absent: not asked for."""


class LostRecord(_Record, total=False):
    """In place of a run's blanks: from here on records could not be written."""

    step: int
    """Of the first that is lost. Absent: it had none."""
    write_error: str
    """Why."""


Status = Literal["finished", "interrupted", "failed"]


class EndRecord(_Record, total=False):
    """The end of a training. Without one it runs, or was killed: `host` of its `run` tells which."""

    status: Status
    """`finished`, `interrupted` (by Ctrl-C, by `sys.exit` or on request) or `failed`."""
    error_type: str
    """Class of the error. Absent: none, or training stopped without telling why: caught."""
    error: str
    """Its text."""
    lost_records: int
    """How many could not be written. Absent: none."""
    write_error: str
    """Why the last of them."""
    step: int
    """Finished steps."""
    steps: int
    """Those of this start."""
    recomputed_layers: int
    """The sum. Absent: no layer can be."""
    optimizer_classes: list[str]
    """From the outer wrapper to the optimizer itself."""
    optimizer_states: dict[str, dict[str, int]]
    """How many tensors of which type each state has."""
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
