"""Optimizers with small states: in 8 or 4 bits, or for a low-rank projection of the gradient."""

from __future__ import annotations

from hf_memkit.catalog.optimizers import TORCHAO_BLOCKS
from hf_memkit.common.resources import documentation
from hf_memkit.common.units import format_size
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.optimizers import NO_CLIPPING, NO_DECAY
from hf_memkit.setup.techniques.registry import Bounds, InPlans, advice, technique
from hf_memkit.setup.techniques.setup_ledger import padded_vocabulary, states_of

VOCABULARY_MULTIPLE = 64
"""Rows of the word embedding are padded to a multiple of this. NVIDIA's guide recommends it for tensor cores. If the
width is a multiple of 4, the embedding's size is then a multiple of torchao's block of 256."""

_PART = "hf_memkit.components.low_bit_adamw"


@technique(
    "adamw-8bit",
    saves="AdamW's states take 2 bytes a parameter instead of 8 (embeddings: 8); paged_adamw_8bit also moves them to "
    "RAM when the GPU is full",
    costs="its states are rounded to 8 bits (no loss in the tasks of Dettmers et al. 2021, arXiv 2110.02861); needs "
    "the package bitsandbytes",
    not_when="most parameters are embeddings, whose states Trainer keeps in 32 bits, or the weights are 16-bit",
    proof="curve",
    packages=("bitsandbytes",),
    group="nearly the same",
    settings={"arguments.optim": "adamw_bnb_8bit"},
    offered={"optimizer": 2, "recomputation": 3, "anything": 3},
    devices=("cuda", "rocm"),
    unless=("DeepSpeed", "FSDP", "paged optimizer"),
    planned=InPlans("small optimizer", "8-bit AdamW", "optimizer states in 8 bits (bitsandbytes)"),
)
def adamw_8bit(setup: Setup) -> Setup:
    """bitsandbytes' AdamW with 8-bit block-wise states.

    Two kinds of parameters keep fp32 states: embeddings, because Trainer sets so (transformers 5.23.0: trainer.py
    1331-1344), and tensors of fewer than 4096 elements. Use it with fp32 weights: it rounds 16-bit ones to nearest.
    """
    setup = setup.put("arguments.optim", "adamw_bnb_8bit", "2 bytes of state a parameter instead of 8")
    return _embeddings_noted(setup)


@technique(
    "paged-adamw-8bit",
    saves="when the GPU is full, CUDA moves the 8-bit states to RAM instead of raising an out-of-memory error",
    costs="a step is slow after states were moved; not on Windows or WSL2; needs the package bitsandbytes",
    not_when="the states never fit: moving them at each step is much slower than offload",
    packages=("bitsandbytes",),
    gpu_only="paging is CUDA's unified memory; on a CPU bitsandbytes warns and does not page",
    group="nearly the same",
    settings={"arguments.optim": "paged_adamw_8bit"},
    slows=True,
    offered={"optimizer": 2, "recomputation": 3, "anything": 3},
    devices=("cuda", "rocm"),
    unless=("DeepSpeed", "FSDP", "paged optimizer"),
    planned=InPlans(
        "small optimizer",
        "paged 8-bit AdamW",
        "optimizer states in 8 bits (bitsandbytes), in memory that CUDA moves to RAM when the GPU is full",
    ),
)
def paged_adamw_8bit(setup: Setup) -> Setup:
    """bitsandbytes' 8-bit AdamW with its states in CUDA's managed memory (Dettmers et al. 2023, arXiv 2305.14314).

    States of fewer than 100 000 elements are not paged (bitsandbytes 0.50.2: optim/optimizer.py 383).
    """
    setup = setup.put(
        "arguments.optim", "paged_adamw_8bit", "8-bit states, moved to RAM by the driver when the GPU is full"
    )
    return _embeddings_noted(setup)


def _embeddings_noted(setup: Setup) -> Setup:
    model = setup.resolved_for.model
    if model is None or setup.section("adapter"):
        return setup
    states = states_of(setup, model)
    return setup.with_notes(
        f"8-bit states take {format_size(states.quantised)}; embeddings and small parameters keep 32-bit states, "
        f"{format_size(states.plain)}"
    )


