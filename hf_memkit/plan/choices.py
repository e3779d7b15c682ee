"""The techniques of the catalogue that a plan can try on a script: choices by slot.

Omits choices that the script's Trainer does not support or that a rule of `checks/` refuses. The search decides
whether a choice fits and is faster.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from hf_memkit.catalog.fp16_overflow import overflow_in_fp16
from hf_memkit.catalog.hardware import Machine
from hf_memkit.catalog.liger_support import LIGER_OPTIONS
from hf_memkit.catalog.optimizers import OPTIMIZERS, install_command
from hf_memkit.common.user_files import user_path
from hf_memkit.deepspeed import presets
from hf_memkit.plan import fsdp_choices, other_code
from hf_memkit.plan.candidate import Choice
from hf_memkit.plan.compile_choice import compile_choice, too_old_for_triton
from hf_memkit.plan.refused_settings import refused
from hf_memkit.prediction.traced_training import BatchEffects, TracedArguments, TracedTraining
from hf_memkit.setup.techniques.adapters import QUANTIZATION, RANK, TARGETS, peft_arguments
from hf_memkit.setup.techniques.allocator import user_settings
from hf_memkit.setup.techniques.registry import CATALOGUE, Group, Technique

ROWS_COMPARED: Final = "the loss compares the rows of a micro-batch with one another"
"""Why the micro-batch stays as it is."""

_SLOTS: Final = (
    "loss", "loss with code", "attention", "optimizer", "checkpointing", "allocator", "precision", "small optimizer",
    "padding", "sharding", "engine", "method", "compile",
)  # fmt: skip
"""In this order."""

LeftOut = dict[str, str]
"""Name of a choice → reason why no setup has it."""

_LEAST_PADDING: Final = 0.05
"""Share of a batch: with less padding, padding-free batches are not worth another attention implementation."""

_NO_CHECKPOINTING: Final = Choice("checkpointing", "no checkpointing", {"arguments.activation_checkpointing": False})

_NO_NEW_HEAD: Final = ("ForMaskedLM", "ForPreTraining", "ForConditionalGeneration")
"""Suffixes of model classes whose checkpoints contain the head."""

_SPLIT: Final = ("zero2", "zero3")
"""DeepSpeed presets that save nothing on one GPU."""

ON_DISK: Final = "zero3-infinity"
"""The DeepSpeed preset that needs a folder."""

_FREE: Final = ("attention", "optimizer")
"""Slots whose choices cost nothing: a setup always has them."""


def _rows(slot: str) -> list[Technique]:
    """The techniques of a slot, in order of falling memory use; of "", those that no plan has."""
    turns = [(row.planned.turn, row) for row in CATALOGUE.values() if row.planned and row.planned.slot == slot]
    return [row for _, row in sorted(turns, key=lambda each: each[0])]


def choice_of(row: Technique, **changes: Any) -> Choice:
    """A technique as a choice of a plan, with `changes` of its fields."""
    assert row.planned is not None
    return replace(
        Choice(
            row.planned.slot, row.planned.name, dict(row.settings), row.group, row.planned.result,
            costs_time=row.slows,
        ),
        **changes,
    )  # fmt: skip


ADAPTERS: Final = {row.name: choice_of(row).name for row in _rows("method")}
"""Methods that `--also` takes besides optimizers → their names in a plan."""

IN_NO_PLAN: Final[LeftOut] = {row.planned.name: row.planned.never for row in _rows("") if row.planned}
"""Techniques that no plan has."""


@dataclass(frozen=True, slots=True)
class _Script:
    """The arguments of conditions."""

    own: TracedTraining
    machine: Machine
    environment: Mapping[str, str]
    gpus: int


def choices_for(
    own: TracedTraining,
    machine: Machine,
    environment: Mapping[str, str],
    *,
    gpus: int,
    left_out: LeftOut,
    also: tuple[str, ...] = (),
    nvme_path: str | None = None,
) -> dict[str, list[Choice | None]]:
    """Slot → choices, in order of falling memory use; None stands for the unchanged script.

    Args:
        left_out: receives the names of omitted choices, with the reason.
        also: other methods to try: names of `ADAPTERS`, and optimizers (`optim`).
        nvme_path: folder for DeepSpeed's swap files; None: no swapping.
    """
    script = _Script(own, machine, environment, gpus)
    special: dict[str, Callable[[], list[Choice | None]]] = {
        "checkpointing": lambda: list(_checkpointing(own, left_out)),
        "sharding": lambda: [None, *fsdp_choices.sharding(own)],
        "engine": lambda: [None, *_engines(script, left_out, nvme_path)],
        "method": lambda: [None, *_methods(script, also, left_out)],
    }
    by_slot = {slot: special[slot]() if slot in special else _choices(slot, script, left_out) for slot in _SLOTS}
    if len(by_slot["loss"]) > 1:
        by_slot["loss with code"] = [None]  # a fused loss needs no code
    if own.parallel_sizes:
        left_out["another layout of the GPUs"] = fsdp_choices.kept_layout(own)
    left_out |= IN_NO_PLAN
    return {slot: _legal(choices, own, machine, gpus, left_out) for slot, choices in by_slot.items()}


def _choices(slot: str, script: _Script, left_out: LeftOut) -> list[Choice | None]:
    choices: list[Choice | None] = []
    for row in _rows(slot):
        choice = choice_of(row)
        outcome = _CONDITIONS.get(row.name, _unless_set)(script, row, choice)
        if isinstance(outcome, Choice):
            choices.append(outcome)
        elif outcome:
            left_out[choice.name] = outcome
    return choices or [None] if slot in _FREE else [None, *choices]


def smaller_evaluations(own: TracedTraining, micro_batch: int) -> Iterator[Choice]:
    """Evaluations with predictions in RAM, with batches as large as the micro-batch, then of one row."""
    arguments = own.arguments
    rows = arguments.per_device_eval_batch_size or 1
    in_ram = {"arguments.eval_accumulation_steps": 1} if arguments.eval_accumulation_steps is None else {}
    for size in sorted({min(rows, micro_batch), 1}, reverse=True):
        if size < rows:
            settings = {"arguments.per_device_eval_batch_size": size, **in_ram}
            # transformers 5.23.0: trainer.py, `evaluation_loop` repeats the mean of a batch for each of its rows
            decides = arguments.load_best_model_at_end or "plateau" in str(own.facts.schedule)
            choice = choice_of(CATALOGUE["small-evaluation-batch"], settings=settings)
            group: Group = "nearly the same" if decides else choice.group
            yield replace(choice, name=f"{choice.name} {size}", group=group)
        elif in_ram:
            yield choice_of(CATALOGUE["eval-accumulation"], settings=in_ram)


def micro_batches(sequences: int) -> list[int]:
    """The divisors of one GPU's sequences in an optimizer step, the largest first."""
    return [size for size in range(sequences, 0, -1) if sequences % size == 0]


