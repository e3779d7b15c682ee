"""Learning curves of every optimizer beside AdamW's, on real text: `python -m benchmarks.optimizer_curves`.

A two-layer GPT-2 (a Llama where the library cannot work on GPT-2's Conv1D) of width 64 with 1013 words, so that the
word embedding divides by no block, is trained by the real Trainer on the text that comes with Python, with the same
seed and the same order of data for all. The learning rate is the best of up to three after a quarter of the steps,
the baseline's own for optimizers that are meant to do as AdamW does. The evidence is written after each arm; arms
that are in it already are not run again.

    python -m benchmarks.optimizer_curves [--out FILE] [--arms NAME;NAME] [--steps 2000]
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers import set_seed as set_all_seeds

from benchmarks.optimizer_arms import ARMS, BASELINE, Arm
from benchmarks.optimizer_bytes import cuda_does_nothing
from benchmarks.optimizer_text import Blocks, make_blocks

VOCABULARY: Final = 1013
LENGTH: Final = 64
BATCH: Final = 8
EVERY: Final = 50
OUT: Final = Path(__file__).parent / "results" / "optimizer_curves.json"
PACKAGES: Final = ("torch", "transformers", *sorted({package for arm in ARMS.values() for package in arm.packages}))


def make_model(architecture: str, dtype: str) -> Any:
    """Two layers, four heads, tied embeddings, no dropout; the same random weights each time."""
    set_all_seeds(0)
    model: Any
    if architecture == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, **off)
        )
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, max_position_embeddings=LENGTH, hidden_size=64, intermediate_size=256,
                num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    return model.to(getattr(torch, dtype))


def train(arm: Arm, rate: float, steps: int, blocks: Blocks) -> dict[str, Any]:
    """Held-out loss (nats a token) every 50 steps, and at the end."""
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "output_dir": folder, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
            "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": 64, "max_steps": steps,
            "learning_rate": rate, "lr_scheduler_type": "cosine", "warmup_steps": 100, "logging_strategy": "no",
            "eval_strategy": "steps", "eval_steps": EVERY, "prediction_loss_only": True, "data_seed": 0, "seed": 0,
        }  # fmt: skip
        arguments = TrainingArguments(**{**options, **arm.arguments})
        model = make_model(arm.architecture, arm.dtype)
        rows = [{"input_ids": row, "labels": row} for row in blocks.train]
        aside = [{"input_ids": row, "labels": row} for row in blocks.held_out]
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            eval_dataset=aside,
            optimizer_cls_and_kwargs=arm.class_and_options(rate),
        )
        trainer.remove_callback(_printer())
        started = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - started
    curve = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    steps_and_losses = [[step, round(loss, 5)] for step, loss in curve.items()]
    return {"learning_rate": rate, "held_out": steps_and_losses, "seconds": round(seconds, 1)}


def _printer() -> Any:
    from transformers import PrinterCallback

    return PrinterCallback


def compare(arm: Arm, steps: int, blocks: Blocks, chosen: dict[str, float]) -> dict[str, Any]:
    """The arm's learning rates in a quarter of the steps, and the best of them to the end."""
    tried = {rate: train(arm, rate, steps // 4, blocks)["held_out"][-1][1] for rate in arm.rates}
    finite = {rate: loss for rate, loss in tried.items() if loss == loss}
    rate = min(finite, key=lambda one: finite[one]) if finite else chosen[arm.rates_of]
    return {"tried": [[rate, loss] for rate, loss in tried.items()], **train(arm, rate, steps, blocks)}


def _compared_with(arm: Arm) -> dict[str, Any]:
    usual = BASELINE if arm.architecture == "gpt2" else f"{BASELINE}, {arm.architecture}"
    return {"baseline": arm.baseline or usual, "bar": arm.bar}


def _facts(steps: int, blocks: Blocks) -> dict[str, Any]:
    model = make_model("gpt2", "float32")
    return {
        "schema": 1,
        "benchmark": "optimizer_curves",
        "device": "cpu",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "model": {
            "layers": 2, "width": 64, "vocabulary": VOCABULARY, "length": LENGTH, "batch": BATCH,
            "parameters": sum(one.numel() for one in model.parameters()),
        },
        "text": {
            "source": "pydoc_data.topics and the docstrings of Python's library",
            "characters": blocks.characters, "train_blocks": len(blocks.train),
            "held_out_blocks": len(blocks.held_out), "blocks_sha256": blocks.sha256,
        },
        "steps": steps, "warmup_steps": 100, "schedule": "cosine", "max_grad_norm": 1.0, "weight_decay": 0.0,
        "arms": {},
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--arms", default="", help="names, with semicolons between them; all if not given")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args(argv)
    blocks = make_blocks(VOCABULARY, LENGTH, held_out=128)
    content = json.loads(options.out.read_text("utf-8")) if options.out.exists() else _facts(options.steps, blocks)
    if content["steps"] != options.steps or content["text"]["blocks_sha256"] != blocks.sha256:
        parser.error(f"{options.out} holds another text or another number of steps; delete it, or name another --out")
    for name, held in content["arms"].items():  # this is no measurement: it follows ARMS
        held.update(_compared_with(ARMS[name]))
    options.out.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    cuda_does_nothing()
    for name in [one for one in options.arms.split(";") if one] or list(ARMS):
        if name in content["arms"]:
            continue
        chosen = {done: result["learning_rate"] for done, result in content["arms"].items()}
        arm = ARMS[name]
        result = compare(arm, options.steps, blocks, chosen)
        content["arms"][name] = {
            "technique": arm.technique, "arguments": dict(arm.arguments), "optimizer": dict(arm.optimizer),
            "weights": arm.dtype, "architecture": arm.architecture, **_compared_with(arm), "cpu": arm.cpu, **result,
        }  # fmt: skip
        options.out.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        print(f"{name}: {result['held_out'][-1][1]} at {result['learning_rate']}, {result['seconds']} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
