"""Cases of the rules on adapters, quantised weights and torchao's offloaded optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_memkit.catalog.models import Linear
from hf_memkit.checks import Subject
from tests.checks.case import SMALL, Case, Cases
from tests.checks.configs import ds

_LAYERS = (Linear("h.0.attn.c_attn", 1_000, 1_000), Linear("lm_head", 1_000, 2_000, head=True))
MODEL = replace(SMALL, vocabulary=2_001, linears=_LAYERS)
EXPERTS = replace(MODEL, stacked=3_000_000)
LORA = {"adapter.r": 8, "adapter.target_modules": "all-linear"}
NF4 = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip
PART = "trainer_parts.cpu_offload_optimizer"
OFFLOAD = {PART: {"max_grad_norm": 1.0}}
QLORA = {**LORA, "model.dtype": "bfloat16", "model.quantization": NF4}


def job(settings: dict[str, Any], arguments: dict[str, Any] | None = None, **more: Any) -> Subject:
    return Subject(arguments=arguments or {}, settings=settings, **{"model": MODEL, **more})


def quantised(**changes: Any) -> dict[str, Any]:
    """QLoRA's settings with these fields of BitsAndBytesConfig changed; None takes one out."""
    fields = {key: value for key, value in {**NF4, **changes}.items() if value is not None}
    return {**QLORA, "model.quantization": fields}


def lora(**fields: Any) -> dict[str, Any]:
    return {**LORA, **{f"adapter.{name}": value for name, value in fields.items()}}


NO_CLIP = {"max_grad_norm": 0.0}
ON = {"ddp_find_unused_parameters": False}
LIGER = {"use_liger_kernel": True}

CASES: Cases = {
    "adapter-target-missing": Case("adapter.target_modules", job(lora(target_modules=["c_attn", "q_proj"])),
                                   job(lora(target_modules=["c_attn"]))),
    "adapter-copies-module": [
        Case("adapter.modules_to_save", job(lora(modules_to_save=["lm_head"])), job(LORA)),
        Case("adapter.modules_to_save", job(lora(modules_to_save=["wte"]), model=replace(MODEL, tied=2_001_000)),
             job(lora(modules_to_save=["score"]))),
        Case("adapter.modules_to_save", job(lora(modules_to_save=["wte"]), model=None), job(LORA, model=None)),
    ],
    "adapter-saves-embedding": [
        Case("model.pad_vocabulary_to_multiple_of", job({**LORA, "model.pad_vocabulary_to_multiple_of": 64}),
             job({"model.pad_vocabulary_to_multiple_of": 64})),
        Case("model.pad_vocabulary_to_multiple_of", job({**LORA, "model.pad_vocabulary_to_multiple_of": 64}),
             job({**LORA, "model.pad_vocabulary_to_multiple_of": 3})),
    ],
    "adapter-searches-graph": [
        Case("ddp_find_unused_parameters", job(LORA, gpus=2), job(LORA, ON, gpus=2)),
        Case("ddp_find_unused_parameters", job(LORA, gpus=1, nodes=2), job(LORA, gpus=1)),
    ],
    "adapter-on-head-unread": [
        Case("adapter.target_modules", job(lora(target_modules=["c_attn", "lm_head"]), LIGER),
             job(lora(target_modules=["c_attn", "lm_head"]))),
        Case("adapter.target_modules", job(lora(target_modules=["lm_head"]), LIGER, model=None), job(LORA, LIGER)),
    ],
    "quantised-without-adapters": Case("model.quantization", job({"model.quantization": NF4}), job(QLORA)),
    "quantised-to-fp4": [
        Case("model.quantization.bnb_4bit_quant_type", job(quantised(bnb_4bit_quant_type=None)), job(QLORA)),
        Case("model.quantization.bnb_4bit_quant_type", job(quantised(bnb_4bit_quant_type="fp4")), job(QLORA)),
    ],
    "quantised-computes-in-fp32": [
        Case("model.quantization.bnb_4bit_compute_dtype", job(quantised(bnb_4bit_compute_dtype=None)), job(QLORA)),
        Case("model.quantization.bnb_4bit_compute_dtype",
             job({**LORA, "model.quantization": {"load_in_4bit": True}}, {"bf16": True}),
             job({**LORA, "model.quantization": {"load_in_4bit": True}})),
    ],
    "quantised-once": Case("model.quantization.bnb_4bit_use_double_quant",
                           job(quantised(bnb_4bit_use_double_quant=None)), job(QLORA)),
    "quantised-head": [
        Case("model.quantization.llm_int8_skip_modules", job(quantised(llm_int8_skip_modules=["c_attn"])),
             job(quantised(llm_int8_skip_modules=["c_attn", "lm_head"]))),
        Case("model.quantization.llm_int8_skip_modules", job(quantised(llm_int8_skip_modules=["x"]), model=None),
             job(quantised(llm_int8_skip_modules=["lm_head"]), model=None)),
    ],
    "experts-not-quantised": Case("model.quantization", job(QLORA, model=EXPERTS), job(LORA, model=EXPERTS)),
    "offload-clips-nothing": [
        Case("max_grad_norm", job(OFFLOAD), job(OFFLOAD, NO_CLIP)),
        Case("max_grad_norm", job(OFFLOAD, {"max_grad_norm": 0.5}), job({}, {"max_grad_norm": 0.5})),
    ],
    "offload-drops-gradients": [
        Case(f"{PART}.offload_gradients", job({PART: {"offload_gradients": True}}, {"gradient_accumulation_steps": 4}),
             job({PART: {"offload_gradients": True}})),
        Case(f"{PART}.offload_gradients", job({PART: {"offload_gradients": True}}, {"gradient_accumulation_steps": 4}),
             job({PART: {}}, {"gradient_accumulation_steps": 4})),
    ],
    "offload-on-several-cards": Case(PART, job(OFFLOAD, NO_CLIP, gpus=2), job(OFFLOAD, NO_CLIP, gpus=1)),
    "offload-rounds-updates": [
        Case("model.dtype", job({**OFFLOAD, "model.dtype": "bfloat16"}), job({**OFFLOAD, "model.dtype": "float32"})),
        Case("model.dtype", job({**OFFLOAD, "model.dtype": "bfloat16"}), job({**OFFLOAD, **QLORA})),
    ],
    "offload-twice": Case(PART, job(OFFLOAD, config=ds(2)), job({}, config=ds(2))),
}  # fmt: skip
