"""FSDP: values that fail, keys that nobody reads, layers that are not wrapped, and weights that are not saved."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Final

from hf_memkit.catalog.library_versions import accelerate_options, model_classes
from hf_memkit.checks.fsdp_settings import (
    LEFT_TO_THE_LAUNCHER,
    SECTION,
    FsdpSettings,
    fsdp_of,
    launched_settings,
    xla_switch,
)
from hf_memkit.checks.other_files import FSDP_SETTINGS
from hf_memkit.checks.rule import Match, any_job
from hf_memkit.checks.rules.optimizer_options import named_optimizer, optimizer_row
from hf_memkit.checks.rules.scripts import trains_adapters
from hf_memkit.checks.subject import Subject
from hf_memkit.common.errors import did_you_mean

_ARGUMENTS: Final = "transformers 5.23.0: training_args.py"
_PLUGIN: Final = "accelerate 1.15.0: utils/dataclasses.py"

_STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_POLICIES: Final = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_STATE_DICTS: Final = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")
_PREFETCHES: Final = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_FALSE: Final = ("0", "F", "FALSE", "N", "NO", "OFF")
_TRUTH: Final = ("TRUE", "FALSE", "1", "T", "Y", "YES", "ON", *_FALSE)
"""What accelerate reads as true or false (accelerate 1.15.0: utils/environment.py, `str_to_bool`)."""

_WORDS: Final = ("full_shard", "shard_grad_op", "offload", "auto_wrap")
"""What version 2 takes in the text of `fsdp`."""
_RESHARD: Final = {"FULL_SHARD": "true", "SHARD_GRAD_OP": "false", "1": "true", "2": "false"}
"""Strategy of version 1 → reshard_after_forward of version 2."""
_HYBRID: Final = (
    "write fsdp: true. To shard within a machine only, set parallelism_config_dp_shard_size and "
    "parallelism_config_dp_replicate_size in parallelism_config of accelerate's YAML"
)

_READ_BY_TRAINER: Final = frozenset({
    "version", "cpu_offload", "auto_wrap_policy", "min_num_params", "transformer_layer_cls_to_wrap",
    "cpu_ram_efficient_loading", "state_dict_type", "activation_checkpointing", "reshard_after_forward", "xla",
    "xla_fsdp_settings", "xla_fsdp_v2", "xla_fsdp_grad_ckpt",
})  # fmt: skip
_VERSION_1: Final = {
    "backward_prefetch": "BACKWARD_PRE",
    "forward_prefetch": "FALSE",
    "limit_all_gathers": "TRUE",
    "sync_module_states": "TRUE",
    "use_orig_params": "TRUE",
}
"""Setting that only version 1 reads → the value that describes what version 2 does in any case."""

_INSTEAD: Final = {
    "offload_params": "write cpu_offload: {}",
    "backward_prefetch_policy": "write backward_prefetch: {} for version 1; version 2 always prefetches",
    "activation_checkpointing_offload": "set FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD={} in the job's environment",
    "ignored_modules": "set FSDP_IGNORED_MODULES={} in the job's environment",
    "mixed_precision_policy": "delete it, and set bf16 or fp16 in the arguments",
    "mixed_precision": "delete it, and set bf16 or fp16 in the arguments",
    "sharding_strategy": "write reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP)",
    "strategy": "write reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP)",
}
"""Setting that is not read → what to write instead of it; {} is its value."""


@any_job.error(
    why="TrainingArguments, the launcher or accelerate's plugin refuse this value",
    fix="write a value that they take",
    source=f"{_ARGUMENTS} 2775-2940; {_PLUGIN} 1823-2073; utils/launch.py 304-333",
)
def fsdp_wrong_value(subject: Subject) -> Iterator[Match]:
    fsdp = fsdp_of(subject)
    if fsdp is None:
        return

    for word in _words(subject):
        if word not in _WORDS and (fsdp.version == 2 or word.upper() not in _STRATEGIES):
            yield _refused_word(word)
    if not fsdp.version:
        yield replace(fsdp.place("version"), fix="write 2")
    for name, match in fsdp.read.items():
        if fix := _fix_of_value(name, match.value, fsdp):
            yield replace(match, fix=fix)

    if fsdp.by_trainer and isinstance(fsdp.value("cpu_offload"), str) and not fsdp.on("cpu_offload"):
        why = "any text counts as true: weights, gradients and states stay in RAM"
        yield replace(fsdp.place("cpu_offload"), why=why, fix="write false without quotes")
    offload = "activation_checkpointing_offload"
    if not fsdp.by_trainer and fsdp.on(offload) and not (fsdp.version == 2 and fsdp.on("activation_checkpointing")):
        why = "accelerate's plugin refuses it without version 2 and activation_checkpointing"
        yield replace(fsdp.place(offload), why=why, fix=f"set both, or {offload}: false")

    of_launcher = launched_settings(subject)
    sync = of_launcher.get("sync_module_states")
    loading = of_launcher.get("cpu_ram_efficient_loading")
    if sync is not None and not sync.value and (loading is None or loading.value):
        why = "the launcher refuses cpu_ram_efficient_loading, which is on by default, without sync_module_states"
        yield replace(sync, why=why, fix="delete it, or set fsdp_cpu_ram_efficient_loading: false")


def _words(subject: Subject) -> list[str]:
    """The words in the text or list of `fsdp`, as older versions of transformers had it."""
    value = subject.argument("fsdp")
    words = value.split() if isinstance(value, str) else value
    return list(map(str, words)) if isinstance(words, list) else []


def _refused_word(word: str) -> Match:
    """The problem with a word in the text of `fsdp` that version 2 refuses."""
    why = f"TrainingArguments do not know {word!r}"
    fix = f"write fsdp: true, and the rest in fsdp_config{did_you_mean(word.lower(), _WORDS)}"
    if word.lower() in ("true", "false"):
        fix = f"write {word.lower()} without quotes; on a command line, --fsdp full_shard or no --fsdp"
    elif word.upper() == "NO_SHARD":
        why = f"version 2 has no {word}"
        fix = "delete fsdp: without it each GPU keeps the whole model"
    elif word.upper() in _STRATEGIES[3:]:
        why = f"version 2 has no {word}; version 1, which transformers proposes then, shards over all GPUs in any case"
        fix = _HYBRID
    return Match("fsdp", why=why, fix=fix, argument=True)


def _fix_of_value(name: str, value: Any, fsdp: FsdpSettings) -> str:
    """What to write instead of a value that is refused; empty for another one."""
    word = str(value).upper()
    if name == "min_num_params" and fsdp.policy == "SIZE_BASED_WRAP":
        is_number = isinstance(value, int) or (word.isdigit() and not fsdp.by_trainer)
        return "" if is_number else "write a whole number without quotes, such as 100000000"
    if name == "auto_wrap_policy" and fsdp.by_trainer and word in _POLICIES and value != word:
        return f"write {word}, in capitals"
    allowed = _allowed_words(name, fsdp)
    if allowed == _TRUTH and word not in allowed:
        return f"write {_RESHARD.get(word, 'true or false')}"
    if not allowed or word in allowed or value is None or word.isdigit():
        return ""
    return f"write {' or '.join(allowed)}"


def _allowed_words(name: str, fsdp: FsdpSettings) -> tuple[str, ...]:
    """The words that a setting takes, in capitals or not; empty if it takes others, or nothing reads it."""
    first = fsdp.version == 1
    of_launcher = {"offload_params": _TRUTH, "activation_checkpointing_offload": _TRUTH}
    of_version_1 = dict.fromkeys(("forward_prefetch", "sync_module_states", "use_orig_params"), _TRUTH)
    strategy = "reshard_after_forward" if fsdp.by_trainer else "sharding_strategy"
    allowed: Mapping[str, tuple[str, ...]] = {
        "activation_checkpointing": _TRUTH,
        "cpu_ram_efficient_loading": _TRUTH,
        "auto_wrap_policy": _POLICIES,
        "state_dict_type": _STATE_DICTS if first else _STATE_DICTS[:2],
        "backward_prefetch": () if fsdp.by_trainer and not first else _PREFETCHES,
        **({} if fsdp.by_trainer else of_launcher),
        **(of_version_1 | {strategy: _STRATEGIES} if first else {"reshard_after_forward": _TRUTH}),
    }
    return allowed.get(name, ())


@any_job.warning(
    why="nothing reads this key: it has no effect",
    fix="delete it",
    source=f"{_ARGUMENTS} 2775-2885; {_PLUGIN} 1831-1956; utils/launch.py 304-333",
)
def fsdp_key_unread(subject: Subject) -> Iterator[Match]:
    """A hint if the engine does in any case what the key asks for."""
    fsdp = fsdp_of(subject)
    if fsdp is None:
        return
    launched = {name.removeprefix("fsdp_") for name in accelerate_options("prepare_multi_gpu_env")}
    known = _READ_BY_TRAINER | _VERSION_1.keys() if fsdp.by_trainer else launched or FSDP_SETTINGS
    obsolete = {*_VERSION_1, "sharding_strategy"} & known if fsdp.version == 2 else set()
    for name, match in fsdp.read.items():
        word = str(match.value).upper()
        if name in obsolete:
            same = word in (_VERSION_1.get(name), "FULL_SHARD", "1")
            fix = _instead(name, match.value) or "delete it"
            if name != "sync_module_states" or fsdp.by_trainer:  # the launcher asks for it
                yield replace(match, why="version 2 does not read it", fix=fix, severity="hint" if same else None)
        elif name not in known:
            why = f"{'Trainer' if fsdp.by_trainer else 'the launcher'} does not read it: it has no effect"
            fix = _instead(name, match.value) or f"delete it{did_you_mean(name, known - obsolete)}"
            same = name in ("offload_params", "activation_checkpointing_offload") and word in _FALSE
            yield replace(match, why=why, fix=fix, severity="hint" if same else None)
    is_chosen = fsdp.by_trainer or "auto_wrap_policy" in fsdp.read
    for name, policy in (("min_num_params", _POLICIES[1]), ("transformer_layer_cls_to_wrap", _POLICIES[0])):
        if is_chosen and name in fsdp.read and fsdp.value(name) and fsdp.policy != policy:
            why = f"only {policy} reads it; the policy is {fsdp.policy}"
            yield replace(fsdp.place(name), why=why, fix=f"set auto_wrap_policy: {policy}, or delete {name}")
    yield from _unread_strategy(subject, fsdp)
    if fsdp.by_trainer and (of_launcher := launched_settings(subject)):
        different = (name for name, match in of_launcher.items() if not _is_same(name, match.value, fsdp))
        others = ", ".join(name for name in different if name not in LEFT_TO_THE_LAUNCHER)
        why = f"Trainer's fsdp and fsdp_config take precedence; nothing reads {others}"
        if others:
            value = (subject.launcher or {})[SECTION]
            yield Match(SECTION, value, why=why, fix="set FSDP in one of the two files", launcher=True)


def _is_same(name: str, value: Any, fsdp: FsdpSettings) -> bool:
    """Whether Trainer's settings have this value of accelerate's YAML, too."""
    return name in fsdp.given and str(fsdp.value(name)).upper() == str(value).upper()


def _instead(name: str, value: Any) -> str:
    """What to write instead of a setting that is not read; empty if it has no successor."""
    if name in ("sharding_strategy", "strategy") and str(value).upper() in _RESHARD:
        return f"write reshard_after_forward: {_RESHARD[str(value).upper()]}"
    return _INSTEAD.get(name, "").format(json.dumps(value) if isinstance(value, bool) else value)


def instead_in_fsdp_config(name: str, value: Any) -> str:
    """What to write in `fsdp_config` instead of an argument that is a setting of FSDP; empty for another one."""
    written = json.dumps(value) if isinstance(value, bool) else value
    return _instead(name, value) or (f"write {name}: {written}" if name in FSDP_SETTINGS else "")


def _unread_strategy(subject: Subject, fsdp: FsdpSettings) -> Iterator[Match]:
    """Version 1 asks for sharding_strategy before reshard_after_forward, and accelerate always sets it: to
    FSDP_SHARDING_STRATEGY, which the launcher takes from its YAML, or to FULL_SHARD."""
    strategies = [Match("fsdp", word, argument=True) for word in _words(subject) if word.upper() in _STRATEGIES]
    if "reshard_after_forward" in fsdp.read:
        strategies = [fsdp.read["reshard_after_forward"]]
    if fsdp.version != 1 or (not fsdp.by_trainer and "sharding_strategy" in fsdp.read):
        return
    for match in strategies:
        word = str(match.value).upper()
        if word not in ("FULL_SHARD", "1", "TRUE"):
            fix = f"set FSDP_SHARDING_STRATEGY={word} in the job's environment, or use version 2"
            why = "version 1 reads sharding_strategy first, which accelerate sets to FULL_SHARD"
            yield replace(match, why=why, fix=fix if fsdp.by_trainer else f"write fsdp_sharding_strategy: {word}")


@any_job.warning(
    why="it is for TPUs: without torch_xla, Trainer fails when training starts",
    fix="delete it, and train with FSDP2 on GPUs",
    source="transformers 5.23.0: trainer.py 2680; integrations/tpu.py 61",
)
def fsdp_for_tpus(subject: Subject) -> Iterator[Match]:
    xla = xla_switch(subject)
    if xla is not None and importlib.util.find_spec("torch_xla") is None:
        yield xla


@any_job.warning(
    why="Trainer reads fsdp_config only if fsdp is set: nothing is sharded",
    fix="set fsdp: true",
    source=f"{_ARGUMENTS} 2776",
)
def fsdp_config_without_fsdp(subject: Subject) -> Iterator[Match]:
    content = subject.argument(SECTION)
    # Saved arguments of a training without FSDP have keys with 0 and false.
    is_used = any(content.values()) if isinstance(content, Mapping) else content
    if subject.argument("fsdp") or not is_used:
        return
    if fsdp_of(subject) is None:
        yield Match(SECTION, argument=True)
    else:
        why = "Trainer reads fsdp_config only if fsdp is set: FSDP runs with the settings of accelerate's YAML"
        yield Match(SECTION, why=why, fix="move them to fsdp_config of accelerate's YAML", argument=True)


@any_job.warning(
    why="no layer is wrapped: each step gathers all layers on every GPU at once",
    fix="set auto_wrap_policy: TRANSFORMER_BASED_WRAP",
    source="accelerate 1.15.0: utils/fsdp_utils.py 713-716, 921-972; utils/dataclasses.py 2102-2107",
)
def fsdp_unwrapped(subject: Subject) -> Iterator[Match]:
    """An error with activation checkpointing: version 2 calls the policy, which is None."""
    fsdp = fsdp_of(subject)
    if fsdp is None:
        return
    least = fsdp.value("min_num_params", 0 if fsdp.by_trainer else 1)  # the launcher passes 100 million on
    if fsdp.policy != "NO_WRAP" and not (fsdp.policy == "SIZE_BASED_WRAP" and least in (0, "0", None)):
        return
    if fsdp.version == 2 and fsdp.on("activation_checkpointing"):
        why = "activation checkpointing needs wrapped layers: \"TypeError: 'NoneType' object is not callable\""
        yield replace(fsdp.place("auto_wrap_policy"), why=why, severity="error")
    else:
        yield fsdp.place("auto_wrap_policy")


@any_job.error(
    why='accelerate fails: "Could not find the transformer layer class", but only after loading the model',
    fix="write the class of the model's layers",
    source="accelerate 1.15.0: utils/dataclasses.py 2085-2096",
)
def fsdp_wrap_class(subject: Subject) -> Iterator[Match]:
    """A hint if the class may be that of a model with its own code."""
    fsdp = fsdp_of(subject)
    if fsdp is None or fsdp.policy != "TRANSFORMER_BASED_WRAP":
        return
    match = fsdp.place("transformer_layer_cls_to_wrap")
    model = subject.model
    modules = model.module_classes if model is not None else frozenset()
    by_default = model.layer_classes if model is not None else ()
    present = [name for name in by_default if name in modules]
    fix = f"write transformer_layer_cls_to_wrap: {','.join(present)}" if present else ""

    if match.value is None:
        missing = [name for name in by_default if name not in modules]
        if missing:
            why = f"accelerate wraps what _no_split_modules names, and the model has no {' and no '.join(missing)}"
            yield replace(match, why=f"{why}: it fails after loading the model", fix=fix)
        elif modules and not by_default:
            why = "transformers names no layers of this model: none is wrapped, and each step gathers all at once"
            yield replace(match, why=why, fix="write the class of its layers", severity="warning")
        return

    names = list(map(str, match.value)) if isinstance(match.value, list) else str(match.value).split(",")
    joined = ",".join(name.strip() for name in names)
    if not joined:
        yield replace(match, why="accelerate looks for a class without a name, and fails", fix="delete it")
        return
    if match.launcher and isinstance(match.value, list):
        yield replace(match, why="the launcher passes the list on as one text with brackets", fix=f"write {joined}")
        return
    for name in names:
        if name != name.strip():
            yield replace(match, why=f"accelerate looks for {name!r}, with the space", fix=f"write {joined}")
        elif modules and name not in modules:
            yield replace(match, why=f"the model has no {name}: accelerate fails after loading it", fix=fix)
        elif not modules and model_classes() and name not in model_classes():
            yield _unknown_class(match, name)


def _unknown_class(match: Match, name: str) -> Match:
    """The problem with a class that no model of transformers has; an error if only the case of its letters differs."""
    why = f"no model of the installed transformers has {name}"
    if same := [each for each in model_classes() if each.lower() == name.lower()]:
        return replace(match, why=f"{why}: accelerate fails after loading the model", fix=f"write {same[0]}")
    near = get_close_matches(name, model_classes(), n=1, cutoff=0.8)
    fix = f"write {near[0]}, unless the model brings its own code" if near else "compare it with the model's own code"
    return replace(match, why=why, fix=fix, severity="hint")


_NO_WEIGHTS: Final = (
    "save_model() writes no weights, and checkpoints have only FSDP's shards, which `accelerate merge-weights` merges"
)


@any_job.warning(
    why=f"with SHARDED_STATE_DICT {_NO_WEIGHTS}",
    fix="set state_dict_type: FULL_STATE_DICT, or call set_state_dict_type('FULL_STATE_DICT') of "
    "trainer.accelerator.state.fsdp_plugin before the last save_model()",
    source=f"transformers 5.23.0: trainer.py 907-912, 4097-4100; {_PLUGIN} 2047-2051",
)
def fsdp_saves_no_weights(subject: Subject) -> Iterator[Match]:
    """An error with save_only_model."""
    fsdp = fsdp_of(subject)
    if fsdp is None or fsdp.state_dict != "SHARDED_STATE_DICT":
        return
    if subject.on("save_only_model"):
        why = "Trainer rejects save_only_model together with SHARDED_STATE_DICT"
        yield Match("save_only_model", True, why=why, argument=True, severity="error")
    else:
        default = "SHARDED_STATE_DICT is version 2's default in accelerate's YAML: "
        why = "" if "state_dict_type" in fsdp.given else default + _NO_WEIGHTS
        yield replace(fsdp.place("state_dict_type"), why=why)


@any_job.error(
    why="version 2's checkpointing renames the layers, and PEFT then finds none of their adapters: a save writes an "
    "empty file of 40 bytes, without an error",
    fix="use Trainer's checkpointing: activation_checkpointing: false in fsdp_config, true in the arguments",
    source="accelerate 1.15.0: utils/fsdp_utils.py 722; peft 0.21.2: tuners/tuners_utils.py 1536-1537",
)
def fsdp_saves_empty_adapter(subject: Subject) -> Iterator[Match]:
    fsdp = fsdp_of(subject)
    if fsdp is not None and fsdp.version == 2 and fsdp.on("activation_checkpointing") and trains_adapters(subject):
        yield fsdp.place("activation_checkpointing")


@any_job.error(
    why="version 2 shards parameters as DTensors, which operators of this optimizer do not take: the first optimizer "
    "step fails",
    fix="set optim: adamw_torch_8bit, of torchao, or adamw_torch_fused with cpu_offload",
    source="bitsandbytes 0.50.2: optim/optimizer.py 540-590; transformers 5.23.0: optimization.py 1237, 1266; "
    "apollo-torch 1.0.3: random_projector.py 112-121; torch 2.13.0: distributed/tensor/_dispatch.py",
)
def fsdp_optimizer(subject: Subject) -> Iterator[Match]:
    fsdp = fsdp_of(subject)
    if fsdp is not None and fsdp.version == 2 and not optimizer_row(subject).dtensors:
        yield Match("optim", named_optimizer(subject), argument=True)


@any_job.warning(
    why="version 2 does not shard integers: each GPU keeps all 4-bit weights",
    fix="set bnb_4bit_quant_storage to the type in which the model computes, such as bfloat16",
    source="accelerate 1.15.0: utils/fsdp_utils.py 793-811; transformers 5.23.0: utils/quantization_config.py 477",
)
def fsdp_whole_4bit(subject: Subject) -> Iterator[Match]:
    fsdp = fsdp_of(subject)
    quantization = subject.setting("model.quantization") or {}
    key, given = "model.quantization.bnb_4bit_quant_storage", quantization
    if subject.on("load_in_4bit"):  # TRL's argument
        key, given = "bnb_4bit_quant_storage", subject.arguments or {}
    storage = given.get("bnb_4bit_quant_storage")
    is_whole = given.get("load_in_4bit") is True and str(storage or "uint8") in ("uint8", "int8")
    if fsdp is not None and fsdp.version == 2 and is_whole:
        yield Match(key, storage, argument=given is not quantization)


@any_job.error(
    why="around PEFT's model accelerate shards the output layer as a unit of one layer, and Liger's loss reads its "
    "weights without a call that gathers them: the first step fails",
    fix="set liger_kernel_config: {fused_linear_cross_entropy: false, cross_entropy: true}",
    source="accelerate 1.15.0: utils/fsdp_utils.py 733-748, 868-879; liger_kernel 0.8.5: model/llama.py 194-202",
)
def fsdp_liger_adapters(subject: Subject) -> Iterator[Match]:
    fsdp = fsdp_of(subject)
    if fsdp is None or fsdp.version != 2 or not subject.on("use_liger_kernel") or not trains_adapters(subject):
        return
    kernels = subject.argument("liger_kernel_config")
    if not isinstance(kernels, Mapping) or kernels.get("fused_linear_cross_entropy", True):
        yield Match("use_liger_kernel", True, argument=True)


@any_job.hint(
    why="transformers deprecates version 1 of FSDP, and fsdp as a text or list",
    fix="write fsdp: true, and the settings of version 2 in fsdp_config",
    source=f"{_ARGUMENTS} 2863-2868, 2901-2912",
)
def fsdp_deprecated(subject: Subject) -> Iterator[Match]:
    fsdp = fsdp_of(subject)
    if fsdp is None:
        return
    words = subject.argument("fsdp")
    if isinstance(words, str | list) and fsdp.by_trainer:
        yield Match("fsdp", words, why="transformers deprecates fsdp as a text or list", fix="write fsdp: true",
                    argument=True)  # fmt: skip
    if fsdp.by_trainer and fsdp.version == 1:
        yield replace(fsdp.given["version"], why="transformers deprecates version 1 of FSDP", fix="write version: 2")
    elif not fsdp.by_trainer and "version" not in fsdp.given:
        why = "accelerate takes version 1 where none is given"
        yield replace(fsdp.place("version"), why=why, fix="add fsdp_version: 2, or 1 if you mean it")
