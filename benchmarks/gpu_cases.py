"""The cases of `gpu.py`: what is predicted, then trained on the GPU.

They vary one thing at a time around a few models: precision, checkpointing, optimizer, length, adapters, engine,
evaluation, the allocator's settings. Every setup is made of memkit's own techniques where the model is a causal
language model, and of fields of TrainingArguments where it is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from hf_memkit.catalog.architectures import ARCHITECTURES

Kind = Literal["script", "train", "edge", "history", "kernels"]
"""`script`: `memkit run --predict` of a script; `train`: a setup, predicted and measured; `edge`: trained with the
predicted smallest cap, and with less; `history`: the allocator's history is recorded, which takes time, and replayed
by the model of the allocator; `kernels`: how long each operation's kernels take, for `operation_time.py`."""


@dataclass(frozen=True, slots=True)
class Model:
    """Config values, as `AutoConfig.for_model` takes them, those that a rehearsal on a CPU takes instead, and the
    class where it is no causal language model."""

    config: Mapping[str, Any]
    rehearsed: Mapping[str, Any]
    model_class: str | None = None

    def values(self, *, on_cpu: bool) -> dict[str, Any]:
        return {**self.config, **(self.rehearsed if on_cpu else {})}


_SMALL_GPT2: Final = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 509}
_SMALL_LLAMA: Final = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 509, "max_position_embeddings": 64,
}  # fmt: skip
_BERT: Final = {
    "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "vocab_size": 30522, "max_position_embeddings": 512,
}  # fmt: skip
_T5: Final = {
    "model_type": "t5", "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16,
    "vocab_size": 32128, "decoder_start_token_id": 0,
}  # fmt: skip
_VIT: Final = {
    "model_type": "vit", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "image_size": 224, "patch_size": 16,
}  # fmt: skip
_WHISPER: Final = {
    "model_type": "whisper", "d_model": 768, "encoder_layers": 12, "decoder_layers": 12,
    "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
    "num_mel_bins": 80, "vocab_size": 51865, "max_source_positions": 1500, "max_target_positions": 448,
    "pad_token_id": 50257, "bos_token_id": 50257, "eos_token_id": 50257, "decoder_start_token_id": 50258,
}  # fmt: skip


def _known(hub_id: str, rehearsed: Mapping[str, Any]) -> Model:
    return Model(ARCHITECTURES[hub_id].config, rehearsed)


