"""How TrainingArguments objects are made, read and changed: real ones of transformers and TRL, in forked processes,
because hooks stay for as long as a process does."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets.fingerprint import Hasher
from transformers import GPT2Config, GPT2LMHeadModel, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from trl import DPOConfig, GRPOConfig, SFTConfig

from hf_memkit.catalog.library_versions import to_installed_arguments
from hf_memkit.common.errors import InputError
from hf_memkit.setup.live_arguments import CreationRecord, change_fields, creation_record, on_creation, watch_reads
from hf_memkit.setup.process_group import single_process_environment

KINDS = (TrainingArguments, Seq2SeqTrainingArguments, SFTConfig, DPOConfig, GRPOConfig)

GIVEN: dict[str, Any] = {"output_dir": "out", "use_cpu": True, "report_to": "none", "logging_steps": 7}

ZERO2 = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}

CHANGES: tuple[dict[str, Any], ...] = (
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    {"gradient_checkpointing": False},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"activation_checkpointing": True},
    {"optim": "adamw_8bit", "torch_empty_cache_steps": 3},
    {"bf16": True, "fp16": False},
    {"bf16": False},
    {"fp16": True, "bf16": False},
    {"use_liger_kernel": True, "eval_accumulation_steps": 2, "per_device_eval_batch_size": 1},
    {"deepspeed": ZERO2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
)
OF_SFT: tuple[dict[str, Any], ...] = ({"loss_type": "dft"}, {"packing": True, "padding_free": True}, {"fp16": True})


def forked(check: Callable[[], None]) -> None:
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)  # before threads of this process ask for torch's pool (child/script/forks.py)
            os.environ.update(single_process_environment(), DS_ACCELERATOR="cpu")
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "see the traceback above"


def attributes(arguments: Any) -> dict[str, Any]:
    """But for objects that are each object's own, of which what they hold is compared."""
    result = dict(vars(arguments))
    for name in ("distributed_state", "deepspeed_plugin"):
        result.pop(name, None)
    config = result.pop("hf_deepspeed_config", None)
    return {**result, "config of DeepSpeed": config and config.config}


def deepspeed_config() -> Any:
    """The one that transformers knows of."""
    from transformers.integrations import deepspeed

    result = deepspeed._hf_deepspeed_config_weak_ref
    return result and result()


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "not seen"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_changed_is_as_made_with_them(kind: Any, seen: bool) -> None:
    """Finds: a field that no other follows (the batch of a generation, mixed precision, DeepSpeed's `auto`), one name
    of two that stays, a class that takes its own derived values for given ones."""

    def check() -> None:
        if seen:
            on_creation()
        for change in (*CHANGES, *(OF_SFT if kind is SFTConfig else ())):
            if not seen and change == {"fp16": True}:
                continue  # TRL's bf16 is derived; nobody can know that
            arguments = kind(**GIVEN)
            arguments.of_the_script = [1]
            change_fields(arguments, change)
            assert arguments.of_the_script == [1]
            del arguments.of_the_script
            assert attributes(arguments) == attributes(kind(**{**GIVEN, **to_installed_arguments(change)})), change

    forked(check)


def test_later_values_of_the_script_stay(tmp_path: Path) -> None:
    """Finds: a script's line that is undone, a field changed though the class refused, the device of the process
    dropped, which a Trainer has."""

    def check() -> None:
        on_creation()
        arguments = TrainingArguments(**GIVEN, deepspeed=ZERO2)
        config, state = arguments.hf_deepspeed_config, arguments.distributed_state
        arguments.max_steps, arguments.save_steps = 5, 9
        change_fields(arguments, {"per_device_train_batch_size": 3, "save_steps": 4})
        assert (arguments.max_steps, arguments.save_steps, arguments.per_device_train_batch_size) == (5, 4, 3)
        assert arguments.hf_deepspeed_config is deepspeed_config() is not config
        before = attributes(arguments)
        for wrong, words in (
            ({"per_device_train_batchsize": 1}, "did you mean 'per_device_train_batch_size'"),
            ({"fp16": True, "bf16": True}, "fp16=True, bf16=True: TrainingArguments cannot be built: At most one"),
        ):
            with pytest.raises(InputError, match=words):
                change_fields(arguments, wrong)
            assert attributes(arguments) == before and arguments.distributed_state is state
            assert deepspeed_config() is arguments.hf_deepspeed_config
        change_fields(arguments, {"deepspeed": None})
        assert deepspeed_config() is None and not hasattr(arguments, "hf_deepspeed_config")

    forked(check)


def test_a_generation_that_nobody_saw_the_making_of() -> None:
    """Finds: another generation batch than the script's, guessed."""
    arguments = GRPOConfig(**GIVEN, steps_per_generation=4)
    with pytest.raises(InputError, match="Add one of the two to the fields"):
        change_fields(arguments, {"per_device_train_batch_size": 4})
    change_fields(arguments, {"per_device_train_batch_size": 4, "steps_per_generation": 4})
    assert arguments.generation_batch_size == 16


