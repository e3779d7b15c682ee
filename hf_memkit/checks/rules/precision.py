"""Precision: in the DeepSpeed config, with the states' types; and Trainer's own: dtypes that cannot train, that are
unintended, or that silently change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from hf_memkit.checks.fsdp_settings import fsdp_of
from hf_memkit.checks.rule import Match, any_job, deepspeed
from hf_memkit.checks.rules.optimizer_options import UNSEEN, keeps_small_updates
from hf_memkit.checks.rules.scripts import trains_loaded_weights
from hf_memkit.checks.subject import Subject
from hf_memkit.setup.techniques.registry import setting_of

_BF16: Final = setting_of("bf16-autocast")
_FP16: Final = setting_of("fp16-autocast")

_DTYPES = {"fp16": "fp16", "float16": "fp16", "half": "fp16", "bf16": "bf16", "bfloat16": "bf16", "fp32": "fp32",
           "float32": "fp32", "float": "fp32"}  # fmt: skip


def _switched_on(subject: Subject, name: str, fix_of_argument: str, why: str = "") -> Match:
    """Where fp16 or bf16 is switched on: in the arguments if the config leaves it to them, else in the config."""
    if subject.at(f"{name}.enabled") != "auto":
        return Match(f"{name}.enabled", why=why)
    given = name if subject.on(name) else f"{name}_full_eval"
    return Match(given, True, why=why, fix=fix_of_argument, argument=True)


@deepspeed.error(
    why="DeepSpeed allows only one of fp16 and bf16; it fails with an assertion",
    fix='set "enabled" to "auto" in both sections, or to false in one',
    source="deepspeed 0.19.8: runtime/config.py 511",
)
def fp16_and_bf16(subject: Subject) -> Iterator[Match]:
    both_auto = all(subject.at(f"{name}.enabled") == "auto" and subject.on(name) for name in ("fp16", "bf16"))
    if subject.enabled("fp16") and subject.enabled("bf16") and not both_auto:  # by two-precisions, of the arguments
        yield _switched_on(subject, "fp16", "set fp16: false")


@deepspeed.error(
    why='without a GPU DeepSpeed fails on most CPUs: "Type fp16 is not supported on your device"',
    fix="use bf16 or fp32 here",
    source="deepspeed 0.19.8: runtime/engine.py 2003",
)
def fp16_without_gpu(subject: Subject) -> Iterator[Match]:
    if subject.enabled("fp16") and subject.without_gpu:
        yield _switched_on(subject, "fp16", f"set fp16: false here, and {_BF16} or neither")


@deepspeed.warning(
    why="this GPU emulates bf16, slower than fp32",
    fix='use fp16, with "bf16": {"enabled": "auto"}',
    source="torch 2.13.0: cuda/__init__.py, is_bf16_supported(including_emulation=True)",
)
def bf16_emulated(subject: Subject) -> Iterator[Match]:
    if subject.enabled("bf16") and subject.gpu is not None and not subject.gpu.bf16:
        why = f"{subject.gpu.name} emulates bf16, slower than fp32"
        yield _switched_on(subject, "bf16", f"set {_FP16} instead", why)


@deepspeed.hint(
    why="gradients accumulate in 4 bytes instead of 2; at stage 1 with bf16 each GPU holds all of them",
    fix="delete the key, unless the accumulation is so long that bf16 rounds too much",
    source="deepspeed 0.19.8: runtime/engine.py 2305-2310, runtime/zero/stage3.py 791",
)
def fp32_accumulation(subject: Subject) -> Iterator[Match]:
    path = "data_types.grad_accum_dtype"
    sixteen = subject.zero.element_bytes == 2
    if _DTYPES.get(str(subject.at(path)).lower()) != "fp32" or not sixteen:
        return
    if subject.zero.stage == 0:
        why = "without ZeRO DeepSpeed rejects it with 16-bit weights"
        yield Match(path, why=why, severity="error")
    elif subject.zero.stage == 1 and subject.zero.optimizer.device == "none" and subject.enabled("bf16") is not False:
        why = "at stage 1 with bf16 DeepSpeed uses its BF16_Optimizer: 4 bytes for every parameter on every GPU"
        yield Match(path, why=f"{why}, not split", severity="warning")
    else:
        yield Match(path)


@deepspeed.error(
    why="bf16_optimizer_states needs bf16_master_weights_and_grads; DeepSpeed fails with an assertion",
    fix='add "bf16_master_weights_and_grads": true',
    source="deepspeed 0.19.8: runtime/config.py 711-714",
)
def lean_states_without_master(subject: Subject) -> Iterator[Match]:
    master = subject.at("bf16.bf16_master_weights_and_grads")
    if subject.at("bf16.bf16_optimizer_states") is True and master is not True:
        yield Match("bf16.bf16_optimizer_states", True)


@deepspeed.error(
    why="16-bit master weights with fp32 moments need an optimizer offloaded to DeepSpeedCPUAdam; DeepSpeed fails",
    fix='add "bf16_optimizer_states": true, or offload the optimizer',
    source="deepspeed 0.19.8: runtime/base_optimizer.py 507-521, runtime/zero/stage_1_and_2.py 331",
)
def lean_master_without_offload(subject: Subject) -> Iterator[Match]:
    if subject.zero.optimizer.device != "none" or subject.zero.stage == 0:
        return
    bf16, fp16 = "bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads"
    if subject.at(bf16) is True and subject.at("bf16.bf16_optimizer_states") is not True:
        yield Match(bf16, True)
    if subject.at(fp16) is True:
        why = "fp16 master weights need an optimizer offloaded to DeepSpeedCPUAdam; DeepSpeed fails"
        yield Match(fp16, True, why=why, fix="offload the optimizer, or delete the key")


@deepspeed.error(
    why="offloaded 16-bit moments need an optimizer in the config: the one that accelerate creates keeps them in "
    "fp32, and DeepSpeed fails with an assertion",
    fix='add "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", '
    '"weight_decay": "auto"}}',
    source="deepspeed 0.19.8: runtime/base_optimizer.py 515-518; accelerate 1.15.0: utils/deepspeed.py 104",
)
def lean_offload_without_optimizer(subject: Subject) -> Iterator[Match]:
    path = "bf16.bf16_optimizer_states"
    if subject.at(path) is True and subject.zero.optimizer.device != "none" and not subject.has("optimizer"):
        yield Match(path, True)


@deepspeed.error(
    why="16-bit master weights and moments need stage 1, 2 or 3; DeepSpeed fails with an assertion",
    fix='set "stage" to 1, 2 or 3',
    source="deepspeed 0.19.8: runtime/config.py 701-714",
)
def lean_states_without_zero(subject: Subject) -> Iterator[Match]:
    for path in ("bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads"):
        if subject.at(path) is True and subject.zero.stage == 0:
            yield Match(path, True)


@deepspeed.error(
    why="bf16 is off: the model stays in fp32, its master weights are in bf16, and every update is rounded",
    fix='set "enabled": true in the same section',
    source="deepspeed 0.19.8: runtime/base_optimizer.py 525, which does not ask",
)
def lean_states_without_bf16(subject: Subject) -> Iterator[Match]:
    if subject.at("bf16.bf16_master_weights_and_grads") is True and subject.enabled("bf16") is False:
        yield Match("bf16.bf16_master_weights_and_grads", True)


@deepspeed.error(
    why="param_dtype must match the type that fp16 or bf16 sets; DeepSpeed fails with an assertion",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/engine.py 1812-1829",
)
def parameter_type(subject: Subject) -> Iterator[Match]:
    path = "data_types.param_dtype"
    asked = _DTYPES.get(str(subject.at(path)).lower())
    real = subject.computes_in
    if asked is not None and real is not None and asked != real:
        yield Match(path, why=f"the model is in {real}; DeepSpeed fails with an assertion")


@deepspeed.warning(
    why="neither Trainer nor the engine reads this section: it saves and moves no activations",
    fix=f"delete it, and set {setting_of('activation-checkpointing')} in TrainingArguments",
    source="deepspeed 0.19.8: runtime/activation_checkpointing/checkpointing.py 1118, read only by configure()",
)
def activation_section_unread(subject: Subject) -> Iterator[Match]:
    section = subject.at("activation_checkpointing")
    if isinstance(section, Mapping) and any(value not in (False, None) for value in section.values()):
        yield Match("activation_checkpointing", section)


@deepspeed.warning(
    why="contiguous checkpoints need partition_activations and number_checkpoints; configure() fails with an "
    "assertion",
    fix="add both, or delete the key",
    source="deepspeed 0.19.8: runtime/activation_checkpointing/checkpointing.py 1228-1231",
)
def contiguous_activations(subject: Subject) -> Iterator[Match]:
    path = "activation_checkpointing.contiguous_memory_optimization"
    partition = subject.at("activation_checkpointing.partition_activations")
    number = subject.at("activation_checkpointing.number_checkpoints")
    if subject.at(path) is True and not (partition is True and isinstance(number, int)):
        yield Match(path, True)


def _weights(subject: Subject) -> tuple[str, str]:
    """The key of the dtype in which the weights are loaded, and the dtype: fp16, bf16 or fp32. Of a setup, or the
    script's own argument; both empty without one."""
    if subject.has_setting("model.dtype"):
        return "model.dtype", _DTYPES.get(str(subject.setting("model.dtype")), "")
    for name in ("dtype", "torch_dtype"):  # run_clm.py and TRL have it, TrainingArguments have not
        value = subject.argument(name)
        if isinstance(value, str):
            return name, _DTYPES.get(value.removeprefix("torch."), "")
    return "", ""


