"""Commands that start trainings, read as their launchers read them."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any, Final
from unittest import mock

import psutil
import pytest

from hf_memkit.cli import main
from hf_memkit.common.errors import InputError
from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction.launch_command import is_command, read_command
from hf_memkit.prediction.trace.request import TORCHRUN
from tests.conftest import ROOT
from tests.loaded import Loaded

pytest.importorskip("trl", reason="its accelerate configs are read")

YAML: Final = "site/trl/accelerate_configs"
"""TRL's own: what its documentation and alignment-handbook launch with has these values."""

COMMANDS: Final = (
    # command; GPUs, machines, engine, ZeRO stage
    (f"accelerate launch --config_file {YAML}/zero3.yaml scripts/sft.py --config c.yaml", 8, 1, "DEEPSPEED", "3"),
    (f"accelerate launch --config_file={YAML}/zero1.yaml --num_processes=2 train.py", 2, 1, "DEEPSPEED", "1"),
    (f"accelerate launch --config_file {YAML}/single_gpu.yaml train.py", 1, 1, "", ""),
    (f"accelerate launch --config_file {YAML}/fsdp2.yaml scripts/sft.py", 8, 1, "FSDP", ""),
    (
        f"accelerate launch --config_file {YAML}/multi_gpu.yaml --num_machines 2 --num_processes 16 --machine_rank 0 "
        "--main_process_ip 10.0.0.1 --main_process_port 29501 train.py", 8, 2, "", "",
    ),
    ("accelerate launch train.py", None, 1, "", ""),
    (f"accelerate launch --config_file {YAML}/fsdp2.yaml --num_processes 1 train.py", 1, 1, "FSDP", ""),
    ("accelerate launch --multi_gpu --num_processes 2 -m pkg.train --a -m", 2, 1, "", ""),
    ("accelerate launch --use_deepspeed --zero_stage 2 --num_processes 2 train.py", 2, 1, "DEEPSPEED", "2"),
    ("accelerate-launch --num_processes 2 train.py", 2, 1, "", ""),
    ("python -m accelerate.commands.launch --num_processes 2 train.py", 2, 1, "", ""),
    ("torchrun --nproc_per_node 8 train.py --a 1", 8, 1, "", ""),
    ("torchrun --nproc-per-node=4 --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h:1 train.py", 4, 2, "", ""),
    ("torchrun --nproc_per_node gpu --mod pkg.train", None, 1, "", ""),
    ("torchrun train.py", 1, 1, "", ""),
    ("python -m torch.distributed.run --standalone --nproc_per_node 2 train.py", 2, 1, "", ""),
    ("deepspeed --num_gpus=4 train.py --deepspeed ds.json", 4, 1, "", ""),
    ("deepspeed --include localhost:2,3 train.py", 2, 1, "", ""),
    ("deepspeed --include h1:0,1@h2:0,1 --module pkg.train", 2, 2, "", ""),
    ("deepspeed train.py", None, 1, "", ""),
)  # fmt: skip
LINES: Final = (Path(__file__).with_name("launch_lines.txt")).read_text().splitlines()
"""All launch lines of alignment-handbook and of TRL's documentation: GPUs on each machine, machines, engine, ZeRO
stage, and the command, with values where they have placeholders (huggingface/alignment-handbook@925acdf, trl@f2cd577).
"""
SCRIPTS: Final = ("train.py", "scripts/sft.py", "pkg.train")

CONFIGS: Final = {
    "recipes/accelerate_configs": {"zero3": "zero3", "ddp": "multi_gpu", "fsdp": "fsdp1", "fsdp+qlora": "fsdp1"},
    "examples/accelerate_configs": {
        "deepspeed_zero1": "zero1", "deepspeed_zero2": "zero2", "deepspeed_zero3": "zero3", "multi_gpu": "multi_gpu",
    },
}  # fmt: skip
"""Folder → name of a config → that of TRL's package, which has the same values."""

