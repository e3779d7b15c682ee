"""Checkpoints with all their weights: which ones Trainer loses, and a resumed training that equals a whole one."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_memkit import MemoryReportCallback
from hf_memkit.catalog.checkpoint_names import saved_under_other_names
from hf_memkit.components.check_length_grouping import CheckLengthGrouping
from hf_memkit.components.resuming import (
    checkpoint_to_resume,
    lack_of,
    last_checkpoint,
    lost_weights,
    lost_when_saved,
    restore_all_weights,
)
from hf_memkit.recipes.export.scripts.job import TrainingJob

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
EXPERTS = {"vocab_size": 64, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 16, **SMALL}
T5 = {"vocab_size": 64, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 1}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
VIT = {**SMALL, "image_size": 8, "patch_size": 4, "num_labels": 3}

MODELS = {
    "vit": (AutoModelForImageClassification, VIT),
    "qwen3_moe": (AutoModelForCausalLM, EXPERTS),
    "t5": (AutoModelForSeq2SeqLM, T5),  # tied: shared, encoder.embed_tokens, decoder.embed_tokens, lm_head
    "gpt2": (AutoModelForCausalLM, GPT2),  # tied: wte, lm_head
    "dinov2": (AutoModelForImageClassification, VIT),
    "mixtral": (AutoModelForCausalLM, {**EXPERTS, "num_local_experts": 4}),
}


def made(kind: str, seed: int = 0) -> Any:
    auto, shape = MODELS[kind]
    torch.manual_seed(seed)
    return auto.from_config(AutoConfig.for_model(kind, **shape))


def missed(model: PreTrainedModel, folder: Path) -> int:
    """Parameters that keep their values when weights are read as Trainer reads them."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    model.load_state_dict({name: value + 1 for name, value in weights.items()}, strict=False)
    return sum(each.numel() for name, each in model.named_parameters() if torch.equal(each, before[name]))


