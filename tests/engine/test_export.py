"""`--export`: a script that passes a linter, reads args.yaml, and runs on its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hf_memkit.catalog.hardware import Machine
from hf_memkit.deepspeed import ops
from hf_memkit.recipes.export import export_script
from hf_memkit.recipes.schema import Recipe
from hf_memkit.run.folder import RecipeRun
from hf_memkit.setup.request import Request
from tests.conftest import ROOT, Quick, read_json_lines
from tests.recipes.resolving import resolve

EVERY = {"train_text.py", "job.py", "rows.py", "text_rows.py", "args.yaml", "memkit-run.json"}
EVERY |= {"resuming.py", "stopping.py", "verify_checkpointing.py"}
LOSS = {"chunked_loss.py", "chunked_loss_logits.py", "chunked_loss_sum.py"}
ENGINE = {"ds_config.json", "process_group.py"}
FILES = {
    "resident": EVERY | LOSS | {"low_bit_adamw.py"},
    "offload": EVERY | LOSS | ENGINE,
    "infinity": EVERY | ENGINE | {"deepspeed_wiring.py"},
    "lora": EVERY | LOSS,
}


@pytest.mark.alone
@pytest.mark.operators
def test_two_processes_on_deepspeed(quick_memkit: Quick, tmp_path: Path, text_file: Path) -> None:
    """On a CPU the script itself starts DeepSpeed's communication, and leaves it at the end."""
    asked = ["recipe", "gpt2-on-16gb", "--variant", "offload", "--gpus", "2", "--data", str(text_file)]
    exported = quick_memkit(*asked, "--max-steps", "2", "--export", "job")
    assert exported.returncode == 0, exported.stderr
    assert "torchrun --standalone --nproc-per-node 2 job/train_text.py" in exported.stdout
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = _run([*launcher, "job/train_text.py"], tmp_path)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
    for rank in (0, 1):
        last = read_json_lines(tmp_path / "job" / f"memory-rank{rank}.jsonl")[-1]
        assert last["kind"] == "end" and last["status"] == "finished" and last["steps"] == 2


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    # As in an activated environment: another ninja would build everything again.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment["TORCH_EXTENSIONS_DIR"] = str(ops.extensions_folder(cpu=True))  # operators that other tests have built
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "variant", ["resident", "infinity", *(pytest.param(name, marks=pytest.mark.slow) for name in ("offload", "lora"))]
)
def test_scripts_for_a_gpu_are_written_anywhere(memkit_here: Quick, tmp_path: Path, variant: str) -> None:
    asked = ["recipe", "gpt2-on-16gb", "--variant", variant, "--gpu", "RTX 4090", "--export", "job", "--json"]
    exported = memkit_here(*asked)
    assert exported.returncode == 0, exported.stderr
    job = tmp_path / "job"
    assert Path(json.loads(exported.stdout)["files"][0]).name == "train_text.py"
    assert {path.name for path in job.iterdir()} == FILES[variant]
    script = (job / "train_text.py").read_text()
    assert script.count("hf_memkit") == 1, "the script needs memkit for more than its callback"
    assert "hf_memkit" not in (job / "job.py").read_text() and "attach(trainer)" in script
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "119", "--select", "B,E,F,W", "."]
    lint = subprocess.run(ruff, cwd=job, capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout
    again = memkit_here(*asked)
    assert again.returncode == 2 and "train_text.py" in again.stderr
    text = (job / "args.yaml").read_text()
    assert all(line.startswith("#") for line in text.splitlines()[:4])
    args = yaml.safe_load(text)
    assert args["model"]["name"] == "openai-community/gpt2-xl" and args["model"]["dtype"] == "bfloat16"
    assert "architecture" not in args["model"], "the real model's weights"
    assert "use_cpu" not in args["arguments"]
    assert args["data"]["hub_id"] and args["data"]["tokenizer"] == args["model"]["name"]
    reasons = [line for line in text.splitlines() if line.startswith("  # ")]
    assert len(reasons) > 20, "every value stands under its reason"


def test_random_weights_need_nothing_of_the_hub(recipe: Recipe, machine: Machine, tmp_path: Path) -> None:
    """Defect, seen on a GPU without network: the script asked the hub for the tokenizer of the model it makes up."""
    setup = resolve(recipe, machine, Request(variant="lora"), use_hub=False)
    setup = setup.put("model.random_weights", True, "--random-weights")
    export_script(RecipeRun(recipe.name, "lora", setup), tmp_path / "job")
    args = yaml.safe_load((tmp_path / "job" / "args.yaml").read_text())
    assert args["model"]["architecture"]["n_layer"] == 48 and "name" not in args["model"]
    assert args["data"]["tokenizer"] is None and args["data"]["vocabulary_size"] == 50257
