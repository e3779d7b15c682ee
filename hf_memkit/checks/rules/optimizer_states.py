"""Optimizers, states and rounding: where they differ from what the name suggests."""

from __future__ import annotations

from collections.abc import Iterator

from hf_memkit.catalog.optimizers import SMALLEST_QUANTISED, Optimizer, techniques_of
from hf_memkit.checks.rule import Match, any_job
from hf_memkit.checks.rules.optimizer_options import (
    UNSEEN,
    keeps_small_updates,
    named_optimizer,
    optimizer_row,
    rounds_stochastically,
)
from hf_memkit.checks.rules.scripts import trains_loaded_weights
from hf_memkit.checks.subject import Subject
from hf_memkit.setup.techniques.registry import setting_of


def _bitsandbytes_8bit(row: Optimizer) -> bool:
    """Trainer keeps the states of embeddings wide with these (transformers 5.23.0: trainer.py 1329-1344)."""
    return row.packages == ("bitsandbytes",) and row.bits == 8


def _torchao_chosen(subject: Subject) -> bool:
    """Whether `optim` chooses a torchao optimizer, and no class overrides it."""
    return "torchao" in optimizer_row(subject).packages and not _class(subject)


def _class(subject: Subject) -> str:
    return str(subject.setting("optimizer.class") or "")


def _chosen(subject: Subject, why: str = "", default: str = "") -> Match:
    """The optimizer, where it is chosen: as a class, or by `optim`."""
    if name := _class(subject):
        return Match("optimizer.class", name, why=why)
    return Match("optim", named_optimizer(subject) or default, why=why, argument=True)


def _trains_16_bit_weights(subject: Subject) -> bool:
    """It is known that the weights are loaded in 16 bits, and that they, not adapters, are trained without a copy."""
    return subject.half_weights and trains_loaded_weights(subject)


@any_job.warning(
    why="this optimizer rounds 16-bit weights to nearest and silently loses every update below 1/256 of a weight, "
    f"{UNSEEN}",
    fix=f"use adamw-8bit-stochastic or adamw-4bit-stochastic, or fp32 weights with {setting_of('bf16-autocast')}",
    source="torch 2.13: optim/adamw.py (the update is added in the weight's dtype); bitsandbytes 0.50.2: "
    "backends/cpu/ops.py 448; transformers 5.23.0: optimization.py, Adafactor copies its fp32 result back",
    techniques=("pure-bf16", *techniques_of(lambda row: row.rounding == "nearest")),
)
def stochastic_rounding_missing(subject: Subject) -> Iterator[Match]:
    if _trains_16_bit_weights(subject) and not keeps_small_updates(subject):
        yield _chosen(subject, default="adamw_torch_fused")


@any_job.warning(
    why="stochastic rounding applies to bf16 weights only, and these are fp32: "
    f"{setting_of('bf16-autocast')} is autocast over fp32 weights",
    fix="load the weights in bf16 (technique pure-bf16), or delete the option",
    source="torchao 0.18.0: optim/adam.py 167; hf_memkit/components/stochastic_adafactor.py",
    techniques=techniques_of(lambda row: row.rounding == "stochastic"),
)
def stochastic_rounding_ignored(subject: Subject) -> Iterator[Match]:
    wide = subject.setting("model.dtype", "float32" if subject.mixed and not subject.settings else "") == "float32"
    if not wide or not rounds_stochastically(subject):
        return
    if _class(subject):
        yield Match("optimizer.bf16_stochastic_round", True)
    else:
        yield Match("optim_args", argument=True)


@any_job.warning(
    why="torchao keeps the moments of what it does not quantise in bf16 (norms, biases, sizes not divisible by 256): "
    "with beta2 = 0.999 the second moment's change is below bf16's precision, and it never moves",
    fix="use technique adamw-8bit-stochastic or adamw-4bit-stochastic, which keep those moments in fp32",
    source="torchao 0.18.0: optim/adam.py 74-83 (zeros_like the parameter)",
    techniques=("pure-bf16", *techniques_of(lambda row: "torchao" in row.packages)),
)
def second_moment_in_bf16(subject: Subject) -> Iterator[Match]:
    if _trains_16_bit_weights(subject) and (_torchao_chosen(subject) or _class(subject).startswith("torchao.")):
        yield _chosen(subject)