OTHERS: Final = {
    "context_parallel_2gpu.yaml": {
        "distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": {"parallelism_config_cp_size": 2},
    },
    "examples/accelerate_configs/alst_ulysses_4gpu.yaml": {
        "distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": {"zero_stage": 3},
        "parallelism_config": {"parallelism_config_sp_size": 2, "parallelism_config_dp_shard_size": 2},
    },
    "multi_node.yaml": {
        "distributed_type": "MULTI_GPU", "num_processes": 16, "num_machines": 2, "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
    },
}  # fmt: skip
"""What counts here of the configs that TRL has not in its package."""

READ: Final = """
import json, os
os.environ["HF_HOME"] = os.getcwd()  # a folder without a config of accelerate
os.environ.pop("CUDA_VISIBLE_DEVICES")
from hf_memkit.prediction import wire
from hf_memkit.prediction.child.script.read_launch import read_launch
open("answers.json", "w").write(wire.dumps([read_launch(words) for words in json.load(open("lines.json"))]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands are typed: TRL's configs lie in `site`."""
    import trl

    made = tmp_path_factory.mktemp("typed")
    (made / "site").symlink_to(Path(trl.__file__).parents[1])
    for place, names in CONFIGS.items():
        (made / place).mkdir(parents=True)
        for name, own in names.items():
            (made / place / f"{name}.yaml").symlink_to(made / YAML / f"{own}.yaml")
    common = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16", "machine_rank": 0}
    for name, content in OTHERS.items():
        (made / name).write_text(json.dumps({**common, **content}))  # YAML, too
    return made


def typed(line: str) -> list[str]:
    """The launcher's own words in a line."""
    words = shlex.split(line.partition(" | ")[2])
    return words[words.index("accelerate") :]


@pytest.fixture(scope="module")
def found(process: Loaded, folder: Path) -> list[dict[str, Any]]:
    (folder / "read.py").write_text(READ)
    (folder / "lines.json").write_text(json.dumps([*(shlex.split(each[0]) for each in COMMANDS), *map(typed, LINES)]))
    ran = process.run(["read.py"], folder)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads((folder / "answers.json").read_text())
    return answers


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=[each[0] for each in COMMANDS])
def test_gpus_engine_and_stage_are_those_of_the_command(found: list[dict[str, Any]], number: int) -> None:
    command, gpus, nodes, engine, stage = COMMANDS[number]
    (script,) = set(shlex.split(command)) & set(SCRIPTS)
    answer = found[number]
    variables = answer["environment"]
    chosen = [name for name in ("DEEPSPEED", "FSDP") if variables.get(f"ACCELERATE_USE_{name}") == "true"]
    assert (answer["gpus"], answer["nodes"], answer["script"]["target"]) == (gpus, nodes, script)
    plain = answer["gpus"] == 1 and not engine and command.startswith("accelerate")  # no process group
    assert (TORCHRUN in variables) == (engine != "DEEPSPEED" and "deepspeed" not in command and not plain)
    assert "".join(chosen) == engine and variables.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "") == stage
    words = shlex.split(command)
    assert [*words[: answer["at"]], script, *answer["script"]["arguments"]] == words


def test_the_launch_lines_of_two_projects(found: list[dict[str, Any]]) -> None:
    for line, answer in zip(LINES, found[len(COMMANDS) :], strict=True):
        variables = answer["environment"]
        chosen = [name for name in ("DEEPSPEED", "FSDP") if variables.get(f"ACCELERATE_USE_{name}") == "true"]
        stage = variables.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "-")
        read = f"{answer['gpus'] or 'all'} {answer['nodes']} {''.join(chosen) or '-'} {stage}"
        assert read == line.partition(" | ")[0], line
        words = typed(line)
        assert answer["script"]["target"].endswith(".py") and words[answer["at"]] == answer["script"]["target"]


def test_python_is_read_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    read = read_command(["A=1", "python3", "-u", "-W", "ignore", "train.py", "-m", "x"])
    assert (read.script.target, read.script.arguments) == ("train.py", ("-m", "x"))
    assert (read.gpus, read.nodes, read.environment) == (1, 1, {"A": "1"})
    assert read.with_script(UserScript("hf_memkit", True, ("run",))) == [
        "env", "A=1", "python3", "-u", "-W", "ignore", "-m", "hf_memkit", "run",
    ]  # fmt: skip
    for words in (["-m", "pkg.train"], ["-mpkg.train"], ["-um", "pkg.train"]):
        read = read_command(["python", *words, "--a"])
        assert read.script == UserScript("pkg.train", True, ("--a",))
    assert read.before == ("python", "-u")


