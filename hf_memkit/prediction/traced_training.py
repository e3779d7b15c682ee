"""Results of the child process: a traced training, or why there is none.

Plain data without torch, written by `child/` and read by predictions and plans (`wire.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from hf_memkit.common.terms import Phase
from hf_memkit.prediction.trace.request import Device
from hf_memkit.prediction.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class TracedArguments:
    """Fields of TrainingArguments and TRL's configs that candidates change or that decide the length of the run. None:
    the script's value is None, is not JSON, or its class lacks the field."""

    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    per_device_eval_batch_size: int | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_kwargs: Mapping[str, Any] | None = None
    optim: str | None = None
    bf16: bool | None = None
    fp16: bool | None = None
    tf32: bool | None = None
    use_liger_kernel: bool | None = None
    max_steps: int | None = None
    num_train_epochs: float | None = None
    eval_strategy: str | None = None
    eval_steps: float | None = None
    save_strategy: str | None = None
    save_steps: float | None = None
    dataloader_drop_last: bool | None = None
    deepspeed: Any = None
    fsdp: Any = None
    fsdp_config: Any = None
    accelerator_config: Mapping[str, Any] | None = None  # without what is the default
    packing: bool | None = None
    padding_free: bool | None = None
    loss_type: str | None = None
    train_sampling_strategy: str | None = None
    eval_accumulation_steps: int | None = None
    torch_empty_cache_steps: int | None = None
    max_length: int | None = None
    auto_find_batch_size: bool | None = None
    dataloader_num_workers: int | None = None
    save_only_model: bool | None = None
    load_best_model_at_end: bool | None = None
    torch_compile: bool | None = None
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None

    def known(self) -> dict[str, Any]:
        """The fields that are not None, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class GivenSettings:
    """What rules about known mistakes read of a training."""

    arguments: dict[str, Any]  # as the script gave them, where they differ from a default; only JSON
    files: dict[str, str]  # argument that named a JSON → its path; `arguments` has its content
    settings: dict[str, Any]  # of model and adapters, by the keys of a Setup
    model_config: dict[str, Any]  # of transformers; empty for other models
    own_optimizer: bool  # the script makes it, or may: `arguments` has no `optim`


@dataclass(frozen=True, slots=True)
class TracedModel:
    """The trained model, without PEFT's wrapper."""

    kind: str  # its class
    name: str  # hub ID or path; empty: unknown
    parameters: int  # elements, including adapters
    trainable_parameters: int
    dtypes: tuple[str, ...]  # of all parameters, such as `"float32"`
    trained_dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One optimizer step of the trace."""

    kind: str  # `"typical"`, `"worst"`, or the setting that the user would change
    events: tuple[int, int]  # (first, one past the last) in `Trace.events`
    calls: tuple[int, int]  # the same in `Work.calls`; (0, 0): not recorded


@dataclass(frozen=True, slots=True)
class BatchShapes:
    """Batches in words, such as `"8 × 1024 tokens"`."""

    worst: str  # the largest that the sampler can form
    typical: str  # the median
    high: str  # the 95th percentile
    grouping: bool  # whether a reader may expect grouping by length to make the worst smaller


@dataclass(frozen=True, slots=True)
class Engine:
    """DeepSpeed, without which the training is traced."""

    config: dict[str, Any]  # with Trainer's values for `"auto"`
    written: dict[str, Any]  # as the script has it
    trained: tuple[tuple[int, bool], ...]  # `(elements, whether weight decay applies)` of each parameter
    frozen: tuple[tuple[int, bool], ...]
    linear_elements: int  # that linear layers keep from forward to backward

    @property
    def stage(self) -> int:
        """Stage of ZeRO."""
        return int(self.config.get("zero_optimization", {}).get("stage", 0))


@dataclass(frozen=True, slots=True)
class Fsdp:
    """FSDP2's settings, from arguments or accelerate's config."""

    reshard_after_forward: bool
    cpu_offload: bool
    activation_checkpointing: bool


COMPILED: Final = "compiled by torch"
"""Begins the note of a training that torch.compile compiles."""

ULYSSES: Final = (
    "DeepSpeed's sequence parallelism (Ulysses) is not predicted. Write cp_size in its place, with FSDP version 2"
)

FSDP_COMPARED: Final = (
    "sharded weights: the bytes of a rank equal those of real ranks on CPUs; on several GPUs, only trainings that "
    "others measured were compared"
)


@dataclass(frozen=True, slots=True)
class Compilation:
    """What torch.compile's backend inductor compiled."""

    graphs: int = 0  # forward and backward count separately, and so does each recompilation
    calls: int = 0  # of kernels and operations in the generated code of all graphs


