"""The cases of section `techniques`: what is trained, with which techniques, and what each is compared with.

A case is a model and a set of techniques; two places that need the same set share the case. Every registered technique
has one: alone where it can stand alone, otherwise upon those it needs (`UPON`), and its base without it is a case too.
`LADDERS` add one technique at a time, from Trainer's defaults to everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from hf_memkit.presets.compose import with_techniques
from hf_memkit.technique import TECHNIQUES, Technique, find_technique, in_order

Data = Literal["equal", "unequal"]


@dataclass(frozen=True, slots=True)
class Size:
    """What a model is trained with, whatever the techniques.

    `hub_id` names a built-in architecture; `rehearsed` are the config values that a CPU takes instead.
    """

    hub_id: str
    micro_batch_size: int
    accumulation: int
    sequence_length: int
    rehearsed: Mapping[str, int]

    def micro_batch(self, *, on_cpu: bool) -> int:
        return 2 if on_cpu else self.micro_batch_size

    def length(self, *, on_cpu: bool) -> int:
        return 64 if on_cpu else self.sequence_length


_SMALL_LLAMA: Final = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 509, "max_position_embeddings": 64,
}  # fmt: skip
_SMALL_GPT2: Final = {"n_layer": 4, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 509}

MODELS: Final[Mapping[str, Size]] = {
    "gpt2": Size("openai-community/gpt2", 8, 1, 1024, _SMALL_GPT2),
    "llama-1b": Size("meta-llama/Llama-3.2-1B", 4, 1, 1024, _SMALL_LLAMA),
    "gpt2-xl": Size("openai-community/gpt2-xl", 4, 2, 1024, _SMALL_GPT2),
}
"""Small enough for many cases; with a vocabulary of 128 256 and kernels of Liger's; and the model of the recipe."""


@dataclass(frozen=True)
class Case:
    """One training. `data`: sequences of equal or of unequal lengths; `evaluates`: an evaluation with a metric that
    reads logits follows; `cap_gib`: what PyTorch's allocator may reserve, of the whole GPU if None."""

    model: str
    techniques: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    data: Data = "equal"
    evaluates: bool = False
    cap_gib: float | None = None

    @property
    def name(self) -> str:
        details = [f"{key}={value}" for key, value in self.values.items()]
        details += ["unequal lengths"] if self.data == "unequal" else []
        details += ["evaluates"] if self.evaluates else []
        details += [f"of {self.cap_gib:g} GiB"] if self.cap_gib is not None else []
        brackets = f" ({', '.join(details)})" if details else ""
        return f"{self.model}: {' + '.join(self.techniques) or 'defaults'}{brackets}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A technique's case, and the case that is the same but for it."""

    technique: str
    case: Case
    base: Case


@dataclass(frozen=True, slots=True)
class Upon:
    """What a technique's case needs beside it, and what it is compared with: the same without it, or `base`."""

    techniques: tuple[str, ...] = ("bf16-autocast",)
    base: tuple[str, ...] | None = None
    models: tuple[str, ...] = ("gpt2",)
    data: Data = "equal"
    evaluates: bool = False
    cap_gib: float | None = None
    values: tuple[Mapping[str, Any], ...] = ({},)  # a case each


_ALONE: Final = Upon(techniques=())
_BF16_WEIGHTS: Final = Upon(techniques=("pure-bf16",), models=("gpt2", "llama-1b"))
_LINEAR: Final = Upon(models=("llama-1b",))  # only nn.Linear is projected: GPT-2 has Conv1D
_FRAGMENTS: Final = Upon(data="unequal", cap_gib=15.0)
"""Sizes that change at every step, on a GPU with little more than GPT-2 needs for 8 long sequences: about 13.6 GiB,
four times what a trace of 4 × 512 tokens came to."""

