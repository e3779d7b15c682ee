"""Optimizers, conflicts: with the rest of the job, and with DeepSpeed, which may take the steps with another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from hf_memkit.catalog.optimizers import techniques_of
from hf_memkit.checks.deepspeed_keys import REMOVED_OPTIMIZERS
from hf_memkit.checks.rule import Match, Rules, any_job, deepspeed
from hf_memkit.checks.rules.optimizer_options import named_optimizer, optimizer_row
from hf_memkit.checks.rules.trainer import DEFAULTS
from hf_memkit.checks.subject import Subject
from hf_memkit.deepspeed.optimizer import stepping_optimizer
from hf_memkit.setup.techniques.registry import setting_of

_FILE = "transformers 5.23.0: trainer_optimizer.py"
_LOW_RANK: Final = techniques_of(lambda row: row.low_rank)
_LAYERWISE: Final = techniques_of(lambda row: row.gradients_at_once == 1)
_LOMO: Final = techniques_of(lambda row: "lomo_optim" in row.packages)
_for_lomo: Final = Rules(techniques=_LOMO)
_CONV1D: Final = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")


def _is_lomo(subject: Subject) -> bool:
    return "lomo_optim" in optimizer_row(subject).packages


def _is_layerwise(subject: Subject) -> bool:
    """Trainer's own form, which steps in hooks."""
    return optimizer_row(subject).gradients_at_once == 1


@any_job.error(
    why="Trainer rejects GaLore and APOLLO without optim_target_modules, but only after loading the model",
    fix="set optim_target_modules: '.*\\.\\d+\\..*' (the linear layers inside the blocks), or all-linear",
    source=f"{_FILE} 120-121",
    techniques=_LOW_RANK,
)
def low_rank_without_targets(subject: Subject) -> Iterator[Match]:
    if optimizer_row(subject).low_rank and subject.argument("optim_target_modules") is None:
        yield Match("optim", argument=True)


@any_job.error(
    why="Trainer projects only nn.Linear, and this model uses Conv1D",
    fix=f"set {setting_of('adamw-8bit')}",
    source=f"{_FILE} 136-156",
    techniques=_LOW_RANK,
)
def low_rank_on_conv1d(subject: Subject) -> Iterator[Match]:
    targets = subject.argument("optim_target_modules")
    if not optimizer_row(subject).low_rank or subject.model_type not in _CONV1D:
        return
    everything = isinstance(targets, str) and targets.replace("_", "-") == "all-linear"
    if everything or (isinstance(targets, str) and re.fullmatch(targets, "lm_head")):
        why = (
            "Trainer finds only lm_head, whose weight is the word embedding's and is listed under that name: nothing "
            "is projected, and AdamW with full states silently trains everything"
        )
        yield Match("optim_target_modules", why=why, argument=True, severity="warning")
    else:
        why = "Trainer projects only nn.Linear, finds none among this model's Conv1D layers, and fails"
        yield Match("optim_target_modules", why=why, argument=True)


@any_job.error(
    why="galore_torch passes by position two arguments that bitsandbytes removed: the values arrive as max_unorm=100 "
    "and skip_zeros=True",
    fix="set optim: galore_adamw",
    source="galore_torch 1.0: adamw8bit.py 10; bitsandbytes 0.50.2: optim/optimizer.py 409-427",
    techniques=("galore",),
)
def galore_8bit_arguments(subject: Subject) -> Iterator[Match]:
    if named_optimizer(subject).startswith("galore_adamw_8bit"):
        yield Match("optim", argument=True)


@any_job.error(
    why="Trainer passes a learning rate and leaves relative_step on; Adafactor rejects the two together, but only "
    "after loading the model",
    fix="set optim: galore_adafactor, or galore_adamw_layerwise",
    source=f"{_FILE} 378-381",
    techniques=("galore-layerwise",),
)
def galore_adafactor_layerwise(subject: Subject) -> Iterator[Match]:
    if named_optimizer(subject) == "galore_adafactor_layerwise":
        yield Match("optim", argument=True)


@any_job.error(
    why="a layer-wise optimizer frees the gradients of each micro-batch; Trainer rejects accumulation, but only "
    "after loading the model",
    fix="set gradient_accumulation_steps: 1, or use the optimizer's other form (not layer-wise)",
    source=f"{_FILE} 165-166",
    techniques=_LAYERWISE,
)
def layerwise_accumulation(subject: Subject) -> Iterator[Match]:
    if _is_layerwise(subject) and subject.accumulation > 1:
        yield Match("gradient_accumulation_steps", argument=True)


