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


def test_half_the_batch_keeps_the_samples_of_a_step_and_its_figure_is_measured() -> None:
    change = all_of(run(), oom())["arguments.per_device_train_batch_size"]
    assert change.value == 4 and "gradient_accumulation_steps 2 → 4" in change.reason
    assert change.saves_gib == 7.5 and change.basis is not None and "measured" in change.basis


@pytest.mark.parametrize(
    ("samples", "value", "accumulation", "saves"), [(9, 3, 6, 10.0), (5, 1, 10, 12.0), (6, 3, 4, 7.5)]
)
def test_an_odd_batch_is_divided_so_that_the_samples_stay(
    samples: int, value: int, accumulation: int, saves: float
) -> None:
    change = all_of(run(arguments={"per_device_train_batch_size": samples}), oom())[
        "arguments.per_device_train_batch_size"
    ]
    assert (change.value, change.saves_gib) == (value, saves)
    assert f"gradient_accumulation_steps 2 → {accumulation}" in change.reason


def test_a_batch_that_the_search_made_smaller_counts_as_it_is() -> None:
    record = run(arguments={"auto_find_batch_size": True})
    assert all_of(record, oom(samples=4))["arguments.per_device_train_batch_size"].value == 2
    assert "arguments.per_device_train_batch_size" not in all_of(record, oom(samples=1))


def test_checkpointing_has_the_name_that_this_transformers_knows() -> None:
    assert all_of(run(), oom())["arguments.activation_checkpointing"].value is True
    old = all_of(run(versions={"transformers": "5.22.1"}), oom())
    assert "arguments.gradient_checkpointing" in old and "arguments.activation_checkpointing" not in old
    for record in (
        run(engine="FullyShardedDataParallel"),
        run(engine="FSDPGPT2LMHeadModel"),
        run(arguments={"fsdp": True}),
    ):
        assert all_of(record, oom())["arguments.fsdp_config"].value == {"activation_checkpointing": True}


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_what_is_on_is_not_proposed(name: str) -> None:
    changes = all_of(run(arguments={name: True}), oom())
    assert not any("checkpointing" in key for key in changes)


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


def test_eight_bit_states_are_not_proposed_where_they_do_nothing() -> None:
    first_step = oom("forward")
    first_step["categories"]["optimizer_gib"] = 0.0
    assert "arguments.optim" not in all_of(run(), first_step), "the states do not exist yet"
    for record in (
        run(arguments={"optim": "adafactor"}),
        run(engine="DeepSpeedEngine"),
        run(arguments={"deepspeed_stage": 2}),
    ):
        assert "arguments.optim" not in all_of(record, oom())
    assert all_of(run(arguments={"optim": "adamw_bnb_8bit"}), oom())["arguments.optim"].value == "paged_adamw_8bit"


def test_the_first_optimizer_step_makes_the_states() -> None:
    making = oom("optimizer")
    making["categories"] = {"weights_gib": 5.8, "gradients_gib": 5.8, "optimizer_gib": 1.0, "other_gib": 0.1}
    changes = all_of(run(), making)
    assert changes["arguments.optim"].value == "adamw_bnb_8bit"
    assert "arguments.per_device_train_batch_size" not in changes, "activations are gone by then"


def test_foreach_adamw_makes_temporaries_that_the_fused_one_does_not() -> None:
    lora = {"trainable_parameters": PARAMETERS}
    changes = suggest(
        run(arguments={"optim": "adamw_torch"}, **lora), {**oom("optimizer"), "categories": {"weights_gib": 5.8}}
    )
    assert {change.key: change.value for change in changes}["arguments.optim"] in (
        "adamw_bnb_8bit",
        "adamw_torch_fused",
    )
    small = run(arguments={"optim": "adamw_torch"}, trainable_parameters=10_000_000)
    moment = {**oom("optimizer"), "categories": {"weights_gib": 20.0, "optimizer_gib": 0.07}}
    assert all_of(small, moment)["arguments.optim"].value == "adamw_torch_fused"


def test_the_fused_loss_only_for_models_that_liger_knows() -> None:
    assert "arguments.use_liger_kernel" not in all_of(run(), oom()), "GPT-2 is none of them"
    llama = run(model_type="llama", vocabulary=128256)
    assert "128,256" in all_of(llama, oom())["arguments.use_liger_kernel"].reason
    assert "arguments.use_liger_kernel" not in all_of(
        run(model_type="llama", arguments={"use_liger_kernel": True}), oom()
    )


