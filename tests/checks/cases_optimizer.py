"""Cases of the rules about the choice of an optimizer: see `cases.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_memkit.catalog.models import Linear
from hf_memkit.checks import Subject
from tests.checks.case import ON_CPU, SMALL, Case, Cases, of

TARGETS = {"optim_target_modules": "all-linear"}
BLOCKS = (Linear("model.layers.0.mlp.up_proj", 1_000, 1_000), Linear("lm_head", 1_000, 2_000, head=True))
LLAMA = replace(SMALL, config={"model_type": "llama"}, linears=BLOCKS)
ODD = replace(LLAMA, vocabulary=2_001, parameters=10_000_000)  # 2 001 000 elements: no block divides them
EVEN = replace(LLAMA, vocabulary=2_048, parameters=10_000_000)
WORDS = replace(LLAMA, parameters=3_000_000)  # of which 2 000 × 1 000 are words
OURS = "hf_memkit.components.low_bit_adamw:AdamW8bit"


def on(optim: str, **more: Any) -> Subject:
    """A job with this optimizer; what is no field of `Subject` is an argument."""
    fields = {name: more.pop(name) for name in ("model", "machine", "gpus", "settings") if name in more}
    return Subject(arguments={"optim": optim, "max_grad_norm": 0.0, "save_strategy": "no", **more}, **fields)


def given(cls: str, **options: Any) -> Subject:
    settings = {"optimizer.class": cls, **{f"optimizer.{name}": value for name, value in options.items()}}
    return Subject(arguments={}, settings=settings)


def loaded(dtype: str, optim: str, **more: Any) -> Subject:
    """A setup whose weights are loaded so; what has a point in its name is a setting, all else an argument."""
    settings = {name: value for name, value in more.items() if "." in name}
    arguments = {name: value for name, value in more.items() if "." not in name}
    return Subject(arguments={"optim": optim, **arguments}, settings={"model.dtype": dtype, **settings})


CASES: Cases = {
    "optimizer-options-ignored": [
        Case("optim_args", on("adamw_torch", optim_args="foreach=False"), on("adamw_torch")),
        Case("optim_args", on("adamw_bnb_8bit", optim_args="min_8bit_size=1"), on("sgd", optim_args="momentum=0.9")),
        Case("optim_args", on("sgd", optim_args="momemtum=0.9"), on("rmsprop_bnb", optim_args="anything=1")),
    ],
    "optimizer-options-unreadable": Case("optim_args", on("sgd", optim_args="momentum:0.9"),
                                         on("sgd", optim_args="momentum = 0.9")),
    "optimizer-option-always-true": Case("optim_args", on("stable_adamw", optim_args="kahan_sum=False"),
                                         on("stable_adamw", optim_args="max_lr=1")),
    "optimizer-decay-overridden": Case("optim_args", on("sgd", optim_args="momentum=0,weight_decay=0.1"),
                                       on("sgd", weight_decay=0.1)),
    "torchao-block-size": Case("optim_args", on("adamw_torch_4bit", optim_args="block_size=128"),
                               on("adamw_torch_4bit")),
    "adam-settings-ignored": [
        Case("adam_beta1", on("adafactor", adam_beta1=0.5), on("adamw_torch", adam_beta1=0.5)),
        Case("adam_beta2", on("galore_adamw", adam_beta2=0.95, **TARGETS), on("galore_adamw", **TARGETS)),
        Case("adam_epsilon", on("apollo_adamw", adam_epsilon=1e-6), on("apollo_adamw", adam_epsilon=1e-8)),
        Case("adam_epsilon", on("lion_8bit", adam_epsilon=1e-6), on("lion_8bit", adam_beta2=0.99)),
        Case("adam_beta1", on("", adam_beta1=0.5, settings={"optimizer.takes": ["lr"], "optimizer.class": "a:B"}),
             on("", adam_beta1=0.5, settings={"optimizer.class": "a:B"})),
    ],
    "weight-decay-ignored": [
        Case("weight_decay", on("lomo", weight_decay=0.1), on("lomo", weight_decay=0.0)),
        Case("weight_decay", on("apollo_adamw", weight_decay=0.1), on("adafactor", weight_decay=0.1)),
    ],
    "sgd-without-momentum": [
        Case("optim", on("sgd"), on("sgd", optim_args="momentum=0")),
        Case("optim", on("sgd", learning_rate=2e-5), on("sgd", learning_rate=0.01)),
    ],
    "lion-betas": Case("optim", on("lion_8bit"), on("lion_8bit", adam_beta2=0.99)),
    "optimizer-ignored": Case("optim", Subject(arguments={"optim": "sgd"}, settings={"optimizer.class": OURS}),
                              given(OURS)),
    "targets-ignored": Case("optim_target_modules", on("adamw_torch", **TARGETS), on("galore_adamw", **TARGETS)),
    "low-rank-without-targets": Case("optim", on("galore_adamw"), on("galore_adamw", **TARGETS)),
    "low-rank-on-conv1d": [
        Case("optim_target_modules", on("galore_adamw", **TARGETS, model=SMALL),
             on("galore_adamw", **TARGETS, model=LLAMA)),
        Case("optim_target_modules", on("apollo_adamw", optim_target_modules=["mlp"], model=SMALL),
             on("adamw_torch", model=SMALL)),
    ],
    "galore-8bit-arguments": Case("optim", on("galore_adamw_8bit", **TARGETS), on("galore_adamw", **TARGETS)),
    "galore-adafactor-layerwise": Case("optim", on("galore_adafactor_layerwise", **TARGETS),
                                       on("galore_adafactor", **TARGETS)),
    "layerwise-accumulation": Case("gradient_accumulation_steps",
                                   on("galore_adamw_layerwise", gradient_accumulation_steps=2),
                                   on("galore_adamw", gradient_accumulation_steps=2)),
    "layerwise-several-cards": Case("optim", on("apollo_adamw_layerwise", gpus=2),
                                    on("apollo_adamw_layerwise", gpus=1)),
    "clipping-without-gradients": [
        Case("max_grad_norm", on("lomo", max_grad_norm=1.0), on("lomo")),
        Case("max_grad_norm", Subject(arguments={"optim": "galore_adamw_layerwise"}), on("galore_adamw_layerwise")),
    ],
    "lomo-accumulation": Case("gradient_accumulation_steps", on("lomo", gradient_accumulation_steps=4),
                              on("lomo", gradient_accumulation_steps=1)),
    "lomo-several-cards": Case("optim", on("adalomo", gpus=2), on("adalomo", gpus=1)),
    "lomo-with-deepspeed": Case("optim", of(2, arguments={"optim": "lomo", "max_grad_norm": 0.0}),
                                of(2, arguments={"optim": "adafactor"})),
    "lomo-with-fp16": Case("fp16", on("lomo", fp16=True), on("lomo", bf16=True)),
    "adalomo-without-cuda": Case("optim", on("adalomo", machine=ON_CPU), on("lomo", machine=ON_CPU)),
    "checkpoint-cannot-be-loaded": [
        Case("save_only_model", on("galore_adamw", save_strategy="steps"), on("galore_adamw")),
        Case("save_only_model", on("apollo_adamw", save_strategy="epoch"),
             on("apollo_adamw", save_strategy="epoch", save_only_model=True)),
    ],
    "states-not-saved": [
        Case("save_only_model", on("adalomo", save_strategy="steps"), on("lomo", save_strategy="steps")),
        Case("save_only_model", on("galore_adamw_layerwise", save_strategy="steps"),
             on("galore_adamw_layerwise", save_strategy="steps", save_only_model=True)),
    ],
    "stochastic-rounding-missing": [
        Case("optim", loaded("bfloat16", "adamw_torch_fused"), loaded("float32", "adamw_torch_fused")),
        Case("optim", loaded("bfloat16", "adafactor"), loaded("bfloat16", "lomo")),
        Case("optim", loaded("bfloat16", "adamw_anyprecision"), loaded("bfloat16", "stable_adamw")),
        Case("optim", loaded("bfloat16", "adamw_torch", fsdp=True),
             loaded("bfloat16", "adamw_torch", fsdp=True, bf16=True)),
        Case("optim", loaded("bfloat16", "adamw_torch", use_lora=False),
             loaded("bfloat16", "adamw_torch", use_lora=True)),
        Case("optim", loaded("bfloat16", "adamw_bnb_8bit"), loaded("bfloat16", "adamw_bnb_8bit", **{"adapter.r": 8})),
        Case("optimizer.class",
             Subject(arguments={}, settings={"model.dtype": "bfloat16", "optimizer.class": "torch.optim:AdamW"}),
             Subject(arguments={}, settings={"model.dtype": "bfloat16", "optimizer.class": OURS,
                                             "optimizer.bf16_stochastic_round": True})),
    ],
    "stochastic-rounding-ignored": [
        Case("optim_args", on("adamw_torch_8bit", bf16=True, optim_args="bf16_stochastic_round=True"),
             on("adamw_torch_8bit", bf16=True)),
        Case("optimizer.bf16_stochastic_round",
             Subject(arguments={}, settings={"model.dtype": "float32", "optimizer.class": OURS,
                                             "optimizer.bf16_stochastic_round": True}),
             Subject(arguments={}, settings={"model.dtype": "bfloat16", "optimizer.class": OURS,
                                             "optimizer.bf16_stochastic_round": True})),
    ],
    "second-moment-in-bf16": [
        Case("optim", loaded("bfloat16", "adamw_torch_8bit"), loaded("float32", "adamw_torch_8bit")),
        Case("optim", loaded("float16", "adamw_torch_8bit", fsdp=True),
             loaded("float16", "adamw_torch_8bit", fsdp=True, fp16=True)),
    ],
    "embedding-not-quantised": [
        Case("optim", on("adamw_torch_8bit", model=ODD), on("adamw_torch_8bit", model=EVEN)),
        Case("optimizer.class", replace(given(OURS, block_size=256), model=ODD),
             Subject(arguments={}, model=ODD,
                     settings={"optimizer.class": OURS, "model.pad_vocabulary_to_multiple_of": 64})),
    ],
    "adapters-too-small-for-8-bit": Case("optim", on("adamw_bnb_8bit", model=LLAMA, settings={"adapter.r": 4}),
                                         on("adamw_bnb_8bit", model=LLAMA, settings={"adapter.r": 8})),
    "embeddings-stay-in-32-bits": Case("optim", on("adamw_bnb_8bit", model=WORDS), on("adamw_bnb_8bit", model=EVEN)),
    "paged-without-cuda": Case("optim", on("paged_adamw_8bit", machine=ON_CPU), on("adamw_bnb_8bit", machine=ON_CPU)),
    "zero-parameters-frozen": Case("optimizer.class", given("bitsandbytes.optim:LAMB"),
                                   given("hf_memkit.components.large_batch_optimizers:LAMB")),
    "trust-ratio-missing": Case("optimizer.class", given("bitsandbytes.optim:LARS8bit"),
                                given("bitsandbytes.optim:LARS")),
}  # fmt: skip
