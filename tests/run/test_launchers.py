"""`memkit run` under the real launchers, two ranks on the CPU, by the commands of docs/your-script.md: what each rank
sees, computes and ends with is what it is without memkit."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.deepspeed import ops
from hf_memkit.measuring.memory.records import read_records, steps
from tests.fewer import some
from tests.run.conftest import HERE, Ended, Started

pytestmark = pytest.mark.slow

LAUNCHERS = {
    "torchrun": "torchrun --standalone --nproc_per_node 2 -m",
    "accelerate": "accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 -m",
    "deepspeed": "deepspeed --num_gpus 2 --master_port {port} --module",
    "deepspeed without --local_rank": "deepspeed --num_gpus 2 --master_port {port} --no_local_rank --module",
    "accelerate with deepspeed": "accelerate launch --use_deepspeed --deepspeed_config_file zero2.json "
    "--num_processes 2 --main_process_port 0 -m",
}
"""Each up to the module that it launches. `accelerate launch --cpu` starts one process for any number
(accelerate 1.15.0: commands/launch.py, `simple_launcher`)."""

MEMKIT = ("hf_memkit", "run")
PAGE = "memory-report.html"
Launch = Callable[..., Ended]
Losses = list[list[str]]


@pytest.fixture(scope="module")
def launch() -> Launch:
    def launched(folder: Path, launcher: str, *command: str) -> Ended:
        """A script, or where the command begins with `MEMKIT` memkit as a module."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            name, *options = LAUNCHERS[launcher].format(port=free.getsockname()[1]).split()
        if command[:2] != MEMKIT:
            options.pop()
        program = shutil.which(name, path=str(Path(sys.executable).parent))
        assert program is not None, name
        # Engines use the operators that memkit has built.
        variables = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(ops.extensions_folder(cpu=True))}
        return Started([program, *options, *command], folder, variables).ended()

    return launched


SEES = """
import json, os, sys, time
from pathlib import Path
import shows_itself

rank, out = os.environ["RANK"], sys.argv[-1]
Path(f"{out}-{rank}.tmp").write_text(json.dumps(shows_itself.sees()))
Path(f"{out}-{rank}.tmp").rename(f"{out}-{rank}.json")
while len(list(Path().glob(f"{out}-*.json"))) < 2:
    time.sleep(0.01)
sys.exit({"0": 0, "1": 3}[rank])
"""


def seen(folder: Path, out: str, rank: int) -> dict[str, Any]:
    """But for what is another in every run."""
    result: dict[str, Any] = json.loads((folder / f"{out}-{rank}.json").read_text())
    result["argv"][-1] = "out"
    variables = result["environment"].items()
    result["environment"] = {
        name: value for name, value in variables if name != "MASTER_PORT" and not name.startswith("TORCHELASTIC_")
    }
    return result


@pytest.mark.parametrize(
    "launcher",
    some([name for name in LAUNCHERS if " with " not in name], "torchrun", "deepspeed without --local_rank"),
)
def test_each_rank_sees_what_it_sees_without_memkit_and_fails_as_it_fails(
    launch: Launch, script: Callable[[str], Path], tmp_path: Path, launcher: str
) -> None:
    """Finds: a launcher's argument that is lost, moved or memkit's to parse, its variables changed, an exit code of a
    rank that it does not hear of."""
    script("shows_itself.py")
    (tmp_path / "sees.py").write_text(SEES)
    plain = launch(tmp_path, launcher, "sees.py", "--lr", "1", "plain")
    memkit = launch(tmp_path, launcher, *MEMKIT, "sees.py", "--", "--lr", "1", "memkit")
    for rank in (0, 1):
        assert seen(tmp_path, "memkit", rank) == seen(tmp_path, "plain", rank)
    given = ["--local_rank=1"] if launcher == "deepspeed" else []
    assert seen(tmp_path, "memkit", 1)["argv"] == ["sees.py", *given, "--lr", "1", "out"]
    assert memkit.code == plain.code == (3 if "deepspeed" in launcher else 1), memkit.err


