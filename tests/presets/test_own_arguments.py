"""The user's own arguments beside the preset's: theirs win, also over what would silently win over them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.catalog import library_versions
from hf_memkit.catalog.argument_values import check_values, is_unknown, misspelt
from hf_memkit.catalog.former_arguments import _SUCCESSORS, ever_fields, former_arguments
from hf_memkit.catalog.library_versions import fields, to_installed_arguments
from hf_memkit.common.errors import SettingError
from hf_memkit.presets.users_values import apply_own_arguments
from hf_memkit.setup.setup import Setup


def setup_of(**settings: Any) -> Setup:
    made = Setup(preset="made-up")
    for key, value in settings.items():
        made = made.put(key.replace("__", "."), value, f"the reason for {key}")
    return made


def arguments(tmp_path: Path, **given: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)


def test_without_own_arguments_transformers_compiles_against_the_user_s_no(tmp_path: Path) -> None:
    """Why `settle` drops what went with the preset's value: the real library does not."""
    assert arguments(tmp_path, torch_compile=False, torch_compile_mode="default").torch_compile is True
    made, replaced = apply_own_arguments(
        setup_of(arguments__torch_compile=True, arguments__torch_compile_mode="default"), {"torch_compile": False}
    )
    assert made.arguments == {"torch_compile": False}
    assert [(each.setting.key, each.by) for each in replaced] == [
        ("arguments.torch_compile", "torch_compile"),
        ("arguments.torch_compile_mode", "torch_compile"),
    ]
    assert arguments(tmp_path, **made.arguments).torch_compile is False


def test_two_names_of_one_field_are_one(tmp_path: Path) -> None:
    """transformers 5.23 silently uses the new name's value and ignores the old name's."""
    own, problems = check_values({"gradient_checkpointing": False})
    assert not problems
    made, replaced = apply_own_arguments(
        setup_of(
            arguments__activation_checkpointing=True,
            arguments__activation_checkpointing_kwargs={"a": 1},
            trainer_parts__verify_checkpointing={"every": 1},
        ),
        own,
    )
    assert len(replaced) == 3 and not made.section("trainer_parts")
    assert made.arguments == {"activation_checkpointing": False}
    real = arguments(tmp_path, **to_installed_arguments(made.arguments))
    assert real.gradient_checkpointing is False
    assert str(replaced[0]) == (
        "your activation_checkpointing = False replaces the preset's True: the reason for "
        "arguments__activation_checkpointing"
    )
    _, problems = check_values({"gradient_checkpointing": False, "activation_checkpointing": True})
    assert len(problems) == 1 and "same field" in problems[0]


def test_contradicting_and_ignored_settings_are_removed() -> None:
    made, _ = apply_own_arguments(setup_of(arguments__bf16=True, arguments__fp16=False), {"fp16": True})
    assert made.arguments == {"fp16": True}
    made, replaced = apply_own_arguments(
        setup_of(optimizer__class="torch.optim:SGD", optimizer__momentum=0.9, arguments__optim_args="a=1"),
        {"optim": "adamw_torch"},
    )
    assert made.arguments == {"optim": "adamw_torch"} and not made.section("optimizer")
    assert [each.setting.key for each in replaced] == ["arguments.optim_args", "optimizer.class"]
    with pytest.raises(SettingError, match="has its own DeepSpeed config"):
        apply_own_arguments(
            setup_of(deepspeed__config={"a": 1}, deepspeed__preset="zero2"), {"deepspeed": "mine.json"}
        )


def test_a_value_that_is_also_the_preset_s_replaces_nothing() -> None:
    before = setup_of(arguments__bf16=True, arguments__torch_compile=True, arguments__torch_compile_mode="default")
    after, replaced = apply_own_arguments(before, {"bf16": True, "torch_compile": True, "learning_rate": 1e-4})
    assert not replaced and after.arguments == {**before.arguments, "learning_rate": 1e-4}
    assert next(s.reason for s in after.settings if s.key == "arguments.bf16") == "the reason for arguments__bf16"