@pytest.mark.compat
@pytest.mark.parametrize("shards", [None, "5KB"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_lost_weights_are_those_that_reading_leaves(kind: str, shards: str | None, tmp_path: Path) -> None:
    model = made(kind)
    model.save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shards
    lost = lost_weights(model, tmp_path)
    assert (lost.parameters if lost else 0) == missed(made(kind, seed=1), tmp_path)
    if lost is not None:
        assert lost.total == sum(each.numel() for each in model.parameters())
        assert lost_when_saved(model) == lost
    assert bool(saved_under_other_names(model.config.to_dict())) is (lost is not None)
    if kind in ("t5", "gpt2"):
        assert lost is None and lost_when_saved(model) is None, "tied weights are saved under one name"


@pytest.mark.parametrize("other", ["global_step4", "pytorch_model_fsdp_0"])
def test_what_an_engine_reads_is_left_to_it(other: str, tmp_path: Path) -> None:
    model = made("vit")
    model.save_pretrained(tmp_path)
    (tmp_path / other).mkdir()
    assert lost_weights(model, tmp_path) is None


class Interrupt(TrainerCallback):  # type: ignore[misc]
    """Ctrl-C in step 2."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGINT)


def images() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [{"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": n % 3} for n in range(24)]


def trainer_of_images(folder: Path, *callbacks: Any, model: Any = None, **more: Any) -> Trainer:
    options = {"max_steps": 4, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 4, "save_steps": 2}
    options |= {"learning_rate": 1e-2, "per_device_train_batch_size": 4, **more}
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **options)
    model = made("vit") if model is None else model
    return Trainer(model, arguments, train_dataset=images(), eval_dataset=images()[:6], callbacks=[*callbacks])


def figures(trainer: Trainer) -> dict[str, float]:
    """Losses by step, and held out."""
    history = trainer.state.log_history
    return {
        f"{name} {entry['step']}": entry[name] for entry in history for name in ("loss", "eval_loss") if name in entry
    }


@pytest.mark.compat
def test_a_script_that_was_interrupted_goes_on_as_if_it_had_not_been(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trainer_of_images(tmp_path / "whole")
    whole.train()

    job = bare_job(tmp_path)
    stopped = trainer_of_images(tmp_path / "run", Interrupt())
    job.prepare_trainer(stopped)
    with pytest.raises(SystemExit) as exit:
        job.train(stopped)
    assert exit.value.code == 130 and stopped.state.global_step == 2
    checkpoint = last_checkpoint(tmp_path / "run")
    assert checkpoint == str(tmp_path / "run" / "checkpoint-2")

    resumed = trainer_of_images(tmp_path / "run")
    job.prepare_trainer(resumed)
    job.train(resumed)
    assert checkpoint in capsys.readouterr().out
    assert figures(resumed) == figures(whole) and "eval_loss 4" in figures(whole)

    finished = trainer_of_images(tmp_path / "run")
    with pytest.raises(SystemExit, match="max_steps: 4"):
        job.train(finished)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def grouped_trainer(folder: Path, seen: list[list[int]]) -> Trainer:
    """Two epochs of six steps. `seen` gets the rows of each batch; a row's first token is its number."""
    rows = [{"input_ids": [n] * (4 + n % 2)} for n in range(12)]

    def batch(chosen: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        seen.append([row["input_ids"][0] for row in chosen])
        length = max(len(row["input_ids"]) for row in chosen)
        tokens = torch.tensor([(row["input_ids"] * 2)[:length] for row in chosen])
        return {"input_ids": tokens, "labels": tokens}

    by_name = "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
    grouping: dict[str, Any] = {"train_sampling_strategy": "group_by_length"} if by_name else {"group_by_length": True}
    options = {"max_steps": 12, "logging_steps": 1, "save_steps": 4, "per_device_train_batch_size": 2, **grouping}
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **options)
    check = CheckLengthGrouping()  # raises where rows are not grouped
    return Trainer(made("gpt2"), arguments, train_dataset=rows, data_collator=batch, callbacks=[check])


def bare_job(folder: Path) -> TrainingJob:
    """A job without args.yaml."""
    job = object.__new__(TrainingJob)
    job.folder, job.adapter = folder, {}
    return job


@pytest.mark.compat
def test_a_resume_in_a_later_epoch_sees_the_rows_that_are_left(tmp_path: Path) -> None:
    job = bare_job(tmp_path)
    whole_rows: list[list[int]] = []
    whole = grouped_trainer(tmp_path, whole_rows)
    job.prepare_trainer(whole)
    job.train(whole)
    first, second = whole_rows[:6], whole_rows[6:]
    assert all(sorted(chain(*epoch)) == list(range(12)) for epoch in (first, second)) and first != second

    shutil.rmtree(tmp_path / "checkpoint-12")
    resumed_rows: list[list[int]] = []
    resumed = grouped_trainer(tmp_path, resumed_rows)
    job.prepare_trainer(resumed)
    job.train(resumed)
    assert resumed_rows == whole_rows[8:] and figures(resumed) == figures(whole)


@pytest.mark.compat
def test_ranks_that_resume_share_the_rows_that_are_left(tmp_path: Path) -> None:
    """accelerate's `set_epoch` does not reach the sampler through its two wrappers."""
    trainer = grouped_trainer(tmp_path, [])
    bare_job(tmp_path).prepare_trainer(trainer)
    trainer.state.epoch = 1.0
    order = list(trainer._get_train_sampler())
    trainer.state.epoch = 1 + 1 / 3  # after one of three batches a rank
    left = []
    for rank in range(2):
        torch.manual_seed(rank)
        loader = DataLoader(range(12), batch_size=2, sampler=trainer._get_train_sampler())  # type: ignore[arg-type]
        shard = prepare_data_loader(loader, num_processes=2, process_index=rank, put_on_device=False)
        shard = skip_first_batches(shard, 1)
        shard.set_epoch(1)
        left += [row for rows in shard for row in rows.tolist()]
    assert sorted(left) == sorted(order[4:])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.compat
def test_a_checkpoint_that_lacks_a_part_is_skipped(tmp_path: Path) -> None:
    trainer_of_images(tmp_path).train()
    older, newer = (tmp_path / f"checkpoint-{step}" for step in (2, 4))
    weights = newer / "model.safetensors"
    assert last_checkpoint(tmp_path) == str(newer)
    for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt", "model.safetensors"):
        for damage in (Path.unlink, cut):
            content = (newer / name).read_bytes()
            damage(newer / name)
            lines: list[str] = []
            assert checkpoint_to_resume(tmp_path, lines.append) == str(older)
            (line,) = lines
            assert str(newer) in line and older.name in line
            assert name in line or (name == weights.name and damage is Path.unlink)
            (newer / name).write_bytes(content)
    assert last_checkpoint(tmp_path) == str(newer)

    for checkpoint in (older, newer):
        (checkpoint / "optimizer.pt").rename(checkpoint / "kept")
    with pytest.raises(SystemExit, match=r"checkpoint-4: .*no optimizer\.pt"):  # from step 1 it would be replaced
        checkpoint_to_resume(tmp_path, lines.append)
    for checkpoint in (older, newer):
        (checkpoint / "trainer_state.json").rename(checkpoint / "state")
    assert checkpoint_to_resume(tmp_path, lines.append) is None, "saves that were cut short"
    (newer / "kept").rename(newer / "optimizer.pt")
    (newer / "state").rename(newer / "trainer_state.json")
    weights.rename(newer / "adapter_model.safetensors")
    assert last_checkpoint(tmp_path) == str(newer)
    (newer / "adapter_model.safetensors").rename(newer / "model-1-of-2.safetensors")
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (newer / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-2-of-2.safetensors" in lack_of(newer)
    shutil.copy(newer / "model-1-of-2.safetensors", newer / "model-2-of-2.safetensors")
    assert lack_of(newer) == ""
    cut(newer / "model-2-of-2.safetensors")
    assert "model-2-of-2.safetensors" in lack_of(newer)


@pytest.mark.parametrize("shards", ["global_step4", "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"])
def test_a_checkpoint_of_an_engine_is_complete_with_its_shards(shards: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4" / shards).mkdir(parents=True)
    assert last_checkpoint(tmp_path) is None
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text("{}")
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


@pytest.mark.compat
def test_the_best_model_has_all_its_weights(tmp_path: Path) -> None:
    first_is_best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = trainer_of_images(tmp_path, eval_steps=2, **first_is_best)
    restore_all_weights(trainer)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    best = type(trainer.model).from_pretrained(trainer.state.best_model_checkpoint).state_dict()
    assert all(torch.equal(value, best[name]) for name, value in trainer.model.state_dict().items())


def test_a_checkpoint_without_some_weights_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of_images(tmp_path, max_steps=2)
    trainer.train()
    config = json.loads((tmp_path / "checkpoint-2" / "config.json").read_text())
    deeper = AutoModelForImageClassification.from_config(
        AutoConfig.for_model("vit", **{**VIT, "num_hidden_layers": 3})
    )
    assert config["num_hidden_layers"] == 2
    resumed = trainer_of_images(tmp_path, model=deeper)
    restore_all_weights(resumed)
    with pytest.raises(SystemExit, match=r"vit\.layers\.2"):
        resumed.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("name", ["resume_from_checkpoint", "load_best_model_at_end"])
def test_the_callback_warns_and_training_goes_on(
    name: str, restores: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumes = name == "resume_from_checkpoint"
    if resumes:
        trainer_of_images(tmp_path, max_steps=2).train()
    caplog.set_level(logging.WARNING, "hf_memkit")
    more = {} if resumes else {name: True, "eval_steps": 2, "max_steps": 2}
    callback = MemoryReportCallback(summary=False, html=False)
    trainer = trainer_of_images(tmp_path, callback, **more)
    if restores:
        from hf_memkit import attach

        attach(trainer)
        restore_all_weights(trainer)
    trainer.train(resume_from_checkpoint=resumes)
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("hf_memkit")]
    assert len(warnings) == (0 if restores else 1), warnings
    assert callback.callback_errors == 0 and trainer.state.global_step == trainer.args.max_steps
    if not restores:
        assert (str(tmp_path / "checkpoint-2") if resumes else name) in warnings[0]


def test_a_model_loaded_from_the_checkpoint_needs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = trainer_of_images(tmp_path, max_steps=2)
    first.train()
    loaded = type(first.model).from_pretrained(tmp_path / "checkpoint-2")
    caplog.set_level(logging.WARNING, "hf_memkit")
    trainer_of_images(tmp_path, MemoryReportCallback(summary=False, html=False), model=loaded).train(
        resume_from_checkpoint=True
    )
    assert not [record for record in caplog.records if record.name.startswith("hf_memkit")]
