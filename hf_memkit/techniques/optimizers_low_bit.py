"""Optimizers that keep their states in 8 or 4 bits."""

from __future__ import annotations

from hf_memkit.job import Job
from hf_memkit.optimizers import TORCHAO_BLOCKS
from hf_memkit.setup import Setup
from hf_memkit.technique import technique
from hf_memkit.techniques.optimizer_states import padded_vocabulary, states_of
from hf_memkit.units import format_size

__all__ = [
    "VOCABULARY_MULTIPLE",
    "adamw_4bit_stochastic",
    "adamw_8bit",
    "adamw_8bit_stochastic",
    "lion_8bit",
    "paged_adamw_8bit",
]

VOCABULARY_MULTIPLE = 64
"""Rows of the word embedding become a multiple of this: NVIDIA's guide asks for it on tensor cores, and with a width
that divides by 4 the embedding's size then divides by torchao's block of 256."""

_PART = "hf_memkit.components.low_bit_adamw"


@technique(
    "adamw-8bit",
    family="optimizers",
    saves="6 of AdamW's 8 bytes of state a parameter, except for embeddings",
    costs="accuracy of the states (none lost in Dettmers et al. 2021, arXiv 2110.02861)",
    not_when="most parameters are embeddings, which Trainer keeps in 32 bits, or the weights are 16-bit",
    proof="curve",
    packages=("bitsandbytes",),
)
def adamw_8bit(setup: Setup, job: Job) -> Setup:
    """bitsandbytes' AdamW with 8-bit block-wise states.

    Two kinds of parameters keep fp32 states: embeddings (Trainer overrides them: transformers 5.23.0: trainer.py
    1331-1344), and what has fewer than 4096 elements. Weights that are 16-bit are rounded to nearest: use it with
    fp32 weights.
    """
    setup = setup.put("arguments.optim", "adamw_bnb_8bit", "2 bytes of state a parameter instead of 8")
    return _embeddings_noted(setup, job)


@technique(
    "paged-adamw-8bit",
    family="optimizers",
    saves="what adamw-8bit saves, and states give way to RAM when the card is full, instead of an error",
    costs="time, while states travel over PCIe; nothing while the card has room",
    not_when="the states never fit: paging at each step is far slower than offloading on purpose",
    packages=("bitsandbytes",),
    gpu_only="paging is CUDA's unified memory; on a CPU bitsandbytes warns and does not page",
)
def paged_adamw_8bit(setup: Setup, job: Job) -> Setup:
    """bitsandbytes' 8-bit AdamW with its states in CUDA's managed memory (Dettmers et al. 2023, arXiv 2305.14314).

    The arithmetic is that of adamw-8bit. States of fewer than 100 000 elements are not paged (bitsandbytes 0.50.2:
    optim/optimizer.py 383).
    """
    setup = setup.put(
        "arguments.optim", "paged_adamw_8bit", "8-bit states, moved to RAM by the driver when the card is full"
    )
    return _embeddings_noted(setup, job)


def _embeddings_noted(setup: Setup, job: Job) -> Setup:
    if job.model is None or setup.section("adapter"):
        return setup
    states = states_of(setup, job.model)
    return setup.with_notes(
        f"8-bit states take {format_size(states.quantised)}; embeddings and small parameters keep 32-bit states, "
        f"{format_size(states.plain)}"
    )


@technique(
    "adamw-8bit-stochastic",
    family="optimizers",
    saves="6 bytes a parameter against AdamW's fp32 states, and the fp32 master copy besides",
    costs="accuracy of the states (none lost in Dettmers et al. 2021, arXiv 2110.02861), a compilation at the start",
    not_when="the weights are fp32 and few",
    proof="curve",
    packages=("torchao",),
)
def adamw_8bit_stochastic(setup: Setup, job: Job) -> Setup:
    """AdamW with 8-bit block-wise states and stochastic rounding of bf16 weights (torchao).

    Two traps of torchao are closed here. It quantises a state only if the parameter's size divides by the block, which
    GPT-2's word embedding does not (50257 × 1600 leaves 64): the vocabulary is padded, so that it does. And what it
    does not quantise it keeps in the parameter's dtype, where a bf16 second moment stands still at beta2 = 0.999 (a
    change of 0.1 % is below half a unit in the last place): `hf_memkit.components.low_bit_adamw` keeps those in fp32.
    """
    return _torchao(setup, job, "AdamW8bit", TORCHAO_BLOCKS[8], "2 bytes of state a parameter instead of 8")


@technique(
    "adamw-4bit-stochastic",
    family="optimizers",
    saves="7 bytes a parameter against AdamW's fp32 states, and the fp32 master copy besides",
    costs="accuracy of the states (Li et al. 2023, arXiv 2309.01507, lose little); the curve is in the docs",
    not_when="adamw-8bit-stochastic fits",
    proof="curve",
    packages=("torchao",),
)
def adamw_4bit_stochastic(setup: Setup, job: Job) -> Setup:
    """AdamW with 4-bit block-wise states and stochastic rounding of bf16 weights (torchao).

    As adamw-8bit-stochastic, with blocks of 128. Trainer's own `optim: adamw_torch_4bit` takes blocks of 256 and
    cannot be given others (transformers 5.23.0: trainer_optimizer.py 470: the value stays a string).
    """
    return _torchao(setup, job, "AdamW4bit", TORCHAO_BLOCKS[4], "1 byte of state a parameter instead of 8")


def _torchao(setup: Setup, job: Job, name: str, block: int, saves: str) -> Setup:
    model = job.model
    padded = padded_vocabulary(model.vocabulary) if model is not None else 0
    if model is not None and padded != model.vocabulary and not setup.section("adapter"):
        setup = setup.put(
            "model.pad_vocabulary_to_multiple_of", VOCABULARY_MULTIPLE,
            f"{model.vocabulary} rows become {padded}: tensor cores like it, and {padded} × {model.width} "
            f"divides by torchao's block of {block}, so that the embedding's states are quantised too",
        )  # fmt: skip
    return setup.put_all(
        "optimizer",
        {
            "class": (f"{_PART}:{name}", saves),
            "bf16_stochastic_round": (True, "bf16 weights would lose every update below 1/256 of a weight"),
            "block_size": (block, "torchao's default"),
        },
    )


@technique(
    "lion-8bit",
    family="optimizers",
    saves="7 of AdamW's 8 bytes of state a parameter, except for embeddings: one moment, in 8 bits",
    costs="another algorithm, with a learning rate 3 to 10 times smaller than AdamW's to be found; the curve is in "
    "the docs",
    not_when="AdamW's learning rate is to be kept, or most parameters are embeddings, which keep 32 bits",
    proof="curve",
    packages=("bitsandbytes",),
)
def lion_8bit(setup: Setup, job: Job) -> Setup:
    """Lion: the sign of one moment is the step (Chen et al. 2023, arXiv 2302.06675), which is kept in 8 bits.

    Trainer gives it AdamW's betas, 0.9 and 0.999; the paper's are 0.9 and 0.99, and they are set here. The paper
    (section 5) takes a learning rate 3 to 10 times smaller than AdamW's and a weight decay as much larger.
    """
    setup = setup.put_all(
        "arguments",
        {
            "optim": ("lion_8bit", "one byte of state a parameter instead of 8"),
            "adam_beta2": (0.99, "Lion's own; Trainer would give it AdamW's 0.999"),
        },
    )
    setup = setup.with_notes("Lion's learning rate is 3 to 10 times smaller than AdamW's, its weight decay larger")
    return _embeddings_noted(setup, job)
