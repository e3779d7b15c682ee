"""What comes of a script in the child process: a traced training, or why there is none. Plain data without torch,
written by `child/` and read by predictions and plans (`wire.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hf_memkit.common.terms import Phase
from hf_memkit.prediction.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class TracedArguments:
    """Fields of TrainingArguments and TRL's configs as the script has them: what candidates change, and what says how
    long a run is. None: it is None, no JSON, or its class has no such field."""

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
        """Those that are not None, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TracedModel:
    """The trained model, without adapters around it: its class; the hub's name, or a path (empty: unknown); how many
    parameters there are, adapters included, and of which types, such as `"float32"`: all of them, and those that are
    trained."""

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
        kind: `"usual"`, `"worst"`, or what the user would change for it.
        events, calls: the first in `Trace.events` and in `Work.calls`, and one past the last; 0: no work is recorded.
    """

    kind: str
    events: tuple[int, int]
    calls: tuple[int, int]


@dataclass(frozen=True, slots=True)
class BatchShapes:
    """The largest batch that the sampler can form, the median, and the one that 95 of 100 do not exceed, such as `"8 ×
    1024 tokens"`. `grouping`: whether someone may think that grouping by length would make the worst smaller."""

    worst: str
    usual: str
    high: str
    grouping: bool


@dataclass(frozen=True, slots=True)
class Engine:
    """DeepSpeed, which the trace is without: its config as written, and with Trainer's values in place of `"auto"`; of
    the model's trained and frozen parameters `(elements, whether weight decay is for it)`; and elements of what linear
    layers hold from forward to backward."""

    config: dict[str, Any]
    written: dict[str, Any]
    trained: tuple[tuple[int, bool], ...]
    frozen: tuple[tuple[int, bool], ...]
    linear_elements: int

    @property
    def stage(self) -> int:
        """Of ZeRO."""
        return int(self.config.get("zero_optimization", {}).get("stage", 0))


@dataclass(frozen=True, slots=True)
class Vllm:
    """A vLLM that generates for the training: on other GPUs (`"server"`, and nothing else counts), or in this process
    (`"colocate"`): its share of the GPU's memory, whether it gives that back after each generation, and its own copy
    of the weights."""

    mode: str
    share: float = 0.0
    sleeps: bool = False
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostMemory:
    """RAM of the script's process: what it holds itself, as measured here, and by phase the most of its tensors."""

    own_bytes: int
    tensor_bytes: dict[Phase, int]


# ---- for plans ----


