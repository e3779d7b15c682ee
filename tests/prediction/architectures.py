"""The models and settings at which fake tensors are compared with real ones. Fixed before anything was tuned to them.

Each model is a class of transformers with a config made small: activations outweigh weights and optimizer states, so
that what the tracer sees of forward and backward decides the peak. Everything else is the config's default, dropout
included; `layerdrop` is 0, because a real run leaves out layers by chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hf_memkit.prediction.setup_as_script import SetupJob
from hf_memkit.setup.setup import Setup


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model and its training data.

    Attributes:
        name: its `model_type` in transformers.
        model_class: the class that is trained.
        config: config values that differ from the defaults.
        length: tokens of each example; of the labels where the input is no text.
        batch_size: examples of a micro-batch.
    """

    name: str
    model_class: str
    config: Mapping[str, Any] = field(repr=False)
    length: int = 128
    batch_size: int = 4


_DECODER: Final = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip
_GROUPED: Final = {**_DECODER, "num_key_value_heads": 2}
_BART: Final = {
    "vocab_size": 384, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 256,
}  # fmt: skip
_DISTILBERT: Final = {"vocab_size": 384, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4}

ARCHITECTURES: Final = (
    # Decoders: learned, rotary and offset positions; grouped heads; sliding windows; capped logits.
    Architecture(
        "gpt2", "GPT2LMHeadModel", {"vocab_size": 384, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
    ),
    Architecture("llama", "LlamaForCausalLM", _GROUPED),
    Architecture("qwen2", "Qwen2ForCausalLM", _GROUPED),
    Architecture("mistral", "MistralForCausalLM", {**_GROUPED, "sliding_window": 64}),
    Architecture("gemma2", "Gemma2ForCausalLM", {**_GROUPED, "head_dim": 16, "sliding_window": 64}),
    Architecture("opt", "OPTForCausalLM", {**_DECODER, "ffn_dim": 160, "word_embed_proj_dim": 64}),
    # Encoders, with a head for sequences, for spans, for tokens, and for masked words.
    Architecture("bert", "BertForSequenceClassification", _DECODER),
    Architecture("distilbert", "DistilBertForQuestionAnswering", _DISTILBERT),
    Architecture("roberta", "RobertaForTokenClassification", _DECODER),
    Architecture(
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        {**_DECODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32},
        length=64,
    ),
    # Encoder and decoder.
    Architecture(
        "t5",
        "T5ForConditionalGeneration",
        {"vocab_size": 384, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
    ),
    Architecture("bart", "BartForConditionalGeneration", _BART),
    # Images: patches, and convolutions.
    Architecture(
        "vit",
        "ViTForImageClassification",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "image_size": 48,
            "patch_size": 4,
        },
    ),
    Architecture(
        "convnext",
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1], "image_size": 96},
    ),
    # Sound: a spectrogram, and the wave itself.
    Architecture(
        "whisper",
        "WhisperForConditionalGeneration",
        {
            **_BART,
            "num_mel_bins": 16,
            "max_source_positions": 128,
            "max_target_positions": 128,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
        },
        length=96,
    ),
    Architecture(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "conv_dim": [8, 8, 8, 8, 8, 8, 8],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "layerdrop": 0.0,
        },
        batch_size=2,
    ),
)

UNSEEN: Final = (
    Architecture("phi", "PhiForCausalLM", _DECODER),
    Architecture(
        "modernbert",
        "ModernBertForTokenClassification",
        {**_DECODER, "local_attention": 32, "pad_token_id": 0},
    ),
    Architecture("pegasus", "PegasusForConditionalGeneration", _BART),
    Architecture(
        "swin",
        "SwinForImageClassification",
        {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "image_size": 64, "window_size": 4},
    ),
    Architecture(
        "audio-spectrogram-transformer",
        "ASTForAudioClassification",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "max_length": 128,
            "num_mel_bins": 64,
        },
    ),
)
"""Chosen together with the others, and run for the first time when nothing was left to be changed. Since then they are
cases like the others; `benchmarks/results/predict_equality.json` keeps what they came to at first."""