@any_job.warning(
    why="a bf16 weight has 8 significant bits: an ordinary optimizer loses updates below about 1/256 of the weight, "
    f"which are most updates at fine-tuning rates, {UNSEEN}",
    fix=f"load fp32 weights (dtype: float32) and set {_BF16}, or use an optimizer with stochastic rounding "
    "(technique adamw-8bit-stochastic)",
    source="torch 2.13.0: optim/adamw.py; transformers 5.23.0: trainer_optimizer.py 472",
    techniques=("pure-bf16", "load-in-training-dtype"),
)
def bf16_weights_lose_updates(subject: Subject) -> Iterator[Match]:
    key, dtype = _weights(subject)
    # A setup's weights have their own rule: stochastic-rounding-missing.
    if key == "model.dtype" or dtype != "bf16":
        return
    if not trains_loaded_weights(subject) or keeps_small_updates(subject):
        return
    if fsdp_of(subject) is not None:
        why = (
            "a bf16 weight has 8 significant bits: an ordinary optimizer loses updates below about 1/256 of the "
            "weight. FSDP keeps an fp32 copy of the weights only with mixed precision"
        )
        yield Match(key, why=why, fix=f"set {_BF16}", argument=True)
    else:  # accelerate's own config may turn on DeepSpeed or FSDP, as in most recipes that load bf16 weights
        yield Match(key, severity="hint", argument=True)