@pytest.mark.slow
def test_a_command_of_slurm_is_read_behind_srun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    Path("train.py").touch()
    read = read_command(["srun", "--nodes=2", "accelerate", "launch", "--config_file", "multi_node.yaml", "train.py"])
    assert (read.gpus, read.nodes, read.before[:3]) == (8, 2, ("srun", "--nodes=2", "accelerate"))
    assert is_command("srun")
    with pytest.raises(InputError, match="srun"):
        read_command(["srun", "--nodes=2", "hostname"])


@pytest.mark.slow
def test_variables_before_a_command_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: one GPU where four are visible; memkit's own path in the script's variables."""
    monkeypatch.chdir(folder)
    Path("train.py").touch()
    read = read_command(["CUDA_VISIBLE_DEVICES=4,5,6,7", "accelerate", "launch", "train.py"], {**os.environ})
    assert read.gpus == 4 and read.environment["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    zero = shlex.split(f"accelerate launch --config_file {YAML}/zero3.yaml --mixed_precision fp16 train.py")
    variables = read_command(zero, {**os.environ, "PYTHONPATH": "/own"}).environment
    module = read_command(["torchrun", "--mod", "pkg.train"])
    assert module.script.is_module and module.with_script(module.script) == ["torchrun", "-m", "pkg.train"]
    assert variables["ACCELERATE_MIXED_PRECISION"] == "fp16" and str(ROOT) not in variables["PYTHONPATH"].split(":")


@pytest.mark.slow
def test_the_command_that_a_front_end_starts_is_the_one_that_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Would notice: TRL's options for accelerate that are taken for the script's, or a training that begins."""
    monkeypatch.chdir(folder)
    given = "--model_name_or_path m --dataset_name d --output_dir out"
    read = read_command(shlex.split(f"trl sft {given} --num_processes 2 --accelerate_config zero2"), gpus=1)
    assert read.script.target.endswith("trl/scripts/sft.py") and read.script.arguments == tuple(given.split())
    assert (read.gpus, read.nodes, read.environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"]) == (2, 1, "2")
    assert read.before[:2] == ("accelerate", "launch") and not Path("out").exists()


@pytest.mark.parametrize("word", ["train.py", "python.py", "gpt2-xl", "my-accelerate", "torchrun.py", "./train"])
def test_a_script_or_a_model_is_no_command(word: str) -> None:
    assert not is_command(word)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("python", "python train.py"),
        ("python -c pass", "python train.py"),
        ("python no.py", "no.py"),
        ("python - train.py", "python train.py"),
        ("A=1", "accelerate launch"),
    ],
)
def test_what_is_no_training_is_refused_at_once(command: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        read_command(shlex.split(command))


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("accelerate env", "accelerate launch"),
        ("trl env", "write trl sft"),
        ("trl sft --output_dir out --dataset_name d --no_such_option 3", "--no_such_option"),
        ("accelerate launch --config_file no.yaml train.py", "no.yaml"),
        ("accelerate launch --config_file list.yaml train.py", "memkit check list.yaml"),
        ("env CUDA_VISIBLE_DEVICES=0,1 python train.py", "torchrun --nproc_per_node 2"),
        ("srun --nodes=1 --ntasks-per-node=4 python train.py", "srun torchrun"),
        ("torchrun --no-such-option train.py", "--no-such-option"),
        ("torchrun --nnodes 1:4 train.py", "1:4"),
        ("torchrun --nproc_per_node 2 no.py", "no.py"),
        (f"accelerate launch --config_file {YAML}/zero3.yaml --cpu train.py", "ACCELERATE_USE_CPU"),
        ("torchrun --nproc_per_node cpu train.py", "ACCELERATE_USE_CPU"),
        ("deepspeed --no_python train.py", "--no_python"),
        ("accelerate launch --num_machines 3 --num_processes 6 train.py", "--machine_rank"),
        ("accelerate launch --help", "starts no training"),
        ("accelerate launch --num_processes 2 --dynamo_backend inductor train.py", "ACCELERATE_DYNAMO_BACKEND"),
    ],
)
@pytest.mark.slow
def test_what_a_launcher_refuses_or_memkit_does_not_predict_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, named: str
) -> None:
    monkeypatch.chdir(folder)
    Path("train.py").write_text("open('ran', 'w')")
    Path("list.yaml").write_text("- distributed_type: NO\n")
    assert main(["predict", "--gpu", "T4", "--", *shlex.split(command)]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("memkit: error: ") and named in last and not Path("ran").exists()


@pytest.mark.parametrize(("option", "number"), [("--gpus", "4"), ("--nodes", "2")])
def test_numbers_that_contradict_the_command_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, number: str
) -> None:
    monkeypatch.chdir(folder)
    Path("train.py").touch()
    words = ["--", "python", "train.py"]
    assert main(["predict", "--gpu", "T4", option, number, *words]) == 2
    assert f"{option} {number}" in capsys.readouterr().err