def test_a_cpu_is_spared_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tf32"):
        arguments(tmp_path, tf32=True)
    made, replaced = apply_own_arguments(
        setup_of(
            arguments__tf32=True,
            arguments__activation_checkpointing_kwargs={"use_reentrant": False, "offload": True},
            environment__PYTORCH_ALLOC_CONF="expandable_segments:True",
        ),
        {"use_cpu": True},
    )
    assert made.arguments == {"activation_checkpointing_kwargs": {"use_reentrant": False}, "use_cpu": True}
    assert not made.section("environment") and len(replaced) == 3
    assert all(each.why and each.why in str(each) for each in replaced)
    for paged, plain in (("paged_adamw_32bit", "adamw_torch"), ("paged_lion_8bit", "lion_8bit")):
        unpaged, (one,) = apply_own_arguments(setup_of(arguments__optim=paged), {"use_cpu": True})
        assert unpaged.arguments["optim"] == plain and one.setting.value == paged
        assert arguments(tmp_path, optim=plain).optim == plain
    kept, _ = apply_own_arguments(setup_of(arguments__tf32=True), {"use_cpu": True, "tf32": True})
    assert kept.arguments["tf32"] is True  # the user's own wish stays, and transformers answers it


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"learning_rate": "1e-4"}, {"learning_rate": 1e-4}),
        ({"bf16": "false"}, {"bf16": False}),
        ({"save_strategy": False}, {"save_strategy": "no"}),
        ({"max_steps": "5", "logging_steps": 5}, {"max_steps": 5, "logging_steps": 5}),
        ({"output_dir": Path("out")}, {"output_dir": "out"}),
        ({"train_file": "x.txt", "no_field": None}, {"train_file": "x.txt", "no_field": None}),
    ],
)
def test_values_are_written_as_what_they_mean(given: dict[str, Any], written: dict[str, Any]) -> None:
    assert check_values(given) == (written, [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_steps": "five"}, "max_steps=five: expected int"),
        ({"gradient_accumulation_steps": 2.5}, "expected int, got float"),
        ({"optim": "adamw_torchh"}, "did you mean 'adamw_torch'"),
        ({"bf16": None}, "Omit it for the default"),
        ({"optim_args": {"rank": 4}}, "expected str or null, got dict"),
    ],
)
def test_values_that_mean_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    _, problems = check_values(given)
    assert len(problems) == 1 and message in problems[0]


def test_every_default_of_transformers_is_a_value_of_its_field() -> None:
    from transformers import TrainingArguments

    fields = [f for f in dataclasses.fields(TrainingArguments) if f.init and f.default is not dataclasses.MISSING]
    assert fields
    assert check_values({field.name: field.default for field in fields})[1] == []


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("per_device_train_batchsize", ["per_device_train_batch_size"]),
        ("per_device_batch_size", ["per_device_train_batch_size", "per_device_eval_batch_size"]),
        ("grad_accumulation_steps", ["gradient_accumulation_steps"]),
        ("gradient_checkpointin", ["gradient_checkpointing"]),
        ("Learning_rate", ["learning_rate"]),
        ("lora_target_module", ["lora_target_modules"]),
        ("max_lenght", ["max_length"]),
        # The script's names: one word more than a field, another word, or an argument of the example scripts.
        *((name, []) for name in ("ref_model_name_or_path", "per_device_test_batch_size", "dataset", "use_lora")),
        # Nearly a field of TRL's: another word, of an experimental config; one word fewer; a name that many have.
        *((name, []) for name in ("prompt_template", "max_prompt_len", "use_nested_quant", "loss_weight")),
        *((name, []) for name in ("block_size", "max_seq_length", "my_own", "batch_size", "7")),
        # Fields of other versions, which have a successor.
        *((name, []) for name in ("evaluation_strategy", "per_gpu_train_batch_size", "use_liger")),
    ],
)
def test_a_misspelt_field_differs_from_a_name_of_the_script(name: str, field: list[str]) -> None:
    assert list(misspelt(name)) == field


NEEDS_TRL = pytest.mark.skipif(not library_versions.trl_classes(), reason="TRL is not installed")


@NEEDS_TRL
def test_no_field_of_the_installed_libraries_is_a_former_one() -> None:
    """And each successor is a field."""
    for owner, names in {
        "TrainingArguments": library_versions.argument_types(),
        **library_versions.trl_classes(),
    }.items():
        assert former_arguments(dict.fromkeys(names, 1)) == {}, owner
    assert set(library_versions.argument_types()) <= ever_fields("transformers"), "run scripts/argument_fields.py"
    for former, successor in _SUCCESSORS.items():
        assert re.match(r"\w+", successor)[0] in fields(), former  # type: ignore[index]
        assert "=" not in former and former not in library_versions.argument_types()


@NEEDS_TRL
def test_a_former_argument_s_fix_has_its_value() -> None:
    given = {"warmup_ratio": 0.1, "fsdp_transformer_layer_cls_to_wrap": ["A", "B"], "no_cuda": False, "packing": True}
    fixes = {name: former.fix for name, former in former_arguments({**given, "max_seq_length": 512}).items()}
    assert "warmup_steps: 0.1" in fixes["warmup_ratio"] and "max_length: 512" in fixes["max_seq_length"]
    assert "transformer_layer_cls_to_wrap: [A, B]" in fixes["fsdp_transformer_layer_cls_to_wrap"]
    assert "use_cpu" not in fixes["no_cuda"], "off: there is nothing to write"
    (fix,) = (each.fix for each in former_arguments({"warmup_ratio": 0.1, "warmup_steps": 5}).values())
    assert "warmup_steps: 0.1" not in fix, "it is set already"


def test_the_fields_of_trl_are_those_of_its_classes() -> None:
    """They are read from TRL's source; here its real classes are asked."""
    trl = pytest.importorskip("trl")
    for config in (trl.SFTConfig, trl.DPOConfig, trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments):
        names = {each.name for each in dataclasses.fields(config) if each.init}
        assert names <= fields() and not any(is_unknown(name) for name in names), config
