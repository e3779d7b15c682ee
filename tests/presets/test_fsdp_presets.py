"""Presets with FSDP2: what they set, and that the libraries read all of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import HfArgumentParser, LlamaConfig, TrainingArguments
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

from hf_memkit import preset
from hf_memkit.cli import main
from hf_memkit.common.errors import InputError
from hf_memkit.prediction import predict
from hf_memkit.prediction.from_script import predict_script
from hf_memkit.prediction.launch_command import read_command
from hf_memkit.presets.argument_file import accelerate_file, argument_file

GPU: dict[str, Any] = {"gpu_memory": "24GB", "ram": "256GB", "use_hub": False}
MODEL = "Qwen/Qwen2.5-0.5B"


def test_a_gpu_holds_its_share() -> None:
    one, two, offloaded = (
        preset(name, model=MODEL, gpus=gpus, **GPU).ledger
        for name, gpus in (("bf16-autocast", 1), ("fsdp2", 4), ("fsdp2-offload", 4))
    )
    states = {"weights", "gradients", "optimizer"}
    whole = sum(row.size_bytes for row in one.rows if row.place == "device" and "autocast" not in row.term)
    share = sum(row.size_bytes for row in two.rows if row.place == "device" and row.category in states)
    assert share == pytest.approx(whole / 4, rel=0.01)
    assert not [row for row in two.rows if "DistributedDataParallel" in row.term]
    assert [row.term for row in offloaded.rows if row.place == "device"] == ["largest weight, gathered"]
    assert offloaded.total_bytes("host", "pinned") > whole


def test_one_gpu_is_refused() -> None:
    setup = preset("fsdp2", model=MODEL, **GPU)
    assert any("--gpus 2" in problem for problem in setup.problems)
    with pytest.raises(InputError, match=r"^fsdp: FSDP2 splits a model between GPUs, .* --gpus 2$"):
        predict(setup)
    assert not preset("fsdp2", **GPU).problems, "without a model nothing is known of the machine"


_SCRIPT: Final = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]), dtype=torch.float32)
rows = [{"input_ids": torch.arange(64), "labels": torch.arange(64)}] * 64
arguments = TrainingArguments("out", report_to=[], per_device_train_batch_size=2, **json.loads(sys.argv[2]))
Trainer(model, arguments, train_dataset=rows).train()
"""


