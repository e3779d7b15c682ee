"""The presets: named sets of techniques, each for one kind of user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from hf_memkit.deepspeed import techniques as zero_techniques
from hf_memkit.setup import techniques

assert techniques and zero_techniques  # imported for the registry that they fill


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of techniques.

    Attributes:
        audience: users that it suits, one line.
        techniques: names of its techniques.
        checkpoint_bytes_per_parameter: size on disk of weights, optimizer states and DeepSpeed's copy of the weights.
        solves_for: size made as large as fits, if not given: micro-batch (of the global batch), batch, or sequence.
        where_possible: techniques that are omitted, with a note, if a rule says that they do not apply to the model.
    """

    audience: str
    techniques: tuple[str, ...]
    checkpoint_bytes_per_parameter: float
    solves_for: Literal["micro-batch", "batch", "sequence"] = "micro-batch"
    where_possible: tuple[str, ...] = ("chunked-loss",)


_ON_THE_GPU: Final = ("data-parallel", "activation-checkpointing", "chunked-loss", "expandable-segments")
"""Typical techniques of a preset that trains on the GPU without DeepSpeed."""

_SHARDED: Final = ("adamw-fused", "activation-checkpointing", "chunked-loss", "expandable-segments")
"""Typical techniques of a preset that trains with FSDP2."""

PRESETS: Final[dict[str, Preset]] = {
    "lean": Preset(
        "your script runs, and you want memory that costs neither speed nor accuracy; goes with any other preset",
        ("chunked-loss", "fused-gelu", "sdpa-attention", "expandable-segments"),
        checkpoint_bytes_per_parameter=4 + 8,
        where_possible=("chunked-loss", "fused-gelu", "sdpa-attention"),
    ),
    "checkpointed": Preset(
        "activations fill your GPU: long sequences, or you want a larger batch",
        ("activation-checkpointing", "chunked-loss", "expandable-segments"),
        checkpoint_bytes_per_parameter=4 + 8,
    ),
    "8bit": Preset(
        "optimizer states fill your GPU, and you want to keep fp32 weights: 8-bit AdamW under autocast",
        ("bf16-autocast", "adamw-8bit", *_ON_THE_GPU),
        checkpoint_bytes_per_parameter=4 + 2.04,
    ),
    "resident": Preset(
        "all weights are trained, and everything stays on one GPU: 16-bit weights, 8-bit optimizer",
        ("pure-bf16", "adamw-8bit-stochastic", *_ON_THE_GPU),
        checkpoint_bytes_per_parameter=2 + 2.04,
    ),
    "offload": Preset(
        "the GPU is small and RAM is large: ZeRO-2 with the optimizer in RAM (ZeRO-Offload)",
        ("half-weights-deepspeed", "zero2-offload", "activation-checkpointing", "chunked-loss", "expandable-segments"),
        checkpoint_bytes_per_parameter=2 + 2 + 12,
    ),
    "sharded": Preset(
        "several GPUs, and the model does not fit on one: ZeRO-3 splits weights, gradients and states between them",
        ("half-weights-deepspeed", "zero3", "activation-checkpointing", "chunked-loss", "expandable-segments"),
        checkpoint_bytes_per_parameter=2 + 2 + 12,
    ),
    "fsdp2": Preset(
        "several GPUs, and the model does not fit on one: torch's FSDP2 splits weights, gradients and states; no "
        "DeepSpeed",
        ("bf16-autocast", "fsdp2", *_SHARDED),
        checkpoint_bytes_per_parameter=4 + 8,
    ),
    "fsdp2-offload": Preset(
        "several GPUs that are small together, and RAM is large: FSDP2 with its shares in RAM",
        ("bf16-autocast", "fsdp2-offload", *_SHARDED),
        checkpoint_bytes_per_parameter=4 + 8,
    ),
    "fsdp2-lora": Preset(
        "adapters will do, and the 16-bit weights do not fit on one GPU: FSDP2 splits them",
        ("half-weights-frozen", "lora", "fsdp2", *_SHARDED),
        checkpoint_bytes_per_parameter=0.2,  # adapters only
    ),
    "fsdp2-qlora": Preset(
        "adapters will do, and even a share of the 16-bit weights is too large: FSDP2 splits 4-bit NF4 weights",
        ("half-weights-frozen", "qlora", "fsdp2", *_SHARDED),
        checkpoint_bytes_per_parameter=0.2,  # adapters only
    ),
    "infinity": Preset(
        "GPU memory and RAM are small, a disk is fast: ZeRO-3 with optimizer and parameters on NVMe (ZeRO-Infinity)",
        ("half-weights-deepspeed", "zero3-infinity", "activation-checkpointing", "expandable-segments"),
        checkpoint_bytes_per_parameter=2 + 2 + 12,
        where_possible=(),
    ),
    "in-backward": Preset(
        "all weights are trained, and one GPU lacks room for their gradients: APOLLO steps inside the backward pass",
        ("pure-bf16", "apollo-layerwise", "activation-checkpointing", "chunked-loss", "expandable-segments"),
        checkpoint_bytes_per_parameter=2,
    ),
    "lora": Preset(
        "adapters will do: frozen 16-bit weights, LoRA on every linear layer",
        ("half-weights-frozen", "lora", "adamw-fused", *_ON_THE_GPU),
        checkpoint_bytes_per_parameter=0.2,  # adapters only
    ),
    "qlora": Preset(
        "adapters will do, and even the frozen weights are too large: 4-bit NF4 weights, paged 8-bit AdamW",
        ("half-weights-frozen", "qlora", "paged-adamw-8bit", *_ON_THE_GPU),
        checkpoint_bytes_per_parameter=0.2,  # adapters only
    ),
    "largest-batch": Preset(
        "you want as many sequences at once as one GPU takes",
        ("pure-bf16", "adamw-8bit-stochastic", *_ON_THE_GPU),
        checkpoint_bytes_per_parameter=2 + 2.04,
        solves_for="batch",
    ),
    "longest-sequence": Preset(
        "you want the longest sequence that one GPU takes: checkpoints wait in RAM",
        ("pure-bf16", "sdpa-attention", "data-parallel", "adamw-8bit-stochastic", "offloaded-checkpointing",
         "chunked-loss", "expandable-segments"),
        checkpoint_bytes_per_parameter=2 + 2.04,
        solves_for="sequence",
        where_possible=("chunked-loss", "sdpa-attention"),
    ),
}  # fmt: skip