@dataclass(frozen=True, slots=True)
class Vllm:
    """A vLLM that generates for the training."""

    mode: str  # `"server"`: on other GPUs, and the other fields are 0; `"colocate"`: in this process
    share: float = 0.0  # share of the GPU's memory
    sleeps: bool = False  # whether it frees that memory after each generation
    weights_bytes: int = 0  # its copy of the weights


@dataclass(frozen=True, slots=True)
class HostMemory:
    """RAM of the script's process: its own, as measured here, and the peak of its tensors by phase."""

    own_bytes: int
    tensor_bytes: dict[Phase, int]
    of_other_ranks: dict[Phase, int] = field(default_factory=dict)  # in phases in which they have less than the first


@dataclass(frozen=True, slots=True)
class CallPlace:
    """A call in the user's code: line and column after its closing parenthesis, as `ast` counts."""

    file: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """A call that creates a Trainer."""

    place: CallPlace
    model: int | str | None = "model"  # index or name of the argument that is the model, `"model_init"`, or None
    named: bool = False  # whether that is a model's name, which TRL loads
    takes: tuple[str, ...] = ()  # which of the parameters that a change of the code may need its constructor accepts


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Properties of the model that decide which settings are possible."""

    model_type: str | None  # transformers' name of the architecture; None for other models
    attention: str | None  # its implementation, such as `"sdpa"`
    supports_checkpointing: bool  # according to its class
    supports_sdpa: bool  # according to its class
    of_transformers: bool  # its class has `from_pretrained`
    from_pretrained: bool  # that created it
    loaded_at: CallPlace | None  # the user's call that loaded it; None: unknown
    device_map: bool  # that call passed one
    adapters: bool
    quantised: bool
    chunkable_loss: bool  # its loss can be computed in chunks


@dataclass(frozen=True, slots=True)
class Weights:
    """Elements of each parameter including adapters, total bytes, and bytes of one gradient element."""

    trained: tuple[int, ...]
    frozen: tuple[int, ...]
    trained_bytes: int
    frozen_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class BatchEffects:
    """Effects of another micro-batch with the same rows per step."""

    rows_compared: bool = False  # the loss compares the rows of a micro-batch
    scaled_by_accumulation: bool = False  # the loss is not divided by the accumulation steps
    loss_func: bool = False  # the script passes a `compute_loss_func` to Trainer
    fixed_by_deepspeed: tuple[str, ...] = ()  # sizes that the DeepSpeed config sets
    late_batch: bool = False  # the script sets the batch size after it created its Trainer
    batch_norm: bool = False  # statistics are computed per micro-batch
    mean_of_micro_batches: bool = False  # Trainer divides by the accumulation steps, for micro-batches of any size
    dropout: bool = False  # the training draws random numbers


@dataclass(frozen=True, slots=True)
class RunLength:
    """Length of the run; None: unknown."""

    steps: int | None = None
    steps_an_epoch: int | None = None
    rows: int | None = None
    rows_an_epoch: int | None = None  # rows that are trained on in an epoch
    evaluation_batches: int = 0  # of one evaluation; 0: no data
    generates: bool = False  # whether evaluations generate


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding of text batches."""

    share: float | None  # average share of a batch; None: sizes are not tokens
    longest_row: int | None  # in tokens
    is_left_out: bool  # the Trainer already trains without padding
    needed: str  # why rows cannot be concatenated; empty if they can
    counts_first_labels: bool  # the divisor of the loss counts the first token of each row
    cuts_rows: bool  # `max_length` cuts rows


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """Facts for plans: possible settings, whether they change the training, and how long it takes.

    Attributes:
        tokens: tokens of a micro-batch without padding, by kind of step; None: it has no tokens.
        mean: tokens of an average batch relative to a "typical" or "worst" one: with padding, and without.
    """

    model: ModelTraits
    weights: Weights
    batch: BatchEffects
    length: RunLength
    padding: Padding
    made_at: TrainerCall | None  # the call that creates the Trainer; None if a library does
    parses_arguments: bool  # the script reads its TrainingArguments from the command line with HfArgumentParser
    own_optimizer: bool  # the script creates its optimizer
    schedule: tuple[str, ...]  # values of the arguments for learning rate and optimizer
    rows_digest: str = ""  # of the sizes of all rows; empty: not all were read
    tokens: dict[str, float | None] = field(default_factory=dict)
    mean: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the weights in a checkpoint: with adapters only they are saved."""
        return self.weights.trained_bytes + (0 if self.model.adapters else self.weights.frozen_bytes)


@dataclass(frozen=True, slots=True)
class TracedTraining:
    """A training with some traced optimizer steps, then evaluations and saves.

    Attributes:
        optional: events of an evaluation that neither the arguments nor the script request; None: there is none.
        rows, sequence_length: of the worst batch (a packed one has one row, pairs have two each); None: no tokens.
    """

    trainer: str  # name of its class
    arguments: TracedArguments
    model: TracedModel
    device: Device = "cuda"  # of its tensors
    trace: Trace = field(default_factory=Trace)  # of all of these
    steps: tuple[TracedStep, ...] = ()  # in order
    steps_end: int = 0  # one past the last event of all steps
    optional: tuple[int, int] | None = None
    rows: int | None = None
    sequence_length: int | None = None
    batches: BatchShapes | None = None  # None: all have about the same size
    batches_tried: tuple[int, ...] = ()  # sizes that `auto_find_batch_size` would try, in order
    memory_fraction: float | None = None  # of `torch.cuda.set_per_process_memory_fraction`; None: not set
    allocator: dict[str, str] = field(default_factory=dict)  # environment variables of the script for the allocator
    engine: Engine | None = None
    sharded: bool = False  # ranks share the parameters, by FSDP2, tensor parallelism or when loaded; one is traced
    parallel_sizes: dict[str, int] = field(default_factory=dict)  # above 1, of hybrid, context, tensor parallelism
    fsdp: Fsdp | None = None  # None: no FSDP2
    unused_savings: tuple[str, ...] = ()  # of sharded parameters: settings that save memory and are not set
    vllm: Vllm | None = None
    compilation: Compilation | None = None  # None: nothing was compiled, or by another backend than inductor
    host: HostMemory | None = None  # None: no tensor is fake
    given: GivenSettings | None = None  # None: unknown
    fp16_overflow: str = ""  # what overflows in this training if it computes in fp16; empty: nothing is known
    notes: tuple[str, ...] = ()  # assumptions and omissions
    notices: tuple[str, ...] = ()  # what memkit did instead of the script, and to which of the user's files
    plan: PlanFacts | None = None  # None: not requested

    @property
    def ranks_per_batch(self) -> int:
        """Ranks that train on the same sequences, by context and tensor parallelism."""
        return self.parallel_sizes.get("cp_size", 1) * self.parallel_sizes.get("tp_size", 1)

    @property
    def facts(self) -> PlanFacts:
        """`plan`, which must have been requested."""
        assert self.plan is not None
        return self.plan

    def without_trace(self) -> TracedTraining:
        """The training without its trace, as plans keep it for each candidate."""
        return replace(self, trace=Trace())

    def of_steps(self) -> dict[str, Trace]:
        """The trace of each kind of step: everything up to the end of the typical steps, then this kind's steps.
        Events after all steps, such as an evaluation, belong to the worst if they were requested."""
        events = len(self.trace.events)
        begin, end = self.optional or (events, events)
        requested = self.trace if self.optional is None else self.trace.only((0, begin), (end, events))
        typical = [step.events[1] for step in self.steps if step.kind == "typical"]
        if not typical:
            return {"worst": requested}
        head, after = (0, typical[-1]), (self.steps_end, len(requested.events))
        traces = {"typical": requested.only(head)}
        for kind in dict.fromkeys(step.kind for step in self.steps if step.kind != "typical"):
            own = [step.events for step in self.steps if step.kind == kind]
            traces[kind] = requested.only(head, *own, *([after] if kind == "worst" else []))
        return traces


@dataclass(frozen=True, slots=True)
class BatchLengths:
    """Lengths of columns, in tokens, in batches that a script's data can form; None: there is no such batch."""

    worst: dict[str, int]  # the largest
    typical: dict[str, int] | None  # the median; None: about as large
    half: dict[str, int] | None  # the worst with half as many rows
    cut: dict[str, int] | None  # the worst with rows cut to the 95th percentile
    rows: int  # of the worst
    description: str  # of the worst
    shapes: BatchShapes | None  # None without `typical`


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception that ended the script."""

    by_script: bool  # it is the script's, not memkit's
    type: str  # its class
    message: str
    place: str  # line of the script, such as `"train.py, line 5"`; empty: unknown
    text: str  # its traceback
    arguments: dict[str, Any] = field(default_factory=dict)  # that the script gave last, as in `GivenSettings`
    refused_arguments: bool = False  # it came from their class


@dataclass(frozen=True, slots=True)
class Untrained:
    """A script that ended without calling `train()`; `exit`: the argument of `sys.exit`."""

    exit: int | str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a script: one of the fields; all None except `died` if its process died without a result. `died`:
    how the process died; None: exit code 0."""

    training: TracedTraining | None = None
    lengths: BatchLengths | None = None
    failed: Failed | None = None
    untrained: Untrained | None = None
    died: str | None = None
