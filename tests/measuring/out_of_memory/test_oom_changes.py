"""Changes for a job, from its records: each one where it applies, and none that is on, refused, or saves nothing."""

from __future__ import annotations

from typing import Any

import pytest

from hf_memkit.common.resources import folder
from hf_memkit.common.units import GIB
from hf_memkit.measuring.out_of_memory import Change, suggest
from hf_memkit.measuring.report.sanitize import clean_record

PARAMETERS = 1_557_611_200  # GPT-2 XL
STATES_GIB = PARAMETERS * 8 / GIB


def run(**more: Any) -> dict[str, Any]:
    """A full fine-tuning of GPT-2 XL on one 40 GB GPU, as a `run` record has it."""
    record: dict[str, Any] = {
        "kind": "run",
        "rank": 0,
        "world_size": 1,
        "versions": {"transformers": "5.23.0", "torch": "2.13.0"},
        "hardware": {"device_name": "NVIDIA A100-SXM4-40GB", "device_type": "cuda", "ram_gib": 250.0},
        "arguments": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "optim": "adamw_torch_fused",
                      "bf16": True, "per_device_eval_batch_size": 8, "activation_checkpointing": False},
        "model_class": "GPT2LMHeadModel",
        "model_type": "gpt2",
        "vocabulary": 50257,
        "weights_dtypes": {"float32": PARAMETERS},
        "attention": "sdpa",
        "optimizer_classes": ["AcceleratedOptimizer", "AdamW"],
        "parameters": PARAMETERS,
        "trainable_parameters": PARAMETERS,
    }  # fmt: skip
    for key, value in more.items():
        old = record.get(key)
        record[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return record


def oom(phase: Any = "backward", **more: Any) -> dict[str, Any]:
    categories = {"weights_gib": 5.8, "gradients_gib": 3.0, "optimizer_gib": STATES_GIB, "activations_gib": 12.0,
                  "loss_gib": 3.0, "buffers_gib": 0.1, "other_gib": 0.4}  # fmt: skip
    return {"kind": "oom", "phase": phase, "step": 3, "samples": 8, "longest_sequence": 1024, "cause": "size",
            "categories": categories, **more}  # fmt: skip


def all_of(run_record: dict[str, Any], moment: dict[str, Any], **more: Any) -> dict[str, Change]:
    return {change.key: change for change in suggest(run_record, moment, limit=99, **more)}


def test_most_first_and_three_at_most_with_one_measured_figure_among_them() -> None:
    changes = suggest(run(), oom())
    assert [(change.key, change.saves_gib) for change in changes] == [
        ("arguments.deepspeed", None),
        ("arguments.activation_checkpointing", None),
        ("arguments.per_device_train_batch_size", 7.5),
    ]
    assert all(change.cost and change.reason and not change.cost.endswith(".") for change in changes)
    assert [change.key for change in suggest(run(), oom(), limit=1)] == ["arguments.deepspeed"]


@pytest.mark.parametrize(
    ("samples", "value", "accumulation", "saves"), [(8, 4, 4, 7.5), (9, 3, 6, 10.0), (5, 1, 10, 12.0), (6, 3, 4, 7.5)]
)
def test_a_batch_is_divided_so_that_the_samples_of_a_step_stay(
    samples: int, value: int, accumulation: int, saves: float
) -> None:
    record = run(arguments={"per_device_train_batch_size": samples})
    change = all_of(record, oom())["arguments.per_device_train_batch_size"]
    assert (change.value, change.saves_gib) == (value, saves) and "measured" in str(change.basis)
    assert f"gradient_accumulation_steps 2 → {accumulation}" in change.reason


BATCH, CHECKPOINTING, OPTIM = (
    f"arguments.{name}" for name in ("per_device_train_batch_size", "activation_checkpointing", "optim")
)
DEEPSPEED, FUSED_LOSS, WORKERS = (
    f"arguments.{name}" for name in ("deepspeed", "use_liger_kernel", "dataloader_num_workers")
)
CATEGORIES = oom()["categories"]
FRACTION = {"trainable_parameters": 10_000_000}
ADAPTERS = {"weights_gib": 36.0, "gradients_gib": 0.01, "optimizer_gib": 0.02, "activations_gib": 3.0}
OFFLOADED: dict[str, Any] = {"engine": "DeepSpeedEngine", "optimizer_classes": ["DeepSpeedCPUAdam"]}
IN_RAM = {"cause": "host memory", "held": {"pinned": {"optimizer_gib": 17.4}}}
FOUR: dict[str, Any] = {"world_size": 4, "hardware": {"ram_gib": 16.0}}


def peaks(**phases: float) -> dict[str, Any]:
    return {"phase": None, "cause": None, "phases": {name: {"peak_allocated_gib": at} for name, at in phases.items()}}


@pytest.mark.parametrize(
    ("job", "moment", "expected"),
    [
        # A batch that the search made smaller counts as it is.
        ({"arguments": {"auto_find_batch_size": True}}, {"samples": 4}, {BATCH: 2}),
        ({"arguments": {"auto_find_batch_size": True}}, {"samples": 1}, {BATCH: None}),
        # Checkpointing has the name that this transformers knows.
        ({}, {}, {CHECKPOINTING: True}),
        ({"versions": {"transformers": "5.22.1"}}, {},
         {"arguments.gradient_checkpointing": True, CHECKPOINTING: None}),
        *(({**fsdp}, {}, {"arguments.fsdp_config": {"activation_checkpointing": True}}) for fsdp in (
            {"engine": "FullyShardedDataParallel"}, {"engine": "FSDPGPT2LMHeadModel"}, {"arguments": {"fsdp": True}},
        )),
        # What is on is not proposed.
        ({"arguments": {"activation_checkpointing": True}}, {}, {CHECKPOINTING: None}),
        ({"arguments": {"gradient_checkpointing": True}}, {}, {CHECKPOINTING: None}),
        # 8-bit states where they do nothing: none exist yet, they are small, or another optimizer has them.
        ({}, {"phase": "forward", "categories": {**CATEGORIES, "optimizer_gib": 0.0}}, {OPTIM: None}),
        ({"arguments": {"optim": "adafactor"}}, {}, {OPTIM: None}), ({"engine": "DeepSpeedEngine"}, {}, {OPTIM: None}),
        ({"arguments": {"deepspeed_stage": 2}}, {}, {OPTIM: None}),
        ({"arguments": {"optim": "adamw_bnb_8bit"}}, {}, {OPTIM: "paged_adamw_8bit"}),
        # The first optimizer step makes the states; activations are gone by then.
        ({}, {"phase": "optimizer", "categories": {"weights_gib": 5.8, "gradients_gib": 5.8, "optimizer_gib": 1.0}},
         {OPTIM: "adamw_bnb_8bit", BATCH: None}),
        # foreach AdamW makes temporaries that the fused one does not.
        ({"arguments": {"optim": "adamw_torch"}, **FRACTION},
         {"phase": "optimizer", "categories": {"weights_gib": 20.0, "optimizer_gib": 0.07}},
         {OPTIM: "adamw_torch_fused"}),
        # The fused loss only for models that Liger knows.
        ({}, {}, {FUSED_LOSS: None}), ({"model_type": "llama"}, {}, {FUSED_LOSS: True}),
        ({"model_type": "llama", "arguments": {"use_liger_kernel": True}}, {}, {FUSED_LOSS: None}),
        # Half precision where activations outweigh the copies of the weights: 4 GiB are less than 2 bytes a parameter.
        ({"arguments": {"bf16": False}}, {}, {"arguments.bf16": True}), ({}, {}, {"arguments.bf16": None}),
        ({"arguments": {"bf16": False}}, {"categories": {**CATEGORIES, "activations_gib": 4.0}},
         {"arguments.bf16": None}),
        # States in RAM where the RAM, or a container's limit, holds them.
        ({}, {}, {DEEPSPEED: "zero2-offload.json"}), ({"hardware": {"ram_gib": 16.0}}, {}, {DEEPSPEED: None}),
        ({"hardware": {"ram_limit_gib": 16.0}}, {}, {DEEPSPEED: None}),
        ({**OFFLOADED, "arguments": {"deepspeed_stage": 2}}, {}, {DEEPSPEED: None}),
        ({"engine": "DeepSpeedEngine", "arguments": {"deepspeed_stage": 2, "deepspeed_offload_optimizer": "cpu"}}, {},
         {DEEPSPEED: None}),
        # Several GPUs share the states.
        (FOUR, {}, {DEEPSPEED: "zero2.json"}),
        ({**FOUR, "engine": "deepspeed", "arguments": {"deepspeed_stage": 2}}, {}, {DEEPSPEED: "zero3.json"}),
        ({**FOUR, "engine": "deepspeed", "arguments": {"deepspeed_stage": 3}}, {}, {DEEPSPEED: None}),
        # Shorter sequences; where their length is known.
        ({}, {}, {"data.max_length": 512}), ({}, {"longest_sequence": None}, {"data.max_length": None}),
        # Before the forward the batch and the states can be smaller.
        ({}, {"phase": "data"}, {BATCH: 4, OPTIM: "adamw_bnb_8bit", CHECKPOINTING: None}),
        # What makes no room is not proposed; on a small GPU the same is one per cent.
        ({**FRACTION, "hardware": {"capacity_gib": 39.39}}, {"categories": ADAPTERS},
         {OPTIM: None, BATCH: 4, CHECKPOINTING: True}),
        ({**FRACTION, "hardware": {"capacity_gib": 2.0}}, {"categories": ADAPTERS}, {OPTIM: "adamw_bnb_8bit"}),
        # A step record speaks for the phase of its peak.
        ({}, peaks(forward=20.0, backward=31.0), {BATCH: 4}),
        ({}, peaks(forward=20.0, evaluate=31.0), {BATCH: None, "arguments.per_device_eval_batch_size": 4}),
        # RAM
        (OFFLOADED, IN_RAM, {DEEPSPEED: "zero3-infinity-optimizer.json"}),
        ({"engine": "DeepSpeedEngine", "arguments": {"deepspeed_offload_optimizer": "nvme"}}, IN_RAM,
         {DEEPSPEED: None}),
        # Frozen weights may be 16-bit.
        (FRACTION, {"categories": {**CATEGORIES, "gradients_gib": 0.07, "optimizer_gib": 0.15}},
         {"adapter.LoraConfig": None, "model.dtype": "bfloat16"}),
        ({**FRACTION, "weights_dtypes": {"float32": 0, "bfloat16": 9}},
         {"categories": {**CATEGORIES, "gradients_gib": 0.07, "optimizer_gib": 0.15}}, {"model.dtype": None}),
    ],
)  # fmt: skip
def test_a_change_where_it_applies(job: dict[str, Any], moment: dict[str, Any], expected: dict[str, Any]) -> None:
    changes = all_of(run(**job), {**oom(), **moment})
    assert {key: changes[key].value if key in changes else None for key in expected} == expected
    presets = [change.value for key, change in changes.items() if key == DEEPSPEED]
    assert all((folder("ds_configs") / str(name)).is_file() for name in presets)


@pytest.mark.parametrize(
    ("job", "moment", "keys"),
    [
        ({}, oom("evaluate"), {
            "arguments.eval_accumulation_steps", "Trainer.preprocess_logits_for_metrics",
            "arguments.per_device_eval_batch_size", "arguments.prediction_loss_only",
        }),
        ({"arguments": {"prediction_loss_only": True}}, oom("evaluate"), {"arguments.per_device_eval_batch_size"}),
        ({"engine": "DeepSpeedEngine", "arguments": {"deepspeed_stage": 3}}, oom("save"), {
            "deepspeed.zero_optimization.stage3_gather_16bit_weights_on_model_save", "arguments.save_only_model",
        }),
        ({}, oom("save"), set()),
        ({"arguments": {"dataloader_num_workers": 8, "dataloader_pin_memory": True}}, oom(cause="host memory"),
         {WORKERS, "arguments.dataloader_pin_memory"}),
        ({}, oom(cause="kernel resources"), set()),  # no matter of the job
        # A device that tells no categories gets changes without figures.
        ({"hardware": {"device_type": "xpu"}}, {**oom("forward"), "categories": None}, {BATCH, CHECKPOINTING}),
    ],
)  # fmt: skip
def test_all_changes(job: dict[str, Any], moment: dict[str, Any], keys: set[str]) -> None:
    changes = all_of(run(**job), moment)
    assert set(changes) == keys
    assert moment["categories"] or all(change.saves_gib is None for change in changes.values())


def test_eight_bit_states_have_a_figure_where_the_table_of_modules_tells_the_embeddings() -> None:
    embeddings = 50257 * 1600 + 1024 * 1600
    rows = [
        {"name": "wte", "class": "Embedding", "trainable_parameters": 50257 * 1600},
        {"name": "wpe", "class": "Embedding", "trainable_parameters": 1024 * 1600},
        {"name": "h", "class": "Conv1D", "trainable_parameters": PARAMETERS - embeddings},
    ]
    without = all_of(run(), oom())["arguments.optim"]
    assert without.value == "adamw_bnb_8bit" and without.saves_gib is None and without.basis is None
    change = all_of(run(), oom(), modules={"rows": rows})["arguments.optim"]
    # bitsandbytes: two bytes and two scales for each block of 256; embeddings keep 8 bytes.
    assert change.saves_gib == pytest.approx((PARAMETERS - embeddings) * (8 - 2 - 8 / 256) / GIB, abs=0.01)
    sixteen = oom()
    sixteen["categories"]["optimizer_gib"] = STATES_GIB / 2
    assert all_of(run(), sixteen, modules={"rows": rows})["arguments.optim"].saves_gib is None


@pytest.mark.parametrize(
    ("name", "has"),
    [("Tesla T4", False), ("Quadro RTX 6000", False), ("NVIDIA A100-SXM4-40GB", True), ("NVIDIA RTX A6000", True)],
)
def test_which_gpus_compute_in_bf16(name: str, has: bool) -> None:
    changes = all_of(run(arguments={"bf16": False}, hardware={"device_name": name}), oom())
    assert ("arguments.bf16" in changes) is has and ("arguments.fp16" in changes) is not has


def test_adapters_come_last_and_figures_of_what_is_frozen_or_shorter() -> None:
    keys = [change.key for change in suggest(run(), oom(), limit=99)]
    assert set(keys[-2:]) == {"adapter.LoraConfig", "data.max_length"}
    shorter = all_of(run(), oom())["data.max_length"]
    assert shorter.saves_gib == 7.5 and "at least half" in str(shorter.basis)
    frozen = all_of(run(**FRACTION), oom(categories={**CATEGORIES, "gradients_gib": 0.07, "optimizer_gib": 0.15}))
    assert frozen["model.dtype"].saves_gib == pytest.approx((PARAMETERS - 10_000_000) * 2 / GIB, abs=0.01)
    assert "17.40 GiB" in all_of(run(**OFFLOADED), oom(**IN_RAM))[DEEPSPEED].reason
    assert "3.00 GiB" in all_of(run(model_type="llama"), oom())[FUSED_LOSS].reason


def test_fragmentation_is_answered_by_the_allocator_first() -> None:
    pieces = oom(cause="fragmentation", fragmentation_gib=3.87)
    first = suggest(run(), pieces)[0]
    assert (first.key, first.value) == ("environment.PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert "3.87 GiB" in first.reason
    old = suggest(run(versions={"torch": "2.8.0"}), pieces)[0]
    assert old.key == "environment.PYTORCH_CUDA_ALLOC_CONF", "2.9 is the first that reads the shorter name"
    on = suggest(run(hardware={"allocator_settings": "expandable_segments:True"}), pieces)[0]
    assert on.key == "arguments.torch_empty_cache_steps"


@pytest.mark.parametrize("record", [{}, {"arguments": {}, "hardware": {}}, run(arguments={"optim": None})])
@pytest.mark.parametrize("moment", [{}, {"phase": "evaluate"}, {"phase": "backward"}, oom(categories=None)])
def test_records_that_say_little_give_few_changes_and_no_error(record: dict[str, Any], moment: dict[str, Any]) -> None:
    for change in suggest(record, moment, limit=99):
        assert change.saves_gib is None and change.basis is None


@pytest.mark.parametrize(
    "broken", [{"arguments": None, "hardware": 3, "versions": []}, {"optimizer_classes": 7}, {"weights_dtypes": [1]}]
)
def test_values_of_another_type_are_left_out_of_records_before_they_are_read(broken: dict[str, Any]) -> None:
    record, moment = clean_record(run(**broken)), clean_record(oom(phase=7, categories="x"))
    assert all(change.saves_gib is None for change in suggest(record, moment, limit=99))
    assert "optimizer_classes" not in clean_record(run(optimizer_classes=7))
