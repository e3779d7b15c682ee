"""A recipe resolved, rehearsed and exported for several processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hf_memkit.catalog.hardware import Machine
from hf_memkit.common.units import GIB
from hf_memkit.recipes.export import export_script, start_command
from hf_memkit.recipes.rehearse import rehearse
from hf_memkit.recipes.schema import Recipe
from hf_memkit.run.folder import RecipeRun
from hf_memkit.run.training import mistakes_of_target
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup
from tests.recipes.resolving import resolve


def make(recipe: Recipe, machine: Machine, variant: str, gpus: int, nodes: int = 1) -> Setup:
    request = Request(variant=variant, gpus=gpus, nodes=nodes, output="out")
    return resolve(recipe, machine, request, use_hub=False)


@pytest.mark.parametrize(
    ("variant", "held"),
    [
        ("lora", "every GPU holds all weights, gradients and optimizer states, and trains on 1/8"),
        ("offload", "all weights on the GPU, and 1/8 of the gradients and optimizer states in RAM (ZeRO-2)"),
        ("infinity", "1/8 of the weights on disk, and 1/8 of the gradients and optimizer states on disk (ZeRO-3)"),
    ],
)
def test_the_setup_says_what_each_gpu_and_machine_holds(
    recipe: Recipe, machine: Machine, variant: str, held: str
) -> None:
    setup = resolved = make(recipe, machine, variant, gpus=4, nodes=2)
    notes = "\n".join(setup.notes)
    assert held in notes
    assert "counted for one machine with its 4 processes" in notes and "that all 2 machines see" in notes
    arguments = setup.arguments
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * 8 == 32
    reason = next(s.reason for s in setup.settings if s.key == "arguments.gradient_accumulation_steps")
    assert "× 8 processes = 32 sequences a step" in reason
    assert setup["environment.OMP_NUM_THREADS"] == "2"
    assert (resolved.resolved_for.gpus, resolved.resolved_for.nodes) == (4, 2)


@pytest.mark.parametrize(("variant", "trained_bytes"), [("resident", 2), ("lora", 4)])
def test_gpus_that_hold_everything_also_hold_buckets(
    recipe: Recipe, machine: Machine, variant: str, trained_bytes: int
) -> None:
    one, two = (make(recipe, machine, variant, gpus) for gpus in (1, 2))
    assert "arguments.ddp_find_unused_parameters" not in one
    assert two["arguments.ddp_find_unused_parameters"] is False
    rows = {row.term: row.size_bytes for row in two.ledger.rows}
    gradients = sum(row.size_bytes for row in one.ledger.rows if row.category == "gradients")
    assert rows["gradient buckets of DistributedDataParallel"] == gradients
    assert gradients % trained_bytes == 0
    assert two.ledger.total_bytes("device") == one.ledger.total_bytes("device") + gradients
    host = one.ledger.total_bytes("host"), two.ledger.total_bytes("host")
    assert host[1] == 2 * host[0]


def test_zero_splits_what_it_splits(recipe: Recipe, machine: Machine) -> None:
    ram = [make(recipe, machine, "offload", 1, nodes).ledger.total_bytes("host", "pinned") for nodes in (1, 4)]
    assert ram[1] < 0.6 * ram[0]
    disk = [make(recipe, machine, "infinity", 1, nodes).ledger.total_bytes("disk") for nodes in (1, 4)]
    assert disk[1] == pytest.approx(disk[0] / 4, rel=0.01)


@pytest.mark.parametrize("processes", [1, 2, 8, 16])
def test_the_rehearsal_accumulates_as_the_target_does_with_any_number_of_processes(
    recipe: Recipe, machine: Machine, processes: int
) -> None:
    """A recipe of 48 sequences a step can be shared by all of these."""
    whole = recipe.model_copy(update={"sequences_per_step": 48})
    resolved = make(whole, machine, "resident", processes)
    setup = rehearse(whole, resolved).setup
    arguments = setup.arguments
    accumulates = resolved["arguments.gradient_accumulation_steps"] > 1
    assert accumulates == (processes < 3), "16 sequences a GPU and step are one micro-batch"
    assert arguments["gradient_accumulation_steps"] == (2 if accumulates else 1)
    assert arguments["per_device_train_batch_size"] == max(1, (4 if accumulates else 8) // processes)
    assert ("arguments.ddp_find_unused_parameters" in setup) == (processes > 1)
    tokens = arguments["per_device_train_batch_size"] * setup["data.sequence_length"]
    assert setup["model_parts.chunked_loss"]["chunk_tokens"] == tokens / 4


@pytest.mark.parametrize("variant", ["infinity", "lora"])
def test_an_exported_script_says_how_to_launch_it(
    recipe: Recipe, machine: Machine, tmp_path: Path, variant: str
) -> None:
    resolved = make(recipe, machine, variant, gpus=2)
    job = RecipeRun(recipe.name, variant, resolved, gpus=2)
    export_script(job, tmp_path / "job")
    args = (tmp_path / "job" / "args.yaml").read_text()
    assert "\n# Run:    torchrun --standalone --nproc-per-node 2 train_text.py\n" in args
    assert "CUDA_VISIBLE_DEVICES" not in args and "MASTER_ADDR" not in args
    assert (tmp_path / "job" / "process_group.py").exists()
    several = start_command(replace(job, nodes=2), "train_text.py")
    assert several.startswith("torchrun --nnodes 2 --node-rank 0 --master-addr ADDRESS_OF_MACHINE_0 --nproc-per-node")


def test_a_run_file_keeps_the_processes(recipe: Recipe, machine: Machine) -> None:
    job = RecipeRun("r", "lora", make(recipe, machine, "lora", gpus=2), gpus=2, nodes=2)
    assert RecipeRun.from_json(job.to_json()).processes == 4
    before = {key: value for key, value in job.to_json().items() if key not in ("gpus", "nodes")}
    assert RecipeRun.from_json(before).processes == 1  # a run file of an earlier memkit


def test_a_shortage_is_reported_once(recipe: Recipe, machine: Machine) -> None:
    """By the setup, which counts activations and processes too, and not again by the checks."""
    resolved = make(recipe, machine.with_ram(16 * GIB), "offload", gpus=1)
    assert any("GiB of RAM; " in problem for problem in resolved.problems)
    assert not mistakes_of_target(resolved)
