"""Presets with FSDP2: what they set, and that the libraries read all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import HfArgumentParser, LlamaConfig, TrainingArguments

from hf_memkit import preset
from hf_memkit.common.errors import InputError
from hf_memkit.prediction import predict
from hf_memkit.prediction.from_script import predict_script
from hf_memkit.prediction.launch_command import read_command
from hf_memkit.presets.argument_file import accelerate_file, argument_file

GPU: dict[str, Any] = {"gpu_memory": "24GB", "ram": "256GB", "use_hub": False}
MODEL = "Qwen/Qwen2.5-0.5B"
READ: dict[str, Any] = {"fsdp_version": 2, "reshard_after_forward": True, "cpu_ram_efficient_loading": True}


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


@pytest.mark.parametrize(("name", "offloads"), [("fsdp2", False), ("fsdp2-offload", True)])
def test_the_libraries_read_every_setting(
    name: str, offloads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: a key that Trainer or accelerate drops and says nothing."""
    setup = preset(name, gpus=2, **GPU)
    path = tmp_path / "args.yaml"
    path.write_text(argument_file(setup, own={"output_dir": "out", "use_cpu": True}).text(as_yaml=True))
    monkeypatch.setattr(TrainingArguments, "device", None)  # which would start a process group
    (arguments,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(path))
    from_trainer = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)

    launch = tmp_path / "accelerate.yaml"
    launch.write_text(accelerate_file(setup))
    options = launch_command_parser().parse_args(["--config_file", str(launch), "train.py"])
    options, _, _ = _validate_launch_command(options)
    assert options.use_fsdp and options.num_processes == 2 and options.mixed_precision == "bf16"
    unknown = [key for key in yaml.safe_load(launch.read_text())["fsdp_config"] if not hasattr(options, key)]
    assert unknown == []
    for key, value in prepare_multi_gpu_env(options).items():
        if key.startswith("FSDP_"):
            monkeypatch.setenv(key, value)
    from_launcher = FullyShardedDataParallelPlugin()

    for plugin in (from_trainer, from_launcher):
        assert {key: getattr(plugin, key) for key in READ} == READ
        assert plugin.state_dict_type.name == "FULL_STATE_DICT"
        assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
        assert type(plugin.cpu_offload).__name__ == ("CPUOffloadPolicy" if offloads else "OffloadPolicy")


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