@any_job.error(
    why=f"with {_FP16} torch fails to unscale fp16 gradients at the first step; without it AdamW divides by zero "
    "(its epsilon, 1e-8, is 0 in fp16) and the weights become NaN",
    fix=f"load fp32 weights (dtype: float32) and set {_FP16}",
    source="torch 2.13.0: amp/grad_scaler.py 252-259, optim/adamw.py",
    techniques=("fp16-autocast", "half-weights-deepspeed", "half-weights-frozen", "load-in-training-dtype"),
)
def fp16_weights_trained(subject: Subject) -> Iterator[Match]:
    key, dtype = _weights(subject)
    if dtype == "fp16" and trains_loaded_weights(subject):
        yield Match(key, "float16", argument=key != "model.dtype")


@any_job.error(
    why="the run stops in its first optimizer step: CUDA has no kernel that unscales bf16 gradients",
    fix=f"load fp32 weights (dtype: float32), or set {_BF16} instead of {_FP16} on a GPU with bf16",
    source="pytorch 2.13.0: aten/src/ATen/native/cuda/AmpKernels.cu; torch 2.13.0: amp/grad_scaler.py 252-284",
    techniques=("fp16-autocast", "pure-bf16", "load-in-training-dtype"),
)
def bf16_weights_fp16_scaler(subject: Subject) -> Iterator[Match]:
    _, dtype = _weights(subject)
    if dtype == "bf16" and subject.on("fp16") and trains_loaded_weights(subject):
        yield Match("fp16", True, argument=True)


@any_job.error(
    why="TrainingArguments fail: only one of fp16 and bf16 can be true, and only one of fp16_full_eval and "
    "bf16_full_eval",
    fix="set fp16 to false on GPUs with bf16 (compute capability 8.0 and later), and bf16 to false on others",
    source="transformers 5.23.0: training_args.py 1784-1788",
    techniques=("bf16-autocast", "fp16-autocast", "fp32"),
)
def two_precisions(subject: Subject) -> Iterator[Match]:
    for end in ("", "_full_eval"):
        if subject.on(f"fp16{end}") and subject.on(f"bf16{end}"):
            yield Match(f"fp16{end}", True, argument=True)


@any_job.warning(
    why="this GPU emulates bf16: Trainer accepts it, but it is slower than fp32",
    fix=f"set {_FP16} instead",
    source="transformers 5.23.0: utils/import_utils.py 650; torch 2.13.0: cuda/__init__.py 191-211",
    techniques=("bf16-autocast", "pure-bf16"),
)
def bf16_argument_emulated(subject: Subject) -> Iterator[Match]:
    gpu = subject.gpu
    # A setup reports it among its problems, and a DeepSpeed config has its own rule.
    own = subject.settings or subject.config is not None
    for name in ("bf16", "bf16_full_eval"):
        if gpu is not None and not gpu.bf16 and not own and subject.on(name):
            why = f"{gpu.name} emulates bf16: Trainer accepts it, but it is slower than fp32"
            yield Match(name, True, argument=True, why=why)


@any_job.warning(
    why="on a CPU accelerate silently ignores fp16 and trains in fp32",
    fix=f"set {_BF16}, which a CPU supports, or delete it",
    source="accelerate 1.15.0: accelerator.py 565-570",
    techniques=("fp16-autocast",),
)
def fp16_ignored_on_cpu(subject: Subject) -> Iterator[Match]:
    if subject.on("fp16") and subject.without_gpu and subject.config is None:
        yield Match("fp16", True, argument=True)


@any_job.error(
    why="TrainingArguments fail: TF32 needs a GPU of Ampere or later",
    fix="delete tf32",
    source="transformers 5.23.0: training_args.py 1677-1682",
    techniques=("tf32",),
)
def tf32_not_there(subject: Subject) -> Iterator[Match]:
    old = subject.gpu is not None and not subject.gpu.bf16
    if subject.on("tf32") and (subject.without_gpu or old) and not subject.settings:
        yield Match("tf32", True, argument=True)
