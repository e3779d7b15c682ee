"""What a script could do in another way: by what its Trainer is, and what the rules of `checks/` let through.

In: the script's own training, GPU and number of GPUs. Out: choices by slot. Whether they fit and pay is for the search
to find out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hf_memkit.catalog.fp16_overflow import overflow_in_fp16
from hf_memkit.catalog.hardware import Machine
from hf_memkit.catalog.liger_support import LIGER_OPTIONS
from hf_memkit.catalog.optimizers import OPTIMIZERS, install_command
from hf_memkit.checks.apply import check
from hf_memkit.checks.subject import Subject
from hf_memkit.common.resources import documentation
from hf_memkit.common.user_files import user_path
from hf_memkit.deepspeed import presets
from hf_memkit.plan import other_code
from hf_memkit.plan.candidate import Alternative, Group
from hf_memkit.prediction.traced_training import BatchEffects, TracedArguments, TracedTraining
from hf_memkit.setup.techniques.adapters import QUANTIZATION, RANK, TARGETS, told_of_model
from hf_memkit.setup.techniques.allocator import VARIABLE, user_settings

ADAPTERS: Final = {"lora": "LoRA", "qlora": "QLoRA"}
"""Methods that `--also` takes besides optimizers, and what a setup with one is called."""

ROWS_COMPARED: Final = "the loss compares the rows of a micro-batch with one another"
"""Why the micro-batch stays as it is."""

LeftOut = dict[str, str]
"""Name of a choice → why no setup has it."""

IN_NO_PLAN: Final[LeftOut] = {
    "packing": "it changes which tokens an optimizer step has, and so how many steps an epoch has",
    "torch_compile": "a compiled model keeps and recomputes what its compiler decides, which a trace does not show",
    "half weights with stochastic rounding": (
        "Trainer's optim has no such optimizer; for your script: "
        + documentation("techniques/optimizers.md#adamw-8bit-stochastic")
    ),
}
"""What no plan has, whatever the script."""

_LEAST_PADDING: Final = 0.05
"""Of a batch: where less is padding, leaving it out is not worth another attention."""

_TRITON: Final = 7.0
"""The least compute capability that Triton compiles for (torch 2.13: _inductor/exc.py, `GPUTooOldForTriton`)."""

_FLASH: Final = "flash_attention_2"

_EIGHT_BITS: Final = "adamw_bnb_8bit"
_PAGED: Final = "paged_adamw_8bit"

_ON: Final = {
    "arguments.activation_checkpointing": True,
    "arguments.activation_checkpointing_kwargs": {"use_reentrant": False},
}

_CHECKPOINTING: Final = (
    Alternative("checkpointing", "no checkpointing", {"arguments.activation_checkpointing": False}),
    Alternative(
        "checkpointing", "checkpointing of every 2nd layer",
        {**_ON, "arguments.activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2}},
        costs_time=True,
    ),
    Alternative("checkpointing", "checkpointing", _ON, costs_time=True),
)  # fmt: skip
"""From the fastest to the leanest."""

_NO_NEW_HEAD: Final = ("ForMaskedLM", "ForPreTraining", "ForConditionalGeneration")
"""Ends of names of classes whose checkpoints have all layers."""

_ENGINES: Final = {
    1: ("zero2-offload", "zero3-offload"),
    2: ("zero2", "zero3", "zero2-offload", "zero3-offload"),
}
"""DeepSpeed presets that keep the result, by GPUs from which on they make sense, from the fastest to the leanest."""

ON_DISK: Final = "zero3-infinity"
"""The DeepSpeed preset that is leaner than all of them, where a folder for it is given."""


def choices_for(
    own: TracedTraining,
    machine: Machine,
    environment: Mapping[str, str],
    *,
    gpus: int,
    left_out: LeftOut,
    also: tuple[str, ...] = (),
    nvme_path: str | None = None,
) -> dict[str, list[Alternative | None]]:
    """By slot, from the fastest to the leanest; None stands for what the script does itself.

    Args:
        left_out: gets what no setup has, and why.
        also: other methods that are asked for: of `ADAPTERS`, and optimizers (`optim`).
        nvme_path: folder that DeepSpeed may swap to; None: it may not.
    """
    losses = list(_losses(own, machine, left_out))
    found: dict[str, list[Alternative | None]] = {
        "loss": [None, *losses],
        "loss with code": [None, *([] if losses else _chunked_losses(own))],
        "attention": list(_attentions(own, left_out)) or [None],
        "optimizer": list(_fused(own)) or [None],
        "checkpointing": list(_checkpointing(own, left_out)),
        "allocator": [None, *_allocators(environment)],
        "precision": [None, *_precisions(own, machine, left_out)],
        "small optimizer": [None, *_small_optimizers(own, left_out)],
        "padding": [None, *_without_padding(own, left_out)],
        "engine": [None, *_engines(own, gpus, left_out, nvme_path)],
        "method": [None, *_methods(own, machine, also, left_out)],
    }
    left_out |= IN_NO_PLAN
    return {slot: _legal(choices, own, machine, gpus, left_out) for slot, choices in found.items()}


def smaller_evaluations(own: TracedTraining, micro_batch: int) -> Iterator[Alternative]:
    """Evaluations whose predictions do not stay on the GPU, in batches of a micro-batch, then of one row."""
    arguments = own.arguments
    rows = arguments.per_device_eval_batch_size or 1
    in_ram = {"arguments.eval_accumulation_steps": 1} if arguments.eval_accumulation_steps is None else {}
    for size in sorted({min(rows, micro_batch), 1}, reverse=True):
        if size < rows:
            settings = {"arguments.per_device_eval_batch_size": size, **in_ram}
            # transformers 5.23.0: trainer.py, `evaluation_loop` repeats the mean of a batch for each of its rows
            said = "eval_loss is averaged over other batches"
            decides = arguments.load_best_model_at_end or "plateau" in str(own.facts.schedule)
            group: Group = "nearly the same" if decides else "same result"
            yield Alternative("evaluation", f"evaluation batch {size}", settings, group, said)
        elif in_ram:
            yield Alternative("evaluation", "predictions in RAM", in_ram)


def micro_batches(sequences: int) -> list[int]:
    """The sizes of a micro-batch that divide what one GPU takes in an optimizer step, the largest first."""
    return [size for size in range(sequences, 0, -1) if sequences % size == 0]


def wrong_sequences(sequences: int, gpus: int) -> str:
    """Why an optimizer step on so many GPUs cannot have so many sequences, as a message; empty: it can."""
    if sequences >= 1 and sequences % gpus == 0:
        return ""
    below = sequences // gpus * gpus
    near = f"{below} or {below + gpus}" if below > 0 else str(gpus)
    return f"--sequences-per-step {sequences}: must be a multiple of {gpus}, the number of GPUs; write {near}"


def of_batch(batch: BatchEffects) -> tuple[Group, str]:
    """What another micro-batch does to the result: (group, in words)."""
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
    said = []
    if batch.batch_norm:
        said.append("batch normalisation takes its statistics from another micro-batch")
    if batch.mean_of_micro_batches:
        said.append("the loss is the mean of the micro-batches' means, which weighs rows by their micro-batch")
    if batch.dropout:
        said.append("dropout draws other numbers")
    return ("nearly the same" if said else "same result"), "; ".join(said)


def undivided(batch: BatchEffects) -> str:
    """Why accumulation scales the gradients, where it does, and what to change."""
    if batch.loss_func:
        return "compute_loss_func ignores num_items_in_batch, and Trainer does not divide its loss: divide a sum by it"
    return (
        "Trainer does not divide this model's loss by the accumulation, which would scale the gradients; to have it "
        "do so, set model.accepts_loss_kwargs = False before Trainer(...)"
    )


def _checkpointing(own: TracedTraining, left_out: LeftOut) -> Iterator[Alternative | None]:
    if not own.facts.model.supports_checkpointing:
        left_out["checkpointing"] = "the model's class does not support gradient checkpointing"
        yield None
        return
    has = _own_checkpointing(own.arguments)
    for choice in _CHECKPOINTING:
        yield None if choice.name == has else choice
    if has not in {each.name for each in _CHECKPOINTING}:
        yield None


def _own_checkpointing(arguments: TracedArguments) -> str:
    if not arguments.activation_checkpointing:
        return _CHECKPOINTING[0].name
    every = (arguments.activation_checkpointing_kwargs or {}).get("every_n_layers", 1)
    return {1: _CHECKPOINTING[2].name, 2: _CHECKPOINTING[1].name}.get(every, "")


def _losses(own: TracedTraining, machine: Machine, left_out: LeftOut) -> Iterator[Alternative]:
    if own.arguments.use_liger_kernel:
        return
    name = "Liger kernels (fused loss)"
    if own.facts.model.model_type not in LIGER_OPTIONS:
        left_out[name] = f"Liger has no kernels for model type {own.facts.model.model_type}"
    elif machine.gpu is not None and (machine.gpu.capability or _TRITON) < _TRITON:
        left_out[name] = f"Triton needs compute capability {_TRITON}; {machine.gpu.name} has {machine.gpu.capability}"
    elif importlib.util.find_spec("liger_kernel") is None:
        left_out[name] = "liger-kernel is not installed here: pip install liger-kernel"
    else:
        yield Alternative("loss", name, {"arguments.use_liger_kernel": True})


def _chunked_losses(own: TracedTraining) -> Iterator[Alternative]:
    """For those whom Liger has no kernels for: its fused loss needs no code."""
    made = own.facts.made_at
    late = made is not None and made.model == "model_init"  # it is made anew where training begins
    if own.facts.model.chunkable_loss and not own.arguments.use_liger_kernel and not late:
        yield Alternative(
            "loss", "chunked loss", {"loss.chunked": True}, result="the logits of a batch are never whole in memory",
            code=other_code.CHUNKED_LOSS,
        )  # fmt: skip


def _attentions(own: TracedTraining, left_out: LeftOut) -> Iterator[Alternative]:
    if own.facts.model.attention == "eager" and own.facts.model.supports_sdpa and own.facts.model.of_transformers:
        if own.facts.batch.dropout:
            left_out["sdpa attention"] = "its dropout draws other numbers; to have it, load the model with it"
            return
        yield Alternative("attention", "sdpa attention", {"model.attn_implementation": "sdpa"})


def _fused(own: TracedTraining) -> Iterator[Alternative]:
    if own.arguments.optim == "adamw_torch" and not own.facts.own_optimizer:
        yield Alternative("optimizer", "fused AdamW", {"arguments.optim": "adamw_torch_fused"})


def _allocators(environment: Mapping[str, str]) -> Iterator[Alternative]:
    if user_settings(environment) is None:
        setting = {f"environment.{VARIABLE}": "expandable_segments:True"}
        yield Alternative("allocator", "expandable segments", setting)


def _precisions(own: TracedTraining, machine: Machine, left_out: LeftOut) -> Iterator[Alternative]:
    arguments = own.arguments
    gpu = machine.gpu
    if gpu is None or arguments.fp16 or "float32" not in own.model.trained_dtypes:
        return
    if not gpu.bf16 and "bfloat16" in own.model.trained_dtypes:
        return  # GradScaler cannot unscale their gradients
    if not gpu.bf16 and (why := overflow_in_fp16(own.facts.model.model_type)):
        left_out["fp16"] = why.removeprefix("fp16: ")
    elif not gpu.bf16:
        fields = {"arguments.fp16": True, **({"arguments.bf16": False} if arguments.bf16 else {})}
        said = "products in fp16 (autocast, gradients scaled) instead of " + ("bf16" if arguments.bf16 else "fp32")
        yield Alternative("precision", "fp16", fields, "nearly the same", said)
    elif not arguments.bf16:
        yield Alternative(
            "precision", "bf16", {"arguments.bf16": True}, "nearly the same",
            "products in bf16 (autocast) instead of fp32",
        )  # fmt: skip


def _small_optimizers(own: TracedTraining, left_out: LeftOut) -> Iterator[Alternative]:
    optimizer = OPTIMIZERS.get(str(own.arguments.optim))
    name = "8-bit AdamW"
    if own.arguments.deepspeed:
        left_out[name] = "memkit does not plan it together with DeepSpeed"
        return
    if own.facts.own_optimizer or optimizer is None or optimizer.algorithm != "AdamW" or optimizer.bits != 32:
        left_out[name] = "the script's optimizer is not a 32-bit AdamW of Trainer's optim"
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        left_out[name] = "bitsandbytes is not installed here: pip install bitsandbytes"
        return
    said = "optimizer states in 8 bits (bitsandbytes)"
    yield Alternative(
        "small optimizer", name, {"arguments.optim": _EIGHT_BITS}, "nearly the same", said,
    )  # fmt: skip
    yield Alternative(
        "small optimizer", "paged 8-bit AdamW", {"arguments.optim": _PAGED}, "nearly the same",
        f"{said}, in memory that CUDA moves to RAM when the GPU is full", costs_time=True,
    )  # fmt: skip


def _without_padding(own: TracedTraining, left_out: LeftOut) -> Iterator[Alternative]:
    """Rows behind one another in the place of padding, as TRL's `padding_free` has them. It does not cut rows, and
    wants to be told so (trl 1.16.0: sft_trainer.py, `SFTTrainer.__init__`)."""
    padding, cut_at = own.facts.padding, own.arguments.max_length
    if padding.is_left_out or not padding.share:
        return
    name = "padding-free"
    if padding.share < _LEAST_PADDING:
        left_out[name] = f"{100 * padding.share:.1f} % of a batch is padding"
    elif padding.needed:
        left_out[name] = padding.needed
    elif cut_at is not None and padding.cuts_rows and (padding.longest_row or 0) >= cut_at:
        left_out[name] = f"it does not truncate rows, and max_length={cut_at} does; truncate them when tokenizing"
    else:
        settings: dict[str, Any] = {"arguments.padding_free": True}
        settings |= {"arguments.max_length": None} if cut_at is not None else {}
        said = f"no padding, {100 * padding.share:.0f} % of a batch now"
        install = ""
        if "flash" not in str(own.facts.model.attention):
            settings["model.attn_implementation"] = _FLASH
            said += ", and flash attention"
            install = "pip install flash-attn  # or kernels"
        said += ": sums in another order"
        if padding.counts_first_labels:  # transformers 5.23.0: trainer.py, `_get_num_items_in_batch`
            said += "; the loss's divisor then omits the first token of each row, which no position predicts"
        yield Alternative("padding", name, settings, "nearly the same", said, install=install)


def _engines(own: TracedTraining, gpus: int, left_out: LeftOut, nvme_path: str | None) -> Iterator[Alternative]:
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
    configs = {name: presets.load(name) for name in _ENGINES[min(gpus, 2)]}
    if nvme_path is None:
        left_out[ON_DISK] = "needs a folder on a fast disk: --nvme-path FOLDER"
    else:
        configs[ON_DISK] = _on_disk(own, gpus, nvme_path)
    said = "computes from 16-bit copies of the weights" if "float32" in own.model.trained_dtypes else ""
    for name, config in configs.items():
        if own.facts.model.device_map and config["zero_optimization"]["stage"] == 3:
            left_out[name] = "the script loads its model with device_map, which ZeRO-3 refuses"
            continue
        yield Alternative(
            "engine", name, {"arguments.deepspeed": config}, result=said, engine=name, costs_time=True,
        )  # fmt: skip


def _on_disk(own: TracedTraining, gpus: int, nvme_path: str) -> dict[str, Any]:
    """The preset with this folder, and with buffers that hold the largest weight's share: of a larger one DeepSpeed
    stops (`checks/rules/buffers.py`, `buffer_too_small`)."""
    config = presets.load(ON_DISK)
    zero = config["zero_optimization"]
    for part in ("offload_optimizer", "offload_param"):
        zero[part]["nvme_path"] = str(user_path(nvme_path).absolute())
    share = -(-max((*own.facts.weights.trained, *own.facts.weights.frozen), default=0) // gpus)
    zero["offload_param"]["buffer_size"] = max(zero["offload_param"]["buffer_size"], -(-share // 1024) * 1024)
    return config


def _methods(own: TracedTraining, machine: Machine, also: tuple[str, ...], left_out: LeftOut) -> Iterator[Alternative]:
    for name in dict.fromkeys(also):
        if name in ADAPTERS:
            why = _no_adapters(own, name)
            if why:
                left_out[ADAPTERS[name]] = why
            else:
                yield _adapters(own, machine, name)
            continue
        optimizer = OPTIMIZERS[name]
        missing = [each for each in optimizer.packages if importlib.util.find_spec(each) is None]
        if own.facts.own_optimizer or missing:
            why = "the script creates its own optimizer"
            left_out[name] = f"{missing[0]} is not installed here: {install_command(missing[0])}" if missing else why
            continue
        said = f"{name}: another optimizer, which needs its own learning rate"
        settings: dict[str, Any] = {"arguments.optim": name}
        if optimizer.low_rank:
            settings["arguments.optim_target_modules"] = "all-linear"
        yield Alternative("method", name, settings, "another method", said)


def _no_adapters(own: TracedTraining, name: str) -> str:
    """Why a script cannot have LoRA, or QLoRA, put into it; empty: it can."""
    if importlib.util.find_spec("peft") is None:
        return "peft is not installed here: pip install peft"
    if own.facts.model.adapters:
        return "the script trains adapters already"
    if own.facts.model.quantised:
        return "the script's model is quantised already"
    if not own.facts.model.of_transformers:
        return f"{own.model.kind} is not a model class of transformers: PEFT does not know its layers"
    kind = own.model.kind
    if not told_of_model(kind) and not kind.endswith(_NO_NEW_HEAD):
        return f"PEFT has no task type for {kind}, and would leave a new head untrained"
    if own.facts.own_optimizer:
        return "the script creates its own optimizer, for the parameters of the whole model"
    if name == "lora":
        return ""
    if own.arguments.deepspeed:
        return "the script uses DeepSpeed, which memkit does not plan with 4-bit weights"
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed here: pip install bitsandbytes"
    if not own.facts.model.from_pretrained:
        return "the script does not load its model with from_pretrained, which does the quantising"
    return ""


def _adapters(own: TracedTraining, machine: Machine, name: str) -> Alternative:
    told = {key: value for key, (value, _) in told_of_model(own.model.kind).items()}
    adapter = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": TARGETS, **told}
    settings = {f"adapter.{key}": value for key, value in adapter.items()}
    over = ", over 4-bit weights" if name == "qlora" else ""
    said = f"only adapters are trained (rank {RANK}){over}; they need their own learning rate"
    kwargs = own.arguments.activation_checkpointing_kwargs or {}
    if kwargs.get("use_reentrant"):
        # What enters the first layer needs no gradients now, and a reentrant checkpoint would give none behind it.
        settings["arguments.activation_checkpointing_kwargs"] = {**kwargs, "use_reentrant": False}
    if name == "qlora":
        dtype = "bfloat16" if machine.gpu is not None and machine.gpu.bf16 else "float16"
        settings["model.quantization_config"] = {**QUANTIZATION, "bnb_4bit_compute_dtype": dtype}
    code = other_code.lines(own.facts.made_at, adapter, settings.get("model.quantization_config"))
    return Alternative("method", ADAPTERS[name], settings, "another method", said, code=code)


def _legal(
    choices: list[Alternative | None], own: TracedTraining, machine: Machine, gpus: int, left_out: LeftOut
) -> list[Alternative | None]:
    """Without those in which a rule finds a mistake that the script does not make itself."""
    found: list[Alternative | None] = []
    for choice in choices:
        if choice is not None and (why := refused(choice.settings, own.arguments, machine, gpus)):
            left_out[choice.name] = why
        else:
            found.append(choice)
    return found


def refused(settings: Mapping[str, Any], arguments: TracedArguments, machine: Machine, gpus: int) -> str:
    """The mistake that a rule finds in the script with these settings, and not in the script itself; empty: none."""
    before = {each.rule for each in _problems(arguments.known(), machine, gpus)}
    given = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith("arguments.")}
    others = {key: value for key, value in settings.items() if key.startswith("adapter.")}
    if "model.quantization_config" in settings:
        others["model.quantization"] = settings["model.quantization_config"]
    found = _problems({**arguments.known(), **given}, machine, gpus, others)
    return next((f"{each.why} (rule {each.rule})" for each in found if each.rule not in before), "")


def _problems(
    arguments: Mapping[str, Any], machine: Machine, gpus: int, settings: Mapping[str, Any] | None = None
) -> list[Any]:
    config = arguments.get("deepspeed")
    known = {name: value for name, value in arguments.items() if value is not None}
    subject = Subject(
        config=config if isinstance(config, Mapping) else None, arguments=known, machine=machine, gpus=gpus,
        settings=settings or {},
    )  # fmt: skip
    return [each for each in check(subject) if each.severity == "error"]