def of_batch(batch: BatchEffects) -> tuple[Group, str]:
    """The effect of another micro-batch on the result: (group, in words)."""
    if batch.rows_compared:
        return "another method", ROWS_COMPARED
    if batch.scaled_by_accumulation:
        return "another method", undivided(batch)
    if batch.fixed_by_deepspeed:
        return (
            "another method",
            f"the DeepSpeed config fixes {', '.join(batch.fixed_by_deepspeed)}; omit it there, or write auto",
        )
    if batch.late_batch:
        return "another method", "the script sets its batch after it creates its Trainer"
    effects = []
    if batch.batch_norm:
        effects.append("batch normalisation takes its statistics from another micro-batch")
    if batch.mean_of_micro_batches:
        effects.append("the loss is the mean of the micro-batches' means, which weighs rows by their micro-batch")
    if batch.dropout:
        effects.append("dropout draws other numbers")
    return ("nearly the same" if effects else "same result"), "; ".join(effects)


def undivided(batch: BatchEffects) -> str:
    """Why accumulation scales the gradients of this training, and the fix."""
    if batch.loss_func:
        return "compute_loss_func ignores num_items_in_batch, and Trainer does not divide its loss: divide a sum by it"
    return (
        "Trainer does not divide this model's loss by the accumulation, which would scale the gradients; to have it "
        "do so, set model.accepts_loss_kwargs = False before Trainer(...)"
    )


def _checkpointing(own: TracedTraining, left_out: LeftOut) -> Iterator[Choice | None]:
    if own.fsdp is not None and own.fsdp.activation_checkpointing:
        yield from fsdp_choices.without_checkpointing(own, left_out)
        return
    if not own.facts.model.supports_checkpointing:
        left_out["checkpointing"] = "the model's class does not support gradient checkpointing"
        yield None
        return
    choices = [_NO_CHECKPOINTING, *map(choice_of, _rows("checkpointing"))]
    has = _own_checkpointing(own.arguments)
    for choice in choices:
        yield None if choice.name == has else choice
    if has not in {each.name for each in choices}:
        yield None