@technique(
    "adamw-8bit-stochastic",
    saves="8-bit states take 2 bytes a parameter instead of 8, and bf16 weights need no fp32 master copy",
    costs="its states are rounded to 8 bits (no loss in Dettmers et al. 2021, arXiv 2110.02861); it compiles at the "
    "first step",
    not_when="the weights are fp32: stochastic rounding then has no effect",
    proof="curve",
    packages=("torchao",),
    planned=InPlans(
        "",
        "half weights with stochastic rounding",
        turn=2,
        never="Trainer's optim has no such optimizer; for your script: "
        + documentation("techniques/optimizers.md#adamw-8bit-stochastic"),
    ),
)
def adamw_8bit_stochastic(setup: Setup) -> Setup:
    """AdamW with 8-bit block-wise states and stochastic rounding of bf16 weights (torchao).

    memkit fixes two problems of torchao. It quantises a state only if the parameter's size is a multiple of the block.
    GPT-2's word embedding is not (50257 × 1600 leaves a remainder of 64), so memkit pads the vocabulary. And it keeps
    unquantised states in the parameter's dtype, where a bf16 second moment stops changing: beta2 = 0.999 changes it by
    0.1 %, less than half a unit in the last place. `hf_memkit.components.low_bit_adamw` keeps these in fp32.
    """
    return _torchao(setup, "AdamW8bit", TORCHAO_BLOCKS[8], "2 bytes of state a parameter instead of 8")


@technique(
    "adamw-4bit-stochastic",
    saves="4-bit states take 1 byte a parameter instead of 8, and bf16 weights need no fp32 master copy",
    costs="its states are rounded to 4 bits (a small loss in Li et al. 2023, arXiv 2309.01507; learning curve in the "
    "docs)",
    not_when="adamw-8bit-stochastic fits",
    proof="curve",
    packages=("torchao",),
)
def adamw_4bit_stochastic(setup: Setup) -> Setup:
    """AdamW with 4-bit block-wise states and stochastic rounding of bf16 weights (torchao).

    Blocks have 128 elements. Trainer's `optim: adamw_torch_4bit` uses blocks of 256 and fails with another
    `block_size`, because it passes the value as a string (transformers 5.23.0: trainer_optimizer.py 470).
    """
    return _torchao(setup, "AdamW4bit", TORCHAO_BLOCKS[4], "1 byte of state a parameter instead of 8")


def _torchao(setup: Setup, name: str, block: int, saves: str) -> Setup:
    model = setup.resolved_for.model
    padded = padded_vocabulary(model.vocabulary) if model is not None else 0
    if model is not None and padded != model.vocabulary and not setup.section("adapter"):
        setup = setup.put(
            "model.pad_vocabulary_to_multiple_of", VOCABULARY_MULTIPLE,
            f"{model.vocabulary} rows become {padded}: fast on tensor cores, and {padded} × {model.width} is a "
            f"multiple of torchao's block of {block}, so that the embedding's states are quantised too",
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
    saves="one 8-bit moment takes 1 byte a parameter (embeddings: 4); AdamW's two take 8",
    costs="another algorithm, whose learning rate is 3 to 10 times smaller than AdamW's (learning curve in the docs)",
    not_when="you must keep AdamW's learning rate, or most parameters are embeddings, whose state keeps 32 bits",
    proof="curve",
    packages=("bitsandbytes",),
)
def lion_8bit(setup: Setup) -> Setup:
    """Lion with its moment in 8 bits: each step is the sign of a moving average (Chen et al. 2023, arXiv 2302.06675).

    Trainer would give it AdamW's betas, 0.9 and 0.999; this sets the paper's, 0.9 and 0.99. The paper (section 5)
    uses a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by the same factor.
    """
    setup = setup.put_all(
        "arguments",
        optim=("lion_8bit", "one byte of state a parameter instead of 8"),
        adam_beta2=(0.99, "Lion's value; Trainer would give it AdamW's 0.999"),
    )
    setup = setup.with_notes("Lion's learning rate is 3 to 10 times smaller than AdamW's, its weight decay larger")
    return _embeddings_noted(setup)


IN_BLOCKS = r".*\.\d+\..*"
"""Regular expression for every module in a numbered block, so not for the output layer, whose projection would be the
largest (transformers 5.23.0: trainer_utils.py, `check_target_module_exists`)."""

_TRAINER_RANK = 128
"""Trainer's default rank (transformers 5.23.0: trainer_optimizer.py 371, 398)."""

_CHECKPOINT = "a checkpoint of the optimizer could not be loaded: torch.load refuses the projectors in it"
_LAYERWISE_CHECKPOINT = "a checkpoint would lack the states: Trainer saves those of a placeholder optimizer"
_NOT_ON_CONV1D = "the linear layers are Conv1D, as in GPT-2: Trainer projects nn.Linear only"
_VALUES = {"projection_rank": int, "projection_interval": int}
_BOUNDS: Bounds = {"projection_rank": (1, None), "projection_interval": (1, None)}


