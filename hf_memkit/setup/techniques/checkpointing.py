"""Activation checkpointing: keep few activations, and recompute the others in backward.

A setup checkpoints every layer, every n-th layer, all but the matrix products, or every layer with the inputs in
host memory. A part raises an error if the first step recomputes fewer layers.
"""

from __future__ import annotations

from typing import Any

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import InPlans, advice, technique

_REENTRANT = "the reentrant form gives a layer no gradients where none of its inputs needs one; torch advises this one"


@technique(
    "activation-checkpointing",
    saves="each layer keeps its input and recomputes its other activations in backward",
    costs="about one more forward pass a step (Chen et al. 2016, arXiv 1604.06174); the same result",
    not_when="activations are not what fills the GPU (short sequences, small batches)",
    settings={
        "arguments.activation_checkpointing": True,
        "arguments.activation_checkpointing_kwargs": {"use_reentrant": False},
    },
    slows=True,
    frees={"activations": 1.0},
    offered={"attention": 4, "one large tensor": 3, "anything": 2, "host/forward": 2},
    unless=("checkpointing",),
    planned=InPlans("checkpointing", "checkpointing", turn=2),
)
def every_layer(setup: Setup) -> Setup:
    """Checkpoint every layer, through Trainer's own switch."""
    return _by_trainer(setup, {}, "keeps one input a layer and recomputes the rest: a third more arithmetic")


@technique(
    "every-nth-layer-checkpointing",
    saves="the activations of one layer in n; every layer would save more",
    costs="less than every layer does: one n-th of a forward pass more",
    not_when="every layer is needed to fit; larger n means more memory, not less",
    values={"checkpoint_every": int},
    bounds={"checkpoint_every": (1, None)},
    settings={
        "arguments.activation_checkpointing": True,
        "arguments.activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    },
    slows=True,
    planned=InPlans("checkpointing", "checkpointing of every 2nd layer", turn=1),
)
def every_nth_layer(setup: Setup) -> Setup:
    """Checkpoint layers 0, n, 2n … Value: `checkpoint_every` (n, default 2)."""
    every = int(setup.resolved_for.values.get("checkpoint_every", 2))
    reason = f"one layer in {every} is recomputed, the others keep their activations: memory given back for speed"
    return _by_trainer(setup, {"every_n_layers": every}, reason)


@technique(
    "selective-checkpointing",
    saves="norms, activation functions and dropout: two fifths to two thirds of the activations",
    costs="next to no arithmetic, as no large matrix product runs twice",
    not_when="every layer is needed to fit, which holds a fraction of this",
)
def selective(setup: Setup) -> Setup:
    """Keep the outputs of matrix products and attention, and recompute the rest."""
    reason = "products and attention are kept, what costs little is recomputed (Korthikanti et al. 2022, section 5)"
    off = "a part does it: Trainer's argument would checkpoint every layer instead"
    setup = setup.put("arguments.activation_checkpointing", False, off)
    return _verified(setup.put("model_parts.checkpoint_selective", {}, reason), 1)


@technique(
    "offloaded-checkpointing",
    saves="the layers' inputs as well: bytes × tokens × width × layers go to pinned host memory",
    costs="two copies over PCIe of each input, which the GPU waits for; pinned RAM, rounded up to powers of two",
    not_when="inputs are small (short sequences), or RAM or PCIe is what is short",
    gpu_only="on a CPU the inputs are in host memory already; which tensors are moved is tested",
)
def offloaded(setup: Setup) -> Setup:
    """Checkpoint every layer and keep the inputs in pinned host memory, through Trainer's own switch."""
    return _by_trainer(setup, {"offload": True}, "inputs of the layers wait in host memory")


def _by_trainer(setup: Setup, options: dict[str, Any], reason: str) -> Setup:
    setup = setup.put_all(
        "arguments",
        activation_checkpointing=(True, reason),
        activation_checkpointing_kwargs=({"use_reentrant": False, **options}, _REENTRANT),
    )
    return _verified(setup, int(options.get("every_n_layers", 1)))


def _verified(setup: Setup, every: int) -> Setup:
    return setup.put(
        "trainer_parts.verify_checkpointing",
        {"every": every},
        "stops the run if too few layers are recomputed in the first step",
    )


advice(
    "torch-checkpointing", "checkpointing", {"model.use_gradient_checkpointing": True},
    saves='instead of "unsloth", which moves the inputs of all layers to page-locked RAM',
    costs="these inputs stay on the GPU",
    offered={"pinned/unsloth": 1}, only_with=("unsloth",),
)  # fmt: skip
