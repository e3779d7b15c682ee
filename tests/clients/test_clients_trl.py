"""TRL's own SFT script, in a process of its own each way: what `trl sft` runs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hf_memkit.measuring.memory.records import steps
from tests.clients.clients import COMMON, STEPS, Client, callback_in
from tests.clients.compare import assert_complete, assert_same_output, assert_same_results, ended

pytestmark = pytest.mark.slow


def sft_script() -> str:
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "scripts" / "sft.py").read_text()


CLIENT = Client(
    "sft", sft_script(), callback_in("import argparse", "train_dataset=dataset["),
    (
        *COMMON, "--model_name_or_path", "{inputs}/tiny-gpt2", "--dataset_name", "{inputs}/sft", "--max_length", "64",
        "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--bf16", "False",
        "--save_steps", "2", "--packing", "--use_peft", "--lora_target_modules", "c_attn", "c_proj",
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def ran(inputs: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both at once: most of their time is importing."""
    folder = tmp_path_factory.mktemp("trl")
    arguments = [argument.format(inputs=inputs) for argument in CLIENT.arguments]
    running = {}
    for way, source in ((way, CLIENT.in_way(way)) for way in ("without", "with")):
        place = folder / way
        (place / "cache").mkdir(parents=True)
        (place / "sft.py").write_text(source)
        environment = {**environment, "HF_HOME": str(place / "cache")}  # or one would find what the other has prepared
        running[way] = subprocess.Popen(
            [sys.executable, "sft.py", *arguments], cwd=place, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    for way, process in running.items():
        stdout, stderr = process.communicate(timeout=300)
        result = {"code": process.returncode, "stdout": stdout, "stderr": stderr}
        (folder / way / "ended-rank0.json").write_text(json.dumps(result))
    return folder


def test_results_are_the_same_to_the_last_bit(ran: Path) -> None:
    assert_same_results(ended(ran / "without"), ended(ran / "with"))


def test_output_is_the_same(ran: Path) -> None:
    assert_same_output(ended(ran / "without"), ended(ran / "with"))


def test_records_are_complete(ran: Path) -> None:
    records = ended(ran / "with").records()
    assert_complete(records, evaluations=0, saves=2)
    assert records[0]["model_class"] == "PeftModelForCausalLM"
    # Packed: one row of many samples, longer than any of them, and the loss is computed outside the model's forward.
    assert [step["samples"] for step in steps(records)] == [2] * STEPS
    assert all(48 < step["longest_sequence"] <= 128 and step["tokens"] > 200 for step in steps(records))