def test_half_precision_where_activations_outweigh_the_copies_of_the_weights() -> None:
    plain = run(arguments={"bf16": False})
    assert all_of(plain, oom())["arguments.bf16"].value is True
    old_gpu = run(arguments={"bf16": False}, hardware={"device_name": "Tesla T4"})
    assert "arguments.fp16" in all_of(old_gpu, oom()) and "arguments.bf16" not in all_of(old_gpu, oom())
    few = oom()
    few["categories"]["activations_gib"] = 4.0  # half of them is less than 2 bytes a parameter: it would take more
    assert "arguments.bf16" not in all_of(plain, few)
    assert "arguments.bf16" not in all_of(run(), oom())


@pytest.mark.parametrize(
    ("name", "has"),
    [("Tesla T4", False), ("Tesla V100-SXM2-16GB", False), ("NVIDIA GeForce RTX 2080 Ti", False),
     ("Quadro RTX 6000", False),
     ("NVIDIA GeForce GTX 1080 Ti", False), ("NVIDIA A100-SXM4-40GB", True), ("NVIDIA GeForce RTX 3090", True),
     ("NVIDIA L4", True), ("NVIDIA H100 80GB HBM3", True), ("NVIDIA RTX A6000", True), ("NVIDIA L40S", True)],
)  # fmt: skip
def test_which_gpus_compute_in_bf16(name: str, has: bool) -> None:
    changes = all_of(run(arguments={"bf16": False}, hardware={"device_name": name}), oom())
    assert ("arguments.bf16" in changes) is has and ("arguments.fp16" in changes) is not has


def test_states_in_ram_where_the_ram_holds_them() -> None:
    assert all_of(run(), oom())["arguments.deepspeed"].value == "zero2-offload.json"
    assert "arguments.deepspeed" not in all_of(run(hardware={"ram_gib": 16.0}), oom())
    assert "arguments.deepspeed" not in all_of(run(hardware={"ram_limit_gib": 16.0}), oom()), "a container's limit"
    for how in ({"optimizer_classes": ["DeepSpeedCPUAdam"]}, {"arguments": {"deepspeed_offload_optimizer": "cpu"}}):
        offloaded = run(engine="DeepSpeedEngine", **how)
        offloaded["arguments"]["deepspeed_stage"] = 2
        assert "arguments.deepspeed" not in all_of(offloaded, oom())


def test_several_gpus_share_the_states() -> None:
    cards = run(world_size=4, hardware={"ram_gib": 16.0})
    assert all_of(cards, oom())["arguments.deepspeed"].value == "zero2.json"
    stage_2 = run(world_size=4, hardware={"ram_gib": 16.0}, engine="deepspeed", arguments={"deepspeed_stage": 2})
    assert all_of(stage_2, oom())["arguments.deepspeed"].value == "zero3.json"
    stage_3 = run(world_size=4, hardware={"ram_gib": 16.0}, engine="deepspeed", arguments={"deepspeed_stage": 3})
    assert "arguments.deepspeed" not in all_of(stage_3, oom())


def test_deepspeed_presets_that_are_named_exist() -> None:
    named = set()
    for record in (run(), run(world_size=4, hardware={"ram_gib": 1.0}),
                   run(world_size=4, hardware={"ram_gib": 1.0}, arguments={"deepspeed_stage": 2}),
                   run(arguments={"deepspeed_stage": 3})):  # fmt: skip
        named |= {change.value for change in suggest(record, oom(), limit=99) if change.key == "arguments.deepspeed"}
    offloaded = run(engine="DeepSpeedEngine", optimizer_classes=["DeepSpeedCPUAdam"])
    named |= {c.value for c in suggest(offloaded, oom(cause="host memory")) if c.key == "arguments.deepspeed"}
    assert named and all((folder("ds_configs") / name).is_file() for name in named), named


def test_adapters_come_last_and_frozen_weights_may_be_16_bit() -> None:
    keys = [change.key for change in suggest(run(), oom(), limit=99)]
    assert set(keys[-2:]) == {"adapter.LoraConfig", "data.max_length"}
    lora = run(trainable_parameters=20_000_000)
    moment = oom()
    moment["categories"] |= {"gradients_gib": 0.07, "optimizer_gib": 0.15}
    changes = all_of(lora, moment)
    assert "adapter.LoraConfig" not in changes
    assert changes["model.dtype"].saves_gib == pytest.approx((PARAMETERS - 20_000_000) * 2 / GIB, abs=0.01)
    assert "model.dtype" not in all_of(
        run(trainable_parameters=20_000_000, weights_dtypes={"float32": 0, "bfloat16": 9}), moment
    )


def test_shorter_sequences_save_at_least_in_proportion() -> None:
    change = all_of(run(), oom())["data.max_length"]
    assert (change.value, change.saves_gib) == (512, 7.5) and "at least half" in str(change.basis)
    assert "data.max_length" not in all_of(run(), {**oom(), "longest_sequence": None})


