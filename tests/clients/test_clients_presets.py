"""Scripts of others, unchanged, with files of `memkit preset copy`: the example that reads one JSON, and TRL."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_memkit.catalog.library_versions import to_installed_arguments
from hf_memkit.cli.main import main
from tests.clients.clients import Client, script, sft_script
from tests.clients.compare import ended

pytestmark = pytest.mark.slow

STEPS = 2
COMMON = {
    "output_dir": "out", "max_steps": STEPS, "logging_steps": 1, "use_cpu": True, "report_to": "none",
    "disable_tqdm": True, "learning_rate": 1e-3, "save_steps": STEPS, "per_device_train_batch_size": 2,
}  # fmt: skip
PRESETS = ("checkpointed", "8bit")


@pytest.fixture(scope="module")
def files(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What a user has, and what the presets make of it: `{client: file}`."""
    folder = tmp_path_factory.mktemp("args")
    mine = {
        "run_clm": {
            **COMMON, "model_name_or_path": f"{inputs}/tiny-gpt2", "train_file": f"{inputs}/texts.txt",
            "validation_file": f"{inputs}/few.txt", "block_size": 64, "do_train": True, "do_eval": True,
        },
        "sft": {
            **COMMON, "model_name_or_path": f"{inputs}/tiny-gpt2", "dataset_name": f"{inputs}/sft", "max_length": 64,
        },
    }  # fmt: skip
    found = {"run_clm-mine": folder / "mine.json"}
    found["run_clm-mine"].write_text(json.dumps(mine["run_clm"]))
    for client, ending in (("run_clm", "json"), ("sft", "yaml")):
        (folder / "own.json").write_text(json.dumps(mine[client]))
        for preset in ("8bit", "lora") if client == "sft" else PRESETS:
            path = folder / f"{client}-{preset}.{ending}"
            arguments = ["preset", "copy", preset, str(path), "--args", str(folder / "own.json")]
            assert main([*arguments, "--for", "trl" if client == "sft" else "run_clm"]) == 0
            found[f"{client}-{preset}"] = path
    return found


@pytest.fixture(scope="module")
def ran(drive: Callable[..., Path], files: dict[str, Path]) -> Path:
    clients = []
    for name, path in files.items():
        if name.startswith("sft"):
            clients.append(Client(name, sft_script().read_text(), (), ("--config", str(path))))
        else:
            clients.append(Client(name, script("run_clm"), (), (str(path),)))
    return drive(clients, ways=("without",))


def current(name: str) -> str:
    """A field's name in the installed transformers."""
    return next(iter(to_installed_arguments({name: True})))


def losses(ran: Path, name: str) -> list[float]:
    """The losses that a script logged, to the last bit."""
    end = ended(ran / name / "without")
    assert end.code == 0, end.stderr[-2000:]
    return [entry["loss"] for entry in end.log_history() if "loss" in entry]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_example_runs_with_one_json_and_no_change(ran: Path, files: dict[str, Path], preset: str) -> None:
    mine, with_preset = losses(ran, "run_clm-mine"), losses(ran, f"run_clm-{preset}")
    assert len(mine) == len(with_preset) == STEPS
    # bf16 autocast rounds to 8 bits of fraction; 8-bit states do the same to the update.
    assert with_preset == pytest.approx(mine, rel=0 if preset != "8bit" else 0.01)
    content = json.loads(files[f"run_clm-{preset}"].read_text())
    assert content["use_cpu"] is True and content["block_size"] == 64
    if preset == "8bit":
        assert with_preset != mine and content["bf16"] is True and "8bit" in content["optim"]
    if preset == "checkpointed":
        assert content[current("activation_checkpointing")] is True


@pytest.mark.parametrize("preset", ["8bit", "lora"])
def test_trl_takes_the_file_as_its_config(ran: Path, files: dict[str, Path], preset: str) -> None:
    with_preset = losses(ran, f"sft-{preset}")
    assert len(with_preset) == STEPS and all(0 < loss < 20 for loss in with_preset)
    assert (ran / f"sft-{preset}" / "without" / "out" / "adapter_config.json").exists() is (preset == "lora")
