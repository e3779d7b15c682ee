"""Optimizer in RAM without DeepSpeed: silent changes of gradients by torchao's CPUOffloadOptimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hf_memkit.checks.rule import Found, Rules, deepspeed
from hf_memkit.checks.subject import Subject
from hf_memkit.setup.techniques.registry import setting_of

_TECHNIQUE: Final = ("cpu-offload-optimizer",)
_offloading: Final = Rules(techniques=_TECHNIQUE)
_PART: Final = "trainer_parts.cpu_offload_optimizer"
_COPIED: Final = "torchao 0.18.0: optim/cpu_offload.py, backward_hook"


def _options(subject: Subject) -> Mapping[str, Any] | None:
    """The part's options; None if the setup does not use it."""
    value = subject.setting(_PART)
    return value if isinstance(value, Mapping) else None


@_offloading.error(
    why="gradients are on the host before Trainer clips them: the step would silently use them unclipped, so memkit "
    "refuses to start",
    fix=f"set max_grad_norm: 0; {_PART}.max_grad_norm clips on the host",
    source=_COPIED,
)
def offload_clips_nothing(subject: Subject) -> Iterator[Found]:
    norm = subject.argument("max_grad_norm", 1.0)
    if _options(subject) is not None and norm:
        yield Found("max_grad_norm", norm, argument=True)


@_offloading.error(
    why="a gradient freed on the GPU cannot accumulate: the step would silently use only the last micro-batch's, so "
    "memkit refuses to start",
    fix="leave offload_gradients out, which turns it on only without accumulation; or set "
    "gradient_accumulation_steps: 1",
    source="torchao 0.18.0: optim/cpu_offload.py 37, 84-99",
)
def offload_drops_gradients(subject: Subject) -> Iterator[Found]:
    options = _options(subject)
    if options and options.get("offload_gradients") is True and subject.accumulation > 1:
        yield Found(f"{_PART}.offload_gradients", True)


@_offloading.error(
    why="gradients are on the host before DistributedDataParallel averages them: each GPU would step with its own, "
    "and the copies of the model would silently diverge, so memkit refuses to start",
    fix="use zero2-offload",
    source=_COPIED,
)
def offload_on_several_cards(subject: Subject) -> Iterator[Found]:
    if _options(subject) is not None and subject.several:
        yield Found(_PART)


@_offloading.error(
    why="the copy on the host has the weights' own 16 bits: AdamW's small updates are silently rounded away",
    fix=f"keep fp32 weights with {setting_of('bf16-autocast')}; or use zero2-offload, which keeps an fp32 master copy "
    "in RAM",
    source="torchao 0.18.0: optim/cpu_offload.py 113 (empty_like)",
)
def offload_rounds_updates(subject: Subject) -> Iterator[Found]:
    # PEFT keeps adapters in fp32.
    if _options(subject) is not None and subject.half_weights and not subject.adapter:
        yield Found("model.dtype")


@deepspeed.error(
    why="DeepSpeed moves tensors that torchao's optimizer has replaced with copies on the host, and fails",
    fix="use one of the two; zero2-offload offloads the optimizer without torchao",
    source="deepspeed 0.19.8: runtime/zero/stage_1_and_2.py 442; accelerate 1.15.0: utils/deepspeed.py 37",
    techniques=(*_TECHNIQUE, "zero2-offload", "zero3", "zero3-offload", "zero3-infinity"),
)
def offload_twice(subject: Subject) -> Iterator[Found]:
    if _options(subject) is not None:
        yield Found(_PART)
