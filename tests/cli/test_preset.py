"""`memkit preset`, as a user types it; in this process, because starting Python each time takes most of the time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hf_memkit.catalog.library_versions import argument_types, current_name
from hf_memkit.checks.apply import check_file
from hf_memkit.cli.main import main
from hf_memkit.presets import PRESETS
from hf_memkit.setup.techniques.registry import TECHNIQUES

Run = Callable[..., tuple[int, str, str]]

FOR_16_GB = ("--model", "gpt2-xl", "--gpu-memory", "16GB", "--ram", "64GB")
MINE = {"train_file": "x.txt", "output_dir": "out", "gradient_checkpointing": False, "learning_rate": 3e-4}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def of(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["preset", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return of


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(MINE))
    return path


def test_list_names_every_preset_and_every_technique(run: Run) -> None:
    code, out, _ = run("list")
    assert code == 0 and all(name in out for name in (*PRESETS, *TECHNIQUES))
    _, out, _ = run("list", "--techniques")
    assert "costs" in out and all(name in out for name in TECHNIQUES)
    message = json.loads(run("list", "--json")[1])
    assert {each["name"] for each in message["presets"]} == set(PRESETS)
    assert {each["name"] for each in message["techniques"]} == set(TECHNIQUES)
    assert all(each["for_whom"] and each["techniques"] for each in message["presets"])


def test_show_gives_each_setting_its_reason_and_a_ledger_that_adds_up(run: Run) -> None:
    sized = (*FOR_16_GB, "--batch-size", "32", "--set", "per_device_train_batch_size=4")
    code, out, err = run("show", "resident", *sized)
    assert code == 0 and err == ""
    message = json.loads(run("show", "resident", *sized, "--json")[1])
    for setting in message["settings"]:
        if setting["key"] not in ("model.origin", "model.architecture"):
            assert setting["reason"].split()[0] in out
            assert f"\n  {setting['key']} = " in out or setting["key"] == "deepspeed.sizes", "a line each"
    arguments = message["arguments"]
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] == 32
    rows = message["ledger"]["device"]
    assert rows and all(row["source"] and row["gib"] > 0 for row in rows) and "Bytes by formula" in out
    assert any(each["what"].startswith("model.dtype") for each in message["outside_arguments"])
    assert "from_pretrained" in out


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_written_and_read(run: Run, tmp_path: Path, mine: Path, name: str) -> None:
    """Each as YAML with the user's own arguments; the names are fields of the installed transformers."""
    path = tmp_path / "configs" / "args.yaml"
    code, out, _ = run("copy", name, str(path), "--args", str(mine), "--set", "max_steps=7")
    assert code == 0 and f"Wrote {path}" in out
    content = yaml.safe_load(path.read_text())
    assert content["train_file"] == "x.txt" and content["learning_rate"] == 3e-4 and content["max_steps"] == 7
    checkpointing = [value for key, value in content.items() if current_name(key) == "activation_checkpointing"]
    assert checkpointing == [False]
    assert {current_name(key) for key in content} - {"train_file"} <= set(argument_types())
    assert check_file(path) == [], "a file that memkit wrote has no known mistake"
    if name in ("offload", "infinity"):
        beside = path.with_name("args-deepspeed.json")
        assert content["deepspeed"] == str(beside) and json.loads(beside.read_text())["zero_optimization"]["stage"] > 1


def test_what_the_user_replaced_is_told_with_both_values(run: Run, mine: Path, tmp_path: Path) -> None:
    code, _, err = run("copy", "lora", "args.json", "--args", str(mine))
    assert code == 0
    assert "Override: your activation_checkpointing = False replaces the preset's True" in err
    assert "drops activation_checkpointing_kwargs" in err
    again = json.loads(run("copy", "lora", "b.yaml", "--args", str(mine), "--json")[1])
    assert {each["by"] for each in again["replaced"]} == {"activation_checkpointing"}
    assert {each["key"].partition(".")[2] for each in again["replaced"]} == {
        "activation_checkpointing", "activation_checkpointing_kwargs", "verify_checkpointing",
    }  # fmt: skip
    assert "of the preset that yours override" in (tmp_path / "b.yaml").read_text()
    assert "get_peft_model" in err and "PYTORCH_ALLOC_CONF=expandable_segments:True" in err


def test_a_file_for_trl_says_more(run: Run, tmp_path: Path) -> None:
    code, out, err = run("copy", "lora", "sft.yaml", "--for", "trl", "--set", "rank=4", "--model", "gpt2")
    assert code == 0 and "trl sft --config sft.yaml" in out
    content = yaml.safe_load((tmp_path / "sft.yaml").read_text())
    assert content["use_peft"] is True and content["lora_r"] == 4 and content["model_name_or_path"] == "gpt2"
    assert content["env"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} and "get_peft_model" not in err


@pytest.mark.parametrize("model", [(), ("--model", "gpt2")])
def test_the_folder_for_swap_files_is_the_user_s(run: Run, tmp_path: Path, model: tuple[str, ...]) -> None:
    """Finds: without a model the placeholder of ds_configs/ in its place."""
    assert run("copy", "infinity", "inf.yaml", "--for", "trl", "--nvme-path", str(tmp_path), *model)[0] == 0
    zero = json.loads((tmp_path / "inf-deepspeed.json").read_text())["zero_optimization"]
    assert {zero[part]["nvme_path"] for part in ("offload_optimizer", "offload_param")} == {str(tmp_path)}