def _own_checkpointing(arguments: TracedArguments) -> str:
    if not arguments.activation_checkpointing:
        return _NO_CHECKPOINTING.name
    every = (arguments.activation_checkpointing_kwargs or {}).get("every_n_layers", 1)
    name = {1: "activation-checkpointing", 2: "every-nth-layer-checkpointing"}.get(every)
    return choice_of(CATALOGUE[name]).name if name else ""


Condition = Callable[[_Script, Technique, Choice], Choice | str]
"""Returns the choice for this script, or the reason why it has none; empty: no reason to print."""


def _not_installed(*packages: str) -> str:
    missing = next((each for each in packages if importlib.util.find_spec(each) is None), "")
    name = install_command(missing).rpartition(" ")[2]
    return f"{name} is not installed here: {install_command(missing)}" if missing else ""


def _unless_set(script: _Script, row: Technique, choice: Choice) -> Choice | str:
    """The default condition: the script does not have these settings, and the packages are installed."""
    known = script.own.arguments.known()
    wanted = {key.removeprefix("arguments."): value for key, value in choice.settings.items()}
    if all(known.get(name) == value for name, value in wanted.items()):
        return ""
    return _not_installed(*row.packages) or choice


def _liger(script: _Script, row: Technique, choice: Choice) -> Choice | str:
    gpu, model_type = script.machine.gpu, script.own.facts.model.model_type
    if script.own.arguments.use_liger_kernel:
        return ""
    if script.own.arguments.torch_compile:
        return "memkit does not plan Liger's kernels together with torch.compile"
    if fsdp_choices.is_sharded_when_loaded(script.own):
        return fsdp_choices.SHARDED_WHEN_LOADED
    if script.own.fsdp is not None and script.own.facts.model.adapters:
        return "its loss does not read an output layer that FSDP2 shards around PEFT's model"
    if model_type not in LIGER_OPTIONS:
        return f"Liger has no kernels for model type {model_type}"
    if why := too_old_for_triton(gpu):
        return why
    return _not_installed(*row.packages) or choice


def _chunked_loss(script: _Script, row: Technique, choice: Choice) -> Choice | str:
    facts = script.own.facts
    late = facts.made_at is not None and facts.made_at.model == "model_init"  # made anew where training begins
    if not facts.model.chunkable_loss or script.own.arguments.use_liger_kernel or late:
        return ""
    if fsdp_choices.is_sharded_when_loaded(script.own):
        return fsdp_choices.SHARDED_WHEN_LOADED
    return replace(choice, code=other_code.CHUNKED_LOSS)


def _sdpa(script: _Script, row: Technique, choice: Choice) -> Choice | str:
    model = script.own.facts.model
    if model.attention != "eager" or not model.supports_sdpa or not model.of_transformers:
        return ""
    if script.own.facts.batch.dropout:
        return "its dropout draws other numbers; to have it, load the model with it"
    return choice


def _precision(script: _Script, row: Technique, choice: Choice) -> Choice | str:
    own, gpu = script.own, script.machine.gpu
    trained = own.model.trained_dtypes
    if gpu is None or own.arguments.fp16 or "float32" not in trained or gpu.bf16 != (row.name == "bf16-autocast"):
        return ""
    if gpu.bf16:
        return "" if own.arguments.bf16 else choice
    if "bfloat16" in trained:
        return ""  # GradScaler cannot unscale their gradients
    if why := overflow_in_fp16(own.facts.model.model_type):
        return why.removeprefix("fp16: ")
    if not own.arguments.bf16:
        return choice
    settings = {**choice.settings, "arguments.bf16": False}
    return replace(choice, settings=settings, result=choice.result.replace("instead of fp32", "instead of bf16"))


def _eight_bit(script: _Script, row: Technique, choice: Choice) -> Choice | str:
    own = script.own
    optimizer = OPTIMIZERS.get(str(own.arguments.optim))
    if own.arguments.deepspeed:
        return "memkit does not plan it together with DeepSpeed"
    if own.sharded:
        return fsdp_choices.NO_DTENSORS
    if own.facts.own_optimizer or optimizer is None or optimizer.algorithm != "AdamW" or optimizer.bits != 32:
        return "the script's optimizer is not a 32-bit AdamW of Trainer's optim"
    return _not_installed(*row.packages) or choice


