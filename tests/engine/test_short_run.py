"""A few steps of the command line, whole: quick enough to run against every supported transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Quick, read_json_lines


@pytest.mark.slow
def test_a_few_steps(quick_memkit: Quick, tmp_path: Path, text_file: Path) -> None:
    command = ["recipe", "gpt2-on-16gb", "--variant", "lora", "--data", str(text_file), "--max-steps", "3"]
    ran = quick_memkit(*command, "--output", "run", "--json")
    assert ran.returncode == 0, ran.stderr[-3000:]
    content = json.loads(ran.stdout)  # nothing else on standard output
    assert content["status"] == "finished" and content["result"]["steps"] == 3
    records = read_json_lines(tmp_path / "run" / "memory-rank0.jsonl")
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2, 3]
    # Every layer of every micro-batch was recomputed: checkpointing is on, under whichever name this version knows it.
    assert content["result"]["recomputed_layers"] == 3 * 2 * 2

    assert quick_memkit(*command, "--output", "run").returncode == 2
    again = quick_memkit(*command, "--output", "run", "--overwrite")
    assert again.returncode == 0, again.stderr[-2000:]
    assert len([r for r in read_json_lines(tmp_path / "run" / "memory-rank0.jsonl") if r["kind"] == "run"]) == 1


@pytest.mark.slow
def test_a_local_model_keeps_its_weights_and_tokenizer(quick_memkit: Quick, tmp_path: Path, text_file: Path) -> None:
    first = ["recipe", "gpt2-on-16gb", "--variant", "resident", "--data", str(text_file), "--max-steps", "3"]
    assert quick_memkit(*first, "--output", "one").returncode == 0
    second = quick_memkit(*first, "--output", "two", "--model", "one/model", "--sequence-length", "256")
    assert second.returncode == 0, second.stderr[-2000:]
    one = json.loads((tmp_path / "one" / "memkit-run.json").read_text())["result"]
    two = json.loads((tmp_path / "two" / "memkit-run.json").read_text())["result"]
    assert two["held_out_loss_before"] == pytest.approx(one["held_out_loss"], abs=0.01)
    assert "random weights" not in second.stdout.lower()
