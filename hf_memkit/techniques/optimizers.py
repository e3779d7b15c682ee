"""Optimizers that keep less state."""

from __future__ import annotations

from hf_memkit.job import Job
from hf_memkit.ledger import Row
from hf_memkit.training_setup import TrainingSetup

__all__ = ["BLOCK", "VOCABULARY_MULTIPLE", "adamw_8bit_stochastic", "adamw_fused", "state_bytes_8bit"]

BLOCK = 256
"""Elements that share one scale in torchao's 8-bit states (torchao:torchao/optim/adam.py, `block_size`)."""

VOCABULARY_MULTIPLE = 64
"""Rows of the word embedding become a multiple of this: NVIDIA's guide asks for it on tensor cores, and with a width
that divides by 4 the embedding's size then divides by torchao's block of 256."""

_SMALLEST_QUANTISED = 4096  # torchao:torchao/optim/adam.py, _new_buffer


def state_bytes_8bit(sizes: tuple[int, ...]) -> tuple[int, int]:
    """(bytes of 8-bit states, bytes of fp32 states) of both Adam moments, for parameters of these sizes.

    A parameter of at least 4096 elements whose size divides by the block takes 1 byte an element plus 4 bytes a block,
    twice; any other keeps two fp32 moments (`hf_memkit.techniques.adamw8bit`).
    """
    quantised = [size for size in sizes if size >= _SMALLEST_QUANTISED and size % BLOCK == 0]
    rest = sum(sizes) - sum(quantised)
    return 2 * sum(size + 4 * (size // BLOCK) for size in quantised), 8 * rest


def adamw_8bit_stochastic(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """AdamW with 8-bit block-wise states and stochastic rounding of bf16 weights (torchao).

    Saves 6 bytes a parameter against AdamW's fp32 states, and the fp32 master copy besides. Costs accuracy of the
    states (Dettmers et al. 2021, arXiv 2110.02861: no loss in their tasks) and a compilation at the first step.

    Two traps of torchao are closed here. It quantises a state only if the parameter's size divides by the block, which
    GPT-2's word embedding does not (50257 × 1600 leaves 64): the vocabulary is padded, so that it does. And what it
    does not quantise it keeps in the parameter's dtype, where a bf16 second moment stands still at beta2 = 0.999 (a
    change of 0.1 % is below half a unit in the last place): `hf_memkit.techniques.adamw8bit` keeps those in fp32.
    """
    sizes = job.model.sizes
    padded = -(-job.model.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if padded != job.model.vocabulary:
        old, new = job.model.vocabulary * job.model.width, padded * job.model.width
        sizes = tuple(new if size == old else size for size in sizes)
        setup = setup.put(
            "model.pad_vocabulary_to_multiple_of", VOCABULARY_MULTIPLE,
            f"{job.model.vocabulary} rows become {padded}: tensor cores like it, and {padded} × {job.model.width} "
            f"divides by torchao's block of {BLOCK}, so that the embedding's states are 8-bit too",
        )  # fmt: skip
    eight, thirty_two = state_bytes_8bit(sizes)
    return setup.put_all(
        "optimizer",
        {
            "class": ("hf_memkit.techniques.adamw8bit:AdamW8bit", "2 bytes of state a parameter instead of 8"),
            "bf16_stochastic_round": (True, "bf16 weights would lose every update below 1/256 of a weight"),
            "block_size": (BLOCK, "torchao's default"),
        },
    ).with_rows(
        Row("device", "optimizer", "8-bit moments", eight, "2 × (1 + 4/256) bytes a parameter (torchao)"),
        Row(
            "device", "optimizer", "fp32 moments of what cannot be quantised", thirty_two,
            "8 bytes an element of parameters below 4096 elements or not divisible by 256",
        ),
    )  # fmt: skip


def adamw_fused(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """Trainer's default AdamW in one fused kernel.

    The fused form has no parameter-sized temporaries; the foreach form makes a whole copy at the peak.
    """
    return setup.put(
        "arguments.optim",
        "adamw_torch_fused",
        "one kernel, and no parameter-sized temporaries as foreach has",
    )
