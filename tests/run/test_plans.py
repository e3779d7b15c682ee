"""`memkit run --plan` with real scripts: what a plan sets is as if its user had typed it, and what the script sets by
hand all the same is said."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hf_memkit.cli import main
from hf_memkit.common.user_script import UserScript
from hf_memkit.measuring.memory.records import read_records, steps
from hf_memkit.measuring.report.answer import text_report
from hf_memkit.measuring.report.load import load_run
from hf_memkit.run.planned import PlannedRun
from hf_memkit.setup.live_arguments import CreationRecord
from hf_memkit.setup.script_overrides import Overrides
from tests.clients.clients import COMMON, SCRIPTS, STEPS, sft_script
from tests.clients.compare import assert_complete
from tests.clients.inputs import make_inputs
from tests.run.conftest import MEMKIT, Start


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


def plan(folder: Path, **content: Any) -> Path:
    (folder / "plan.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder / "plan.yaml"


def ran(folder: Path, script: Path, *arguments: str, by: Path | None = None) -> str:
    """What a script says on standard error, run as Python or with a plan; in a fork of this process, which has
    imported most of what it imports."""
    folder.mkdir()
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.set_num_threads(1)  # before threads of this process ask for torch's pool (child/script/forks.py)
            os.chdir(folder)
            os.environ.update(HF_HOME=str(folder / "cache"), HF_DATASETS_CACHE=str(folder / "cache"))
            sys.stderr = (folder / "err").open("w")
            if by is None:
                UserScript.at(str(script), arguments).run()
            else:
                main(["run", "--plan", str(by), str(script), "--", *arguments])
            code = 0
        except BaseException as error:
            code = error.code or 0 if isinstance(error, SystemExit) else 1
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    err = (folder / "err").read_text()
    assert status == 0, err
    return err


def results(folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """Every loss, and the weights in the end."""
    last = max(folder.glob("out/checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    (weights,) = (*last.glob("model.safetensors"), *last.glob("adapter_model.safetensors"))
    return [entry["loss"] for entry in history if "loss" in entry], load_file(weights)


def assert_same(one: Path, other: Path) -> None:
    (losses, weights), (expected, others) = results(one), results(other)
    assert losses == expected and len(losses) == 4 and weights.keys() == others.keys()
    assert all(weights[name].equal(others[name]) for name in weights)


@pytest.mark.slow
def test_a_parsed_script_trains_as_with_the_plans_flags(inputs: Path, tmp_path: Path) -> None:
    """Finds: a field that Trainer has read by another way, a model in another type, another order of samples."""
    script = SCRIPTS / "run_clm.py"
    own = [
        *COMMON, "--model_name_or_path", str(inputs / "tiny-gpt2"), "--train_file", str(inputs / "texts.txt"),
        "--validation_file", str(inputs / "few.txt"), "--block_size", "32", "--save_steps", "4", "--do_train",
        "--do_eval", "--optim", "adamw_torch",
    ]  # fmt: skip
    by_hand = [
        "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4", "--activation_checkpointing",
        "--optim", "adafactor", "--dtype", "bfloat16",
    ]  # fmt: skip
    fields = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "gradient_checkpointing": True,
        "optim": "adafactor",
    }  # fmt: skip
    by = plan(tmp_path, arguments=fields, model={"dtype": "bfloat16"}, about={"sequences_a_step": 8})
    ran(tmp_path / "by hand", script, *own, *by_hand)
    err = ran(tmp_path / "planned", script, *own, "--per_device_train_batch_size", "8", by=by)
    assert_same(tmp_path / "planned", tmp_path / "by hand")
    message = [line.removeprefix(f"memkit: {by}: ") for line in err.splitlines() if line.startswith(f"memkit: {by}")]
    assert message == [
        "per_device_train_batch_size: 8 → 2", "gradient_accumulation_steps: 1 → 4",
        "activation_checkpointing: False → True", "optim: adamw_torch → adafactor",
    ]  # fmt: skip
    assert "memkit: warning" not in err


@pytest.mark.slow
def test_trls_script_trains_as_with_the_plans_flags(inputs: Path, tmp_path: Path) -> None:
    """Finds: a field of a subclass alone, one that TRL derives from others (bf16), and one with another default in TRL
    (checkpointing)."""
    script = sft_script()
    own = [
        *COMMON, "--model_name_or_path", str(inputs / "tiny-gpt2"), "--dataset_name", str(inputs / "sft"),
        "--max_length", "64", "--save_steps", "4", "--use_peft", "--lora_target_modules", "c_attn", "c_proj",
    ]  # fmt: skip
    by_hand = [
        "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--packing", "--bf16", "False",
        "--activation_checkpointing", "False", "--dtype", "float32", "--attn_implementation", "eager",
    ]  # fmt: skip
    fields = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "packing": True, "bf16": False,
        "activation_checkpointing": False,
    }  # fmt: skip
    by = plan(tmp_path, arguments=fields, model={"dtype": "float32", "attn_implementation": "eager"})
    ran(tmp_path / "by hand", script, *own, *by_hand)
    err = ran(tmp_path / "planned", script, *own, "--dtype", "bfloat16", by=by)
    assert_same(tmp_path / "planned", tmp_path / "by hand")
    assert "packing: False → True" in err and "dtype: bfloat16 → float32" in err and "memkit: warning" not in err
    records = read_records(tmp_path / "planned" / "out" / "memory-rank0.jsonl")
    assert_complete(records, evaluations=0, saves=1)
    assert records[0]["model_class"] == "PeftModelForCausalLM"
    # Packed: one row of many samples, longer than any of them, and the loss is computed outside the model's forward.
    assert [step["samples"] for step in steps(records)] == [2] * STEPS
    assert all(48 < step["longest_sequence"] <= 128 and step["tokens"] > 200 for step in steps(records))


BY_HAND = """
import sys
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0))
rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 8
args = TrainingArguments(sys.argv[1], max_steps=2, report_to="none", save_strategy="no", use_cpu=True)
if sys.argv[2:]:
    args.per_device_train_batch_size = 1
    model.gradient_checkpointing_enable()
