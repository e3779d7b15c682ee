"""Activation checkpointing: off, with another effect than it seems, or failing after the model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hf_memkit.checks.fsdp_settings import fsdp_of
from hf_memkit.checks.rule import Match, Rules, any_job
from hf_memkit.checks.rules.scripts import is_for_other_media, is_for_text, is_for_trl
from hf_memkit.checks.subject import Subject
from hf_memkit.setup.techniques.registry import setting_of

_every_layer: Final = Rules(techniques=("activation-checkpointing",))
_selective: Final = Rules(techniques=("selective-checkpointing",))
_SWITCH: Final = "activation_checkpointing"
_OPTIONS: Final = "activation_checkpointing_kwargs"

_TRAINER: Final = {"every_n_layers", "offload"}  # transformers 5.23.0: trainer.py 1507-1516 takes these out
# torch 2.13.0: utils/checkpoint.py 354-364 and 499
_TORCH: Final = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}

UNSUPPORTED: Final = frozenset(
    {"cpmant", "ctrl", "gpt_neox_japanese", "jetmoe", "openai-gpt", "reformer", "xlm", "xlnet"}
)
"""Model types whose causal language model cannot be checkpointed (transformers 5.23.0:
`supports_gradient_checkpointing` of the classes)."""

_PARTS: Final = ("checkpoint_selective", "checkpoint_offload")


def _options(subject: Subject) -> Mapping[str, Any]:
    options = subject.argument(_OPTIONS)
    return options if isinstance(options, Mapping) else {}


def _part(subject: Subject) -> str:
    """The part that checkpoints instead of Trainer; empty if there is none."""
    return next((part for part in _PARTS if subject.has_setting(f"model_parts.{part}")), "")


@_every_layer.warning(
    why="gradient_checkpointing is the old name of activation_checkpointing; if both are set, the old one is "
    "silently ignored",
    fix="delete the old name",
    source="transformers 5.23.0: training_args.py 1533-1543",
)
def checkpointing_two_names(subject: Subject) -> Iterator[Match]:
    for old, value in subject.superseded_arguments.items():
        new = old.replace("gradient_", "activation_")
        if value != subject.argument(new):
            yield Match(old, value, argument=True)


@_every_layer.warning(
    why="nothing is checkpointed: the options apply only if activation_checkpointing is true",
    fix=f"set {setting_of('activation-checkpointing')}, or delete the options",
    source="transformers 5.23.0: trainer.py 1503",
)
def checkpointing_options_without_switch(subject: Subject) -> Iterator[Match]:
    # TRL's configs have the switch on unless the file says otherwise (trl 1.16.0: trainer/base_config.py 62-63).
    on = subject.on(_SWITCH) or (is_for_trl(subject) and subject.argument(_SWITCH) is None)
    if _options(subject) and not on and not _part(subject):
        switch = _SWITCH.replace("activation", subject.written(_OPTIONS).partition("_")[0])
        why = f"nothing is checkpointed: the options apply only if {switch} is true"
        yield Match(_OPTIONS, why=why, fix=f"set {switch}: true, or delete the options", argument=True)


@_every_layer.hint(
    why="PyTorch uses the reentrant form if use_reentrant is missing, and transformers sets it only if there are no "
    "options at all",
    fix="add use_reentrant: false",
    source="torch 2.13.0: utils/checkpoint.py 486-496; transformers 5.23.0: modeling_utils.py 3148",
)
def checkpointing_reentrant_unset(subject: Subject) -> Iterator[Match]:
    passed = set(_options(subject)) - _TRAINER
    if subject.on(_SWITCH) and passed and _options(subject).get("use_reentrant") is None:
        yield Match(_OPTIONS, argument=True)


@_every_layer.warning(
    why="the reentrant form gives a layer's weights gradients only if one of its positional inputs needs a gradient; "
    "transformers ensures that only for input_ids: with another main input (images, sound), layers above a frozen "
    "embedding silently stay untrained",
    fix="set use_reentrant: false",
    source="torch 2.13.0: utils/checkpoint.py 51-58, a warning; transformers 5.23.0: modeling_utils.py 3181-3189, "
    "enable_input_require_grads",
)
def checkpointing_reentrant_inputs(subject: Subject) -> Iterator[Match]:
    if _is_reentrant(subject) and not is_for_text(subject) and not _searched_by_ddp(subject):
        yield Match(_OPTIONS, argument=True, severity=None if is_for_other_media(subject) else "hint")


def _is_reentrant(subject: Subject) -> bool:
    return subject.on(_SWITCH) and _options(subject).get("use_reentrant") is True


def _searched_by_ddp(subject: Subject) -> bool:
    """Whether DistributedDataParallel, where it runs, looks for unused parameters."""
    ddp = subject.config is None and not subject.argument("deepspeed") and not subject.argument("fsdp")
    return ddp and subject.on("ddp_find_unused_parameters") and subject.processes != 1


@_every_layer.error(
    why="on several GPUs DistributedDataParallel, which looks for unused parameters, and the reentrant form mark the "
    'same gradient twice: "Expected to mark a variable ready only once" in the first backward pass',
    fix="set use_reentrant: false, or ddp_find_unused_parameters: false",
    source="torch 2.13.0: csrc/distributed/c10d/reducer.cpp, mark_variable_ready; nn/parallel/distributed.py, "
    "find_unused_parameters",
)
def checkpointing_reentrant_ddp(subject: Subject) -> Iterator[Match]:
    if _is_reentrant(subject) and _searched_by_ddp(subject):
        yield Match(_OPTIONS, argument=True)


@_every_layer.error(
    why="dropout draws new masks when the layer is recomputed: the gradients match neither pass",
    fix="delete preserve_rng_state",
    source="torch 2.13.0: utils/checkpoint.py 1631-1670; accelerate 1.15.0: utils/fsdp_utils.py 722",
)
def checkpointing_masks_differ(subject: Subject) -> Iterator[Match]:
    """A warning under FSDP, whose checkpointing has no option against it."""
    config = subject.config_of_model
    rates = {name: value for name, value in config.items() if name.endswith(("pdrop", "dropout", "layerdrop"))}
    if not any(value and not name.startswith("summary") for name, value in rates.items()):
        return
    if subject.on(_SWITCH) and _options(subject).get("preserve_rng_state") is False:
        yield Match(_OPTIONS, argument=True)
    fsdp = fsdp_of(subject)
    if fsdp is not None and fsdp.version == 2 and fsdp.on(_SWITCH):
        why = "FSDP's checkpointing draws new masks of dropout when it recomputes: the gradients match neither pass"
        fix = "set dropout to 0, or activation_checkpointing to false in fsdp_config and to true in the arguments"
        yield replace(fsdp.place(_SWITCH), why=why, fix=fix, severity="warning")


@_every_layer.error(
    why="Trainer rejects its own checkpointing together with FSDP's",
    fix="set activation_checkpointing: false in the arguments, or in fsdp_config",
    source="transformers 5.23.0: trainer.py 879-884; trl 1.16.0: trainer/base_config.py 62-63",
)
def checkpointing_and_fsdp(subject: Subject) -> Iterator[Match]:
    fsdp = fsdp_of(subject)
    if fsdp is None or not fsdp.on(_SWITCH):
        return
    if subject.on(_SWITCH):
        of_fsdp = fsdp.place(_SWITCH)
        fix = f"set {subject.written(_SWITCH)}: false in the arguments, or {of_fsdp.key}: false"
        yield Match(_SWITCH, True, fix=f"{fix} in {of_fsdp.file}" if of_fsdp.file else fix, argument=True)
    elif is_for_trl(subject) and subject.argument(_SWITCH) is None:
        why = "TRL turns Trainer's own checkpointing on by default, and Trainer rejects it together with FSDP's"
        yield replace(fsdp.place(_SWITCH), why=why, fix="set gradient_checkpointing: false in the arguments")


@any_job.warning(
    why="every_n_layers checkpoints only layers 0, n, 2n …: a larger n means fewer checkpointed layers and more "
    "memory",
    fix="write a number between 1 and half of the layers",
    source="transformers 5.23.0: modeling_utils.py 3237",
    techniques=("every-nth-layer-checkpointing",),
)
def every_nth_of_few(subject: Subject) -> Iterator[Match]:
    every = _options(subject).get("every_n_layers")
    layers = subject.model.layers if subject.model is not None else 0
    if not subject.on(_SWITCH) or not isinstance(every, int):
        return
    if every < 1:
        yield Match(_OPTIONS, why="every_n_layers must be at least 1", argument=True, severity="error")
    elif layers > 3 and every > layers // 2:
        why = f"every_n_layers={every} checkpoints {-(-layers // every)} of {layers} layers"
        why += "; a larger number means fewer checkpointed layers and more memory"
        yield Match(_OPTIONS, why=why, argument=True)


@_selective.warning(
    why="Trainer's switch checkpoints every layer, instead of the part",
    fix="set activation_checkpointing to false",
    source="transformers 5.23.0: trainer.py 1503-1516, modeling_utils.py 3233",
)
def checkpointing_part_overruled(subject: Subject) -> Iterator[Match]:
    if _part(subject) and subject.on(_SWITCH):
        yield Match(_SWITCH, True, argument=True)


@_selective.error(
    why="a function among the arguments cannot be written as JSON or pickled: the first dashboard or save fails",
    fix="delete it; for the common context_fn use the technique selective-checkpointing",
    source="transformers 5.23.0: training_args.py to_json_string; trainer.py save_model, training_args.bin",
)
def checkpointing_function(subject: Subject) -> Iterator[Match]:
    if any(callable(value) for value in _options(subject).values()):
        yield Match(_OPTIONS, str(subject.argument(_OPTIONS)), argument=True)


@any_job.error(
    why="offload pins host memory, which PyTorch rejects on a machine without an accelerator",
    fix="delete offload: on a CPU the activations are already in host memory",
    source="transformers 5.23.0: modeling_utils.py 3151-3158; torch 2.13.0: autograd/graph.py 403-414",
    techniques=("offloaded-checkpointing",),
)
def offload_without_accelerator(subject: Subject) -> Iterator[Match]:
    if subject.on(_SWITCH) and _options(subject).get("offload") and subject.without_gpu:
        yield Match(_OPTIONS, argument=True)


@any_job.warning(
    why="neither Trainer nor PyTorch's checkpoint knows this option: the layers receive it and silently ignore it",
    fix=f"write one of {', '.join(sorted(_TRAINER | _TORCH - {'context_fn'}))}",
    source="torch 2.13.0: utils/checkpoint.py 500-516; transformers 5.23.0: modeling_layers.py 120",
    techniques=("activation-checkpointing", "every-nth-layer-checkpointing"),
)
def checkpointing_unknown_option(subject: Subject) -> Iterator[Match]:
    for name in _options(subject).keys() - _TRAINER - _TORCH if subject.on(_SWITCH) else ():
        yield Match(f"{_OPTIONS}.{name}", _options(subject)[name], argument=True)


@_every_layer.warning(
    why="a checkpointed layer keeps no cache of keys and values: use_cache is switched off layer by layer",
    fix="delete use_cache; Trainer sets it to false in training",
    source="transformers 5.23.0: modeling_layers.py 93-118",
)
def cache_with_checkpointing(subject: Subject) -> Iterator[Match]:
    if subject.on("use_cache") and (subject.on(_SWITCH) or _part(subject)):
        yield Match("use_cache", True, argument=True)


@_every_layer.error(
    why="this model's class does not support activation checkpointing; Trainer fails, but only after loading the "
    "weights",
    fix="leave checkpointing out, and use a smaller micro-batch",
    source="transformers 5.23.0: modeling_utils.py 3145, supports_gradient_checkpointing of the class",
)
def checkpointing_unsupported_model(subject: Subject) -> Iterator[Match]:
    unsupported = subject.model_type in UNSUPPORTED
    if unsupported and subject.on(_SWITCH):
        yield Match(_SWITCH, True, argument=True)
    elif unsupported and (part := _part(subject)):
        yield Match(f"model_parts.{part}")


@_selective.error(
    why="torch.compile does not support this part: training fails in the first forward or backward pass",
    fix="use activation-checkpointing, which torch.compile supports, or leave torch_compile out",
    source="torch 2.13.0: _dynamo/variables/higher_order_ops.py (context_fn); utils/checkpoint.py, CheckpointError",
)
def checkpointing_parts_compiled(subject: Subject) -> Iterator[Match]:
    part = _part(subject)
    if subject.compiles and part == "checkpoint_selective":
        yield Match(f"model_parts.{part}")