@pytest.fixture(scope="module")
def losses(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Of each rank without memkit. All launchers start the same training."""
    return without_memkit(launch, tmp_path_factory.mktemp("plain"), "torchrun", "ranks", "out", "2")


@pytest.fixture(scope="module")
def losses_with_engine(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    return without_memkit(launch, tmp_path_factory.mktemp("plain"), "deepspeed", "deepspeed", "out", "zero2.json")


def without_memkit(launch: Launch, folder: Path, launcher: str, *how: str) -> Losses:
    plain = launch(made(folder), launcher, "trains.py", *how)
    assert plain.code == 0, plain.err
    return [json.loads((folder / f"out-{rank}.json").read_text())["losses"] for rank in (0, 1)]


def made(folder: Path) -> Path:
    shutil.copy(HERE / "trains.py", folder)
    (folder / "zero2.json").write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}')
    return folder


def check_two_ranks(memkit: Ended, folder: Path, expected: Losses) -> None:
    assert memkit.code == 0, memkit.err
    for rank in (0, 1):
        result = json.loads((folder / f"out-{rank}.json").read_text())
        assert result["losses"] == expected[rank] and len(result["losses"]) == 3
        assert len(steps(read_records(folder / "here" / f"memory-rank{rank}.jsonl"))) == 3
    assert [path.parent.name for path in folder.rglob(PAGE)] == ["here"]
    assert memkit.err.count("Finished after step 3") == memkit.err.count("Page: ") == 1 and "2 ranks" in memkit.err


@pytest.mark.parametrize("launcher", some(["torchrun", "accelerate", "deepspeed"], "accelerate"))
def test_two_ranks_train_as_they_do_without_memkit(
    launch: Launch, losses: Losses, tmp_path: Path, launcher: str
) -> None:
    """Finds: a bit of a loss, a rank without records, a summary or page by each rank, `--records` ignored, a rank that
    trains without the plan, a line by each rank, ranks that are no GPUs."""
    plan = {"about": {"sequences_a_step": 8, "gpus": 2}, "arguments": {"gradient_accumulation_steps": 2}}
    (made(tmp_path) / "plan.yaml").write_text(json.dumps(plan))
    options = ("--plan", "plan.yaml", "--records", "here")
    memkit = launch(tmp_path, launcher, *MEMKIT, *options, "trains.py", "--", "ranks", "out")
    check_two_ranks(memkit, tmp_path, losses)
    assert [line for line in memkit.err.splitlines() if "plan.yaml" in line] == [
        "memkit: plan.yaml: gradient_accumulation_steps: 1 → 2",
        "memkit: warning: plan.yaml: made for 8 sequences a step, but the script has 2 × 1 × 2 GPUs = 4: the plan "
        "changes the batch size",
    ]


SHARDS = """
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from hf_memkit.components.fsdp2_on_cpu import trainer_options

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50, use_cache=False,
))
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64
if args.logging_strategy == "no":
    trainer_options(model=model, processing_class=None, arguments=args)
trainer = Trainer(model, args, train_dataset=rows)
trainer.train()
if trainer.is_fsdp_enabled:
    plugin, weight = trainer.accelerator.state.fsdp_plugin, model.lm_head.weight.to_local()
    print("shard", *weight.shape, plugin.reshard_after_forward, plugin.activation_checkpointing)
"""


@pytest.mark.parametrize("launcher", some(["torchrun", "accelerate"], "torchrun"))
def test_a_plan_of_fsdp2_reaches_its_shards(launch: Launch, tmp_path: Path, launcher: str) -> None:
    """Finds: settings of a plan that no shard has, or that Trainer refuses; without a GPU, a plan for shards and a run
    without any that says nothing."""
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    settings = {
        "per_device_train_batch_size": 4,
        "fsdp": True,
        "fsdp_config": {**config, "reshard_after_forward": False, "activation_checkpointing": True},
        "activation_checkpointing": False,
    }
    (tmp_path / "plan.yaml").write_text(json.dumps({"arguments": settings}))
    (tmp_path / "shards.py").write_text(SHARDS)
    flags = "--output_dir out --max_steps 2 --save_strategy no --report_to none --use_cpu --fsdp"
    own = [*flags.split(), "--fsdp_config", json.dumps(config)]
    command = (*MEMKIT, "--plan", "plan.yaml", "shards.py", "--", *own)

    sharded = launch(tmp_path, launcher, *command, "--logging_strategy", "no")
    assert sharded.code == 0, sharded.err
    assert sharded.out.count("shard 25 16 False True") == 2, "half of 50 rows"
    assert "no effect" not in sharded.err and "sharded by FSDP2, on 2 ranks" in sharded.err

    whole = launch(tmp_path, launcher, *command)
    assert whole.code == 0, whole.err
    assert "plan.yaml: fsdp: no effect: accelerate shards on GPUs only" in whole.err


@pytest.mark.operators
@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        pytest.param("deepspeed", ["deepspeed", "out", "zero2.json"], marks=pytest.mark.exhaustive),
        ("accelerate with deepspeed", ["ranks", "out"]),
    ],
)
def test_two_ranks_train_with_an_engine_as_they_do_without_memkit(
    launch: Launch, losses_with_engine: Losses, tmp_path: Path, launcher: str, how: list[str]
) -> None:
    """Finds: a launcher's variables that are taken for one process's, an engine that the launcher alone names."""
    memkit = launch(made(tmp_path), launcher, *MEMKIT, "--records", "here", "trains.py", "--", *how)
    check_two_ranks(memkit, tmp_path, losses_with_engine)
    assert "one process" not in memkit.err
