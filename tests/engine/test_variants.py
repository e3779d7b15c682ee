"""Every variant of the recipe, whole, as a user runs it without a GPU: the real Trainer, the real engine."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.common.units import MIB
from hf_memkit.recipes.export.scripts.train_text import cut_into_blocks
from hf_memkit.recipes.tasks.made_up_texts import help_texts
from tests.conftest import VARIANTS, Memkit, read_json_lines

pytestmark = pytest.mark.slow

STEPS = {"infinity": 24}
"""Of the others 60, as the recipe rehearses. Fewer show that it learns; test_presets.py compares the losses."""
LAYERS = 2
MICRO_BATCHES = {"offload": 1}  # of the others two

EXPECTED = {
    "resident": ("AdamW8bit", "GPT2LMHeadModel"), "offload": ("DeepSpeedCPUAdam", "DeepSpeedEngine"),
    "infinity": ("DeepSpeedCPUAdam", "DeepSpeedEngine"), "lora": ("AdamW", "PeftModelForCausalLM"),
}  # fmt: skip
"""The optimizer, and what Trainer trains."""


def saved_model_loss(content: dict[str, Any], folder: Path, text_file: Path | None = None) -> float:
    """The held-out loss of the saved model, computed in this one process, without Trainer or DeepSpeed."""
    import numpy as np
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = {s["key"]: s["value"] for s in content["setup"]["settings"]}
    documents = help_texts() if text_file is None else [text_file.read_text(encoding="utf-8")]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows, length = Dataset.from_dict({"text": documents}), settings["data.sequence_length"]
    every = [block["input_ids"] for block in cut_into_blocks(rows, tokenizer, length)]
    held_out = min(round(0.05 * len(every)), settings["data.evaluated_blocks"])
    blocks = torch.tensor(np.array(every[-held_out:])).long()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(blocks, labels=blocks).loss)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rehearsal_learns_and_leaves_proof(memkit: Memkit, tmp_path: Path, variant: str) -> None:
    steps = STEPS.get(variant, 60)
    fewer = ["--max-steps", str(steps)] if variant in STEPS else []
    ran = memkit("recipe", "gpt2-on-16gb", "--variant", variant, "--output", "run", *fewer)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]

    content = json.loads((tmp_path / "run" / "memkit-run.json").read_text())
    result = content["result"]
    assert content["status"] == "finished" and content["rehearsal"] and result["steps"] == steps
    print(variant, result["held_out_loss_before"], result["held_out_loss"])
    if variant == "lora":  # adapters beside random weights cannot learn the text, but must clearly move towards it
        assert result["held_out_loss"] < result["held_out_loss_before"] - 0.3
    elif variant in STEPS:
        assert result["held_out_loss"] < result["held_out_loss_before"] - 0.6
    else:
        assert result["held_out_loss"] < result["unigram_loss"] - 0.15

    records = read_json_lines(tmp_path / "run" / "memory-rank0.jsonl")
    assert all(record["schema"] == 1 for record in records)
    kinds = Counter(record["kind"] for record in records)
    assert kinds["run"] == kinds["end"] == 1 and kinds["evaluate"] == 2 and kinds["save"] >= 5
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, steps + 1))
    end = records[-1]
    assert end["kind"] == "end" and end["status"] == "finished"
    assert end["callback_errors"] == 0 and end["reader_errors"] == {}, end
    assert (end["optimizer_classes"][-1], result["engine"]) == EXPECTED[variant]
    assert end["recomputed_layers"] == steps * MICRO_BATCHES.get(variant, 2) * LAYERS
    if variant == "resident":
        for moment in ("exp_avg", "exp_avg_sq"):
            assert set(end["optimizer_states"][moment]) == {"OptimState8bit", "float32"}
    if variant == "infinity":
        assert result["disk_swap_gb"] * 1e9 > 30 * MIB, "nothing was on the disk"
        assert not list((tmp_path / "run" / "nvme").rglob("*.swp"))

    if variant != "lora":  # what was saved is what was trained (LoRA saves adapters beside a random base)
        assert saved_model_loss(content, tmp_path / "run" / "model") == pytest.approx(
            result["held_out_loss"], abs=0.01
        )

    text = " ".join(ran.stdout.split())
    assert "REHEARSAL" in text and "Not rehearsed: environment.PYTORCH_ALLOC_CONF" in text
    assert "The target run trains openai-community/gpt2-xl" in text and "starts from random weights" in text
    assert (tmp_path / "run" / "model" / ("adapter_config.json" if variant == "lora" else "config.json")).exists()
