"""Results of the child process: a traced training, or why there is none.

Plain data without torch, written by `child/` and read by predictions and plans (`wire.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hf_memkit.common.terms import Phase
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

    def known(self) -> dict[str, Any]:
        """The fields that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TracedModel:
    """The trained model, without PEFT's wrapper.

    Attributes:
        kind: its class.
        name: hub ID or path; empty: unknown.
        parameters, trainable_parameters: number of elements, including adapters.
        dtypes, trained_dtypes: of all and of trained parameters, such as `"float32"`.
    """

    kind: str
    name: str
    parameters: int
    trainable_parameters: int
    dtypes: tuple[str, ...]
    trained_dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One optimizer step of the trace.

    Attributes:
        kind: `"typical"`, `"worst"`, or the setting that the user would change.
        events, calls: (first, one past the last) in `Trace.events` and in `Work.calls`; calls (0, 0): not recorded.
    """

    kind: str
    events: tuple[int, int]
    calls: tuple[int, int]


@dataclass(frozen=True, slots=True)
class BatchShapes:
    """Batches in words, such as `"8 × 1024 tokens"`.

    Attributes:
        worst: the largest that the sampler can form.
        typical: the median.
        high: the 95th percentile.
        grouping: whether a reader may expect grouping by length to make the worst smaller.
    """

    worst: str
    typical: str
    high: str
    grouping: bool


@dataclass(frozen=True, slots=True)
class Engine:
    """DeepSpeed, without which the training is traced.

    Attributes:
        config: with Trainer's values for `"auto"`.
        written: as the script has it.
        trained, frozen: `(elements, whether weight decay applies)` of each parameter.
        linear_elements: elements that linear layers keep from forward to backward.
    """

    config: dict[str, Any]
    written: dict[str, Any]
    trained: tuple[tuple[int, bool], ...]
    frozen: tuple[tuple[int, bool], ...]
    linear_elements: int

    @property
    def stage(self) -> int:
        """Stage of ZeRO."""
        return int(self.config.get("zero_optimization", {}).get("stage", 0))


@dataclass(frozen=True, slots=True)
class Vllm:
    """A vLLM that generates for the training.

    Attributes:
        mode: `"server"`: on other GPUs, and the other fields are 0; `"colocate"`: in this process.
        share: share of the GPU's memory.
        sleeps: whether it frees that memory after each generation.
        weights_bytes: its copy of the weights.
    """

    mode: str
    share: float = 0.0
    sleeps: bool = False
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostMemory:
    """RAM of the script's process: its own, as measured here, and the peak of its tensors by phase."""

    own_bytes: int
    tensor_bytes: dict[Phase, int]


# ---- for plans ----