@pytest.mark.tracing
@pytest.mark.slow
def test_the_prediction_is_that_of_the_same_script(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=514, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    name = "bf16-autocast+fsdp2+adamw-fused+activation-checkpointing"
    options: dict[str, Any] = {"gpus": 4, **GPU}
    del options["use_hub"]
    setup = preset(name, model=str(tmp_path), sequence_length=64, arguments={"per_device_train_batch_size": 2},
                   use_hub=False, **options)  # fmt: skip
    own = {key: value for key, value in setup.plain_arguments.items() if key != "per_device_train_batch_size"}
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    ours, scripts = predict(setup), predict_script(script, [str(tmp_path), json.dumps(own)], **options)
    assert ours.phases["backward"] == scripts.phases["backward"]
    assert ours.phases["optimizer"] == scripts.phases["optimizer"]
    assert ours.categories == scripts.categories


def config_of(plugin: FullyShardedDataParallelPlugin) -> dict[str, Any]:
    """What accelerate has read, by the names in `fsdp_config`."""
    policies = {"transformer_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    same = ("reshard_after_forward", "activation_checkpointing", "cpu_ram_efficient_loading")
    return {
        "version": plugin.fsdp_version,
        "auto_wrap_policy": policies[plugin.auto_wrap_policy.__name__],
        "state_dict_type": plugin.state_dict_type.name,
        "cpu_offload": type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
        **{name: bool(getattr(plugin, name)) for name in same},
    }


def check_read(content: dict[str, Any], *parsed: Any) -> None:
    """Every entry of a file is a field of what its reader has made, with this value."""
    for name, value in content.items():
        (owner,) = (each for each in parsed if hasattr(each, name))
        read = getattr(owner, name)
        if name == "fsdp_config":
            assert read.items() >= value.items()
        else:
            assert getattr(read, "value", read) in (value, [value]), name


@patch.dict(os.environ)
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-offload", "fsdp2-lora", "fsdp2-qlora"])
def test_the_libraries_read_every_setting(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: a key that Trainer, TRL or accelerate drops and says nothing."""
    setup = preset(name, gpus=2, **GPU)
    config = {"cpu_offload": False, "activation_checkpointing": False, **setup["arguments.fsdp_config"]}
    monkeypatch.setattr(TrainingArguments, "device", torch.device("cpu"))  # which would start a process group
    own = {"output_dir": "out", "use_cpu": True}
    path = tmp_path / "args.yaml"

    for_trainer = argument_file(setup, own=own)
    path.write_text(for_trainer.text(as_yaml=True))
    (arguments,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(path))
    check_read(for_trainer.content, arguments)
    assert config_of(FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)).items() >= config.items()

    for_trl = argument_file(setup, own={**own, "dataset_name": "rows"}, script="trl")
    path.write_text(for_trl.text(as_yaml=True))
    variables = for_trl.content["env"]
    parsed = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config(["--config", str(path)])
    check_read({key: value for key, value in for_trl.content.items() if key != "env"}, *parsed)
    assert {variable: os.environ[variable] for variable in variables} == variables
    assert config_of(FullyShardedDataParallelPlugin(**parsed[1].fsdp_plugin_args)).items() >= config.items()
    for variable in [*variables, *(each for each in os.environ if each.startswith("FSDP_"))]:
        del os.environ[variable]

    launch = tmp_path / "accelerate.yaml"
    launch.write_text(accelerate_file(setup))
    options = launch_command_parser().parse_args(["--config_file", str(launch), "train.py"])
    options, _, _ = _validate_launch_command(options)
    assert options.use_fsdp and options.num_processes == 2 and options.mixed_precision == "bf16"
    unknown = [key for key in yaml.safe_load(launch.read_text())["fsdp_config"] if not hasattr(options, key)]
    assert unknown == []
    os.environ |= {key: value for key, value in prepare_multi_gpu_env(options).items() if key.startswith("FSDP_")}
    assert config_of(FullyShardedDataParallelPlugin()).items() >= config.items()


@pytest.mark.slow
def test_trl_reads_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: a value that TRL's own process, which starts the launcher, does not accept."""
    monkeypatch.chdir(tmp_path)
    setup = preset("fsdp2", gpus=2, **GPU)
    own = {"output_dir": "out", "model_name_or_path": "m", "dataset_name": "d"}
    Path("sft.yaml").write_text(argument_file(setup, own=own, script="trl").text(as_yaml=True))
    Path("launch.yaml").write_text(accelerate_file(setup))
    read = read_command(["trl", "sft", "--config", "sft.yaml", "--accelerate_config", "launch.yaml"], gpus=2)
    assert (read.gpus, read.environment["ACCELERATE_USE_FSDP"]) == (2, "true")


def test_the_users_own_values_replace_the_presets() -> None:
    """Defect: a check that stops the training, because fewer layers are recomputed than the preset wanted."""
    setup = preset("fsdp2", gpus=2, arguments={"activation_checkpointing": False}, **GPU)
    assert setup["arguments.activation_checkpointing"] is False
    assert "trainer_parts.verify_checkpointing" not in setup
    assert "arguments.fsdp_config" not in preset("fsdp2", gpus=2, arguments={"fsdp": ""}, **GPU)


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        (True, {}),
        ("full_shard auto_wrap", {}),
        (["shard_grad_op", "offload"], {"reshard_after_forward": False, "cpu_offload": True}),
    ],
)
def test_the_users_own_fsdp_keeps_the_presets_config(
    value: Any, changes: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: a preset without its `fsdp_config`, or with keys that stand against the user's words."""
    config = preset("fsdp2", gpus=2, **GPU)["arguments.fsdp_config"]
    setup = preset("fsdp2", gpus=2, arguments={"fsdp": value}, **GPU)
    assert setup["arguments.fsdp"] == value and not setup.problems
    assert setup["arguments.fsdp_config"] == {**config, **changes}
    assert len(setup.replaced) == len(changes)

    path = tmp_path / "args.yaml"
    own = {"output_dir": "out", "use_cpu": True, "fsdp": value}
    path.write_text(argument_file(setup, own=own).text(as_yaml=True))
    monkeypatch.setattr(TrainingArguments, "device", torch.device("cpu"))  # which would start a process group
    (arguments,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(path))
    assert arguments.fsdp is True and arguments.fsdp_config.items() >= {**config, **changes}.items()


@pytest.mark.parametrize("in_file", [True, False])
def test_the_users_own_fsdp_config_is_read_as_trainer_reads_it(tmp_path: Path, *, in_file: bool) -> None:
    """Defect: a path in place of settings, a second `fsdp_` in accelerate's YAML, or both forms of checkpointing."""
    own: Any = {"fsdp_version": 2, "fsdp_activation_checkpointing": True}
    if in_file:
        (tmp_path / "fsdp.json").write_text(json.dumps(own))
        own = str(tmp_path / "fsdp.json")
    setup = preset("fsdp2", gpus=2, arguments={"fsdp_config": own}, **GPU)
    assert setup["arguments.fsdp_config"] == {"version": 2, "activation_checkpointing": True}
    assert setup["arguments.activation_checkpointing"] is False and not setup.problems
    launched = yaml.safe_load(accelerate_file(setup))["fsdp_config"]
    assert launched == {"fsdp_version": 2, "fsdp_activation_checkpointing": True}


def test_an_fsdp_config_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InputError, match=r"fsdp_config=none\.json: not read: .*Give a JSON file"):
        preset("fsdp2", gpus=2, arguments={"fsdp_config": "none.json"}, **GPU)


@pytest.mark.parametrize("value", ["true", "hybrid_shard"])
def test_fsdp_that_trainer_refuses_is_refused(value: str) -> None:
    with pytest.raises(InputError, match=rf'^fsdp = "{value}": '):
        preset("fsdp2", model=MODEL, gpus=2, arguments={"fsdp": value}, **GPU)


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ("--gpus 2", "start it with: accelerate launch --config_file {0}-accelerate.yaml SCRIPT"),
        ("--gpus 2 --for trl", "trl sft --config {0}.yaml --accelerate_config {0}-accelerate.yaml"),
        ("--gpus 2 --nodes 2", "{0}-accelerate.yaml --main_process_ip FIRST_MACHINE --machine_rank NUMBER SCRIPT"),
    ],
)
def test_the_command_that_uses_the_files_has_their_launcher(
    options: str, start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defect: a command without a launcher, which Trainer refuses with FSDP."""
    name = str(tmp_path / "fsdp2")
    assert main(["preset", "copy", "fsdp2", f"{name}.yaml", "--gpu-memory", "24GB", *options.split()]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Use it: "))
    assert line.endswith(start.format(name))