trainer = Trainer(model, args, train_dataset=rows)
trainer.train()
import os; print(trainer.args.gradient_accumulation_steps, os.environ["PYTORCH_ALLOC_CONF"])
"""

PREDICTION = {"peak_allocated_gib": 1.5, "peak_reserved_gib": [1.6, 1.7], "phases": {}, "categories": {}}


def test_gpus_that_share_a_batch_count_once() -> None:
    """Finds: a warning about the batch of a plan for context parallelism whose run has just that batch."""
    planned = PlannedRun("plan.yaml", Overrides(), {"gpus": 8, "gpus_per_batch": 2, "sequences_a_step": 32})
    fields = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    record = CreationRecord(fields, fields, fields)
    assert planned._other_batch(record, 8) == []
    (line,) = planned._other_batch(CreationRecord(fields, fields, {**fields, "gradient_accumulation_steps": 1}), 8)
    assert "this run has 4 × 1 × 8 GPUs / 2 = 16" in line


@pytest.mark.slow
def test_a_script_that_sets_its_arguments_by_hand_gets_a_message(start: Start, tmp_path: Path) -> None:
    """Finds: a plan that is silently not in force, another batch or number of GPUs, a variable set too late, a
    prediction that no report shows."""
    (tmp_path / "by_hand.py").write_text(BY_HAND)
    about = {"script": "train.py", "gpu": "L4", "sequences_a_step": 64, "gpus": 4, "prediction": PREDICTION}
    fields = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "gradient_checkpointing": False}
    plan(
        tmp_path,
        about={**about, "step_time_s": [0.9, 1.2, 1.6]},
        arguments=fields,
        model={"attn_implementation": "eager"},
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )
    memkit = start(*MEMKIT, "--plan", "plan.yaml", "by_hand.py", "--", "out", "by hand").ended()
    assert memkit.code == 0, memkit.err
    assert memkit.out.splitlines()[-1] == "4 expandable_segments:True"
    assert [line for line in memkit.err.splitlines() if line.startswith("memkit: ")] == [
        "memkit: warning: plan.yaml: made for train.py, but this run is of by_hand.py. Make a plan for it: "
        "memkit plan by_hand.py",
        "memkit: plan.yaml: per_device_train_batch_size: 8 → 4",
        "memkit: plan.yaml: gradient_accumulation_steps: 1 → 4",
        "memkit: warning: plan.yaml: made for L4, but this run trains on the CPU",
        "memkit: warning: plan.yaml: made for 4 GPUs, but this run has 1: memory and time will differ. Make a plan "
        "for this run: memkit plan --gpus 1",
        "memkit: warning: plan.yaml: made for 64 sequences a step, but the script has 8 × 1 × 1 GPU = 8: the plan "
        "changes the batch size",
        "memkit: warning: plan.yaml: made for 64 sequences a step, but this run has 4 × 4 × 1 GPU = 16: set "
        "gradient_accumulation_steps, or make a plan for this run",
        "memkit: warning: plan.yaml: per_device_train_batch_size: the script sets 1 after it makes its "
        "TrainingArguments, which overrides the plan's 4. Remove that line",
        "memkit: warning: plan.yaml: attn_implementation: the model has sdpa, not the plan's eager. Make it with "
        "from_pretrained or from_config",
        "memkit: warning: plan.yaml: activation_checkpointing: the script calls model.gradient_checkpointing_enable()"
        ", which overrides the plan's False. Remove that line",
    ]
    run = read_records(tmp_path / "out" / "memory-rank0.jsonl")[0]
    assert run["prediction"] == {**PREDICTION, "step_time_ms": [900.0, 1200.0, 1600.0]}
    shown = " ".join(text_report(load_run(tmp_path / "out"), width=200).split())
    assert "Peak allocated: predicted 1.50 GiB" in shown
    assert "(median), 1,200 ms predicted (900 ms–1,600 ms)." in shown


ENGINE = """
from transformers import TrainingArguments
given = TrainingArguments("out", use_cpu=True, report_to="none", per_device_train_batch_size=8)
config = given.hf_deepspeed_config.config
assert config["train_micro_batch_size_per_gpu"] == 2 and config["zero_optimization"]["stage"] == 2, config
"""


@pytest.mark.slow
def test_a_plan_brings_deepspeed_to_a_script_without(tmp_path: Path) -> None:
    """Finds: one process that has no environment for DeepSpeed, its config made of the script's batch."""
    (tmp_path / "engine.py").write_text(ENGINE)
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
    by = plan(tmp_path, arguments={"deepspeed": config, "per_device_train_batch_size": 2})
    err = ran(tmp_path / "planned", tmp_path / "engine.py", by=by)
    assert "memkit: DeepSpeed without a launcher: one process" in err and "deepspeed: None → {'zero_opt" in err


