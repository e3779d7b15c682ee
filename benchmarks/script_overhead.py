"""How long `memkit predict SCRIPT` takes beside the script's own imports and data preparation.

    python benchmarks/script_overhead.py        # results/script_overhead.json

A script tokenises and groups a text, makes its model from a config, and trains with Trainer. It is run three times up
to its model, for what it takes by itself, and three times by `memkit predict`; the medians are compared.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # also runs from a checkout that is not installed

from benchmarks.provenance import RESULTS, provenance  # noqa: E402

RUNS: Final = 3
PREDICT: Final = (sys.executable, "-m", "hf_memkit", "predict", "train.py")
SCRIPT: Final = """
import os, sys
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
from transformers import default_data_collator

words = [hash(str(number)) % 50_000 for number in range(400_000)]
rows = Dataset.from_dict({"input_ids": [words[at : at + 1024] for at in range(0, len(words) - 1024, 1024)]})
rows = rows.map(lambda batch: {"labels": batch["input_ids"]}, batched=True)
if os.environ.get("WITHOUT_MODEL"):
    sys.exit()
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("."))
Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator).train()
"""
ARGUMENTS: Final = ("--output_dir", "out", "--bf16", "--gradient_checkpointing", "--per_device_train_batch_size")
MODELS: Final[dict[str, dict[str, Any]]] = {
    "GPT-2 XL": {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25},
    "Llama-3.1-8B": {
        "model_type": "llama", "dtype": "bfloat16", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
}  # fmt: skip


def main() -> int:
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        for model, config in MODELS.items():
            (folder / "config.json").write_text(json.dumps(config))
            alone, predicted, peak = [], [], 0.0
            for _ in range(RUNS):
                without = {"WITHOUT_MODEL": "1", "CUDA_VISIBLE_DEVICES": ""}
                alone.append(_timed([sys.executable, "train.py"], folder, without)[0])
                seconds, answer = _timed(
                    [*PREDICT, "--gpu", "H200", "--json", "--", *ARGUMENTS, "4", "--gradient_accumulation_steps", "4"],
                    folder,
                    {},
                )
                predicted.append(seconds)
                peak = json.loads(answer)["peak_allocated_gib"]
            row = {
                "model": model, "script_alone_s": statistics.median(alone),
                "predict_s": statistics.median(predicted), "peak_allocated_gib": peak,
            }  # fmt: skip
            print(f"{model}: the script alone {row['script_alone_s']:.1f} s, predicted in {row['predict_s']:.1f} s")
            found.append(row)
    content = {"command": "python benchmarks/script_overhead.py", **provenance(), "rows": found}
    (RESULTS / "script_overhead.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


def _timed(command: list[str], folder: Path, more: dict[str, str]) -> tuple[float, str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder),
        **more,
    }
    began = time.monotonic()
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if ran.returncode > 1:
        raise RuntimeError(ran.stderr[-2000:])
    return seconds, ran.stdout


if __name__ == "__main__":
    raise SystemExit(main())