SCRIPT: Final = """
import sys
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

arguments, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000, n_positions=64))
rows = [{"input_ids": [1] * 64, "labels": [1] * 64}] * 64
Trainer(model, arguments, train_dataset=rows).train()
"""
OWN: Final = ("--output_dir", "out", "--report_to", "none", "--max_steps", "2", "--save_strategy", "no")
JSON: Final = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}  # fmt: skip


@pytest.mark.slow
def test_zero_3_by_accelerates_yaml_is_that_of_a_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would notice: an answer for plain replicas, or for another stage, precision or number of GPUs."""
    monkeypatch.chdir(folder)
    Path("train.py").write_text(SCRIPT)
    Path("ds.json").write_text(json.dumps(JSON))

    def predicted(*words: str) -> dict[str, Any]:
        assert main(["predict", "--gpu", "T4", "--ram", "128GB", "--json", "--no-search", *words, *OWN, "--bf16"]) == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    launched = predicted("--", "accelerate", "launch", "--config_file", f"{YAML}/zero3.yaml", "train.py")
    named = ["--", "accelerate", "launch", "--config_file", f"{YAML}/zero3.yaml", "train.py", *OWN, "--bf16"]
    little = psutil.virtual_memory()._replace(total=2 * 2**30, available=2**30)
    with mock.patch("psutil.virtual_memory", lambda: little):  # of a machine that was not named
        assert main(["predict", "--gpu", "T4", "--no-search", *named]) == 0
    capsys.readouterr()
    given = predicted("--gpus", "8", "train.py", "--", "--deepspeed", "ds.json")
    plain = predicted("--gpus", "8", "train.py", "--")
    for key in ("peak_allocated_gib", "peak_reserved_gib", "phases", "categories"):
        assert launched[key] == given[key] != plain[key], key
    assert launched["request"]["gpus"] == given["request"]["gpus"] == 8


@pytest.mark.slow
def test_a_plan_keeps_the_users_launcher(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would notice: `torchrun train.py`, which trains without the DeepSpeed config of accelerate's YAML; fp16 that is
    left out, though Trainer's precision counts before the YAML's; advice for a JSON that there is not."""
    monkeypatch.chdir(folder)
    Path("train.py").write_text(SCRIPT)
    typed = f"accelerate launch --config_file {YAML}/zero3.yaml --num_processes 2"
    words = ["--", *shlex.split(typed), "train.py", *OWN, "--bf16"]
    assert main(["plan", "--gpu", "T4", "--ram", "128GB", "--limit", "0", "--json", "--write", "p.yaml", *words]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["launch"].endswith(f"{typed} train.py") and answer["gpus"] == 2
    assert "fp16" not in answer["left_out"] and "8-bit AdamW" in answer["left_out"]
    assert [each for each in answer["warnings"] if each.endswith("train with fp16=True instead of bf16=True")]
    text = Path("p.yaml").read_text()
    assert "memkit run --plan p.yaml -- " in text and f"{typed} train.py ARGUMENTS" in text
