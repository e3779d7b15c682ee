"""`--host` and `--nvme-path`: the speeds of the user's machine, and a disk that DeepSpeed may swap to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hf_memkit.catalog.hardware import described_machine
from hf_memkit.catalog.host_rates import GivenHost
from hf_memkit.cli.plan_options import read_host
from hf_memkit.common.errors import InputError
from hf_memkit.common.user_script import UserScript
from hf_memkit.plan.candidate_time import Speeds
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.make_plan import PlanRequest, plan_gpus
from hf_memkit.plan.pasted import pasted
from hf_memkit.plan.wording import notes
from tests.plan.made_plans import EIGHT_BITS, plan, setup

SCRIPT = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
config = GPT2Config(
    n_layer=2, n_embd=1024, n_head=8, vocab_size=10_000, n_positions=16, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)
rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 2
Trainer(GPT2LMHeadModel(config), args, train_dataset=rows).train()
"""
OWN = (
    "--output_dir", "out", "--fp16", "--optim", "adamw_torch", "--max_steps", "2", "--report_to", "none",
    "--per_device_train_batch_size", "1",
)  # fmt: skip
ALL = GivenHost(32, 200.0, 6.0, 3.0, 25.0)


def test_host_options_are_parsed() -> None:
    """Would notice: GiB read as GB, a list of which only the first item is read, refused blanks."""
    assert read_host(["cores=32, ram-bandwidth = 200GB/s,nvme-read=6 GB/s", "nvme-write=3000MB/s,pcie=25GB/s"]) == ALL
    assert read_host([], "/fast") == GivenHost(nvme_path="/fast")
    assert read_host(["pcie=10GiB/s"]).pcie_gb_per_s == pytest.approx(10.737, abs=1e-3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nvme-reed=6GB/s", "did you mean 'nvme-read'?"),
        ("ram=6GB/s", "did you mean 'ram-bandwidth'?"),
        ("cores=0", "--host cores=0: write a whole number of cores: cores=32"),
        ("cores=1.5", "write a whole number"),
        ("cores", "write a whole number"),
        ("cores=4,cores=8", "--host cores=8: cores given twice"),
        ("pcie=", "--host pcie=: write NAME=RATE, such as pcie=6GB/s"),
        ("pcie=25", "--host pcie: '25' has no unit of bytes a second"),
        ("pcie=25GB", "'25GB' is a size; write a rate: 25GB/s"),
        ("pcie=800Mbps", "'800Mbps' has no unit of bytes a second, such as GB/s or MB/s; 1 Gbit/s is 0.125GB/s"),
        ("pcie=16Gb/s", "is in bits; write bytes: 2GB/s"),
        ("pcie=0GB/s", "is not a rate; write a number above 0"),
        ("pcie=nan", "is not a rate"),
        ("pcie=-1GB/s", "is not a rate"),
    ],
)
def test_a_wrong_value_is_one_line(given: str, message: str) -> None:
    """Would notice: bits read as bytes, a rate of 0, an unknown name that is ignored."""
    with pytest.raises(InputError) as error:
        read_host([given])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_only_a_folder_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in ((" ", "empty; give a folder"), (str(tmp_path / "file"), "a file; give a folder")):
        with pytest.raises(InputError, match=message):
            read_host([], path)


def test_given_speeds_override_assumed_ones() -> None:
    """Would notice: a given value without effect, or one that changes another value."""
    machine = described_machine("RTX 4090", None, None, None)
    before, after = Speeds.of(machine), Speeds.of(machine, ALL)
    assert before.rates is not None and after.rates is not None
    assert (after.host.cores, after.host.ram_gb_per_s.value, after.rates.pcie_gb_per_s.value) == (32, 200, 25)
    assert after.host.knows_disk and not before.host.knows_disk
    assert replace(after.rates, pcie_gb_per_s=before.rates.pcie_gb_per_s) == before.rates
    assert Speeds.of(machine, GivenHost(cores=3)).host.ram_gb_per_s == before.host.ram_gb_per_s


def setup_on_disk(seconds: float | None) -> Judgement:
    judgement = setup(8, 1, 2.0, seconds)
    assert judgement.prediction is not None
    return replace(judgement, prediction=replace(judgement.prediction, disk_bytes=10**9, host_rss_bytes=10**9))


def test_a_disk_without_a_speed_is_proposed_only_where_nothing_else_fits() -> None:
    """Would notice: a setup that swaps to a disk of unknown speed proposed because it needs least memory."""
    swapped, other = setup_on_disk(None), setup(4, 2, 10.0, None)
    assert plan(setup(8, 1, 40.0, 1.0), swapped, other).proposed is other
    near = setup(8, 1, 10.0, 1.0, EIGHT_BITS)
    assert plan(setup(8, 1, 40.0, 1.0), swapped, near).proposed is near
    assert plan(setup(8, 1, 40.0, 1.0), swapped).proposed is swapped
    assert plan(setup(8, 1, 40.0, 1.0), setup_on_disk(5.0), other).proposed is not other


@pytest.mark.slow
def test_with_its_speed_a_disk_has_a_time_and_the_real_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans a script whose states do not fit the GPU. Would notice: a given rate without effect or without a source; a
    placeholder in a command or file; free space checked in a folder that is not here."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(f"open('log.txt', 'a').write('planned')\n{SCRIPT}")
    Path("log.txt").write_text("earlier")
    machine, host = described_machine("T4", "1000MiB", "64GB", None), replace(ALL, nvme_path="/not here")
    (made,) = plan_gpus(UserScript.at("train.py", OWN), [machine], PlanRequest(host=host))
    disk = (each for each in made.traced if "zero3-infinity" in each.candidate.name)
    swapped = min(disk, key=lambda each: not each.fits)
    assert swapped.fits and swapped.swaps and swapped.is_priced and swapped.step_time is not None
    assert swapped.steps_on_cpu and not made.own.steps_on_cpu, "torchrun would give its optimizer one thread"
    assert any("no such folder here" in note for note in made.notes) and "zero3-infinity" not in made.left_out
    assert Path("log.txt").read_text() == "earlierplanned"
    assert sum("line 1: changes log.txt;" in note for note in made.notes) == 1
    read = 16 * 35e6 / 6e9
    assert swapped.seconds is not None and read < swapped.seconds
    basis = " ".join(swapped.step_time.rests_on)
    assert "32 cores, RAM 200 GB/s, NVMe reads 6 GB/s, NVMe writes 3 GB/s, PCIe 25 GB/s" in basis
    assert "written at 3 GB/s (given by --host)" in basis
    assert any("the machine of --host" in line for line in notes(made))
    first = pasted(swapped.candidate).before[0]
    assert first == "memkit ds copy zero3-infinity --nvme-path '/not here'"
    config = swapped.candidate.overrides.arguments["deepspeed"]["zero_optimization"]
    assert {config[part]["nvme_path"] for part in ("offload_optimizer", "offload_param")} == {"/not here"}