@any_job.error(
    why="Trainer rejects layer-wise optimizers under DistributedDataParallel, but only after loading the model",
    fix="use one GPU, or the optimizer's other form (not layer-wise)",
    source=f"{_FILE} 115-116",
    techniques=_LAYERWISE,
)
def layerwise_several_cards(subject: Subject) -> Iterator[Match]:
    if _is_layerwise(subject) and subject.several:
        yield Match("optim", argument=True)


@any_job.warning(
    why="the optimizer uses and frees the gradients inside backward: Trainer clips nothing and logs a norm of 0",
    fix="set max_grad_norm: 0.0, and a learning rate that needs no clipping",
    source="transformers 5.23.0: trainer.py 1930; trainer_optimizer.py 174-181; lomo-optim 0.1.1: lomo.py 96-137",
    techniques=(*_LOMO, *_LAYERWISE),
)
def clipping_without_gradients(subject: Subject) -> Iterator[Match]:
    value = subject.argument("max_grad_norm", 1.0)
    in_backward = optimizer_row(subject).gradients_at_once is not None
    if in_backward and isinstance(value, int | float) and value > 0:
        yield Match("max_grad_norm", value, argument=True)


@_for_lomo.warning(
    why="LOMO steps inside each backward pass: every micro-batch is an optimizer step, and nothing accumulates",
    fix="set gradient_accumulation_steps: 1",
    source="accelerate 1.15.0: accelerator.py 2858, 4361; lomo-optim 0.1.1: lomo.py 96-137",
)
def lomo_accumulation(subject: Subject) -> Iterator[Match]:
    if _is_lomo(subject) and subject.accumulation > 1:
        yield Match("gradient_accumulation_steps", argument=True)


@_for_lomo.error(
    why="LOMO uses a gradient before DistributedDataParallel averages it: the weights of the GPUs diverge",
    fix="use one GPU, or another optimizer",
    source="lomo-optim 0.1.1: lomo.py 96-137 (no all_reduce outside ZeRO-3)",
)
def lomo_several_cards(subject: Subject) -> Iterator[Match]:
    if _is_lomo(subject) and subject.several and subject.config is None:
        yield Match("optim", argument=True)


@deepspeed.error(
    why="Trainer passes the learning rate to DeepSpeed's backward, which does not accept it: training fails",
    fix="remove the DeepSpeed config, or use another optimizer",
    source="transformers 5.23.0: trainer.py 2095-2097; accelerate 1.15.0: accelerator.py 2852, utils/deepspeed.py 264",
    techniques=_LOMO,
)
def lomo_with_deepspeed(subject: Subject) -> Iterator[Match]:
    if _is_lomo(subject):
        yield Match("optim", argument=True)


@_for_lomo.error(
    why="Trainer passes the learning rate to the scaled backward, which does not accept it: training fails",
    fix=f"set {setting_of('bf16-autocast')}, or train in fp32",
    source="transformers 5.23.0: trainer.py 2095-2097; accelerate 1.15.0: accelerator.py 2856-2857",
)
def lomo_with_fp16(subject: Subject) -> Iterator[Match]:
    if _is_lomo(subject) and subject.on("fp16") and subject.config is None:
        yield Match("fp16", True, argument=True)


@any_job.error(
    why="the library always puts the optimizer's states on CUDA, and fails without it",
    fix="set optim: lomo, or adafactor",
    source="lomo-optim 0.1.1: adalomo.py 92-101",
    techniques=techniques_of(lambda row: not row.on_cpu),
)
def adalomo_without_cuda(subject: Subject) -> Iterator[Match]:
    if not optimizer_row(subject).on_cpu and subject.without_gpu:
        yield Match("optim", argument=True)


def _saves_states(subject: Subject) -> bool:
    saves = subject.argument("save_strategy") != "no" and not subject.on("save_only_model")
    return saves and subject.arguments is not None


@any_job.warning(
    why="the states contain projector objects, which torch.load rejects: Trainer writes checkpoints, but cannot "
    "resume from them",
    fix=f"set {setting_of('save-only-model')}, and do not plan to resume",
    source="transformers 5.23.0: trainer.py 3983 (weights_only=True); galore_torch 1.0: adamw.py 85; apollo_torch "
    "1.0.3: apollo.py",
    techniques=("galore", "apollo"),
)
def checkpoint_cannot_be_loaded(subject: Subject) -> Iterator[Match]:
    if optimizer_row(subject).low_rank and not _is_layerwise(subject) and _saves_states(subject):
        yield Match("save_only_model", subject.argument("save_only_model", False), argument=True)


