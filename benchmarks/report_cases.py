"""The cases of section `report`: the jobs whose records are compared with what the allocator says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

NEIGHBOUR_GIB: Final = 4.0


@dataclass(frozen=True)
class Case:
    """One job. `does`: `train`, `run out`, `neighbour` or `overhead`; `cap_gib`: what the allocator may reserve, in a
    case that runs out in one of `phases`."""

    name: str
    does: str = "train"
    model: str = "openai-community/gpt2"
    batch: int = 4
    length: int = 1024
    arguments: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    deepspeed: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    cap_gib: float | None = None
    phases: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


def cases() -> list[Case]:
    """What is checked most first: a section that is stopped for time goes on with what is left."""
    large, medium = "openai-community/gpt2-large", "openai-community/gpt2-medium"
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # the name that torch 2.11 and 2.13 both know
    bf16 = {"bf16": True}
    return [
        Case("plain"),
        Case("bf16", arguments=bf16),
        Case("runs out in forward or backward", "run out", batch=48, cap_gib=16, phases=("forward", "backward")),
        Case("runs out in optimizer", "run out", model=large, batch=1, length=128, cap_gib=9, phases=("optimizer",)),
        Case("overhead", "overhead", model=medium, batch=16, arguments=bf16),
        Case("accumulation", arguments={**bf16, "gradient_accumulation_steps": 4}),
        Case("checkpointing", model=medium, arguments={**bf16, "activation_checkpointing": True}, batch=8),
        Case("lora", model=medium, arguments=bf16, lora=True, needs=("peft",)),
        Case("expandable segments", arguments=bf16, environment=expandable),
        Case("another process", "neighbour", arguments=bf16, batch=2, length=512),
        Case("sgd", arguments={"optim": "sgd"}),
        Case("8-bit optimizer", model=medium, arguments={**bf16, "optim": "adamw_bnb_8bit"}, needs=("bitsandbytes",)),
        Case("paged 8-bit", model=medium, arguments={**bf16, "optim": "paged_adamw_8bit"}, needs=("bitsandbytes",)),
        Case("zero2-offload", model=medium, arguments=bf16, deepspeed="zero2-offload", needs=("deepspeed",)),
    ]  # fmt: skip
