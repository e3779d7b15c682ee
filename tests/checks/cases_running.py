"""Cases of the rules about torch.compile, sequences and evaluation, which need no DeepSpeed config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_memkit.checks import Subject
from tests.checks.case import LARGE, MACHINE, SMALL, Case, Cases, of, value

PACKED, PADDED = "trainer_parts.packed_batches", "trainer_parts.pad_batches"
ATTENTION = "model.attn_implementation"
GROUPED = {"train_sampling_strategy": "group_by_length"}


def job(settings: dict[str, Any] | None = None, /, **arguments: Any) -> Subject:
    return Subject(arguments=arguments, settings=settings or {})


VIT, LLAMA = {"model_type": "vit"}, {"model_type": "llama"}
RESUMED, BEST = {"resume_from_checkpoint": "out/checkpoint-6"}, {"load_best_model_at_end": True}
OPT = replace(SMALL, config={"model_type": "opt"})
GENERATING = {"predict_with_generate": True, "generation_max_length": 4096, "per_device_eval_batch_size": 8}

CASES: Cases = {
    "drop-last-in-evaluation": [
        Case("dataloader_drop_last", job(dataloader_drop_last=True, eval_strategy="steps"),
             job(dataloader_drop_last=True)),
        Case("dataloader_drop_last", job(dataloader_drop_last=True, do_predict=True),
             job(dataloader_drop_last=False, do_predict=True)),
    ],
    "sampling-strategy-unknown": Case("train_sampling_strategy", job(train_sampling_strategy="by_length"),
                                      job(**GROUPED)),
    "grouping-reorders-predictions": Case("train_sampling_strategy", job(do_predict=True, **GROUPED), job(**GROUPED)),
    "length-column-removed": Case("length_column_name", job(length_column_name="n", **GROUPED),
                                  job(length_column_name="n", remove_unused_columns=False, **GROUPED)),
    "length-column-without-grouping": [
        Case("length_column_name", job(length_column_name="n"), job(length_column_name="n", **GROUPED)),
        value("length_column_name", "n", "length"),
    ],
    "packed-samples-leak": [
        Case(PACKED, Subject(arguments={}, settings={PACKED: {}}, model=OPT),
             Subject(arguments={}, settings={PACKED: {}}, model=SMALL)),
        Case(PACKED, Subject(arguments={}, settings={PACKED: {"length": 32}}, model=OPT),
             Subject(arguments={}, settings={PADDED: {"multiple": 8}}, model=OPT)),
    ],
    "packed-samples-and-cache": Case("use_cache", job({PACKED: {}}, use_cache=True),
                                     job({PADDED: {}}, use_cache=True)),
    "packed-rows-and-flash-attention": Case(ATTENTION, job({PACKED: {"length": 32}, ATTENTION: "flash_attention_2"}),
                                            job({PACKED: {}, ATTENTION: "flash_attention_2"})),
    "padding-free-and-eager-attention": Case(ATTENTION, job({PACKED: {}, ATTENTION: "eager"}),
                                             job({PACKED: {"length": 32}, ATTENTION: "eager"})),
    "grouping-packed-samples": Case("train_sampling_strategy", job({PACKED: {}}, **GROUPED),
                                    job({PADDED: {}}, **GROUPED)),
    "blocks-need-no-padding": Case(PADDED, job({PADDED: {"multiple": 8}, "data.text_column": "text"}),
                                   job({PADDED: {"multiple": 8}, "data.sequence_length": 8})),
    "metrics-never-computed": [
        Case("batch_eval_metrics", job(prediction_loss_only=True, batch_eval_metrics=True),
             job(batch_eval_metrics=True)),
        Case("metric_for_best_model", job(prediction_loss_only=True, metric_for_best_model="accuracy"),
             job(prediction_loss_only=True, metric_for_best_model="eval_loss")),
    ],
    "eval-accumulation-ignored": Case("eval_accumulation_steps",
                                      job(eval_accumulation_steps=4, batch_eval_metrics=True),
                                      job(eval_accumulation_steps=4)),
    "eval-accumulation-without-logits": Case("eval_accumulation_steps",
                                             job(eval_accumulation_steps=4, prediction_loss_only=True),
                                             job(eval_accumulation_steps=4)),
    "metric-input-unknown": value("include_for_metrics", ["input"], ["inputs", "loss"]),
    "inputs-held-for-nothing": Case("include_for_metrics",
                                    job(include_for_metrics=["inputs"], prediction_loss_only=True),
                                    job(include_for_metrics=["inputs"])),
    "predict-keeps-everything": [
        Case("batch_eval_metrics", job(batch_eval_metrics=True, do_predict=True),
             job({"trainer_parts.streamed_metrics": {}}, batch_eval_metrics=True, do_predict=True)),
    ],
    "full-eval-while-training": [
        Case("bf16_full_eval", job(bf16_full_eval=True, eval_strategy="steps"), job(bf16_full_eval=True)),
        Case("fp16_full_eval", job(fp16_full_eval=True, eval_strategy="epoch"),
             job(fp16_full_eval=True, do_train=True, do_eval=True, eval_strategy="no")),
        Case("bf16_full_eval", job({"model.dtype": "float32"}, bf16_full_eval=True, eval_strategy="steps"),
             job({"model.dtype": "float32"}, bf16_full_eval=True, max_steps=10)),
    ],
    "weights-not-restored": [
        Case("resume_from_checkpoint", Subject(arguments=RESUMED, model_config=VIT),
             Subject(arguments=RESUMED, model_config=LLAMA)),
        Case("load_best_model_at_end", Subject(arguments=BEST, model_config={"vision_config": VIT, **LLAMA}),
             Subject(arguments=BEST, model_config=VIT, settings={"adapter.r": 8})),
        Case("resume_from_checkpoint", Subject(arguments=RESUMED, model_config=VIT),
             Subject(arguments={**RESUMED, "model_name_or_path": "./out/checkpoint-6/"}, model_config=VIT)),
        Case("resume_from_checkpoint",
             Subject(arguments={"resume_from_checkpoint": True, "model_name_or_path": "vit"}, model_config=VIT),
             Subject(arguments={"resume_from_checkpoint": True, "model_name_or_path": "out/checkpoint-6"},
                     model_config=VIT)),
        Case("load_best_model_at_end", Subject(arguments=BEST, model_config=VIT),
             Subject(arguments=BEST, model_config=VIT, settings={"data.task": "image-classification"})),
        Case("resume_from_checkpoint", Subject(arguments=RESUMED, model_config=VIT),
             of(2, arguments=RESUMED, model_config=VIT)),
    ],
    "generation-skipped": Case("predict_with_generate", job(predict_with_generate=True, prediction_loss_only=True),
                               job(predict_with_generate=True)),
    "generation-not-asked-for": Case("generation_num_beams", job(generation_num_beams=4),
                                     job(generation_num_beams=4, predict_with_generate=True)),
    "generation-cache-too-large": [
        Case("generation_num_beams",
             Subject(arguments={**GENERATING, "generation_num_beams": 16}, model=LARGE, machine=MACHINE),
             Subject(arguments={**GENERATING, "generation_num_beams": 1}, model=LARGE, machine=MACHINE)),
    ],
    "compile-turned-on-unseen": Case("torch_compile", job(torch_compile=False, torch_compile_mode="max-autotune"),
                                     job(torch_compile=False)),
    "compile-backend-no": Case("torch_compile_backend", job(torch_compile=True, torch_compile_backend="no"),
                               job(torch_compile=True, torch_compile_backend="inductor")),
    "compile-backend": [
        value("torch_compile_backend", "nvprims_nvfuser", "inductor"),
        value("torch_compile_backend", "indcutor", "aot_eager"),
    ],
    "compile-mode": value("torch_compile_mode", "max_autotune", "max-autotune"),
    "compile-mode-ignored": Case("torch_compile_mode",
                                 job(torch_compile_mode="max-autotune", torch_compile_backend="aot_eager"),
                                 job(torch_compile_mode="max-autotune")),
    "compile-graphs-of-many-shapes": Case("torch_compile_mode",
                                          job({PACKED: {}}, torch_compile_mode="reduce-overhead"),
                                          job({PACKED: {"length": 32}}, torch_compile_mode="reduce-overhead")),
    "compile-at-stage-3": Case("torch_compile", of(3, arguments={"torch_compile": True}),
                               of(2, arguments={"torch_compile": True})),
    "grouping-streamed-data": [
        Case("train_sampling_strategy", job(streaming=True, **GROUPED), job(streaming=False, **GROUPED)),
        Case("train_sampling_strategy", job(dataset_streaming=True, **GROUPED), job(dataset_streaming=True)),
    ],
}  # fmt: skip
