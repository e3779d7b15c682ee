"""`memkit run` of a recipe's folder: what it trains, and what it refuses. Ctrl-C, resume and ranks: tests/engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from hf_memkit.cli.run_folder import LastingStream
from hf_memkit.deepspeed.wiring import DeepSpeedWiring
from hf_memkit.measuring.memory.cgroup import process_start_ticks
from hf_memkit.run.folder import RecipeRun, folder_of, written_run
from tests.conftest import ROOT, Memkit, Quick
from tests.measuring.report import synthetic_records as made

RUN = {"recipe": "r", "variant": "lora", "status": "written", "setup": {}, "files": ["train_text.py"]}
SHORT = ("recipe", "gpt2-on-16gb", "--variant", "lora", "--max-steps", "2")


@pytest.fixture
def job(memkit_here: Quick, tmp_path: Path, text_file: Path) -> Path:
    exported = memkit_here(*SHORT, "--data", str(text_file), "--export", "job")
    assert exported.returncode == 0, exported.stderr
    return tmp_path / "job"


def change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))


def change_arguments(job: Path, section: str, **values: Any) -> None:
    path = job / "args.yaml"
    content = yaml.safe_load(path.read_text())
    content[section].update(values)
    path.write_text(yaml.safe_dump(content))


@pytest.mark.slow
def test_it_trains_as_the_recipe_does(quick_memkit: Quick, tmp_path: Path, text_file: Path, job: Path) -> None:
    """And as its owner has changed it: another number of steps."""
    recipe = quick_memkit(*SHORT, "--data", str(text_file), "--output", "recipe", "--json")
    folder = quick_memkit("run", "job/train_text.py", "--json")
    assert recipe.returncode == folder.returncode == 0, recipe.stderr[-2000:] + folder.stderr[-2000:]
    ours, its = json.loads(folder.stdout), json.loads(recipe.stdout)
    assert ours.keys() == its.keys() and ours["blocks_sha256"] == its["blocks_sha256"]
    for name in ("held_out_loss_before", "held_out_loss", "unigram_loss", "steps", "recomputed_layers", "engine"):
        assert ours["result"][name] == its["result"][name], name
    assert ours["target_prediction"] == its["target_prediction"] and ours["not_rehearsed"] == its["not_rehearsed"]
    assert {path.name for path in job.iterdir()} >= {path.name for path in (tmp_path / "recipe").iterdir()}

    change_arguments(job, "arguments", max_steps=1, eval_steps=1)
    refused = quick_memkit("run", "job")
    assert refused.returncode == 2 and "has a finished run. Add --overwrite" in refused.stderr
    again = quick_memkit("run", "job", "--overwrite")
    assert again.returncode == 0 and "1 steps of 8 read them" in again.stdout, again.stderr[-2000:]
    assert "Done: 1 steps" in again.stdout and "This was a REHEARSAL" in again.stdout
    assert not (job / "checkpoint-2").exists(), "of the run before"


@pytest.mark.slow
def test_what_the_script_has_trained_alone_is_not_lost(quick_memkit: Quick, job: Path) -> None:
    change_arguments(job, "arguments", save_steps=1)
    script = [sys.executable, "train_text.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(script, cwd=job, env=environment, check=True, capture_output=True, timeout=600)
    before = {path: path.read_bytes() for path in job.rglob("*.safetensors")}
    assert {path.parent.name for path in before} == {"model", "checkpoint-1", "checkpoint-2"}
    refused = quick_memkit("run", "job")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert "job: has checkpoint-1, checkpoint-2, model" in refused.stderr
    assert "memkit run job --resume" in refused.stderr and "--overwrite" in refused.stderr
    assert {path: path.read_bytes() for path in job.rglob("*.safetensors")} == before

    change_arguments(job, "arguments", max_steps=3, eval_steps=3)
    resumed = quick_memkit("run", "job", "--resume")
    assert resumed.returncode == 0 and "Continuing from job/checkpoint-2" in resumed.stdout, resumed.stderr[-2000:]
    assert "Done: 1 more steps, 3 in total" in resumed.stdout and "starts from random weights" not in resumed.stdout
    assert json.loads((job / "memkit-run.json").read_text())["result"]["steps_run"] == 1


def test_an_impossible_run_is_refused_in_a_line_and_changes_nothing(memkit_here: Quick, job: Path) -> None:
    before = {path.name: path.read_bytes() for path in job.iterdir()}
    for words, expected in (
        (["job", "--resume"], "nothing has run in job yet"),
        (["job", "--gpus", "2"], "job: its batch and checkpoints are for 1 processes. Add --gpus 1"),
        (["--records", "elsewhere", "job"], "--records: only for a script. Change job/args.yaml"),
        (["job", "--", "--learning_rate", "1"], "arguments: only for a script"),
        (["--resume", "job/job.py"], "--resume: only for a folder that memkit recipe wrote"),
    ):
        ran = memkit_here("run", *words)
        assert ran.returncode == 2 and ran.stderr.startswith("memkit: error: ") and expected in ran.stderr, ran.stderr
    assert {path.name: path.read_bytes() for path in job.iterdir()} == before

    started = psutil.Process().create_time()
    host = made.hosted_here(
        pid=os.getpid(), process_started=started, process_start_ticks=process_start_ticks(os.getpid())
    )
    made.write(job, made.healthy(5, host=host)[:-1])  # of a process that lives, without an end
    for option in ("--resume", "--overwrite"):
        ran = memkit_here("run", "job", option)
        assert ran.returncode == 2 and "job: a training goes on there" in ran.stderr, ran.stderr

    (job / "args.yaml").write_text("[")
    assert "args.yaml: cannot be read" in memkit_here("run", "job").stderr
    (job / "memkit-run.json").write_text("{")
    assert "memkit-run.json is damaged" in memkit_here("run", "job").stderr


def test_a_training_outlives_the_reader_of_its_output() -> None:
    """Would notice: a training that `| head` or a lost connection ends, without a checkpoint."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        stream = LastingStream(pipe)
        os.close(read)
        for _ in range(2):
            print("step", file=stream, flush=True)
        assert stream.fileno() == write and not stream.isatty()


