"""Optimizers under DeepSpeed: which one takes the steps."""

from __future__ import annotations

from collections.abc import Iterator

from hf_memkit.checks.deepspeed_keys import REMOVED_OPTIMIZERS
from hf_memkit.checks.rule import Found, deepspeed
from hf_memkit.checks.rules.trainer import DEFAULTS
from hf_memkit.checks.subject import Subject
from hf_memkit.deepspeed.optimizer import stepping_optimizer

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
def optimizer_replaced(subject: Subject) -> Iterator[Found]:
    optim = _optim(subject)
    if not _offloads(subject) or subject.has("optimizer"):
        return
    steps = stepping_optimizer(subject.filled, optim)
    if steps.optimizer is not None and not steps.same_algorithm:
        yield Found("optim", optim, why=steps.why, argument=True)


@deepspeed.warning(
    why="the optimizer of the DeepSpeed config takes precedence; optim has no effect",
    fix='delete the section "optimizer" of the DeepSpeed config, or the argument optim',
    source="transformers 5.23.0: integrations/deepspeed.py 576",
)
def optimizer_twice(subject: Subject) -> Iterator[Found]:
    kind = subject.at("optimizer.type")
    if not isinstance(kind, str) or subject.argument("optim") is None:
        return
    if not stepping_optimizer(subject.filled, _optim(subject)).same_algorithm:
        why = f"{kind} of the DeepSpeed config takes precedence; optim has no effect"
        yield Found("optim", why=why, argument=True)


@deepspeed.error(
    why="DeepSpeed removed its 1-bit optimizers in 0.19.7",
    fix='run: pip install "deepspeed<=0.19.6"',
    source="deepspeed 0.19.8: runtime/config.py 57-60, against 0.19.6: runtime/fp16/onebit/",
)
def removed_optimizer(subject: Subject) -> Iterator[Found]:
    kind = subject.at("optimizer.type")
    if kind in REMOVED_OPTIMIZERS and subject.deepspeed_release > _LAST_WITH_1_BIT:
        why = f"DeepSpeed removed its 1-bit optimizers in 0.19.7; this is {subject.deepspeed}"
        yield Found("optimizer.type", kind, why=why)


@deepspeed.error(
    why="DeepSpeed rejects max_grad_norm among the optimizer's parameters",
    fix='delete it, and set "gradient_clipping": "auto"',
    source="deepspeed 0.19.8: runtime/engine.py 2480",
)
def clipping_in_optimizer(subject: Subject) -> Iterator[Found]:
    kind = str(subject.at("optimizer.type"))
    if subject.has("optimizer.params.max_grad_norm") and kind not in REMOVED_OPTIMIZERS:
        yield Found("optimizer.params.max_grad_norm")


@deepspeed.warning(
    why="only DeepSpeedCPUAdam reads it; without offload_optimizer DeepSpeed drops it",
    fix='delete it, or offload the optimizer; on the GPU "bf16_optimizer_states" has the same effect',
    source="deepspeed 0.19.8: runtime/engine.py 2379-2397",
)
def states_key_without_offload(subject: Subject) -> Iterator[Found]:
    path = "optimizer.params.fp32_optimizer_states"
    if subject.has(path) and not _offloads(subject):
        yield Found(path)
