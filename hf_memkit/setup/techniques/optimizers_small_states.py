"""Optimizers whose states are small: kept in 8 or 4 bits, or of a subspace of low rank."""

from __future__ import annotations

from hf_memkit.catalog.optimizers import TORCHAO_BLOCKS
from hf_memkit.common.resources import documentation
from hf_memkit.common.units import format_size
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.optimizers import NO_CLIPPING, NO_DECAY
from hf_memkit.setup.techniques.registry import Bounds, InPlans, advice, technique
from hf_memkit.setup.techniques.setup_ledger import padded_vocabulary, states_of

VOCABULARY_MULTIPLE = 64
"""Rows of the word embedding become a multiple of this: NVIDIA's guide asks for it on tensor cores, and with a width
that divides by 4 the embedding's size then divides by torchao's block of 256."""

_PART = "hf_memkit.components.low_bit_adamw"


@technique(
    "adamw-8bit",
    saves="AdamW's states take 2 bytes a parameter instead of 8 (embeddings: 8); paged_adamw_8bit also moves them to "
    "RAM when the GPU is full",
    costs="8-bit rounding of the states (no loss in the tasks of Dettmers et al. 2021, arXiv 2110.02861); the "
    "package bitsandbytes",
    not_when="most parameters are embeddings, which Trainer keeps in 32 bits, or the weights are 16-bit",
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

    Two kinds of parameters keep fp32 states: embeddings (Trainer overrides them: transformers 5.23.0: trainer.py
    1331-1344), and what has fewer than 4096 elements. Weights that are 16-bit are rounded to nearest: use it with
    fp32 weights.
    """
    setup = setup.put("arguments.optim", "adamw_bnb_8bit", "2 bytes of state a parameter instead of 8")
    return _embeddings_noted(setup)


@technique(
    "paged-adamw-8bit",
    saves="CUDA moves 8-bit states to RAM when the GPU is full, instead of an out-of-memory error",
    costs="a step waits for the bus when states were moved; the same result; not on Windows or WSL2; the package "
    "bitsandbytes",
    not_when="the states never fit: paging at each step is far slower than offload",
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

    The arithmetic is that of adamw-8bit. States of fewer than 100 000 elements are not paged (bitsandbytes 0.50.2:
    optim/optimizer.py 383).
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
    saves="6 bytes a parameter against AdamW's fp32 states, and the fp32 master copy",
    costs="accuracy of the states (none lost in Dettmers et al. 2021, arXiv 2110.02861), a compilation at the start",
    not_when="the weights are fp32 and few",
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

    Two traps of torchao are closed here. It quantises a state only if the parameter's size divides by the block, which
    GPT-2's word embedding does not (50257 × 1600 leaves 64): the vocabulary is padded, so that it does. And what it
    does not quantise it keeps in the parameter's dtype, where a bf16 second moment stops changing at beta2 = 0.999 (a
    change of 0.1 % is below half a unit in the last place): `hf_memkit.components.low_bit_adamw` keeps those in fp32.
    """
    return _torchao(setup, "AdamW8bit", TORCHAO_BLOCKS[8], "2 bytes of state a parameter instead of 8")


@technique(
    "adamw-4bit-stochastic",
    saves="7 bytes a parameter against AdamW's fp32 states, and the fp32 master copy",
    costs="accuracy of the states (Li et al. 2023, arXiv 2309.01507, lose little); the curve is in the docs",
    not_when="adamw-8bit-stochastic fits",
    proof="curve",
    packages=("torchao",),
)
def adamw_4bit_stochastic(setup: Setup) -> Setup:
    """AdamW with 4-bit block-wise states and stochastic rounding of bf16 weights (torchao).

    As adamw-8bit-stochastic, with blocks of 128. Trainer's own `optim: adamw_torch_4bit` takes blocks of 256 and
    cannot be given others (transformers 5.23.0: trainer_optimizer.py 470: the value stays a string).
    """
    return _torchao(setup, "AdamW4bit", TORCHAO_BLOCKS[4], "1 byte of state a parameter instead of 8")


def _torchao(setup: Setup, name: str, block: int, saves: str) -> Setup:
    model = setup.resolved_for.model
    padded = padded_vocabulary(model.vocabulary) if model is not None else 0
    if model is not None and padded != model.vocabulary and not setup.section("adapter"):
        setup = setup.put(
            "model.pad_vocabulary_to_multiple_of", VOCABULARY_MULTIPLE,
            f"{model.vocabulary} rows become {padded}: fast on tensor cores, and {padded} × {model.width} "
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
    saves="7 of AdamW's 8 bytes of state a parameter, except for embeddings: one moment, in 8 bits",
    costs="another algorithm, with a learning rate 3 to 10 times smaller than AdamW's; the curve is in the docs",
    not_when="AdamW's learning rate must stay, or most parameters are embeddings, which keep 32 bits",
    proof="curve",
    packages=("bitsandbytes",),
)
def lion_8bit(setup: Setup) -> Setup:
    """Lion: the sign of one moment is the step (Chen et al. 2023, arXiv 2302.06675), which is kept in 8 bits.

    Trainer gives it AdamW's betas, 0.9 and 0.999; the paper's are 0.9 and 0.99, and they are set here. The paper
    (section 5) takes a learning rate 3 to 10 times smaller than AdamW's and a weight decay as much larger.
    """
    setup = setup.put_all(
        "arguments",
        optim=("lion_8bit", "one byte of state a parameter instead of 8"),
        adam_beta2=(0.99, "Lion's own; Trainer would give it AdamW's 0.999"),
    )
    setup = setup.with_notes("Lion's learning rate is 3 to 10 times smaller than AdamW's, its weight decay larger")
    return _embeddings_noted(setup)


IN_BLOCKS = r".*\.\d+\..*"
"""Modules inside a numbered block: every linear layer but the output layer, whose projection would be the largest of
all. Trainer reads a string as a regular expression that must match the whole name (transformers 5.23.0:
trainer_utils.py, `check_target_module_exists`)."""

_TRAINER_RANK = 128
"""transformers 5.23.0: trainer_optimizer.py 371, 398."""

_CHECKPOINT = "what Trainer would save cannot be loaded: torch.load refuses the projectors in it"
_LAYERWISE_CHECKPOINT = "a checkpoint would lack the states: Trainer saves those of an optimizer that has none"
_NOT_ON_CONV1D = "the linear layers are Conv1D (GPT-2): Trainer projects nn.Linear only"
_VALUES = {"projection_rank": int, "projection_interval": int}
_BOUNDS: Bounds = {"projection_rank": (1, None), "projection_interval": (1, None)}


def _projected(setup: Setup, optim: str, saves: str, scale: float) -> Setup:
    job, layerwise = setup.resolved_for, optim.endswith("layerwise")
    width = job.model.width if job.model is not None else 0
    rank = int(job.values.get("projection_rank", width // 4 or _TRAINER_RANK))
    interval = int(job.values.get("projection_interval", 200))
    chosen = "a quarter of the width" if width else "Trainer's default"
    why = "asked for" if "projection_rank" in job.values else chosen
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
    saves="most of AdamW's states of linear layers: those of the gradient's projection to a low rank",
    costs="a singular value decomposition of every gradient each 200 steps; betas, epsilon and weight decay do not "
    "reach it; the curve is in the docs",
    not_when=_NOT_ON_CONV1D + "; or the run must be resumable",
    proof="curve",
    packages=("galore_torch",),
    values=_VALUES,
    bounds=_BOUNDS,
)
def galore(setup: Setup) -> Setup:
    """AdamW in the space of the gradient's first singular vectors (Zhao et al. 2024, arXiv 2403.03507).

    Rank: a quarter of the width, as in most of the paper's table 2; scale 0.25 and a new projection each 200 steps,
    its defaults.
    """
    return _projected(setup, "galore_adamw", "AdamW's two moments of the projected gradient", 0.25)


@technique(
    "galore-layerwise",
    saves="what galore saves, and all gradients except one at a time",
    costs="what galore costs; no clipping, no accumulation, one GPU only",
    not_when=_NOT_ON_CONV1D + "; the batch needs accumulation; or the run must be resumable",
    packages=("galore_torch",),
    values=_VALUES,
    bounds=_BOUNDS,
)
def galore_layerwise(setup: Setup) -> Setup:
    """GaLore that updates each parameter as soon as its gradient is there, and drops the gradient."""
    return _projected(setup, "galore_adamw_layerwise", "as galore, one gradient at a time", 0.25)


@technique(
    "apollo",
    saves="most of AdamW's states of linear layers: those of a random projection of the gradient",
    costs="no decomposition, unlike galore; weight decay does not reach it; the curve is in the docs",
    not_when=_NOT_ON_CONV1D + "; or the run must be resumable",
    proof="curve",
    packages=("apollo_torch",),
    values=_VALUES,
    bounds=_BOUNDS,
)
def apollo(setup: Setup) -> Setup:
    """The gradient, scaled by channels as AdamW of a random projection says (Zhu et al. 2024, arXiv 2412.05270).

    Rank: a quarter of the width, scale 1, as in the paper's section 5.
    """
    return _projected(setup, "apollo_adamw", "AdamW's two moments of a random projection", 1.0)


@technique(
    "apollo-layerwise",
    saves="what apollo saves, and all gradients except one at a time",
    costs="what apollo costs; no clipping, no accumulation, one GPU only",
    not_when=_NOT_ON_CONV1D + "; the batch needs accumulation; or the run must be resumable",
    packages=("apollo_torch",),
    values=_VALUES,
    bounds=_BOUNDS,
)
def apollo_layerwise(setup: Setup) -> Setup:
    """APOLLO that updates each parameter as soon as its gradient is there, and drops the gradient."""
    return _projected(setup, "apollo_adamw_layerwise", "as apollo, one gradient at a time", 1.0)


advice(
    "unpaged-states", "optimizers", {"arguments.optim": "adamw_bnb_8bit"},
    "its states lie in the GPU's own memory (adamw_bnb_8bit: 2 bytes a parameter)",
    "the states must fit on the GPU",
    offered={"host/managed memory": 1},
)  # fmt: skip