UPON: Final[Mapping[str, Upon]] = {
    "adafactor-stochastic": _BF16_WEIGHTS,
    "adamw-4bit-stochastic": _BF16_WEIGHTS,
    "adamw-8bit-stochastic": _BF16_WEIGHTS,
    "adamw-fused": Upon(base=("bf16-autocast", "adamw-foreach")),  # it is the default: beside what it replaces
    "apollo": _LINEAR,
    "apollo-layerwise": _LINEAR,
    "bf16-autocast": Upon(techniques=(), models=("gpt2", "llama-1b")),
    "chunked-loss": Upon(models=("gpt2", "llama-1b")),
    "compile": Upon(values=({}, {"compile_backend": "cudagraphs"}, {"compile_mode": "max-autotune"})),
    "cpu-offload-optimizer": Upon(models=("llama-1b",)),
    "flash-attention": Upon(models=("llama-1b",)),
    "expandable-segments": _FRAGMENTS,
    "fp16-autocast": _ALONE,
    "fp32": _ALONE,
    "galore": _LINEAR,
    "galore-layerwise": _LINEAR,
    "garbage-collection-threshold": _FRAGMENTS,
    "length-grouped": Upon(data="unequal"),
    "liger": Upon(models=("llama-1b",)),
    "load-in-training-dtype": Upon(models=("llama-1b",)),
    "lora": Upon(techniques=("half-weights-frozen",), base=("bf16-autocast",), models=("llama-1b",)),
    "low-host-ram": Upon(models=("llama-1b",)),
    "max-split-size": _FRAGMENTS,
    "packing": Upon(data="unequal"),
    "pad-to-multiple": Upon(data="unequal"),
    "padding-free": Upon(data="unequal"),
    "pure-bf16": Upon(techniques=(), models=("gpt2", "llama-1b")),
    "qlora": Upon(
        techniques=("half-weights-frozen", "paged-adamw-8bit"),
        base=("half-weights-frozen", "lora"),
        models=("llama-1b",),
    ),
    "sdpa-attention": Upon(base=("bf16-autocast", "eager-attention")),
    "tf32": _ALONE,
}
"""Of techniques for which `Upon()` does not do."""

_EVALUATES: Final = Upon(evaluates=True)

COVERED: Final[Mapping[str, str]] = {
    "data-parallel": "needs several GPUs",
    "half-weights-deepspeed": "section deepspeed, every preset",
    "half-weights-frozen": "with lora and qlora: nothing trains without adapters",
    "zero2-offload": "section deepspeed, case zero2-offload",
    "zero3": "needs several GPUs",
    "zero3-infinity": "section deepspeed, case zero3-infinity",
    "zero3-offload": "section deepspeed, case zero3-offload",
}
"""Techniques without a case of their own here, each with where it is measured, or why one GPU cannot."""

LADDERS: Final[Mapping[str, tuple[str, ...]]] = {
    "gpt2-xl": (
        "bf16-autocast", "chunked-loss", "fused-gelu", "selective-checkpointing", "activation-checkpointing",
        "segment-checkpointing", "pure-bf16", "adamw-8bit-stochastic", "expandable-segments",
    ),
    "llama-1b": (
        "bf16-autocast", "chunked-loss", "selective-checkpointing", "activation-checkpointing", "adamw-8bit",
        "pure-bf16", "adamw-8bit-stochastic", "expandable-segments",
    ),
    "gpt2": (
        "tf32", "bf16-autocast", "fused-gelu", "chunked-loss", "selective-checkpointing", "activation-checkpointing",
        "pure-bf16", "adamw-8bit-stochastic", "expandable-segments",
    ),
}  # fmt: skip
"""Rungs in order: each adds its technique to those below, and takes the place of one of the same slot."""


def case(model: str, techniques: tuple[str, ...], **options: Any) -> Case:
    """The case of these techniques, in the order in which they are applied."""
    return Case(model, tuple(one.name for one in in_order([find_technique(name) for name in techniques])), **options)


def rungs(model: str) -> list[tuple[str, Case]]:
    """(what the rung adds, its case), from Trainer's defaults on."""
    held: list[Technique] = []
    found = [("defaults", case(model, ()))]
    for name in (name for name in LADDERS[model] if name in TECHNIQUES):
        held = with_techniques(held, [name])
        found.append((name, case(model, tuple(one.name for one in held))))
    return found


def upon(technique: Technique) -> Upon:
    return UPON.get(technique.name, _EVALUATES if technique.family == "evaluation" else Upon())


def comparisons() -> list[Comparison]:
    """One or more of every registered technique that is not `COVERED`."""
    found = []
    for technique in TECHNIQUES.values():
        if technique.name in COVERED:
            continue
        needs = upon(technique)
        others = tuple(name for name in needs.techniques if _goes_with(name, technique))
        without = others if needs.base is None else tuple(name for name in needs.base if name in TECHNIQUES)
        shape: dict[str, Any] = {"data": needs.data, "evaluates": needs.evaluates, "cap_gib": needs.cap_gib}
        for model in needs.models:
            base = case(model, without, **shape)
            for values in needs.values:
                with_it = case(model, (*others, technique.name), values=dict(values), **shape)
                found.append(Comparison(technique.name, with_it, base))
    return found


def _goes_with(name: str, technique: Technique) -> bool:
    return name in TECHNIQUES and (not technique.slot or TECHNIQUES[name].slot != technique.slot)


def cases() -> list[Case]:
    """Each once: the ladders first, from the largest model on, then the techniques one by one."""
    every = [rung for model in LADDERS for _, rung in rungs(model)]
    for comparison in comparisons():
        every += [comparison.base, comparison.case]
    return list({one.name: one for one in every}.values())
