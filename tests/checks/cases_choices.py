"""Cases of the rules about Trainer's own batch, precision, loading and the allocator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_memkit.catalog.models import ModelFacts
from hf_memkit.checks import Subject
from tests.checks.case import MACHINE, OLD_GPU, ON_CPU, SMALL, Case, Cases, of, value


def _of_type(model_type: str) -> ModelFacts:
    return replace(SMALL, config={"model_type": model_type})


def _args(model: ModelFacts | None = None, **arguments: Any) -> Subject:
    return Subject(arguments=arguments, model=model)


def _setup(arguments: dict[str, Any] | None = None, **settings: Any) -> Subject:
    """As a setup gives it: `model__dtype` stands for `model.dtype`."""
    return Subject(
        arguments=arguments or {}, settings={key.replace("__", "."): value for key, value in settings.items()}
    )


_ALLOC = "environment.PYTORCH_ALLOC_CONF"


def _allocator(text: str) -> Subject:
    return Subject(arguments={}, settings={_ALLOC: text})


BATCH = "gradient_accumulation_steps"
SR = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}
FP16 = {"model__dtype": "float16"}

CASES: Cases = {
    "accumulation-multiplies-the-loss": [
        Case(BATCH, _args(_of_type("bart"), gradient_accumulation_steps=4), _args(_of_type("bart"))),
        Case(BATCH, _args(_of_type("xlnet"), gradient_accumulation_steps=2),
             _args(_of_type("gpt2"), gradient_accumulation_steps=2)),
    ],
    "accumulation-averages-means": [
        Case(BATCH, _args(_of_type("gemma3n"), gradient_accumulation_steps=4),
             _args(_of_type("gemma3n"), gradient_accumulation_steps=4, packing=True)),
        Case(BATCH, _args(_of_type("gemma4"), gradient_accumulation_steps=4),
             _args(_of_type("llama"), gradient_accumulation_steps=4)),
    ],
    "batch-norm-with-accumulation": [
        Case(BATCH, _args(replace(SMALL, batch_norms=3), gradient_accumulation_steps=4),
             _args(replace(SMALL, batch_norms=3), gradient_accumulation_steps=1)),
        Case(BATCH, _args(replace(SMALL, batch_norms=1), gradient_accumulation_steps=2),
             _args(SMALL, gradient_accumulation_steps=2)),
    ],
    "batch-search-shrinks-the-batch": [
        value("auto_find_batch_size", True, False),
        Case("auto_find_batch_size", of(2, arguments={"auto_find_batch_size": True}),
             of(3, arguments={"auto_find_batch_size": True})),
    ],
    "batch-split-among-processes": [
        Case("accelerator_config", Subject(arguments={"accelerator_config": {"split_batches": True}}, gpus=2),
             Subject(arguments={"accelerator_config": {"split_batches": True}}, gpus=1)),
        value("accelerator_config", '{"split_batches": true}', '{"split_batches": false}'),
    ],
    "accumulation-in-accelerator-config": [
        Case("accelerator_config", _args(accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 4}}),
             _args(gradient_accumulation_steps=4, accelerator_config={"gradient_accumulation_kwargs": {}})),
        Case("accelerator_config",
             _args(gradient_accumulation_steps=4,
                   accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 1}}),
             _args(accelerator_config="accelerator.json")),
    ],
    "bf16-weights-lose-updates": [
        Case("torch_dtype", _args(torch_dtype="bfloat16"), _args(torch_dtype="bfloat16", **SR)),
        Case("dtype", _args(dtype="bfloat16", optim="adamw_torch_8bit"), _args(dtype="bfloat16", optim="lomo")),
        Case("dtype", _args(dtype="bfloat16", optim="adamw_anyprecision"), _setup({}, model__dtype="bfloat16")),
        Case("torch_dtype", _args(torch_dtype="bfloat16"), _args(torch_dtype="float32", bf16=True)),
        Case("dtype", _args(dtype="bfloat16"), _args(dtype="bfloat16", use_peft=True)),
        Case("dtype", _args(dtype="torch.bfloat16", optim="adafactor"), _args(dtype="bfloat16", deepspeed="ds.json")),
        Case("dtype", _args(dtype="bfloat16", fsdp=True), _args(dtype="bfloat16", fsdp=True, bf16=True)),
        Case("dtype", _args(dtype="bfloat16", fsdp="full_shard", bf16=False, packing=True),
             _args(dtype="bfloat16", fsdp="full_shard", packing=True)),
        Case("dtype", _args(dtype="bfloat16", fsdp=False, bf16=True),
             _args(dtype="bfloat16", fsdp="full_shard auto_wrap", fp16=True)),
        Case("torch_dtype", _args(torch_dtype="bfloat16", use_lora=False, lora_r=8),
             _args(torch_dtype="bfloat16", use_lora=True, lora_r=8)),
        Case("dtype", _args(dtype="bfloat16", optim="adamw_anyprecision"),
             _args(dtype="bfloat16", train_adapter=True)),
        Case("dtype", _args(dtype="bfloat16", optim="sgd"), _args(dtype="bfloat16", optim="stable_adamw")),
        Case("dtype", _args(dtype="bfloat16", optim="adamw_torch_8bit", optim_args="bf16_stochastic_round=no"),
             _args(dtype="bfloat16", optim="adamw_torch_8bit", optim_args="bf16_stochastic_round=true")),
    ],
    "fp16-weights-trained": [
        Case("model.dtype", _setup({"fp16": True}, **FP16), _setup({"fp16": True}, **FP16, adapter__r=8)),
        Case("dtype", _args(dtype="float16"), _args(dtype="float16", load_in_4bit=True)),
        Case("torch_dtype", _args(torch_dtype="float16", fp16=True), _args(torch_dtype="auto", fp16=True)),
        Case("dtype", _args(dtype="float16", fsdp=True), _args(dtype="float16", fsdp=True, fp16=True)),
    ],
    "bf16-weights-fp16-scaler": [
        Case("fp16", _args(dtype="bfloat16", fp16=True, optim="adafactor"), _args(dtype="float32", fp16=True)),
        Case("fp16", _setup({"fp16": True}, model__dtype="bfloat16"),
             _setup({"fp16": True}, model__dtype="bfloat16", adapter__r=8)),
        Case("fp16", _args(torch_dtype="bfloat16", fp16=True), _args(torch_dtype="bfloat16", fp16=True, fsdp=True)),
    ],
    "two-precisions": [
        Case("fp16", _args(fp16=True, bf16=True), _args(fp16=True, bf16=False)),
        Case("fp16_full_eval", _args(fp16_full_eval=True, bf16_full_eval=True), _args(fp16=True)),
    ],
    "bf16-argument-emulated": [
        Case("bf16", Subject(arguments={"bf16": True}, machine=OLD_GPU),
             Subject(arguments={"bf16": True}, machine=MACHINE)),
        Case("bf16_full_eval", Subject(arguments={"bf16_full_eval": True}, machine=OLD_GPU),
             Subject(arguments={"fp16": True}, machine=OLD_GPU)),
    ],
    "fp16-ignored-on-cpu": [
        Case("fp16", _args(fp16=True, use_cpu=True), _args(fp16=True)),
        Case("fp16", Subject(arguments={"fp16": True}, machine=ON_CPU), _args(bf16=True, use_cpu=True)),
    ],
    "tf32-not-there": [
        Case("tf32", Subject(arguments={"tf32": True}, machine=OLD_GPU),
             Subject(arguments={"tf32": True}, machine=MACHINE)),
        Case("tf32", Subject(arguments={"tf32": True}, machine=ON_CPU), _args(tf32=False, use_cpu=True)),
        Case("tf32", _args(tf32=True, use_cpu=True), _args(tf32=True)),
    ],
    "workers-missing": [
        Case("dataloader_persistent_workers", _args(dataloader_persistent_workers=True),
             _args(dataloader_persistent_workers=True, dataloader_num_workers=2)),
        Case("dataloader_prefetch_factor", _args(dataloader_prefetch_factor=4),
             _args(dataloader_prefetch_factor=4, dataloader_num_workers=1)),
    ],
    "pinning-without-card": Case("dataloader_pin_memory", _args(dataloader_pin_memory=True, use_cpu=True),
                                 _args(dataloader_pin_memory=True)),
    "low-cpu-mem-usage-ignored": Case("low_cpu_mem_usage", _args(low_cpu_mem_usage=True), _args(learning_rate=1e-4)),
    "device-map-with-stage-3": [
        Case("model.device_map", of(3, settings={"model.device_map": "cuda"}),
             of(2, settings={"model.device_map": "cuda"})),
        Case("device_map", of(3, arguments={"device_map": "auto"}), of(2, arguments={"device_map": "auto"})),
    ],
    "allocator-options": [
        Case(_ALLOC, _allocator("expandable_segmentz:True"), _allocator("expandable_segments:True")),
        Case(_ALLOC, _allocator("expandable_segments:true"), _allocator("max_split_size_mb:64")),
        Case(_ALLOC, _allocator("expandable_segments:True,max_split_size_mb:128"),
             _allocator("garbage_collection_threshold:0.8,max_split_size_mb:128,per_process_memory_fraction:0.99")),
        Case(_ALLOC, _allocator("expandable_segments:True, garbage_collection_threshold:0.8"),
             _allocator("expandable_segments:False,max_split_size_mb:64")),
        Case(_ALLOC, _allocator("garbage_collection_threshold:0.8"),
             _allocator("garbage_collection_threshold:0.8,per_process_memory_fraction:0.9")),
        Case(_ALLOC, _allocator("max_split_size_mb:10"), _allocator("roundup_power2_divisions:[256:1,>:4]")),
        Case(_ALLOC, _allocator("max_split_size_mb=128"), _allocator("backend:native")),
    ],
}  # fmt: skip