def _without_padding(script: _Script, row: Technique, choice: Choice) -> Choice | str:
    """TRL's `padding_free`. It does not truncate rows, and refuses `max_length` (trl 1.16.0: sft_trainer.py,
    `SFTTrainer.__init__`)."""
    own = script.own
    padding, cut_at = own.facts.padding, own.arguments.max_length
    if padding.is_left_out or not padding.share:
        return ""
    if padding.share < _LEAST_PADDING:
        return f"{100 * padding.share:.1f} % of a batch is padding"
    if padding.needed:
        return padding.needed
    if "cp_size" in own.parallel_sizes:
        return "context parallelism has no mask between rows"
    if cut_at is not None and padding.cuts_rows and (padding.longest_row or 0) >= cut_at:
        return f"it does not truncate rows, and max_length={cut_at} does; truncate them when tokenizing"
    settings = {**choice.settings, **({"arguments.max_length": None} if cut_at is not None else {})}
    result = f"no padding, {100 * padding.share:.0f} % of a batch now"
    install = ""
    if "flash" not in str(own.facts.model.attention):
        settings |= CATALOGUE["flash-attention"].settings
        result += ", and flash attention"
        install = "pip install flash-attn  # or kernels"
    result += ": sums in another order"
    if padding.counts_first_labels:  # transformers 5.23.0: trainer.py, `_get_num_items_in_batch`
        result += "; the loss's divisor then omits the first token of each row, which no position predicts"
    return replace(choice, settings=settings, result=result, install=install)


_CONDITIONS: Final[Mapping[str, Condition]] = {
    "liger": _liger,
    "chunked-loss": _chunked_loss,
    "sdpa-attention": _sdpa,
    "adamw-fused": lambda script, row, choice: (
        choice if script.own.arguments.optim == "adamw_torch" and not script.own.facts.own_optimizer else ""
    ),
    "expandable-segments": lambda script, row, choice: choice if user_settings(script.environment) is None else "",
    "bf16-autocast": _precision,
    "fp16-autocast": _precision,
    "adamw-8bit": _eight_bit,
    # The reason is printed for 8-bit AdamW.
    "paged-adamw-8bit": lambda script, row, choice: (
        choice if isinstance(_eight_bit(script, row, choice), Choice) else ""
    ),
    "padding-free": _without_padding,
    "compile": lambda script, row, choice: compile_choice(script.own, script.machine.gpu, script.environment, choice),
}
"""Conditions of rows for which the default one is not enough."""


def _engines(script: _Script, left_out: LeftOut, nvme_path: str | None) -> Iterator[Choice]:
    if script.own.sharded:
        engine = "FSDP2" if script.own.fsdp is not None else "weights that are sharded when loaded"
        left_out["DeepSpeed"] = f"the script trains with {engine}"
        return
    yield from _deepspeed(script, left_out, nvme_path)
    yield from fsdp_choices.engine(script.own, left_out) if script.gpus > 1 else ()


def _deepspeed(script: _Script, left_out: LeftOut, nvme_path: str | None) -> Iterator[Choice]:
    own, gpus = script.own, script.gpus
    if own.arguments.deepspeed:
        if nvme_path is not None:
            left_out[ON_DISK] = "the training has its own DeepSpeed config"
        return
    obstacles = {
        "the model is quantised": own.facts.model.quantised,
        "the script creates its own optimizer": own.facts.own_optimizer,
        "Trainer refuses auto_find_batch_size with it": own.arguments.auto_find_batch_size,
    }
    if why := next((each for each, is_there in obstacles.items() if is_there), ""):
        left_out["DeepSpeed"] = why
        return
    if "float32" in own.model.trained_dtypes and not (own.arguments.bf16 or own.arguments.fp16):
        left_out["DeepSpeed"] = "the script trains in fp32, and the presets are for bf16 or fp16"
        return
    result = "computes from 16-bit copies of the weights" if "float32" in own.model.trained_dtypes else ""
    for row in _rows("engine"):
        name = row.name
        if gpus < 2 and name in _SPLIT:
            continue
        if name == ON_DISK and nvme_path is None:
            left_out[name] = "needs a folder on a fast disk: --nvme-path FOLDER"
            continue
        config = _on_disk(own, gpus, nvme_path) if name == ON_DISK and nvme_path else presets.load(name)
        if own.facts.model.device_map and config["zero_optimization"]["stage"] == 3:
            left_out[name] = "the script loads its model with device_map, which ZeRO-3 refuses"
            continue
        yield choice_of(row, settings={"arguments.deepspeed": config}, result=result, engine=name)