def test_the_user_s_file_names_model_and_length(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model_name_or_path: gpt2\nblock_size: 128\nlearning_rate: 1e-4\n")
    message = json.loads(run("show", "resident", "--args", "mine.yaml", "--gpu-memory", "16GB", "--json")[1])
    settings = {each["key"]: each["value"] for each in message["settings"]}
    assert settings["model.name"] == "gpt2" and settings["data.sequence_length"] == 128
    assert message["arguments"]["learning_rate"] == 1e-4 and message["ledger"]["device"]
    _, out, _ = run("show", "resident", "--args", "mine.yaml", "--gpu-memory", "16GB")
    assert "your file's '1e-4' becomes 0.0001" in out
    (tmp_path / "mine.yaml").write_text("model_name_or_path: someone/unknown\nevaluation_strategy: steps\n")
    code, out, _ = run("show", "resident", "--args", "mine.yaml")
    assert code == 0 and "eval_strategy: steps" in out, "an argument that transformers removed"
    assert "sizes are not computed for the model in your file: " in out


def test_existing_files_are_kept(run: Run, tmp_path: Path, mine: Path) -> None:
    for taken in ("args.yaml", "args-deepspeed.json"):
        (tmp_path / taken).write_text("mine")
        code, _, err = run("copy", "offload", "args.yaml")
        assert code == 2 and "--overwrite" in err and err.count("\n") == 1
        assert (tmp_path / taken).read_text() == "mine"
        (tmp_path / taken).unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json"]
    (tmp_path / "args.yaml").write_text("old")
    assert run("copy", "offload", "args.yaml", "--overwrite")[0] == 0
    before = mine.read_text()
    code, _, err = run("copy", "offload", "mine.json", "--args", "mine.json", "--overwrite")
    assert code == 2 and "--args reads this file" in err and mine.read_text() == before


def test_destinations(run: Run, tmp_path: Path) -> None:
    assert yaml.safe_load(run("copy", "lora", "-")[1])["optim"] == "adamw_torch_fused" and not list(tmp_path.iterdir())
    assert run("copy", "lora")[0] == 0 and (tmp_path / "lora.yaml").is_file()
    assert run("copy", "8bit", "--for", "run_clm")[0] == 0 and json.loads((tmp_path / "8bit.json").read_text())
    code, out, _ = run("copy", "lora", "folder/")
    assert code == 0 and (tmp_path / "folder" / "lora.yaml").is_file() and "Created the folder folder\n" in out
    assert "Created the folder" not in run("copy", "lora", "folder/again.yaml")[1]


def test_a_technique_takes_the_place_of_what_decides_the_same_thing(run: Run, tmp_path: Path) -> None:
    liger = ("--technique", "liger", "--model", "meta-llama/Llama-3.1-8B")
    message = json.loads(run("show", "lean", *liger, "--technique", "lomo", "--json")[1])
    assert {"liger", "lomo"} <= set(message["techniques"]) and "chunked-loss" not in message["techniques"]
    assert "memkit preset copy lean args.yaml --technique liger" in run("show", "lean", *liger)[1]
    code, _, err = run("copy", "lean", "a.json", *liger)
    assert code == 0 and json.loads((tmp_path / "a.json").read_text())["use_liger_kernel"] is True
    assert 'hf_memkit.preset("lean", techniques=["liger"], …)' in err


@pytest.mark.slow
def test_the_batch_is_the_largest_that_a_trace_shows_to_fit(run: Run, tmp_path: Path) -> None:
    """Would notice: a batch that nobody traced, more than three traces, or a ledger without what they show."""
    sizes = {"n_embd": 64, "n_head": 2, "n_layer": 2, "vocab_size": 50257, "n_positions": 1024}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    asked = ("show", "checkpointed", "--model", str(tmp_path), "--gpu-memory", "2GB", "--ram", "64GB")
    message = json.loads(run(*asked, "--batch-size", "64", "--json")[1])
    size = message["arguments"]["per_device_train_batch_size"]
    (reason,) = (s["reason"] for s in message["settings"] if s["key"] == "arguments.per_device_train_batch_size")
    assert f"{size} fits" in reason and reason.count(" fits") <= 3 and size > 1
    assert any(row["term"] == "by a trace, at its peak" for row in message["ledger"]["device"])


def test_problems_stand_first(run: Run) -> None:
    code, out, _ = run("show", "resident", "--model", "gpt2-xl", "--gpu-memory", "4GB", "--batch-size", "4")
    assert code == 0 and out.startswith("PROBLEM: needs ") and out.count("PROBLEM") == 1


def test_a_file_for_run_clm_has_its_own_name_of_the_length(run: Run, tmp_path: Path) -> None:
    """Defect: run_clm.py fails on the length's name in another script."""
    (tmp_path / "mine.json").write_text(json.dumps({"output_dir": "out", "max_length": 512}))
    assert run("copy", "checkpointed", "c.json", "--for", "run_clm", "--args", "mine.json", "--model", "gpt2")[0] == 0
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["block_size"] == 512 and "max_length" not in written


def test_one_gpu_by_default_is_no_problem_of_fsdp(run: Run) -> None:
    """Defect: a problem on the screen, and exit code 0, although nobody gave a number of GPUs."""
    code, _, err = run("copy", "fsdp2", "f.yaml", "--model", "gpt2", "--gpu", "RTX 4090")
    assert code == 0 and "PROBLEM" not in err and "--gpus 2" in err