@any_job.warning(
    why="the states are outside the optimizer that Trainer saves: a resume silently resets them",
    fix=f"set {setting_of('save-only-model')}, and do not plan to resume",
    source="transformers 5.23.0: trainer_pt_utils.py 1569-1589; lomo-optim 0.1.1: adalomo.py 81-83",
    techniques=("adalomo", *_LAYERWISE),
)
def states_not_saved(subject: Subject) -> Iterator[Match]:
    if (named_optimizer(subject) == "adalomo" or _is_layerwise(subject)) and _saves_states(subject):
        yield Match("save_only_model", subject.argument("save_only_model", False), argument=True)


_LAST_WITH_1_BIT = (0, 19, 6)


def _offloads(subject: Subject) -> bool:
    return subject.zero.optimizer.device != "none"


def _optim(subject: Subject) -> str:
    return str(subject.argument("optim", DEFAULTS["optim"]))


@deepspeed.error(
    why="accelerate silently replaces it with DeepSpeedCPUAdam, which uses L2 decay",
    fix='set optim: adamw_torch; or keep your optimizer with "zero_force_ds_cpu_optimizer": false in the DeepSpeed '
    "config",
    source="accelerate 1.15.0: accelerator.py 2373-2383, utils/deepspeed.py 27-104",
)
def optimizer_replaced(subject: Subject) -> Iterator[Match]:
    optim = _optim(subject)
    if not _offloads(subject) or subject.has("optimizer"):
        return
    steps = stepping_optimizer(subject.filled, optim)
    if steps.optimizer is not None and not steps.same_algorithm:
        yield Match("optim", optim, why=steps.why, argument=True)


@deepspeed.warning(
    why="the optimizer of the DeepSpeed config takes precedence; optim has no effect",
    fix='delete the section "optimizer" of the DeepSpeed config, or the argument optim',
    source="transformers 5.23.0: integrations/deepspeed.py 576",
)
def optimizer_twice(subject: Subject) -> Iterator[Match]:
    kind = subject.at("optimizer.type")
    if not isinstance(kind, str) or subject.argument("optim") is None:
        return
    if not stepping_optimizer(subject.filled, _optim(subject)).same_algorithm:
        why = f"{kind} of the DeepSpeed config takes precedence; optim has no effect"
        yield Match("optim", why=why, argument=True)


@deepspeed.error(
    why="DeepSpeed removed its 1-bit optimizers in 0.19.7",
    fix='run: pip install "deepspeed<=0.19.6"',
    source="deepspeed 0.19.8: runtime/config.py 57-60, against 0.19.6: runtime/fp16/onebit/",
)
def removed_optimizer(subject: Subject) -> Iterator[Match]:
    kind = subject.at("optimizer.type")
    if kind in REMOVED_OPTIMIZERS and subject.deepspeed_release > _LAST_WITH_1_BIT:
        why = f"DeepSpeed removed its 1-bit optimizers in 0.19.7; this is {subject.deepspeed}"
        yield Match("optimizer.type", kind, why=why)


@deepspeed.error(
    why="DeepSpeed rejects max_grad_norm among the optimizer's parameters",
    fix='delete it, and set "gradient_clipping": "auto"',
    source="deepspeed 0.19.8: runtime/engine.py 2480",
)
def clipping_in_optimizer(subject: Subject) -> Iterator[Match]:
    kind = str(subject.at("optimizer.type"))
    if subject.has("optimizer.params.max_grad_norm") and kind not in REMOVED_OPTIMIZERS:
        yield Match("optimizer.params.max_grad_norm")


@deepspeed.warning(
    why="only DeepSpeedCPUAdam reads it; without offload_optimizer DeepSpeed drops it",
    fix='delete it, or offload the optimizer; on the GPU "bf16_optimizer_states" has the same effect',
    source="deepspeed 0.19.8: runtime/engine.py 2379-2397",
)
def states_key_without_offload(subject: Subject) -> Iterator[Match]:
    path = "optimizer.params.fp32_optimizer_states"
    if subject.has(path) and not _offloads(subject):
        yield Match(path)