@dataclass(frozen=True, slots=True)
class CallPlace:
    """A call in the user's code: line and column behind its closing parenthesis, as `ast` counts."""

    file: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """Where a Trainer is made, and how it gets its model.

    Attributes:
        place: of the call.
        model: the number or the name of the argument that is the model, `"model_init"`, or None.
        named: whether that is a model's name, which TRL loads.
        takes: which of the parameters that other code may need its constructor takes.
    """

    place: CallPlace
    model: int | str | None = "model"
    named: bool = False
    takes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What can be done with the model, of transformers' `model_type` (None: it has none).

    Attributes:
        attention: its implementation, such as `"sdpa"`.
        supports_checkpointing, supports_sdpa: whether its class says so.
        of_transformers, from_pretrained: whether its class is made by `from_pretrained`, and whether it was.
        loaded_at: by which call of the user's; None: nobody knows; device_map: whether that call gave one.
        adapters: whether it has some; quantised: whether its weights are.
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
    """Elements of each parameter, adapters included, bytes of all of them, and of one number of a gradient."""

    trained: tuple[int, ...]
    frozen: tuple[int, ...]
    trained_bytes: int
    frozen_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class BatchEffects:
    """What another micro-batch, with as many rows a step, does to the training.

    Attributes:
        rows_compared: the loss compares the rows of a micro-batch with one another.
        scaled_by_accumulation: nobody divides the loss by the accumulation.
        loss_func: the script gives Trainer a `compute_loss_func`.
        fixed_by_deepspeed: sizes that the DeepSpeed config sets itself.
        late_batch: the script sets its batch after it has made its Trainer.
        batch_norm: statistics are taken from each micro-batch.
        mean_of_micro_batches: Trainer divides by the accumulation, whatever the rows of a micro-batch are.
        dropout: random numbers are drawn.
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
    """How long the run is; None: nobody can tell. `rows_an_epoch`: those that are trained on; `evaluation_batches`: of
    one evaluation, 0: there is no data for it; `generates`: whether it does."""

    steps: int | None = None
    steps_an_epoch: int | None = None
    rows: int | None = None
    rows_an_epoch: int | None = None
    evaluation_batches: int = 0
    generates: bool = False


@dataclass(frozen=True, slots=True)
class Padding:
    """Of batches of texts, and why they need it.

    Attributes:
        share, longest_row: of a batch, on average; tokens; None: sizes are no tokens.
        is_left_out: whether the Trainer trains without padding already.
        needed: why rows cannot lie behind one another; empty: they can.
        counts_first_labels: whether the divisor of the loss counts the first token of each row.
        cuts_rows: whether `max_length` cuts rows.
    """

    share: float | None
    longest_row: int | None
    is_left_out: bool
    needed: str
    counts_first_labels: bool
    cuts_rows: bool


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What only plans ask: what could be done in another way, whether that is the same training, how long it takes.

    Attributes:
        made_at: where the script makes its Trainer; None: a library does.
        parses_arguments: whether it reads its TrainingArguments from the command line with HfArgumentParser.
        own_optimizer: whether the script makes its optimizer itself.
        schedule: values of the arguments of learning rate and optimizer.
        rows_digest: of the sizes of all rows; empty: not all were read.
        tokens: of a micro-batch, padding left out, by kind of step; None: it is none of tokens.
        mean: how many times the tokens of a usual or a worst batch an average one has: with padding, and without.
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
        """Of the weights in a checkpoint: beside adapters the rest is not saved."""
        return self.weights.trained_bytes + (0 if self.model.adapters else self.weights.frozen_bytes)


# ---- all of it ----


@dataclass(frozen=True, slots=True)
class TracedTraining:
    """A training of which some optimizer steps were traced, then evaluations and saves.

    Attributes:
        trainer: name of its class.
        arguments, model: what is trained, and how.
        trace: of all that.
        steps: in order.
        steps_end: one past the last event of all steps.
        unasked: the events of an evaluation for which neither arguments nor the script ask; None: there is none.
        rows, sequence_length: of the worst batch of tokens: a packed one has one row, pairs have two each; None: it is
            none of tokens.
        batches: None: all are alike.
        batches_tried: sizes that `auto_find_batch_size` would try, in order.
        memory_fraction: as `torch.cuda.set_per_process_memory_fraction` was given; None: it was not.
        allocator: variables of the script that say how the allocator works.
        engine, vllm: None: there is none.
        host: None: nothing is fake.
        fp16_overflow: what overflows in this training, where it computes in fp16; empty: nothing is known.
        notes: what was assumed or left out.
        plan: None: nobody asked for it.
    """

    trainer: str
    arguments: TracedArguments
    model: TracedModel
    trace: Trace = field(default_factory=Trace)
    steps: tuple[TracedStep, ...] = ()
    steps_end: int = 0
    unasked: tuple[int, int] | None = None
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
        """`plan`, of a training that was traced for one."""
        assert self.plan is not None
        return self.plan

    def without_trace(self) -> TracedTraining:
        """What a plan keeps of each candidate."""
        return replace(self, trace=Trace())

    def of_steps(self) -> dict[str, Trace]:
        """The trace of each kind of step: all up to the end of the usual steps, then its own. What came after all
        steps, an evaluation, belongs to the worst, if it was asked for."""
        events = len(self.trace.events)
        begin, end = self.unasked or (events, events)
        asked = self.trace if self.unasked is None else self.trace.only((0, begin), (end, events))
        usual = [step.events[1] for step in self.steps if step.kind == "usual"]
        if not usual:
            return {"worst": asked}
        head, after = (0, usual[-1]), (self.steps_end, len(asked.events))
        found = {"usual": asked.only(head)}
        for kind in dict.fromkeys(step.kind for step in self.steps if step.kind != "usual"):
            own = [step.events for step in self.steps if step.kind == kind]
            found[kind] = asked.only(head, *own, *([after] if kind == "worst" else []))
        return found


@dataclass(frozen=True, slots=True)
class BatchLengths:
    """How long the columns of some batches are that a script's data can form, tokens: of the largest and a median one
    (None: about as large), the worst of half as many rows, and of rows that are cut (None: there is none).

    Attributes:
        rows, said: of the worst; the worst in words.
        shapes: None without `usual`.
    """

    worst: dict[str, int]
    usual: dict[str, int] | None
    half: dict[str, int] | None
    cut: dict[str, int] | None
    rows: int
    said: str
    shapes: BatchShapes | None


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception that ended the script, the script's own or memkit's: its class, what it says, the line of the
    script, such as `"train.py, line 5"` (empty: unknown), and the traceback."""

    by_script: bool
    type: str
    message: str
    place: str
    text: str


@dataclass(frozen=True, slots=True)
class Untrained:
    """A script that ended by itself before `train()`; `exit`: what it gave `sys.exit`."""

    exit: int | str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a script: one of these, or its process ended without a word. `died`: how; None: exit code 0."""

    training: TracedTraining | None = None
    lengths: BatchLengths | None = None
    failed: Failed | None = None
    untrained: Untrained | None = None
    died: str | None = None