@pytest.mark.slow
def test_a_field_that_the_script_does_not_have_ends_in_a_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / "by_hand.py").write_text(BY_HAND)
    plan(tmp_path, arguments={"rows_of_a_step": 4, "max_steps": 1})
    memkit = start(*MEMKIT, "--plan", "plan.yaml", "by_hand.py", "out").ended()
    assert memkit.code == 2 and "Traceback" not in memkit.err and not (tmp_path / "out").exists()
    line = "memkit: error: plan.yaml: arguments: rows_of_a_step: TrainingArguments has no such field"
    assert any(each.startswith(line) for each in memkit.err.splitlines())


@pytest.mark.parametrize(
    ("options", "content", "words"),
    [
        (("--plan", "none.yaml"), {}, "none.yaml: cannot be read (No such file or directory)"),
        (("--plan", "plan.yaml"), {"arguments": {"max_steps": "five"}}, "max_steps=five: expected int, got str"),
        (("--plan", "plan.yaml", "--predict"), {"model": {}}, "--predict, --plan: mutually exclusive"),
        (("--plan", "plan.yaml"), {"model": {}, "about": {"gpus": "two"}}, "gpus='two': must be a whole number"),
        (("--plan", "plan.yaml"), {"model": {}, "about": {"step_time_s": 0}}, "step_time_s=0: must be seconds"),
        (("--plan", "plan.yaml"), {"model": {}, "about": {"prediction": 1}}, "`memkit predict --json`"),
    ],
)
def test_wrong_input_ends_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...], content: dict[str, Any], words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise AssertionError('it ran')")
    plan(tmp_path, **content)
    assert main(["run", *options, "train.py"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("memkit: error: ") and words in line
