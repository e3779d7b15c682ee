"""Activation functions in one operation instead of many."""

from __future__ import annotations

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import technique

COMPOSED = frozenset({"gelu_new", "gelu_fast", "gelu_accurate", "gelu_python", "gelu_python_tanh", "quick_gelu"})
"""Names in transformers' ACT2FN of functions composed of several operations that one operation computes too
(transformers 5.23.0: activations.py 324-350)."""


def activation_of(config: dict[str, object]) -> str | None:
    """The name of a model's activation function, under whichever name its config has it; None if under none known."""
    for name in ("hidden_activation", "hidden_act", "activation_function"):
        value = config.get(name)
        if isinstance(value, str):
            return value
    return None


@technique(
    "fused-gelu",
    saves="all tensors kept for a composed GELU (GPT-2's gelu_new) except its input",
    costs="nothing: fewer kernels, and the same function up to rounding",
    not_when="the model's activation function is one operation already (Llama's silu), or torch.compile fuses it",
)
def fused_gelu(setup: Setup) -> Setup:
    """nn.GELU in place of transformers' composed forms (`hf_memkit/components/fused_gelu.py`)."""
    job = setup.resolved_for
    name = activation_of(dict(job.model.config)) if job.model is not None else None
    return setup.put(
        "model_parts.fused_gelu",
        {},
        f"{name or 'a composed GELU'} keeps several tensors as large as the feed-forward layer; one kernel keeps one",
    )
