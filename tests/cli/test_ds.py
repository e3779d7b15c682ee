"""`memkit ds`, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hf_memkit.cli import main
from hf_memkit.common import resources
from hf_memkit.common.units import parse_size
from tests.conftest import ROOT, Quick

FOR_16_GB = ("--model", "gpt2-xl", "--gpu-memory", "16GB", "--ram", "32GB", "--nvme-path")


@pytest.mark.slow
def test_list_and_show_tell_what_each_saves_and_costs(memkit_here: Quick) -> None:
    listed = json.loads(memkit_here("ds", "list", "--json").stdout)
    assert [entry["name"] for entry in listed] != [] and {e["name"] for e in listed} == set(
        resources.names("ds_configs")
    )
    text = memkit_here("ds", "list").stdout
    assert all(entry["name"] in text for entry in listed) and "saves" in text and "costs" in text
    shown = memkit_here("ds", "show", "zero3-infinity").stdout
    assert "Saves:" in shown and "Costs:" in shown and '"nvme_path": "/local_nvme"' in shown


@pytest.mark.slow
def test_copy_writes_a_sized_preset_whose_ledger_adds_up(memkit_here: Quick, tmp_path: Path) -> None:
    disk_folder = str(tmp_path / "disk")  # it need not be on this machine
    ran = memkit_here("ds", "copy", "zero3-infinity", "ds.json", *FOR_16_GB, disk_folder, "--json")
    assert ran.returncode == 0, ran.stderr
    message = json.loads(ran.stdout)
    config = json.loads((tmp_path / "ds.json").read_text())
    assert config == message["config"]
    zero = config["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == disk_folder
    assert 80_411_200 <= zero["offload_param"]["buffer_size"] < 80_411_200 + 1024
    assert message["model"]["parameters"] == 1_557_611_200 and message["model"]["origin"] == "architecture"
    disk = {row["term"]: row["gib"] for row in message["ledger"]["disk"]}
    assert sum(disk.values()) * 2**30 == pytest.approx(18 * 1_557_611_200, rel=0.01)
    assert all(row["source"] for rows in message["ledger"].values() for row in rows)

    text = memkit_here("ds", "show", "zero3-infinity", *FOR_16_GB, disk_folder).stdout
    table = [line for line in text.splitlines() if line.startswith("pinned")]
    sizes = [parse_size(re.findall(r"[0-9.]+ [KMG]iB", line)[0]) for line in table]
    assert "sum" in table[-1] and len(table) > 2
    assert sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=0.03 * 2**30)


def test_copy_without_a_model_copies_the_constants(memkit_here: Quick, tmp_path: Path) -> None:
    ran = memkit_here("ds", "copy", "zero2-offload", "configs/")
    assert ran.returncode == 0 and "constants" in ran.stdout
    assert (tmp_path / "configs" / "zero2-offload.json").read_text() == resources.find(
        "ds_configs", "zero2-offload"
    ).read_text()


def test_problems_stand_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("zero3", "--model", "gpt2-xl", "--gpu-memory", "620MB", "--ram", "32GB")
    assert main(["ds", "show", *options]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("PROBLEM: needs ") and shown.count("PROBLEM") == 1
    assert main(["ds", "copy", "zero3", str(tmp_path / "ds.json"), *options[1:]]) == 0
    assert capsys.readouterr().err.startswith("PROBLEM: needs ")


def test_copy_says_where_bf16_is_emulated(memkit_here: Quick) -> None:
    """Would notice: a preset that switches bf16 on for a T4, and does not speak of it."""
    for preset, gpu, warned in (("zero2-lean", "T4", 1), ("zero2-lean", "A10G", 0), ("zero2", "T4", 0)):
        ran = memkit_here("ds", "copy", preset, "--model", "gpt2", "--gpu", gpu, "--overwrite", "--json")
        assert ran.returncode == 0, ran.stderr
        assert len([each for each in json.loads(ran.stdout)["problems"] if "bf16" in each]) == warned


def test_copy_writes_a_config_that_accelerate_reads(memkit_here: Quick, tmp_path: Path) -> None:
    ran = memkit_here(
        "ds", "copy", "zero3", "z.json", "--model", "gpt2", "--gpus", "4", "--nodes", "2", "--accelerate"
    )
    assert ran.returncode == 0, ran.stderr
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(tmp_path / "z-accelerate.yaml"))
    assert loaded.num_processes == 8 and loaded.num_machines == 2
    assert loaded.deepspeed_config["deepspeed_config_file"] == "z.json" and loaded.deepspeed_config["zero3_init_flag"]
    assert "mixed_precision" not in yaml.safe_load((tmp_path / "z-accelerate.yaml").read_text())


def test_an_existing_file_is_kept(memkit_here: Quick, tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text("mine")
    refused = memkit_here("ds", "copy", "zero3")
    assert refused.returncode == 2 and "--overwrite" in refused.stderr
    assert (tmp_path / "zero3.json").read_text() == "mine"
    assert memkit_here("ds", "copy", "zero3", "--overwrite").returncode == 0
    assert (tmp_path / "zero3.json").read_text() != "mine"


@pytest.mark.exhaustive
def test_sizing_takes_little_memory_for_large_models(tmp_path: Path) -> None:
    """2 GiB, nearly all of it for importing torch and transformers' modelling code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    copy = ("-m", "hf_memkit", "ds", "copy", "zero3-offload", "--model", "Llama-3.1-70B", "--gpus", "8", "--overwrite")
    ran = subprocess.run(
        [sys.executable, "-c", USED, *copy], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) * 1024 < 2 * 2**30


USED = """
import resource, subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