MODELS: Final[Mapping[str, Model]] = {
    "gpt2": _known("openai-community/gpt2", _SMALL_GPT2),
    "gpt2-xl": _known("openai-community/gpt2-xl", _SMALL_GPT2),
    "llama-1b": _known("meta-llama/Llama-3.2-1B", _SMALL_LLAMA),
    "llama-8b": _known("meta-llama/Llama-3.1-8B", _SMALL_LLAMA),
    "qwen3-0.6b": _known("Qwen/Qwen3-0.6B", _SMALL_LLAMA),
    "qwen3-1.7b": _known("Qwen/Qwen3-1.7B", _SMALL_LLAMA),
    "bert-large": Model(
        _BERT,
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
        "BertForMaskedLM",
    ),
    "t5-large": Model(
        _T5, {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 2}, "T5ForConditionalGeneration"
    ),
    "vit-large": Model(
        _VIT,
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
        "ViTForImageClassification",
    ),
    "whisper-small": Model(
        _WHISPER,
        {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
        "WhisperForConditionalGeneration",
    ),
}


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        name: of the case.
        model: key of `MODELS`.
        techniques, values: of memkit; the values that they take.
        arguments: fields of TrainingArguments beside.
        micro_batch, length, accumulation: sequences of a forward pass, tokens of one, forward passes of a step.
        evaluates: an evaluation is predicted and measured too.
        kind: what is done.
        script: of kind `script`: the file and its arguments; empty: `gpu_script.py`.
        launcher: of kind `script`: the words before the script; empty: `memkit run` runs it.
    """

    name: str
    model: str = ""
    techniques: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    micro_batch: int = 4
    length: int = 1024
    accumulation: int = 1
    evaluates: bool = False
    kind: Kind = "train"
    script: str = ""
    launcher: tuple[str, ...] = ()

    def shape(self, *, on_cpu: bool) -> tuple[int, int]:
        """(sequences of a forward pass, tokens of one)."""
        return (2, 32) if on_cpu else (self.micro_batch, self.length)


def cases() -> list[Case]:
    """Those that differ most first: a slice that is cut short has some of each kind."""
    return [
        Case(
            "memkit run --predict: gpt2, bf16, micro batch 8", kind="script", micro_batch=8, arguments={"bf16": True}
        ),
        *_first(),
        *_edges(),
        *_more(),
        *_histories(),
        *_compiled(),
        *_fsdp2(),
        *_kernels(),
    ]


def _first() -> list[Case]:
    bf16 = {"bf16": True}
    return [
        _case("gpt2", "bf16-autocast", micro_batch=8),
        _case("gpt2-xl", "bf16-autocast"),
        _case("gpt2-xl", "bf16-autocast", "activation-checkpointing", "adamw-8bit", micro_batch=8),
        _case("llama-1b", "bf16-autocast", length=2048),
        _case("llama-8b", "half-weights-frozen", "lora", "activation-checkpointing", micro_batch=2, length=2048),
        _case("qwen3-0.6b", "bf16-autocast", micro_batch=2, length=4096),
        _case("bert-large", arguments=bf16, micro_batch=32, length=512),
        _case("vit-large", arguments=bf16, micro_batch=64),
        _case("t5-large", arguments=bf16, micro_batch=8, length=512),
        _case("whisper-small", arguments=bf16, micro_batch=8, length=200),
        _case("gpt2-xl", "zero2-offload", "half-weights-deepspeed"),
    ]


def _edges() -> list[Case]:
    return [
        _case("gpt2", "bf16-autocast", micro_batch=8, kind="edge"),
        _case("gpt2", "bf16-autocast", "activation-checkpointing", micro_batch=16, kind="edge"),
        _case("llama-1b", "bf16-autocast", length=1024, kind="edge"),
        _case("gpt2-xl", "bf16-autocast", "activation-checkpointing", kind="edge"),
    ]


def _more() -> list[Case]:
    return [
        _case("gpt2", "bf16-autocast", "activation-checkpointing", micro_batch=16),
        _case("gpt2", "bf16-autocast", "expandable-segments", micro_batch=8),
        _case("qwen3-1.7b", "pure-bf16", "activation-checkpointing", length=4096),
        _case("gpt2"),
        _case("gpt2", "fp16-autocast"),
        _case("gpt2", "bf16-autocast", "eager-attention"),
        _case("gpt2", "bf16-autocast", "adafactor", accumulation=4),
        _case("gpt2", "bf16-autocast", "sgd-momentum"),
        _case("gpt2", "bf16-autocast", evaluates=True),
        _case("gpt2", "bf16-autocast", "garbage-collection-threshold", micro_batch=8),
        _case("gpt2-xl", "bf16-autocast", "activation-checkpointing", "adamw-foreach", micro_batch=8),
        _case("gpt2-xl", "pure-bf16", "activation-checkpointing", "adafactor", micro_batch=8),
        _case("gpt2-xl", "bf16-autocast", "activation-checkpointing", "paged-adamw-8bit"),
        _case("llama-1b", "pure-bf16", "activation-checkpointing", micro_batch=1, length=8192),
        _case("llama-1b", "bf16-autocast", "chunked-loss", length=2048),
        _case("llama-1b", "half-weights-frozen", "lora", length=2048),
        _case("llama-1b", "half-weights-frozen", "qlora", "paged-adamw-8bit", length=2048),
        _case("llama-8b", "pure-bf16", "activation-checkpointing", "adafactor", micro_batch=1),
        _case("bert-large", arguments={"fp16": True, "gradient_checkpointing": True}, micro_batch=32, length=512),
    ]


def _histories() -> list[Case]:
    return [
        _case("gpt2", "bf16-autocast", micro_batch=8, kind="history"),
        _case("gpt2", "bf16-autocast", "expandable-segments", micro_batch=8, kind="history"),
        _case("gpt2", "bf16-autocast", "activation-checkpointing", micro_batch=16, kind="history"),
        _case("gpt2-xl", "bf16-autocast", kind="history"),
        _case("llama-1b", "bf16-autocast", length=2048, kind="history"),
        _case("qwen3-1.7b", "pure-bf16", "activation-checkpointing", length=4096, kind="history"),
    ]


def _kernels() -> list[Case]:
    bf16 = {"bf16": True}
    return [
        _case("gpt2", "bf16-autocast", micro_batch=8, kind="kernels"),
        _case("gpt2-xl", "bf16-autocast", "activation-checkpointing", "adamw-8bit", micro_batch=8, kind="kernels"),
        _case("llama-1b", "bf16-autocast", length=2048, kind="kernels"),
        _case("bert-large", arguments=bf16, micro_batch=32, length=512, kind="kernels"),
        _case("vit-large", arguments=bf16, micro_batch=64, kind="kernels"),
        _case("t5-large", arguments=bf16, micro_batch=8, length=512, kind="kernels"),
        _case("whisper-small", arguments=bf16, micro_batch=8, length=200, kind="kernels"),
    ]


def _compiled() -> list[Case]:
    """Measured on the H200 before memkit predicted compiled models, and predicted since."""
    return [
        _case("gpt2", "bf16-autocast", "compile", micro_batch=8),
        _case("gpt2", "bf16-autocast", "compile", micro_batch=8, kind="history"),
        _case("llama-1b", "bf16-autocast", "compile", length=2048),
        _case("gpt2-xl", "bf16-autocast", "activation-checkpointing", "compile", micro_batch=8),
    ]


def _fsdp2() -> list[Case]:
    """One rank, which has every stream, gather and reduction of several."""
    variants: dict[str, dict[str, Any]] = {
        "": {},
        ", compiled": {"torch_compile": True},
        ", accumulation 2": {"gradient_accumulation_steps": 2},
        ", checkpointing": {"fsdp_config": {"activation_checkpointing": True}},
        ", offload": {"fsdp_config": {"cpu_offload": True}},
        ", not resharded": {"fsdp_config": {"reshard_after_forward": False}},
    }
    cases = []
    for name, own in variants.items():
        config = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], **own.get("fsdp_config", {})}
        arguments = {"bf16": True, "fsdp": "full_shard", **own, "fsdp_config": json.dumps(config)}
        cases.append(
            Case(
                f"FSDP2, one rank: gpt2, bf16, micro batch 8{name}",
                kind="script",
                micro_batch=8,
                arguments=arguments,
                launcher=("torchrun", "--nproc_per_node", "1"),
            )
        )
    return cases


def _case(model: str, *techniques: str, arguments: Mapping[str, Any] | None = None, **options: Any) -> Case:
    """A case with its name: what it is made of."""
    own = dict(arguments or {})
    words = [*techniques, *(f"{key}={value}" for key, value in own.items())]
    for key in ("micro_batch", "length", "accumulation"):
        if key in options:
            words.append(f"{key.replace('_', ' ')} {options[key]}")
    words += ["evaluates"] if options.get("evaluates") else []
    words += {"edge": ["at the edge"], "history": ["its history"], "kernels": ["its kernels"]}.get(
        options.get("kind", ""), []
    )
    return Case(f"{model}: {', '.join(words) or 'defaults'}", model, techniques, arguments=own, **options)