def test_a_device_that_tells_no_categories_gets_changes_without_figures() -> None:
    moment = {**oom("forward"), "categories": None}
    changes = suggest(run(hardware={"device_type": "xpu"}), moment)
    assert [(change.key, change.value, change.saves_gib) for change in changes] == [
        ("arguments.per_device_train_batch_size", 4, None),
        ("arguments.activation_checkpointing", True, None),
    ]


def test_fragmentation_is_answered_by_the_allocator_first() -> None:
    pieces = oom(cause="fragmentation", fragmentation_gib=3.87)
    first = suggest(run(), pieces)[0]
    assert (first.key, first.value) == ("environment.PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert "3.87 GiB" in first.reason
    old = suggest(run(versions={"torch": "2.8.0"}), pieces)[0]
    assert old.key == "environment.PYTORCH_CUDA_ALLOC_CONF", "2.9 is the first that reads the shorter name"
    on = suggest(run(hardware={"allocator_settings": "expandable_segments:True"}), pieces)[0]
    assert on.key == "arguments.torch_empty_cache_steps"


def test_an_evaluation() -> None:
    changes = all_of(run(), oom("evaluate"))
    assert set(changes) == {
        "arguments.eval_accumulation_steps", "Trainer.preprocess_logits_for_metrics",
        "arguments.per_device_eval_batch_size", "arguments.prediction_loss_only",
    }  # fmt: skip
    assert changes["arguments.per_device_eval_batch_size"].value == 4
    lossless = all_of(run(arguments={"prediction_loss_only": True}), oom("evaluate"))
    assert set(lossless) == {"arguments.per_device_eval_batch_size"}
    assert "arguments.eval_accumulation_steps" not in all_of(
        run(arguments={"eval_accumulation_steps": 4}), oom("evaluate")
    )


def test_a_save() -> None:
    stage_3 = all_of(run(engine="DeepSpeedEngine", arguments={"deepspeed_stage": 3}), oom("save"))
    assert set(stage_3) == {
        "deepspeed.zero_optimization.stage3_gather_16bit_weights_on_model_save", "arguments.save_only_model",
    }  # fmt: skip
    assert all_of(run(), oom("save")) == {}


def test_ram() -> None:
    record = run(arguments={"dataloader_num_workers": 8, "dataloader_pin_memory": True})
    changes = all_of(record, oom(cause="host memory"))
    assert set(changes) == {"arguments.dataloader_num_workers", "arguments.dataloader_pin_memory"}
    assert changes["arguments.dataloader_num_workers"].value == 4
    offloaded = run(engine="DeepSpeedEngine", optimizer_classes=["DeepSpeedZeroOptimizer", "DeepSpeedCPUAdam"])
    moment = oom(cause="host memory", held={"pinned": {"optimizer_gib": 17.4}})
    assert "17.40 GiB" in all_of(offloaded, moment)["arguments.deepspeed"].reason
    on_disk = run(engine="DeepSpeedEngine", arguments={"deepspeed_offload_optimizer": "nvme"})
    assert "arguments.deepspeed" not in all_of(on_disk, moment)


def test_a_kernel_that_does_not_fit_the_chip_is_no_matter_of_the_job() -> None:
    assert suggest(run(), oom(cause="kernel resources")) == []


def test_a_step_record_speaks_for_the_phase_of_its_peak() -> None:
    step = {**oom(), "kind": "step", "phase": None, "cause": None}
    step["phases"] = {"forward": {"peak_allocated_gib": 20.0}, "backward": {"peak_allocated_gib": 31.0}}
    assert "arguments.per_device_train_batch_size" in all_of(run(), step)
    step["phases"] = {"forward": {"peak_allocated_gib": 20.0}, "evaluate": {"peak_allocated_gib": 31.0}}
    assert "arguments.per_device_eval_batch_size" in all_of(run(), step)


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


def test_a_change_that_makes_no_room_is_not_proposed() -> None:
    adapters = {"weights_gib": 36.0, "gradients_gib": 0.01, "optimizer_gib": 0.02, "activations_gib": 3.0}
    moment = oom(categories=adapters)
    little = run(trainable_parameters=2_700_000, hardware={"capacity_gib": 39.39}, optim="adamw_torch")
    changes = all_of(little, moment)
    assert "arguments.per_device_train_batch_size" in changes and "arguments.activation_checkpointing" in changes
    assert "arguments.optim" not in changes
    small_gpu = run(trainable_parameters=2_700_000, hardware={"capacity_gib": 2.0})
    assert "arguments.optim" in all_of(small_gpu, moment), "there it is one per cent of the GPU"


def test_before_the_forward_the_batch_and_the_states_can_be_smaller() -> None:
    changes = all_of(run(), oom("data"))
    batch = changes["arguments.per_device_train_batch_size"]
    assert batch.value == 4 and batch.saves_gib is None and "before the model's forward" in batch.reason
    assert "arguments.optim" in changes and "arguments.activation_checkpointing" not in changes