@dataclass(frozen=True, slots=True)
class CallPlace:
    """A call in the user's code: line and column after its closing parenthesis, as `ast` counts."""

    file: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """A call that creates a Trainer.

    Attributes:
        model: index or name of the argument that is the model, `"model_init"`, or None.
        named: whether that is a model's name, which TRL loads.
        takes: which of the parameters that a change of the code may need its constructor accepts.
    """

    place: CallPlace
    model: int | str | None = "model"
    named: bool = False
    takes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Properties of the model that decide which settings are possible.

    Attributes:
        model_type: transformers' name of the architecture; None for other models.
        attention: its implementation, such as `"sdpa"`.
        supports_checkpointing, supports_sdpa: according to its class.
        of_transformers, from_pretrained: whether its class has `from_pretrained`, and whether that created it.
        loaded_at: the user's call that loaded it; None: unknown.
        device_map: whether that call passed one.
        adapters, quantised: whether the model has adapters, or quantised weights.
        chunkable_loss: whether its loss can be computed in chunks.
    """

    model_type: str | None
    attention: str | None
    supports_checkpointing: bool
    supports_sdpa: bool
    of_transformers: bool
    from_pretrained: bool
    loaded_at: CallPlace | None
    device_map: bool
    adapters: bool
    quantised: bool
    chunkable_loss: bool


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
    """Effects of another micro-batch with the same rows per step.

    Attributes:
        rows_compared: the loss compares the rows of a micro-batch.
        scaled_by_accumulation: the loss is not divided by the accumulation steps.
        loss_func: the script passes a `compute_loss_func` to Trainer.
        fixed_by_deepspeed: sizes that the DeepSpeed config sets.
        late_batch: the script sets the batch size after it created its Trainer.
        batch_norm: statistics are computed per micro-batch.
        mean_of_micro_batches: Trainer divides by the accumulation steps, for micro-batches of any size.
        dropout: the training draws random numbers.
    """

    rows_compared: bool = False
    scaled_by_accumulation: bool = False
    loss_func: bool = False
    fixed_by_deepspeed: tuple[str, ...] = ()
    late_batch: bool = False
    batch_norm: bool = False
    mean_of_micro_batches: bool = False
    dropout: bool = False


@dataclass(frozen=True, slots=True)
class RunLength:
    """Length of the run; None: unknown.

    Attributes:
        rows_an_epoch: rows that are trained on in an epoch.
        evaluation_batches: of one evaluation; 0: no data.
        generates: whether evaluations generate.
    """

    steps: int | None = None
    steps_an_epoch: int | None = None
    rows: int | None = None
    rows_an_epoch: int | None = None
    evaluation_batches: int = 0
    generates: bool = False


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding of text batches.

    Attributes:
        share: average share of a batch; None: sizes are not tokens.
        longest_row: in tokens.
        is_left_out: the Trainer already trains without padding.
        needed: why rows cannot be concatenated; empty if they can.
        counts_first_labels: the divisor of the loss counts the first token of each row.
        cuts_rows: `max_length` cuts rows.
    """

    share: float | None
    longest_row: int | None
    is_left_out: bool
    needed: str
    counts_first_labels: bool
    cuts_rows: bool


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """Facts for plans: possible settings, whether they change the training, and how long it takes.

    Attributes:
        made_at: the call that creates the Trainer; None if a library does.
        parses_arguments: the script reads its TrainingArguments from the command line with HfArgumentParser.
        own_optimizer: the script creates its optimizer.
        schedule: values of the arguments for learning rate and optimizer.
        rows_digest: digest of the sizes of all rows; empty: not all were read.
        tokens: tokens of a micro-batch without padding, by kind of step; None: it has no tokens.
        mean: tokens of an average batch relative to a "typical" or "worst" one: with padding, and without.
    """

    model: ModelTraits
    weights: Weights
    batch: BatchEffects
    length: RunLength
    padding: Padding
    made_at: TrainerCall | None
    parses_arguments: bool
    own_optimizer: bool
    schedule: tuple[str, ...]
    rows_digest: str = ""
    tokens: dict[str, float | None] = field(default_factory=dict)
    mean: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the weights in a checkpoint: with adapters only they are saved."""
        return self.weights.trained_bytes + (0 if self.model.adapters else self.weights.frozen_bytes)


# ---- results ----


@dataclass(frozen=True, slots=True)
class TracedTraining:
    """A training with some traced optimizer steps, then evaluations and saves.

    Attributes:
        trainer: name of its class.
        trace: of all of these.
        steps: in order.
        steps_end: one past the last event of all steps.
        optional: events of an evaluation that neither the arguments nor the script request; None: there is none.
        rows, sequence_length: of the worst batch (a packed one has one row, pairs have two each); None: no tokens.
        batches: None: all have about the same size.
        batches_tried: sizes that `auto_find_batch_size` would try, in order.
        memory_fraction: value of `torch.cuda.set_per_process_memory_fraction`; None: not set.
        allocator: environment variables of the script for the allocator.
        host: None: no tensor is fake.
        fp16_overflow: what overflows in this training if it computes in fp16; empty: nothing is known.
        notes: assumptions and omissions.
        plan: None: not requested.
    """

    trainer: str
    arguments: TracedArguments
    model: TracedModel
    trace: Trace = field(default_factory=Trace)
    steps: tuple[TracedStep, ...] = ()
    steps_end: int = 0
    optional: tuple[int, int] | None = None
    rows: int | None = None
    sequence_length: int | None = None
    batches: BatchShapes | None = None
    batches_tried: tuple[int, ...] = ()
    memory_fraction: float | None = None
    allocator: dict[str, str] = field(default_factory=dict)
    engine: Engine | None = None
    vllm: Vllm | None = None
    host: HostMemory | None = None
    fp16_overflow: str = ""
    notes: tuple[str, ...] = ()
    plan: PlanFacts | None = None

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
    """Lengths of columns, in tokens, in batches that a script's data can form; None: there is no such batch.

    Attributes:
        worst: the largest.
        typical: the median; None: about as large.
        half, cut: the worst with half as many rows, and with rows cut to the 95th percentile.
        rows, description: of the worst.
        shapes: None without `typical`.
    """

    worst: dict[str, int]
    typical: dict[str, int] | None
    half: dict[str, int] | None
    cut: dict[str, int] | None
    rows: int
    description: str
    shapes: BatchShapes | None


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception that ended the script.

    Attributes:
        by_script: it is the script's, not memkit's.
        type, message, text: its class, message and traceback.
        place: line of the script, such as `"train.py, line 5"`; empty: unknown.
    """

    by_script: bool
    type: str
    message: str
    place: str
    text: str


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
