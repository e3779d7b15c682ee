"""Records of trainings that nobody has run: made up, for tests of what shows records.

The figures follow the record contract and add up as real ones do; no number here was measured.
docs/report.md and docs/measuring.md show some of them.
"""

from __future__ import annotations

import json
import math
import random
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GIB = 2**30
CAPACITY_GIB = 15.77
MOMENT = 1_700_000_000.0

Record = dict[str, Any]


def write(folder: Path, records: Iterable[Record], rank: int = 0) -> Path:
    """Writes one rank's file as `RecordWriter` would; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"schema": 1, "time": MOMENT + i, **record}, separators=(",", ":"))
        for i, record in enumerate(records)
    ]
    with (folder / f"memory-rank{rank}.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    return folder


def run_record(**changes: Any) -> Record:
    return {
        "kind": "run",
        "start_step": 0,
        "rank": 0,
        "world_size": 1,
        "host": {"hostname": "made-up-host", "boot_id": "0", "pid": 4242, "process_started": MOMENT, "oom_kills": 0},
        "versions": {"hf_memkit": "0", "python": "3.11.9", "torch": "2.13.0", "transformers": "5.23.0"},
        "hardware": {
            "device_name": "Tesla V100-SXM2-16GB",
            "device_type": "cuda",
            "device_count": 1,
            "capacity_gib": CAPACITY_GIB,
            "allocator_cap_fraction": 1.0,
            "cpu_count": 8,
            "ram_gib": 62.7,
        },
        "arguments": {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 8,
            "optim": "adamw_bnb_8bit",
            "bf16": False,
            "fp16": True,
            "activation_checkpointing": False,
            "max_steps": 200,
        },
        "model_class": "GPT2LMHeadModel",
        "model_type": "gpt2",
        "vocabulary": 50257,
        "weights_dtypes": {"float16": 774_030_080},
        "optimizer_classes": ["AcceleratedOptimizer", "AdamW8bit"],
        "parameters": 774_030_080,
        "trainable_parameters": 774_030_080,
        "peak_allocated_gib": 1.5,
        "peak_reserved_gib": 1.6,
        **changes,
    }


def step_record(step: int, tokens: int, longest: int, rng: random.Random) -> Record:
    """One step of a GPT-2 Large in half precision whose activations and logits follow the tokens of a micro-batch."""
    weights, gradients, optimizer, buffers, other = 1.44, 1.44, 1.52, 0.12, 0.05
    activations = round(tokens * 1.25 / 1024 * (1 + longest / 8192), 10)
    loss = round(tokens * 50257 * 10 / GIB, 10)
    peak = round(weights + gradients + optimizer + activations + loss + buffers + other, 10)
    floor = weights + optimizer + other
    reserved = max(math.ceil(peak * 50) / 50 + 0.4, 10.9)
    forward, of_optimizer = peak - gradients * 0.6, floor + gradients + 0.4
    phases = {"data": floor, "forward": forward, "backward": peak, "optimizer": of_optimizer}
    record: Record = {
        "kind": "step",
        "step": step,
        "steps": 1,
        "step_time_ms": round(900 + 0.06 * tokens + rng.uniform(-20, 20), 1),
        "samples": 32,
        "tokens": tokens * 8,
        "longest_sequence": longest,
        "micro_batches": 8,
        "allocated_gib": floor,
        "reserved_gib": reserved,
        "fragmentation_gib": round(reserved - floor, 10),
        "peak_allocated_gib": peak,
        "peak_reserved_gib": reserved,
        "capacity_gib": CAPACITY_GIB,
        "alloc_retries": 0,
        "allocator_ooms": 0,
        "host_rss_gib": 4.1 + min(step, 30) * 0.01,
        "host_available_gib": 48.0 - min(step, 30) * 0.01,
        "pinned_gib": 0.06,
        "phases": {name: {"peak_allocated_gib": p, "peak_reserved_gib": reserved} for name, p in phases.items()},
    }
    if step % 2 == 0:
        record |= {"device_used_gib": reserved + 0.42, "outside_allocator_gib": 0.42}
    if step <= 3 or step % 10 == 0:
        record["categories"] = {
            "weights_gib": weights,
            "gradients_gib": gradients,
            "optimizer_gib": optimizer,
            "activations_gib": activations,
            "loss_gib": loss,
            "buffers_gib": buffers,
            "other_gib": other,
        }
        record["held"] = {"device": {"weights_gib": weights, "optimizer_gib": optimizer}}
    return record


def modules_record() -> Record:
    """Rows as of a GPT-2 Large: 36 equal layers are one row each kind."""
    rows = [
        {"name": "transformer.wte", "class": "Embedding", "parameters": 64_328_960},
        {"name": "transformer.wpe", "class": "Embedding", "parameters": 1_310_720},
        {"name": "transformer.h.0…35.ln_1", "class": "LayerNorm", "parameters": 2_560, "repeats": 36},
        {"name": "transformer.h.0…35.attn.c_attn", "class": "Conv1D", "parameters": 4_919_040, "repeats": 36},
        {"name": "transformer.h.0…35.attn.c_proj", "class": "Conv1D", "parameters": 1_639_680, "repeats": 36},
        {"name": "transformer.h.0…35.ln_2", "class": "LayerNorm", "parameters": 2_560, "repeats": 36},
        {"name": "transformer.h.0…35.mlp.c_fc", "class": "Conv1D", "parameters": 6_558_720, "repeats": 36},
        {"name": "transformer.h.0…35.mlp.c_proj", "class": "Conv1D", "parameters": 6_554_880, "repeats": 36},
        {"name": "transformer.ln_f", "class": "LayerNorm", "parameters": 2_560},
        {"name": "lm_head", "class": "Linear", "parameters": 0},
    ]
    for row in rows:
        count = int(str(row["parameters"]))
        row |= {"trainable_parameters": count, "bytes": count * 2, "places": {"device": count * 2} if count else {}}
    return {"kind": "modules", "rows": rows}


def healthy(steps: int = 200, *, seed: int = 1, longest: int = 1024, **run: Any) -> list[Record]:
    """Batches padded to their longest sequence, an evaluation and a save every 50 steps, a regular end."""
    rng = random.Random(seed)
    records = [run_record(**run), modules_record()]
    for step in range(1, steps + 1):
        length = min(longest, 256 + int(rng.betavariate(2, 3) * (longest - 256)))
        records.append(step_record(step, 4 * length, length, rng))
        if step % 50 == 0:
            common = {"step": step, "capacity_gib": CAPACITY_GIB, "host_rss_gib": 4.5, "host_available_gib": 47.6}
            records.append({"kind": "evaluate", **common, "peak_allocated_gib": 6.2, "peak_reserved_gib": 12.0})
            save = {"peak_allocated_gib": 3.2, "peak_reserved_gib": 12.0, "checkpoint": f"checkpoint-{step}"}
            records.append({"kind": "save", **common, **save})
    records.append({"kind": "end", "status": "finished", "step": steps, "steps": steps})
    return records


def out_of_memory(steps: int = 60) -> list[Record]:
    """Ever longer batches, the last of which asks for more than there is."""
    records: list[Record] = [run_record(), modules_record()]
    rng = random.Random(2)
    for step in range(1, steps + 1):
        length = 200 + step * 12 + rng.randrange(20)
        records.append(step_record(step, 4 * length, length, rng))
    last = records[-1]
    categories = {**step_record(10, 4000, 1000, rng)["categories"]}
    categories["activations_gib"] += 2.6
    allocated = sum(categories.values())
    oom = {
        "kind": "oom",
        "step": steps + 1,
        "phase": "backward",
        "micro_batch": 3,
        "samples": 4,
        "tokens": 5440,
        "longest_sequence": 1360,
        "inputs": {"input_ids": [4, 1360], "labels": [4, 1360]},
        "error_type": "OutOfMemoryError",
        "error": "CUDA out of memory. Tried to allocate 1.04 GiB.",
        "requested_gib": 1.04,
        "free_gib": 0.31,
        "capacity_gib": CAPACITY_GIB,
        "allocated_gib": allocated,
        "reserved_gib": 15.0,
        "peak_allocated_gib": max(allocated, last["peak_allocated_gib"]),
        "peak_reserved_gib": 15.0,
        "cause": "size",
        "categories": categories,
        "changes": [
            {
                "key": "arguments.per_device_train_batch_size",
                "value": 2,
                "reason": "with gradient_accumulation_steps 16 the batch of a step stays the same",
                "cost": "more, smaller steps for the GPU",
                "saves_gib": categories["activations_gib"] / 2,
                "basis": "half of the activations at the moment of the failure",
            },
            {
                "key": "arguments.activation_checkpointing",
                "value": True,
                "reason": "activations are the largest category",
                "cost": "one more forward a step",
                "saves_gib": None,
                "basis": None,
            },
        ],
    }
    end = {"kind": "end", "status": "failed", "error_type": "OutOfMemoryError", "error": oom["error"], "step": steps}
    return [*records, oom, end]


def compiled(steps: int = 30) -> list[Record]:
    """A model that torch compiles in two parts, and again for a second length; one function reaches the limit."""
    records = healthy(steps)
    figures: Record = {
        "graphs": 2, "graph_breaks": 1, "recompilations": 0, "given_up": 0, "compile_time_ms": 41_200.0,
        "graph_break_reasons": ["modeling_own.py:120: Call to `Tensor.item()`"],
    }  # fmt: skip
    by_step = {record["step"]: record for record in records if record["kind"] == "step"}
    for step, graphs, given_up in ((1, 2, 0), (2, 4, 0), (7, 5, 0), (9, 5, 1)):
        new_graphs = graphs - figures["graphs"] if step > 1 else graphs
        figures |= {"graphs": graphs, "graph_breaks": graphs // 2, "recompilations": graphs - 2, "given_up": given_up}
        if step > 1:
            figures["recompile_reasons"] = ["modeling_own.py:88: tensor 'x' size mismatch at index 1"]
        by_step[step] |= {
            "compilation": dict(figures),
            "compiled_graphs": new_graphs,
            "step_time_ms": 20_000.0 * graphs,
        }
    records[-1]["compilation"] = figures
    return records


def on_a_cpu(steps: int = 30) -> list[Record]:
    """A training without an accelerator: no allocator, so no peaks."""
    hardware = {"device_name": "x86_64", "device_type": "cpu", "cpu_count": 2, "ram_gib": 15.6, "ram_limit_gib": 8.0}
    run = run_record(hardware=hardware, model_class="LlamaForCausalLM", optimizer_classes=["AdamW"])
    for name in ("peak_allocated_gib", "peak_reserved_gib"):
        del run[name]
    records = [run]
    for step in range(1, steps + 1):
        record: Record = {
            "kind": "step",
            "step": step,
            "steps": 1,
            "step_time_ms": 210.0 + step % 7,
            "samples": 2,
            "tokens": 256,
            "longest_sequence": 128,
            "micro_batches": 1,
            "host_rss_gib": 1.4,
            "host_available_gib": 5.2,
        }
        if step <= 3 or step % 10 == 0:
            record["held"] = {"host": {"weights_gib": 0.21, "optimizer_gib": 0.42}}
        records.append(record)
    return [*records, {"kind": "end", "status": "finished", "step": steps, "steps": steps}]


def rehearsal(steps: int = 30, **prediction: Any) -> list[Record]:
    """A recipe's rehearsal on a CPU, with the prediction of its target."""
    phases = {"load": 1.25, "data": 3.33, "forward": 4.85, "backward": 4.59, "optimizer": 3.33, "evaluate": 2.88}
    categories = {
        "weights": 1.81, "gradients": 1.25, "optimizer": 0.81, "activations": 0.96, "loss": 0.0, "buffers": 0.02,
        "other": 0.0,
    }  # fmt: skip
    target = {
        "gpu": "RTX 4060",
        "peak_allocated_gib": 4.85,
        "peak_reserved_gib": [4.89, 4.99],
        "outside_allocator_gib": 0.49,
        "capacity_gib": 7.8,
        "phases": {name: {"peak_allocated_gib": gib, "peak_reserved_gib": None} for name, gib in phases.items()},
        "categories": {f"{name}_gib": gib for name, gib in categories.items()},
        "peak_phase": "forward",
        "host_rss_gib": 4.2,
        "pinned_gib": 0.0,
        "disk_gib": None,
        "verdict": "fits",
        "why": "the allocator takes at most 4.99 GiB, and 7.31 GiB are available",
        "confidence": {"level": "trace", "rests_on": "two traced optimizer steps", "measured_on": None},
        **prediction,
    }
    records = on_a_cpu(steps)
    setup = [{"key": "arguments.bf16", "value": True, "reason": "half the bytes"}]
    records[0]["facts"] = {
        "recipe": "bert-large-on-8gb", "variant": "8bit", "rehearsal": True, "setup": setup,
        "target_prediction": target,
    }  # fmt: skip
    return records


def of_ranks(folder: Path, count: int = 4, steps: int = 60) -> Path:
    """Ranks with batches of different lengths."""
    for rank in range(count):
        write(folder, healthy(steps, seed=rank, rank=rank, world_size=count), rank)
    return folder


def hosted_here(**host: Any) -> dict[str, Any]:
    """The `host` field of a process of this machine's present boot."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"hostname": socket.gethostname(), "boot_id": boot_id, **host}
