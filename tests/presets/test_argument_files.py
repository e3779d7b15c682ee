"""A setup as a file of arguments: the real HfArgumentParser reads it, and nothing of the setup gets lost."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_memkit.presets.argument_file import ArgumentFile, argument_file
from hf_memkit.presets.not_in_file import SCRIPTS, outside_lines
from hf_memkit.setup.setup import Setup

SETTINGS: dict[str, Any] = {
    "arguments.activation_checkpointing": True,
    "arguments.activation_checkpointing_kwargs": {"use_reentrant": False},
    "arguments.optim": "adamw_torch",
    "arguments.save_strategy": "no",
    "arguments.learning_rate": 1e-5,
    "arguments.use_cpu": True,
    "model.name": "gpt2",
    "model.origin": "architecture",
    "model.architecture": {"model_type": "gpt2"},
    "model.dtype": "bfloat16",
    "model.attn_implementation": "sdpa",
    "model.quantization": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    },
    "model.config": {"embd_pdrop": 0.0},
    "model.pad_vocabulary_to_multiple_of": 64,
    "model.use_cache": False,
    "adapter.r": 8,
    "adapter.target_modules": "all-linear",
    "adapter.layers_to_transform": [0],
    "data.sequence_length": 256,
    "optimizer.class": "torch.optim:SGD",
    "optimizer.momentum": 0.9,
    "optimizer.takes": ["lr"],
    "environment.PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "model_parts.chunked_loss": {"chunk_tokens": 256},
    "trainer_parts.packing": {},
}


@pytest.fixture
def setup() -> Setup:
    made = Setup(preset="made-up").with_notes("a note")
    for key, value in SETTINGS.items():
        made = made.put(key, value, f"why {key}")
    return made


def parsed(file: ArgumentFile, folder: Path, ending: str) -> Any:
    from transformers import HfArgumentParser, TrainingArguments

    path = folder / f"args.{ending}"
    path.write_text(file.text(as_yaml=ending == "yaml"))
    parser = HfArgumentParser(TrainingArguments)
    read = parser.parse_yaml_file if ending == "yaml" else parser.parse_json_file
    return read(str(path))[0]


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_the_real_parser_reads_every_value(setup: Setup, tmp_path: Path, ending: str) -> None:
    real = parsed(argument_file(setup, own={"output_dir": str(tmp_path / "out")}), tmp_path, ending)
    for name, value in setup.arguments.items():
        names = [n for n in (name, name.replace("activation_", "gradient_")) if hasattr(real, n)]
        actual = getattr(real, names[0])
        assert getattr(actual, "value", actual) == value, name
    assert real.output_dir == str(tmp_path / "out")


def test_yaml_has_each_reason_as_a_comment_and_json_the_same_values(setup: Setup) -> None:
    file = argument_file(setup, own={"train_file": "x.txt", "optim": "sgd"})
    text = file.text(as_yaml=True)
    assert yaml.safe_load(text) == json.loads(file.text(as_yaml=False)) == file.content
    lines = text.splitlines()
    for key in setup.arguments:
        if key != "optim":
            assert lines.index(f"# why arguments.{key}") < len(lines)
    assert list(file.content)[:2] == ["train_file", "optim"] and file.content["optim"] == "sgd"
    assert text.endswith("\n") and "# - a note" in lines


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_gets_lost(setup: Setup, script: str) -> None:
    """Each setting stands in the file, or in a line of what the file cannot say."""
    file = argument_file(setup, script=script)
    written = json.dumps(file.content) + " ".join(f"{each.setting} {each.line}" for each in file.outside)
    for key, value in SETTINGS.items():
        if (key, script) == ("model.name", "trainer") or key in (
            "model.origin", "model.architecture", "optimizer.takes",
        ):  # fmt: skip
            continue
        shown = value if isinstance(value, str) else json.dumps(value)
        values = [json.dumps(v) for v in value.values()] if isinstance(value, dict) else [shown.rpartition(":")[2]]
        assert all(v.strip('"') in written or repr(json.loads(v)) in written for v in values if v), (key, script)


def test_each_kind_of_script_leaves_less_over(setup: Setup) -> None:
    by_script = {script: [each.setting for each in outside_lines(setup, script)] for script in SCRIPTS}
    assert len(by_script["trl"]) < len(by_script["run_clm"]) == len(by_script["trainer"]) - 1  # block_size
    trl = argument_file(setup, script="trl").content
    assert trl["lora_r"] == 8 and trl["use_peft"] is True and trl["max_length"] == 256
    assert trl["load_in_4bit"] is True and trl["use_bnb_nested_quant"] is True and trl["dtype"] == "bfloat16"
    assert trl["env"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert not any("4bit" in what for what in by_script["trl"])
    odd = setup.put("model.quantization", {"load_in_4bit": True, "llm_int8_skip_modules": ["x"]}, "a field TRL lacks")
    assert any("llm_int8_skip_modules" in each.setting for each in outside_lines(odd, "trl"))


def test_names_of_trl_are_those_of_the_installed_trl(setup: Setup) -> None:
    from transformers import TrainingArguments
    from trl import ModelConfig, SFTConfig

    known = {field.name for kind in (ModelConfig, SFTConfig) for field in dataclasses.fields(kind)}
    ours = argument_file(setup, script="trl").content.keys() - {"env"}
    installed = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert ours <= known and len(ours - installed) > 8


def test_lines_are_python(setup: Setup) -> None:
    import ast

    lines = [each.line for each in outside_lines(setup) if not each.line.startswith(("export ", "cut "))]
    assert len(lines) == 7
    for line in lines:
        ast.parse(line.replace("Trainer(…, ", "Trainer("))
    namespace: dict[str, Any] = {"Trainer": dict}
    line = next(line for line in lines if "optimizer_cls_and_kwargs" in line)
    exec(line.replace("Trainer(…, ", "made = Trainer("), namespace)
    kind, options = namespace["made"]["optimizer_cls_and_kwargs"]
    assert kind.__name__ == "SGD" and options == {"momentum": 0.9, "lr": 1e-5}


def test_a_model_that_was_named_for_its_sizes_is_not_loaded_over_one_from_scratch(setup: Setup) -> None:
    assert argument_file(setup, script="run_clm").content["model_name_or_path"] == "gpt2"
    own = {"model_type": "gpt2", "tokenizer_name": "t"}
    assert "model_name_or_path" not in argument_file(setup, own=own, script="run_clm").content
