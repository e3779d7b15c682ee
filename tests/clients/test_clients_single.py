"""Scripts of one process: language model, LoRA, sequence to sequence, a notebook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hf_memkit.common.units import GIB
from hf_memkit.measuring.memory.records import steps
from tests.clients.clients import ATTACH, COMMON, STEPS, Client, script
from tests.clients.compare import (
    assert_complete,
    assert_phases_and_categories,
    assert_same_output,
    assert_same_results,
    ended,
)

pytestmark = pytest.mark.slow

CLIENTS = (
    Client(
        "run_clm", script("run_clm"),
        (
            ("from hf_memkit import MemoryReportCallback", "import math"),
            ("callbacks=[MemoryReportCallback()],", "compute_metrics=compute_metrics"),
        ),
        (
            *COMMON, "--tokenizer_name", "{inputs}/tiny-gpt2", "--config_overrides", "n_embd=32,n_layer=2,n_head=2",
            "--train_file", "{inputs}/texts.txt", "--validation_file", "{inputs}/few.txt", "--do_train", "--do_eval",
            "--block_size", "64", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2",
            "--gradient_checkpointing", "true", "--eval_strategy", "steps", "--eval_steps", "2", "--save_steps", "2",
        ),
    ),
    Client(
        "run_lora", script("run_lora"), ATTACH,
        (*COMMON, "--model", "{inputs}/tiny-gpt2", "--train_file", "{inputs}/texts.jsonl", "--save_steps", "4"),
    ),
    Client(
        "run_summarization", script("run_summarization"), ATTACH,
        (
            *COMMON, "--model", "{inputs}/tiny-t5", "--train_file", "{inputs}/texts.jsonl",
            "--eval_strategy", "steps", "--eval_steps", "2", "--save_strategy", "no",
            "--predict_with_generate", "--generation_max_length", "8", "--label_smoothing_factor", "0.1",
        ),
    ),
    Client("notebook_cell", script("notebook_cell"), ATTACH, (), times=2),
)  # fmt: skip
COUNTED = ("run_clm", "run_summarization")  # accumulates and recomputes; generates


@pytest.fixture(scope="module")
def ran(drive: Callable[..., Path]) -> Path:
    return drive(CLIENTS, further=dict.fromkeys(COUNTED, ("counted",)))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_results_and_output_are_the_same(client: Client, ran: Path) -> None:
    without, having = (ended(ran / client.name / way) for way in ("without", "with"))
    assert_same_results(without, having)  # to the last bit
    assert_same_output(without, having, summaries=client.times)


EVENTS = {"run_clm": (2, 2), "run_lora": (0, 1), "run_summarization": (2, 0), "notebook_cell": (0, 0)}
"""Evaluations and saves of one training."""
SIZES = {
    "run_clm": (4, 256, 64), "run_lora": (8, 152, 19), "run_summarization": (8, 192, 24), "notebook_cell": (4, 96, 24),
}  # fmt: skip
"""Samples, tokens and longest sequence of the first step, as the script's data has them."""


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_records_are_complete(client: Client, ran: Path) -> None:
    having = ended(ran / client.name / "with")
    evaluations, saves = EVENTS[client.name]
    records = having.records()
    assert_complete(records, evaluations=evaluations, saves=saves, trainings=client.times)
    run, modules, first = records[0], records[1], steps(records)[0]
    assert tuple(first.get(name) for name in ("samples", "tokens", "longest_sequence")) == SIZES[client.name]
    assert (having.out / "memory-report.html").stat().st_size > 100_000
    shown = [entry for entry in having.log_history() if "memory/host_rss_gib" in entry]
    assert [entry["step"] for entry in shown] == list(range(1, STEPS + 1)) and all("loss" in entry for entry in shown)
    # Counted by hand: fp32 weights, their gradients, and AdamW's two states with a step count each.
    held = {category: size * GIB for category, size in first["held"]["host"].items()}
    trained = run["trainable_parameters"]
    assert set(held) == {"weights_gib", "gradients_gib", "optimizer_gib"} and set(first["held"]) == {"host"}
    assert held["weights_gib"] == pytest.approx(4 * run["parameters"], rel=0.02)  # and what buffers there are
    assert held["gradients_gib"] == pytest.approx(4 * trained, rel=1e-4)
    assert held["optimizer_gib"] == pytest.approx(8 * trained, rel=0.02)
    size = sum(row["bytes"] * row.get("repeats", 1) for row in modules["rows"])
    assert size == pytest.approx(held["weights_gib"], rel=0.02)


@pytest.mark.parametrize("name", COUNTED)
def test_phases_and_categories_of_real_scripts(name: str, ran: Path) -> None:
    assert_phases_and_categories(ended(ran / name / "counted"))
