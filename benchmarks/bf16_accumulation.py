"""What it costs to sum the gradients of micro-batches in bf16, as pure-bf16 training with accumulation does.

    python benchmarks/bf16_accumulation.py        # about four minutes on one core; writes the evidence

A small GPT-2 is trained in fp32 on real text (Python's own manual and docstrings), so that its gradients are those of
a model that has learnt something. Then, at its weights in bf16, the gradients of 32 micro-batches are computed in
bf16, each divided by the labels of its window as Trainer does, and summed for windows of N = 1 … 32 micro-batches:

* `sum`: relative error of the running sum in bf16 (`parameter.grad` of a bf16 parameter) against the same bf16
  gradients summed in fp32. It is what accumulation alone costs.
* `arithmetic`: relative error of that fp32 sum against the gradient of the same tokens by the fp32 model: what bf16
  weights and arithmetic cost already, without any accumulation.
* `noise`: relative distance between the fp32 gradient of this window and that of another window of the same size: how
  far gradients differ anyway from one batch to the next.

All are norms over all parameters, the median over eight windows' seeds.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs from a checkout that is not installed

from benchmarks.optimizer_text import make_blocks
from benchmarks.provenance import RESULTS, provenance

COUNTS: Final = (1, 2, 4, 8, 16, 32)
VOCABULARY: Final = 1024
SHAPE: Final = {"n_embd": 128, "n_layer": 4, "n_head": 4}


def make_model(length: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=length, **SHAPE, **none))


def train(model: Any, blocks: Tensor, steps: int, batch: int) -> float:
    """Trains in fp32; the mean loss of the last 20 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50)
        rows = blocks[order[torch.arange(step * batch, (step + 1) * batch) % len(blocks)]]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return statistics.mean(losses[-20:])


def gradient(model: Any, rows: Tensor, windows: int) -> list[Tensor]:
    """The gradients of one micro-batch of a window of `windows`, in the model's own dtype."""
    model.zero_grad()
    labels = windows * rows[:, 1:].numel()
    model(input_ids=rows, labels=rows, num_items_in_batch=labels).loss.backward()
    return [parameter.grad.detach().clone() for parameter in model.parameters()]


def norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())


def relative(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return norm([one.double() - other.double() for one, other in zip(found, expected, strict=True)]) / norm(expected)


def summed(gradients: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """Added one after the other in `dtype`, as autograd adds to `parameter.grad`."""
    total = [tensor.to(dtype) for tensor in gradients[0]]
    for one in gradients[1:]:
        for place, tensor in zip(total, one, strict=True):
            place += tensor.to(dtype)
    return total


def measure(model: Any, blocks: Tensor, micro: int, count: int, seeds: int) -> dict[str, Any]:
    """The three figures for windows of `count` micro-batches of `micro` sequences."""
    half = copy.deepcopy(model).to(torch.bfloat16)
    found: dict[str, list[float]] = {"sum": [], "arithmetic": [], "noise": []}
    for seed in range(seeds):
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(1 + seed))
        window, other = (
            [blocks[order[(start + place) * micro : (start + place + 1) * micro]] for place in range(count)]
            for start in (0, count)
        )
        gradients = [gradient(half, rows, count) for rows in window]
        exact = summed(gradients, torch.float32)
        whole = summed([gradient(model, rows, count) for rows in window], torch.float32)
        elsewhere = summed([gradient(model, rows, count) for rows in other], torch.float32)
        found["sum"].append(relative(summed(gradients, torch.bfloat16), exact))
        found["arithmetic"].append(relative(exact, whole))
        found["noise"].append(relative(elsewhere, whole))
    return {"micro_batches": count, **{key: statistics.median(values) for key, values in found.items()}}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="training steps before anything is measured")
    parser.add_argument("--seeds", type=int, default=8, help="windows a row")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    blocks = make_blocks(VOCABULARY, options.length).train
    model = make_model(options.length)
    loss = train(model, blocks, options.steps, 8)
    rows = [measure(model, blocks, options.micro_batch, count, options.seeds) for count in COUNTS]
    evidence = {
        **provenance(),
        "command": "python benchmarks/bf16_accumulation.py",
        "model": {"parameters": model.num_parameters(), "vocabulary": VOCABULARY, **SHAPE},
        "trained": {"steps": options.steps, "loss": loss},
        "micro_batch": {"sequences": options.micro_batch, "tokens": options.length},
        "seeds": options.seeds,
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "bf16_accumulation.json"
    path.write_text(json.dumps(evidence, indent=2) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