def test_reads_are_those_that_something_can_act_on(tmp_path: Path) -> None:
    """Finds: a read by the script or a library that is missed, and one that only shows, copies or makes an object
    taken for one; a class of the script's that has another fingerprint than without memkit."""

    @dataclass
    class Own(TrainingArguments):
        rows: int = 8

        def __post_init__(self) -> None:
            super().__post_init__()
            self.rows = self.gradient_accumulation_steps

        def half(self) -> int:
            return self.rows // 2

    def check() -> None:
        fingerprint = Hasher.hash(Own)
        reads = watch_reads()
        assert Hasher.hash(Own) == fingerprint
        arguments = Own(**{**GIVEN, "output_dir": str(tmp_path)})
        str(arguments), repr(arguments), arguments.to_dict(), arguments.to_sanitized_dict(), arguments.to_json_string()
        copy.copy(arguments), copy.deepcopy(arguments), dataclasses.asdict(arguments), dataclasses.replace(arguments)
        pickle.dumps(TrainingArguments(**GIVEN)), Hasher.hash(arguments)
        assert arguments.device.type == "cpu" and arguments.world_size == 1 and arguments.n_gpu == 0
        assert hasattr(arguments, "to_dict") and reads.fields == frozenset()
        assert arguments.half() == 0 and arguments.train_batch_size == 8 and reads.fields == {
            "rows", "per_device_train_batch_size"
        }  # fmt: skip
        assert getattr(arguments, "gradient_checkpointing", None) is False
        assert reads.fields >= {"activation_checkpointing", "gradient_checkpointing"}
        arguments.max_steps = 3
        Trainer(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8)), arguments)
        assert reads.fields >= {"max_steps", "bf16", "fp16"} and not reads.fields & {
            "optim",
            "torch_empty_cache_steps",
        }
        later = watch_reads()
        assert arguments.max_steps == 3 and later.fields == {"max_steps"}
        vars(arguments)["optim"]
        assert "optim" in reads.fields

    forked(check)


def test_a_change_comes_too_late_for_what_was_read(tmp_path: Path) -> None:
    """Finds: a candidate that is tried in a fork though something has acted on the script's value, perhaps on what a
    class has derived from it; one that is not, though nothing has."""

    def check() -> None:
        reads = watch_reads()
        arguments = GRPOConfig(**GIVEN, deepspeed=ZERO2, num_generations=4)
        before = arguments.to_dict()
        smaller = {"per_device_train_batch_size": 4}
        assert reads.too_late(arguments, {**smaller, "bf16": False, "optim": "adafactor"}) == set()
        assert arguments.generation_batch_size == 8
        assert reads.too_late(arguments, smaller) == {"generation_batch_size"}
        assert not reads.too_late(arguments, {**smaller, "gradient_accumulation_steps": 2})
        assert arguments.mixed_precision == "bf16" and reads.too_late(arguments, {"bf16": False}) == {
            "mixed_precision"
        }
        assert not reads.too_late(arguments, {"bf16": True})
        assert arguments.deepspeed_plugin and arguments.hf_deepspeed_config
        assert not reads.too_late(arguments, {"eval_accumulation_steps": 2})
        assert reads.too_late(arguments, {"deepspeed": {**ZERO2, "bf16": {"enabled": False}}}) == {
            "deepspeed_plugin", "hf_deepspeed_config"
        }  # fmt: skip
        assert reads.fields == {"generation_batch_size", "bf16", "fp16", "deepspeed"}
        assert deepspeed_config() is arguments.hf_deepspeed_config
        with pytest.raises(InputError, match="must be divisible by num_generations"):
            change_fields(arguments, {"per_device_train_batch_size": 2})
        assert arguments.to_dict() == before and deepspeed_config() is arguments.hf_deepspeed_config

    forked(check)


def test_a_making_is_seen_before_anything_is_derived() -> None:
    """Finds: a hook that runs after TRL has derived bf16, twice, or not for a class that existed before."""

    def check() -> None:
        seen = []

        def begins(arguments: Any, made: CreationRecord) -> None:
            seen.append((type(arguments).__name__, vars(arguments).get("bf16"), made.script["fp16"]))
            arguments.fp16 = True

        on_creation(begins=begins)
        arguments = SFTConfig(**GIVEN)
        assert seen == [("SFTConfig", None, False)] and arguments.fp16 and not arguments.bf16
        made = creation_record(arguments)
        assert made is not None and made.given["fp16"] and made.after_init["mixed_precision"] == "fp16"
        assert creation_record(copy.copy(arguments)) is None

    forked(check)


def test_what_trainer_adds_to_a_dict_is_not_given() -> None:
    """Defect: a warning about `num_steps`, which Trainer adds to the script's dict."""
    accumulation = {"sync_each_batch": True}

    def check() -> None:
        on_creation()
        arguments = TrainingArguments("out", accelerator_config={"gradient_accumulation_kwargs": accumulation})
        arguments.accelerator_config.gradient_accumulation_kwargs["num_steps"] = 1
        record = creation_record(arguments)
        assert record is not None
        assert record.given["accelerator_config"] == {"gradient_accumulation_kwargs": {"sync_each_batch": True}}

    forked(check)
