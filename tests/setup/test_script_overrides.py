"""A plan's settings: the file that holds them, and what becomes of them in a script's objects."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)
from transformers.training_args import OptimizerNames
from trl import DPOConfig, SFTConfig

from hf_memkit.common.errors import InputError
from hf_memkit.prediction import wire
from hf_memkit.setup.live_arguments import change_fields
from hf_memkit.setup.script_overrides import OverrideReport, Overrides, install, read_plan
from tests.setup.test_live_arguments import GIVEN, forked

PLAN = """
about: {sequences_a_step: 8}
of somebody else: 1
arguments: {gradient_checkpointing: true, learning_rate: 1e-4, packing: true}
model: {torch_dtype: bfloat16}
environment: {PYTORCH_ALLOC_CONF: "expandable_segments:True", OMP_NUM_THREADS: 2}
"""


def test_a_plan_file_is_read_under_todays_names(tmp_path: Path) -> None:
    (path := tmp_path / "plan.yaml").write_text(PLAN)
    overrides, about = read_plan(path)
    assert about == {"sequences_a_step": 8}
    assert overrides.arguments == {"activation_checkpointing": True, "learning_rate": 1e-4, "packing": True}
    assert overrides.model == {"dtype": "bfloat16"}
    assert overrides.environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "2"}
    assert wire.loads(Overrides, wire.dumps(overrides)) == overrides and Overrides().to_json() == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read (No such file or directory). Write the path of a plan file"),
        ("arguments: [", "line 1: not valid YAML"),
        ("- a", "not a plan file; expected at least one of the keys arguments, model, environment"),
        ("about: {}", "not a plan file; expected at least one of the keys arguments, model, environment"),
        ("arguments: {}\nenviroment: {}", "enviroment: no key of a plan; did you mean 'environment'?"),
        ("arguments: [optim]", "arguments: expected names with values, got list"),
        ("arguments: {max_steps: five}", "arguments: max_steps=five: expected int, got str"),
        ("arguments: {optim: adam_8bit}", "arguments: optim=adam_8bit: must be one of"),
        ("arguments: {per_device_train_batchsize: 1}", "did you mean 'per_device_train_batch_size'?"),
        ("model: {dtype: float16, torch_dtype: float16}", "torch_dtype is the old name of dtype; give one of them"),
        ("environment: {A: true}", "environment: A=True: must be a text or a number; put it in quotes"),
        ("arguments: {}\nabout: 1", "about: expected names with values, got int"),
    ],
)
def test_a_wrong_plan_is_refused_in_a_line(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "plan.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_plan(path)
    assert str(refused.value).startswith(str(path)) and words in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_all_that_is_wrong_is_listed_at_once(tmp_path: Path) -> None:
    (path := tmp_path / "plan.yaml").write_text("arguments: {max_steps: five}\nenvironment: {A: null}\nmodels: {}")
    with pytest.raises(InputError) as refused:
        read_plan(path)
    assert len(str(refused.value).splitlines()) == 3


def tiny(**options: Any) -> GPT2Config:
    return GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, bos_token_id=0, eos_token_id=0, **options)


def test_each_class_derives_from_overrides_what_it_derives_from_arguments() -> None:
    """Finds: TRL's bf16 beside a plan's fp16, a DPO loss that is no list, one value shared by two objects, a field
    that only another class has taken for a mistake."""

    def check() -> None:
        kwargs = {"use_reentrant": False}
        fields = {"fp16": True, "loss_type": "ipo", "activation_checkpointing_kwargs": kwargs, "packing": True}
        report = install(Overrides(fields))
        one, other = SFTConfig(**GIVEN), DPOConfig(**GIVEN)
        assert one.fp16 and not one.bf16 and one.packing and one.mixed_precision == "fp16" and one.loss_type == "ipo"
        assert other.fp16 and other.loss_type == ["ipo"]
        assert one.gradient_checkpointing_kwargs == kwargs and one.gradient_checkpointing_kwargs is not kwargs
        assert "fp16: False → True" in report.overridden and "loss_type: nll → ipo" in report.overridden
        assert report.differences == ["packing: the plan's True has no effect, because DPOConfig has no such field"]
        assert report.arguments is one and report.script["fp16"] is False
        change_fields(one, {"fp16": False, "bf16": True})  # a search's change is not undone by the plan it began with
        assert one.bf16 and not one.fp16

    forked(check)


@dataclass
class Own(TrainingArguments):
    per_device_train_batch_size: int = 16
    rows: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rows = 3 * self.per_device_train_batch_size
        self.optim = OptimizerNames.SGD


def test_a_class_of_the_scripts_that_sets_fields_itself_is_named() -> None:
    def check() -> None:
        report = install(Overrides({"per_device_train_batch_size": 2, "rows": 1, "optim": "adafactor"}))
        arguments = Own(**GIVEN)
        assert arguments.per_device_train_batch_size == 2 and arguments.rows == 6
        assert report.overridden[0] == "per_device_train_batch_size: 16 → 2"
        assert report.differences == [
            "rows: Own changes the plan's 1 to 6",
            "optim: Own changes the plan's adafactor to sgd",
        ]
        Trainer(GPT2LMHeadModel(tiny()), arguments)
        assert len(report.differences) == 2  # not again, as if a line of the script had set them

    forked(check)


def test_a_field_that_no_class_has_is_refused_where_the_arguments_are_made() -> None:
    def check() -> None:
        report = install(Overrides({"rows_a_step": 1, "per_device_rows": 2}))
        with pytest.raises(InputError, match="arguments: rows_a_step: TrainingArguments has no such field") as refused:
            TrainingArguments(**GIVEN)
        assert len(str(refused.value).splitlines()) == 2 and report.refused is refused.value

    forked(check)


def test_models_are_made_with_the_options(tmp_path: Path) -> None:
    """Finds: an Auto class or `from_config` that keeps the script's own, an old name that overrides the new one, a
    bf16 model that is made in another dtype inside."""
    GPT2LMHeadModel(tiny()).save_pretrained(tmp_path)

    def check() -> None:
        report = install(Overrides(model={"attn_implementation": "eager", "dtype": "bfloat16"}))
        for model in (
            AutoModelForCausalLM.from_pretrained(tmp_path),
            AutoModelForCausalLM.from_pretrained(tmp_path, torch_dtype=torch.float32, attn_implementation="sdpa"),
            AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype="float32"),
            GPT2LMHeadModel.from_pretrained(tmp_path, config=tiny(), output_loading_info=True)[0],
            AutoModelForCausalLM.from_config(tiny(), torch_dtype=torch.float16),
        ):
            assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
            assert model.config._attn_implementation == "eager"
            assert Trainer(model, TrainingArguments(**GIVEN)) and report.differences == []
        assert report.overridden == [
            "attn_implementation: sdpa → eager", "dtype: float32 → bfloat16", "dtype: float16 → bfloat16"
        ]  # fmt: skip

    forked(check)


class OwnOptimizer(Trainer):
    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        return super().create_optimizer(*args, **kwargs)


def test_values_that_a_script_sets_by_hand_are_reported() -> None:
    """Finds: a setting without effect that is not reported."""

    def check() -> None:
        fields = {"per_device_train_batch_size": 4, "activation_checkpointing": False, "optim": "adafactor"}
        messages: list[str] = []
        overrides = Overrides(
            {**fields, "lr_scheduler_kwargs": {"a": 1}},
            {"attn_implementation": "eager", "dtype": "bfloat16", "device_map": "auto"},
            {"PYTORCH_ALLOC_CONF": "x"},
        )
        report = install(overrides, on_difference=messages.append)
        assert os.environ["PYTORCH_ALLOC_CONF"] == "x"
        arguments = TrainingArguments(**GIVEN)
        arguments.per_device_train_batch_size = 2
        arguments.auto_find_batch_size = True
        arguments.lr_scheduler_kwargs["more"] = 1
        model = GPT2LMHeadModel(tiny())
        model.gradient_checkpointing_enable()
        os.environ["PYTORCH_ALLOC_CONF"] = "y"
        own = torch.optim.SGD(model.parameters())
        trainer = Trainer(model, arguments, optimizers=(own, None))
        expected = [
            "PYTORCH_ALLOC_CONF=x: set too late, after torch was imported. Set it before Python starts",
            "per_device_train_batch_size: the script sets 2 after it makes its TrainingArguments, which overrides the "
            "plan's 4. Remove that line",
            "auto_find_batch_size=True: after an out-of-memory error Trainer would take a smaller batch than the "
            "plan's. Set it to False",
            "attn_implementation: the model has sdpa, not the plan's eager. Make it with from_pretrained or "
            "from_config",
            "dtype: the model has float32, not the plan's bfloat16. Make it with from_pretrained or from_config",
            "device_map: no effect, because from_pretrained did not make the model. Make it with from_pretrained or "
            "from_config",
            "activation_checkpointing: the script calls model.gradient_checkpointing_enable(), which overrides the "
            "plan's False. Remove that line",
            "PYTORCH_ALLOC_CONF: the script sets y, which overrides the plan's x. Remove that line",
            "optim: the optimizer that the script gives Trainer (SGD) overrides the plan's adafactor. Remove it",
        ]
        assert messages == report.differences == expected
        arguments.optim = "adamw_torch"
        with pytest.raises(ValueError, match="train_dataset"):
            trainer.train()
        OwnOptimizer(model, arguments)
        assert report.differences[len(expected) :] == [
            "optim: the script sets adamw_torch after it makes its TrainingArguments, which overrides the plan's "
            "adafactor. Remove that line",
            "optim: OwnOptimizer.create_optimizer may override the plan's adafactor. Make it use arguments.optim",
        ]

    forked(check)


def test_nothing_to_override_finds_nothing() -> None:
    def check() -> None:
        report = install(Overrides())
        Trainer(GPT2LMHeadModel(tiny()), TrainingArguments(**GIVEN))
        assert isinstance(report, OverrideReport) and report.overridden == report.differences == []
        assert report.script["per_device_train_batch_size"] == 8

    forked(check)