def _projected(setup: Setup, optim: str, saves: str, scale: float) -> Setup:
    job = setup.resolved_for
    width = job.model.width if job.model is not None else 0
    if "projection_rank" in job.values:
        rank, why = int(job.values["projection_rank"]), "asked for"
    else:
        rank, why = (width // 4, "a quarter of the width") if width else (_TRAINER_RANK, "Trainer's default")
    interval = int(job.values.get("projection_interval", 200))

    layerwise = optim.endswith("layerwise")
    setup = setup.put_all(
        "arguments",
        optim=(optim, saves),
        optim_target_modules=(IN_BLOCKS, "every nn.Linear inside a block"),
        optim_args=(f"rank={rank},update_proj_gap={interval},scale={scale}", f"rank {rank}: {why}"),
        weight_decay=(0.0, NO_DECAY),
        save_only_model=(True, _LAYERWISE_CHECKPOINT if layerwise else _CHECKPOINT),
    )
    return setup.put("arguments.max_grad_norm", 0.0, NO_CLIPPING) if layerwise else setup


@technique(
    "galore",
    saves="AdamW keeps states for a low-rank projection of each linear layer's gradient, not for the whole gradient",
    costs="a singular value decomposition of each gradient every 200 steps; it ignores your betas, epsilon and weight "
    "decay (learning curve in the docs)",
    not_when=_NOT_ON_CONV1D + "; or you must be able to resume the run",
    proof="curve",
    packages=("galore_torch",),
    values=_VALUES,
    bounds=_BOUNDS,
)
def galore(setup: Setup) -> Setup:
    """AdamW in the space of the gradient's first singular vectors (Zhao et al. 2024, arXiv 2403.03507).

    Values: `projection_rank` (default: a quarter of the width, as in most of the paper's table 2) and
    `projection_interval`, steps between two decompositions (default 200). The scale is the paper's, 0.25.
    """
    return _projected(setup, "galore_adamw", "two moments of the projected gradient", 0.25)


@technique(
    "galore-layerwise",
    saves="galore's small states, and only one gradient at a time",
    costs="the same as galore; also no gradient clipping, no accumulation, and one GPU only",
    not_when=_NOT_ON_CONV1D + "; the batch needs accumulation; or you must be able to resume the run",
    packages=("galore_torch",),
    values=_VALUES,
    bounds=_BOUNDS,
)
def galore_layerwise(setup: Setup) -> Setup:
    """GaLore that updates each parameter as soon as its gradient exists, and frees the gradient."""
    return _projected(setup, "galore_adamw_layerwise", "two moments of the projected gradient, and one gradient", 0.25)


@technique(
    "apollo",
    saves="AdamW keeps states for a random projection of each linear layer's gradient, not for the whole gradient",
    costs="it ignores your weight decay; unlike galore, it needs no decomposition (learning curve in the docs)",
    not_when=_NOT_ON_CONV1D + "; or you must be able to resume the run",
    proof="curve",
    packages=("apollo_torch",),
    values=_VALUES,
    bounds=_BOUNDS,
)
def apollo(setup: Setup) -> Setup:
    """Scales each channel of the gradient; AdamW on a random projection of it gives the factors.

    Source: Zhu et al. 2024, arXiv 2412.05270; rank (a quarter of the width) and scale (1) as in its section 5.
    """
    return _projected(setup, "apollo_adamw", "two moments of a random projection", 1.0)


@technique(
    "apollo-layerwise",
    saves="apollo's small states, and only one gradient at a time",
    costs="the same as apollo; also no gradient clipping, no accumulation, and one GPU only",
    not_when=_NOT_ON_CONV1D + "; the batch needs accumulation; or you must be able to resume the run",
    packages=("apollo_torch",),
    values=_VALUES,
    bounds=_BOUNDS,
)
def apollo_layerwise(setup: Setup) -> Setup:
    """APOLLO that updates each parameter as soon as its gradient exists, and frees the gradient."""
    return _projected(setup, "apollo_adamw_layerwise", "two moments of a random projection, and one gradient", 1.0)


advice(
    "unpaged-states", "optimizers", {"arguments.optim": "adamw_bnb_8bit"},
    saves="these 8-bit states (2 bytes a parameter) stay in GPU memory and use none of CUDA's managed memory",
    costs="the states must fit on the GPU",
    offered={"host/managed memory": 1},
)  # fmt: skip