@any_job.warning(
    why="torchao quantises a state only if its block size divides the parameter's size; the word embedding's states "
    "stay wide",
    fix="pad the vocabulary to a multiple of 64 (techniques adamw-8bit-stochastic and adamw-4bit-stochastic do)",
    source="torchao 0.18.0: optim/adam.py 78",
    techniques=techniques_of(lambda row: "torchao" in row.packages),
)
def embedding_not_quantised(subject: Subject) -> Iterator[Match]:
    model = subject.model
    low = _torchao_chosen(subject) or _class(subject).endswith((":AdamW8bit", ":AdamW4bit"))
    if model is None or not low or subject.has_setting("adapter"):
        return
    block = int(subject.setting("optimizer.block_size", 256))
    multiple = int(subject.setting("model.pad_vocabulary_to_multiple_of") or 1)
    size = -(-model.vocabulary // multiple) * multiple * model.width
    if size % block:
        why = f"torchao's block of {block} does not divide the word embedding ({size} elements): its states stay wide"
        yield _chosen(subject, why)


@any_job.warning(
    why=f"states of fewer than {SMALLEST_QUANTISED} elements stay in 32 bits; every adapter of this rank is smaller",
    fix=f"set {setting_of('adamw-fused')}, which takes the same memory and is faster",
    source="bitsandbytes 0.50.2: optim/optimizer.py 508; torchao 0.18.0: optim/adam.py 78",
    techniques=techniques_of(_bitsandbytes_8bit),
)
def adapters_too_small_for_8_bit(subject: Subject) -> Iterator[Match]:
    rank = subject.setting("adapter.r")
    row = optimizer_row(subject)
    quantises = _bitsandbytes_8bit(row) or "torchao" in row.packages
    if subject.model is None or not isinstance(rank, int) or not quantises:
        return
    sides = [side for layer in subject.model.linears if not layer.head for side in (layer.inputs, layer.outputs)]
    if sides and rank * max(sides) < SMALLEST_QUANTISED:
        largest = f"the largest adapter has {rank} × {max(sides)} elements"
        why = f"{largest}; states of fewer than {SMALLEST_QUANTISED} stay in 32 bits"
        yield Match("optim", why=why, argument=True)


@any_job.warning(
    why="with bitsandbytes' optimizers Trainer keeps the states of embeddings in 32 bits, and most of this model is "
    "embeddings",
    fix="use technique adamw-8bit-stochastic, which quantises them too",
    source="transformers 5.23.0: trainer.py 1329-1344",
    techniques=techniques_of(_bitsandbytes_8bit),
)
def embeddings_stay_in_32_bits(subject: Subject) -> Iterator[Match]:
    model = subject.model
    if model is None or not _bitsandbytes_8bit(optimizer_row(subject)) or subject.has_setting("adapter"):
        return
    words = model.vocabulary * model.width
    if 2 * words > model.parameters:
        why = f"{words} of {model.parameters} parameters are the word embedding, whose states Trainer keeps in 32 bits"
        yield Match("optim", why=why, argument=True)


@any_job.warning(
    why="paging needs CUDA's managed memory: on a CPU bitsandbytes warns and pages nothing",
    fix='use the same optimizer without "paged"',
    source="bitsandbytes 0.50.2: optim/optimizer.py 371-382",
    techniques=techniques_of(lambda row: bool(row.unpaged)),
)
def paged_without_cuda(subject: Subject) -> Iterator[Match]:
    unpaged = optimizer_row(subject).unpaged
    if unpaged and subject.without_gpu:
        yield Match("optim", fix=f"set optim: {unpaged}", argument=True)


@any_job.error(
    why="bitsandbytes scales each update by the parameter's own norm: a bias that starts at zero never changes",
    fix="use technique lamb or lars, which adapts matrices only",
    source="bitsandbytes 0.50.2: backends/cpu/ops.py 324-340, backends/default/ops.py 459-468",
    techniques=("lamb", "lars"),
)
def zero_parameters_frozen(subject: Subject) -> Iterator[Match]:
    module, _, name = _class(subject).partition(":")
    if module.startswith("bitsandbytes") and name in ("LAMB", "LARS", "LAMB32bit", "LARS32bit"):
        yield Match("optimizer.class", _class(subject))


@any_job.error(
    why="8-bit LARS and LAMB compute no trust ratio: on a CPU they are SGD and Adam, on CUDA they fail",
    fix="use technique lamb or lars (32-bit states)",
    source="bitsandbytes 0.50.2: backends/cpu/ops.py 507-543, backends/cuda/ops.py 1025-1056, 1170-1174",
    techniques=("lamb", "lars"),
)
def trust_ratio_missing(subject: Subject) -> Iterator[Match]:
    module, _, name = _class(subject).partition(":")
    if module.startswith("bitsandbytes") and name in ("LAMB8bit", "LARS8bit"):
        yield Match("optimizer.class", _class(subject))