def test_a_folder_for_a_gpu_is_refused_where_it_does_not_fit(memkit_here: Quick, tmp_path: Path) -> None:
    asked = ("recipe", "gpt2-on-16gb", "--variant", "resident", "--gpu", "RTX 4090", "--export", "job")
    assert memkit_here(*asked).returncode == 0
    assert memkit_here(*asked[:-1], "random", "--random-weights").returncode == 0
    made = [yaml.safe_load((tmp_path / name / "args.yaml").read_text())["model"] for name in ("job", "random")]
    assert ["architecture" in model for model in made] == [False, True]
    ran, path = memkit_here("run", "job"), tmp_path / "job" / "memkit-run.json"
    assert ran.returncode == 1 and "this setup needs a GPU" in ran.stderr
    content = json.loads(path.read_text())
    assert content["status"] == "written" and content["prediction"]["verdict"] == "fits"
    too_much = {"category": "optimizer", "term": "swapped", "gib": 1e6, "phase": None, "source": "made up"}
    change(path, setup={**content["setup"], "ledger": {"disk": [too_much]}})
    ran = memkit_here("run", "job")
    assert ran.returncode == 1 and "job: needs 1000000" in ran.stderr and "GiB of disk; " in ran.stderr


def test_files_in_the_folder_count(memkit_here: Quick, tmp_path: Path) -> None:
    """Would notice: a run that goes by the settings of the export, or takes what stands there for a script alone."""
    asked = ("recipe", "gpt2-on-16gb", "--variant", "infinity", "--gpu", "RTX 4090", "--export", "job")
    assert memkit_here(*asked).returncode == 0
    job = tmp_path / "job"
    unchanged, content = written_run(job)
    exported = RecipeRun.from_json(content)
    assert exported.setup["deepspeed.config"]["zero_optimization"]["offload_optimizer"]["nvme_path"] == "job/nvme"
    assert exported.setup.ledger.total_bytes("disk") > 1e9, "a run asks the disk for so much"
    both = [*unchanged.setup.settings, *exported.setup.settings]
    others = {each.key for each in both if both.count(each) == 1}
    assert others == {"arguments.output_dir", "environment.CUDA_VISIBLE_DEVICES", "model.origin"}
    assert unchanged.setup["model.origin"] == "hub", "the hub was not asked here, and the script will ask it"

    change_arguments(job, "arguments", per_device_train_batch_size=1)
    change_arguments(job, "environment", NCCL_P2P_DISABLE=1, RANK="1")
    config = json.loads((job / "ds_config.json").read_text())
    change(job / "ds_config.json", zero_optimization={**config["zero_optimization"], "sub_group_size": 1000})
    changed = written_run(job)[0].setup
    assert changed.micro_batch_size == 1 and changed["environment.NCCL_P2P_DISABLE"] == 1
    assert "environment.RANK" not in changed and changed["arguments.output_dir"] == str(job)
    assert changed.zero["sub_group_size"] == 1000 and changed.zero.keys() == exported.setup.zero.keys()


def test_which_paths_are_a_recipe_s_folder(tmp_path: Path) -> None:
    (tmp_path / "memkit-run.json").write_text(json.dumps({**RUN, "files": ["train_text.py", "job.py"]}))
    assert folder_of(tmp_path) is None, "no args.yaml"
    (tmp_path / "args.yaml").write_text("")
    assert folder_of(tmp_path) == folder_of(tmp_path / "train_text.py") == tmp_path
    assert folder_of(tmp_path / "own.py") is None and folder_of(tmp_path / "none") is None


def test_a_user_s_script_keeps_its_words(memkit: Memkit, tmp_path: Path) -> None:
    """Finds: an option of folders that is taken from a script, or refused there; a folder among its arguments."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memkit-run.json").write_text(json.dumps(RUN))
    (tmp_path / "job" / "args.yaml").write_text("")
    (tmp_path / "own.py").write_text("import sys; print(*sys.argv[1:])")
    words = ["--resume", "--gpus", "4", "--model", "job"]
    assert memkit("run", "own.py", *words).stdout.split() == words


def test_a_script_alone_refuses_a_resume_from_nvme() -> None:
    engine: Any = SimpleNamespace(
        zero_nvme_offload_optimizer=lambda: True, zero_optimization_partition_weights=lambda: False
    )

    def step(at: int) -> None:
        wiring = DeepSpeedWiring(lambda: engine)
        wiring.on_train_begin(None, None, None)
        for number in (at, at + 1):
            wiring.on_step_begin(SimpleNamespace(output_dir="job"), SimpleNamespace(global_step=number), None)

    step(0)
    with pytest.raises(SystemExit, match="memkit run job --resume"):
        step(4)
    engine.memkit_restored = True
    step(4)