MIXTURES: Final = (
    Architecture("mixtral", "MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_GROUPED, "head_dim": 16, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2},
    ),
)
"""Mixtures of experts: every token goes to as many experts, whichever they are, so that the sizes are known."""

CHATTING: Final = (Architecture("qwen3", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 16}),)
"""Trained with TRL's SFTTrainer only, in addition to llama."""

_SFT: Final = {
    "trainer.class": "trl:SFTTrainer", "trainer.arguments_class": "trl:SFTConfig", "arguments.packing": False,
    "arguments.activation_checkpointing": False, "arguments.bf16": False, "arguments.max_length": 128,
    "arguments.assistant_only_loss": True,
}  # fmt: skip

SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {},
    "bf16": {"arguments.bf16": True},
    "checkpointing": {"arguments.gradient_checkpointing": True},
    "accumulation": {"arguments.gradient_accumulation_steps": 2, "arguments.optim": "adafactor"},
    "lora": {"adapter.r": 8, "adapter.lora_alpha": 16, "adapter.target_modules": "all-linear"},
}
"""Settings by key, beside the batch sizes. Fields that are not listed have Trainer's default, such as fused AdamW."""

_COMPILED: Final = {"arguments.torch_compile": True}
_SAVED: Final = {"arguments.save_strategy": "steps"}

MORE: Final[Mapping[str, Mapping[str, Any]]] = {
    "padded": {"padded": True},
    "padded, bf16": {"padded": True, "arguments.bf16": True},
    "saved": _SAVED,
    "saved, lora": {**_SAVED, **SETTINGS["lora"]},
    "saved, accumulation": {**_SAVED, **SETTINGS["accumulation"]},
    "experts one by one": {"model.config": {"_experts_implementation": "eager"}},
    "metrics": {"metrics": True, "evaluation_batches": 4},
    "metrics moved": {"metrics": True, "evaluation_batches": 4, "arguments.eval_accumulation_steps": 1},
    "sft": _SFT,
    "sft, bf16": {**_SFT, "arguments.bf16": True},
    "sft, lora": {**_SFT, **SETTINGS["lora"]},
    "metrics by batch": {"metrics": True, "evaluation_batches": 4, "arguments.batch_eval_metrics": True},
    "compiled": _COMPILED,
    "compiled, checkpointing": {**_COMPILED, "arguments.gradient_checkpointing": True},
    "compiled, lora": {**_COMPILED, **SETTINGS["lora"]},
    "compiled, two lengths": {**_COMPILED, "typical_length": 96},
    "two lengths": {"typical_length": 96},
    "compiled, bf16": {**_COMPILED, "arguments.bf16": True},
    "compiled, bf16, checkpointing": {**_COMPILED, "arguments.bf16": True, "arguments.gradient_checkpointing": True},
    "compiled, aot_eager": {
        **_COMPILED,
        "arguments.torch_compile_backend": "aot_eager",
        "arguments.eval_strategy": "no",
        "layers": 1,
    },
}
"""What else a training does, for some of the architectures: settings, and fields of `SetupJob` by their names."""


def of_architecture(architecture: Architecture, setting: str) -> SetupJob:
    """The training that the child is to run."""
    config = {"model_type": architecture.name, **architecture.config}
    size = architecture.batch_size
    wanted = {"padded": False, "arguments.save_strategy": "no", **(SETTINGS | MORE)[setting]}
    fields = {name: wanted.pop(name) for name in list(wanted) if "." not in name}
    if "layers" in fields:
        config["num_hidden_layers"] = fields.pop("layers")
    setup = Setup("compared")
    for key, value in {
        "model.name": architecture.name,
        "model.origin": "architecture",
        "model.architecture": config,
        "model.class": architecture.model_class,
        "arguments.per_device_train_batch_size": size,
        "arguments.per_device_eval_batch_size": size,
        "arguments.eval_strategy": "steps",
        **wanted,
    }.items():
        setup = setup.put(key, value, "compared")
    if "typical_length" in fields:
        fields["typical"] = setup.put("data.sequence_length", fields.pop("typical_length"), "compared")
    return SetupJob(setup, architecture.length, **fields)