def _on_disk(own: TracedTraining, gpus: int, nvme_path: str) -> dict[str, Any]:
    """The preset with this folder, and with buffers large enough for the largest weight's share, without which
    DeepSpeed stops (`checks/rules/capacity.py`, `buffer_too_small`)."""
    config = presets.load(ON_DISK)
    zero = config["zero_optimization"]
    for part in ("offload_optimizer", "offload_param"):
        zero[part]["nvme_path"] = str(user_path(nvme_path).absolute())
    share = -(-max((*own.facts.weights.trained, *own.facts.weights.frozen), default=0) // gpus)
    zero["offload_param"]["buffer_size"] = max(zero["offload_param"]["buffer_size"], -(-share // 1024) * 1024)
    return config


def _methods(script: _Script, also: tuple[str, ...], left_out: LeftOut) -> Iterator[Choice]:
    own = script.own
    for name in dict.fromkeys(also):
        if name in ADAPTERS:
            why = _no_adapters(own, name)
            if why:
                left_out[ADAPTERS[name]] = why
            else:
                yield _adapters(own, script.machine, name)
            continue
        optimizer = OPTIMIZERS[name]
        why = _not_installed(*optimizer.packages)
        if own.sharded and not optimizer.dtensors:
            why = fsdp_choices.NO_DTENSORS
        if own.facts.own_optimizer or why:
            left_out[name] = why or "the script creates its own optimizer"
            continue
        result = f"{name}: another optimizer, which needs its own learning rate"
        settings: dict[str, Any] = {"arguments.optim": name}
        if optimizer.low_rank:
            settings["arguments.optim_target_modules"] = "all-linear"
        yield Choice("method", name, settings, "another method", result)


def _no_adapters(own: TracedTraining, name: str) -> str:
    """Why LoRA or QLoRA cannot be added to the script; empty: it can."""
    if why := _not_installed("peft"):
        return why
    if own.facts.model.adapters:
        return "the script trains adapters already"
    if own.facts.model.quantised:
        return "the script's model is quantised already"
    if fsdp_choices.is_sharded_when_loaded(own):
        return fsdp_choices.SHARDED_WHEN_LOADED
    if not own.facts.model.of_transformers:
        return f"{own.model.kind} is not a model class of transformers: PEFT does not know its layers"
    kind = own.model.kind
    if not peft_arguments(kind) and not kind.endswith(_NO_NEW_HEAD):
        return f"PEFT has no task type for {kind}, and would leave a new head untrained"
    if own.facts.own_optimizer:
        return "the script creates its own optimizer, for the parameters of the whole model"
    if name == "lora":
        return ""
    if own.arguments.deepspeed:
        return "the script uses DeepSpeed, which memkit does not plan with 4-bit weights"
    if why := _not_installed("bitsandbytes"):
        return why
    if not own.facts.model.from_pretrained:
        return "the script does not load its model with from_pretrained, which does the quantising"
    return ""


def _adapters(own: TracedTraining, machine: Machine, name: str) -> Choice:
    of_model = {key: value for key, (value, _) in peft_arguments(own.model.kind).items()}
    adapter = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": TARGETS, **of_model}
    settings = {f"adapter.{key}": value for key, value in adapter.items()}
    over = ", over 4-bit weights" if name == "qlora" else ""
    result = f"only adapters are trained (rank {RANK}){over}; they need their own learning rate"
    kwargs = own.arguments.activation_checkpointing_kwargs or {}
    if kwargs.get("use_reentrant"):
        # The first layer's input needs no gradient, and a reentrant checkpoint would then give its layers none.
        settings["arguments.activation_checkpointing_kwargs"] = {**kwargs, "use_reentrant": False}
    if name == "qlora":
        dtype = "bfloat16" if machine.gpu is not None and machine.gpu.bf16 else "float16"
        settings["model.quantization_config"] = {**QUANTIZATION, "bnb_4bit_compute_dtype": dtype}
    code = other_code.lines(own.facts.made_at, adapter, settings.get("model.quantization_config"))
    return choice_of(CATALOGUE[name], settings=settings, result=result, code=code)


def _legal(
    choices: list[Choice | None], own: TracedTraining, machine: Machine, gpus: int, left_out: LeftOut
) -> list[Choice | None]:
    """The choices without those that a rule refuses."""
    legal: list[Choice | None] = []
    for choice in choices:
        if choice is not None and (why := refused(choice.settings, own.arguments, machine, gpus)):
            left_out[choice.name] = why
        else:
            legal.append(choice)
    return legal
