"""Predicted beside measured: trainings that others ran on real GPUs, and what memkit says of them.

    python benchmarks/published.py                      # all rows, then results/published.json
    python benchmarks/published.py --only fms-2024-11   # rows whose id begins so; nothing is written
    python benchmarks/published.py --rows FILE [FILE…]  # other rows, in the format of published_rows/memory.jsonl

```
published_rows/memory.jsonl ──┬─> with today's libraries: predict_trainer ───────────────┬─> results/published.json
  further.jsonl (facts, with  │
  their source)               ├─> with the libraries of that day: published_then.py ──────┤       └─> docs/predict.md
  comparable.json ────────────┘   (transformers 4.x in .compat/, which is made by pip)     └─> README.md
```

Each row is predicted with its own settings. Whether today's libraries allocate what those of the row did was decided
by reading both, before anything was predicted, by model family, method and version (`comparable.json`, with source
lines): the code is the same, near (its one difference, computed from shapes, is below 1.25 %), or different. With the
libraries of that day it is the same. Nothing is left out because of its error.

`measured` says what a row's figure is. `max_allocated` and `max_reserved` are PyTorch's own. `active_bytes` is what
was allocated, and freed blocks that another stream still waited for. `nvml_less_context` is what NVML showed after the
training less a context: what was reserved, and what the context grew by (from torch 2.0 on a kernel is loaded when it
is first used). A row with an `outcome` and no figure says whether the training fitted.

PEFT's table tells no length of its longest batch, which is the same in all of its rows: it is fitted on one of them
(`FITTED_ON`), and that row is not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from itertools import groupby
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # also runs from a checkout that is not installed

from benchmarks import published_models as models  # noqa: E402
from benchmarks.predict_peers import PEERS  # noqa: E402
from benchmarks.published_models import FOLDER, Row  # noqa: E402

__all__ = ["FITTED_ON", "why_not"]

FITTED_ON: Final = "peft-2026-07-lora--llama-3.2-3B-rank64-rslora"
_ROWS: Final = [FOLDER / "memory.jsonl", FOLDER / "further.jsonl"]
_LENGTHS: Final = range(600, 769)
"""Among which the length of PEFT's longest batch is: texts are cut at 768 tokens."""
_TODAY: Final = {"adamw_hf": "adamw_torch_fused"}
"""What transformers no longer has, and what comes nearest: `adamw_hf` had one temporary, of the largest parameter."""
_NO_TOKENIZERS: Final = ("transformers==4.6.", "transformers==4.16.")
"""Those whose tokenizers has no wheel for this Python; `published_then.py` does without."""

Found = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, nargs="+", default=_ROWS)
    parser.add_argument("--only", default="", metavar="PREFIX")
    parser.add_argument("--today", action="store_true", help="today's libraries only")
    options = parser.parse_args()
    every = models.read_rows(*options.rows)
    rows = {name: row for name, row in every.items() if name.startswith(options.only)}
    found: dict[str, Found] = {name: _facts(row) for name, row in rows.items()}
    expressed = {name: row for name, row in rows.items() if why_not(row) is None}
    os.environ[models.ROWS] = os.pathsep.join(str(path.resolve()) for path in options.rows)
    with ThreadPoolExecutor(max_workers=2) as pool:
        then = pool.submit(_then, expressed) if not options.today else None
        length = _fitted_length(every.get(FITTED_ON)) if _of_peft(expressed) else None
        if length:
            print(f"{FITTED_ON}: its reserved memory is that of {length} tokens", flush=True)
        for name, row in expressed.items():
            found[name]["today"] = _today(row, length)
            _say(found[name], "today")
        for name, answer in _peers(expressed).items() if not options.today else ():
            found[name]["peers"] = answer
        for name, answer in then.result().items() if then is not None else ():
            found[name]["then"] = answer
            _say(found[name], "then")
    if options.only or options.today or options.rows != _ROWS:
        return 0
    from benchmarks.provenance import RESULTS, provenance

    content = {
        "command": "python benchmarks/published.py", **provenance(), "fitted_on": FITTED_ON, "fitted_length": length,
        "rows": list(found.values()),
    }  # fmt: skip
    (RESULTS / "published.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def why_not(row: Row) -> str | None:
    """Why a row cannot be predicted: its settings are none of a Trainer's, or memkit does not model them."""
    if row["gpus"] != 1 and "deepspeed" not in row:
        return f"{row['sharding'].split(',')[0]} on {row['gpus']} GPUs: FSDP is not modelled"
    if "no optimizer" in row["method"] or row["optimizer"].startswith("none"):
        return "no optimizer step and no labels: no training with Trainer"
    if not row["vanilla_hf"] and models.kind_of(row) != "PEFT":
        return "kernels of its own (FOAK, GPTQ, Liger of that day)"
    return None


def _facts(row: Row) -> Found:
    """What stands beside the prediction."""
    kept = (
        "id", "source", "model", "task", "method", "micro_batch", "seq_len", "gpus", "gpu", "measured",
        "measured_detail", "gib", "outcome", "also", "missing", "versions",
    )  # fmt: skip
    found: Found = {key: row[key] for key in kept if key in row}
    if (reason := why_not(row)) is not None:
        found["not_predicted"] = reason
    elif "deepspeed" in row:
        found["not_then"] = "what DeepSpeed holds is memkit's arithmetic for the DeepSpeed of today"
    version = row.get("versions", {}).get("transformers", "")
    for entry in json.loads((FOLDER / "comparable.json").read_text(encoding="utf-8")):
        same = (entry["family"], entry["method"]) == (models.family_of(row), models.kind_of(row))
        if same and version in entry["transformers"]:
            found |= {"code": entry["code"], "why": entry["why"]}
    return found


def _today(row: Row, length: int | None) -> Found:
    """What the public API predicts."""
    from hf_memkit import predict_trainer
    from hf_memkit.errors import MemkitError

    tokens = int(row["seq_len"] or length or 0)
    example: dict[str, Any] = models.example_of(row, tokens)
    if row["seq_len"] is None or row.get("padded"):  # texts of several lengths, and the longest is not padded
        example["attention_mask"] = [1] * (tokens - 1) + [0]
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": row["micro_batch"],
        "gradient_accumulation_steps": row["accumulation"],
        "gradient_checkpointing": row["checkpointing"],
        "save_strategy": "no",
        **models.precision_of(row),
    }
    if row["checkpointing"]:  # reentrant: the default of that day
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": row.get("reentrant", True)}
    if row["fused_loss"].startswith("Liger"):
        arguments["use_liger_kernel"] = True
    optimizer = models.optimizer_of(row)
    if isinstance(optimizer, str):
        arguments["optim"] = _TODAY.get(optimizer, optimizer)
    sharded = "deepspeed" in row
    if sharded:
        arguments["deepspeed"] = row["deepspeed"]
    try:
        found = predict_trainer(
            models.transformers_config(row) if sharded else f"benchmarks.published_models:{models.attribute(row)}",
            arguments,
            example=example,
            optimizer_cls_and_kwargs=optimizer if isinstance(optimizer, tuple) else None,
            trainer_class="benchmarks.published_trainer:KeepsOutputs" if models.kind_of(row) == "PEFT" else None,
            gpu=row["gpu"].removeprefix("NVIDIA "),
            gpus=row["gpus"],
        )
    except MemkitError as error:
        return {"error": str(error)}
    said = found.to_json()
    return {
        **{name: said[name] for name in ("peak_allocated_gib", "peak_reserved_gib", "outside_allocator_gib")},
        **({"verdict": said["verdict"]} if "outcome" in row else {}),
        "between_steps_gib": said["phases"]["data"]["peak_allocated_gib"],
        "peak_phase": found.peak_phase,
        "peak_operation": found.peak_operation,
        "peak_category": found.largest_category,
    }


def _of_peft(rows: Mapping[str, Row]) -> bool:
    return any(row["seq_len"] is None for row in rows.values())


def _fitted_length(row: Row | None) -> int | None:
    """The length at which the middle of the predicted range meets the row's reserved memory: found by halving."""
    if row is None:
        return None
    low, high = _LENGTHS[0], _LENGTHS[-1]
    while low < high:
        middle = (low + high) // 2
        reserved = _today(row, middle)["peak_reserved_gib"]
        low, high = (middle + 1, high) if sum(reserved) / 2 < row["gib"] else (low, middle)
    return low


def _then(rows: Mapping[str, Row]) -> dict[str, Found]:
    """What the tracer finds with the libraries of the rows' own day."""
    found: dict[str, Found] = {}
    old = [
        row
        for row in rows.values()
        if row.get("versions", {}).get("transformers", "5").startswith("4.") and "deepspeed" not in row
    ]
    for versions, group in groupby(old, key=lambda row: _packages(row["versions"])):
        folder = _environment(versions)
        script = [sys.executable, str(ROOT / "benchmarks" / "published_then.py")]
        environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        names = [row["id"] for row in group]
        ran = subprocess.run([*script, *names], env=environment, capture_output=True, text=True)
        last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        found.update({name: {"error": last} for name in names})  # of those that are not told below
        for line in ran.stdout.splitlines():
            answer = json.loads(line)
            found[answer.pop("id")] = answer
    return found


def _peers(rows: Mapping[str, Row]) -> dict[str, Found]:
    """What else a user would go by, of the rows that measured allocated memory and whose model's config is kept."""
    asked = {
        name: {
            "config": config, "batch": row["micro_batch"], "length": row["seq_len"], "dtype": "bfloat16",
            "bytes_a_parameter": {"full": 16, "LoRA": 2}.get(models.kind_of(row), 0.5),
        }
        for name, row in rows.items()
        if row["measured"] == "max_allocated" and (config := models.config_of(row)) is not None
    }  # fmt: skip
    answers: dict[tuple[str, str], Found] = {}
    found: dict[str, Found] = {name: {} for name in asked}
    for name, request in asked.items():
        for peer in PEERS:
            if peer == "torch MemTracker" and models.kind_of(rows[name]) != "full":
                continue  # its step is written by hand, without adapters
            if peer != "torch MemTracker":  # the others know no batch
                request = {**request, "batch": None, "length": None}
            key = peer, json.dumps(request)
            if key not in answers:
                command = [sys.executable, str(ROOT / "benchmarks" / "predict_peers.py"), *key]
                ran = subprocess.run(command, capture_output=True, text=True)
                last = (ran.stderr.strip().splitlines() or [""])[-1]
                answers[key] = json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else {"error": last}
            found[name][peer] = answers[key]
    return found


def _packages(versions: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{name}=={versions[name]}" for name in ("transformers", "peft", "accelerate") if name in versions)


def _environment(packages: tuple[str, ...]) -> Path:
    """A folder with these libraries, and the tokenizers and huggingface-hub that this transformers takes."""
    folder = ROOT / ".compat" / "published" / "-".join(packages).replace("==", "-")
    if not (folder / "complete").exists():
        _install(folder, packages)
        beside = ("huggingface-hub",) if packages[0].startswith(_NO_TOKENIZERS) else ("tokenizers", "huggingface-hub")
        _install(folder, tuple(_needed(folder, *beside)))
        (folder / "complete").touch()
    return folder


def _install(folder: Path, packages: tuple[str, ...]) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-input", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), *packages], check=True)


def _needed(folder: Path, *names: str) -> Iterator[str]:
    """What transformers in this folder says of these packages."""
    (transformers,) = (each for each in distributions(path=[str(folder)]) if each.name == "transformers")
    for said in transformers.requires or ():
        requirement = said.partition(";")[0].strip()
        if "extra ==" not in said and re.match(r"[\w-]+", requirement)[0] in names:  # type: ignore[index]
            yield requirement


def _say(found: Found, which: str) -> None:
    answer = found[which]
    if "error" in answer:
        print(f"{found['id']}  {which}: {answer['error'][:150]}", flush=True)
        return
    low, high = answer["peak_reserved_gib"]
    if found["gib"] is None:
        print(f"{found['id']}  {which}: {found['outcome']}, predicted: {answer['verdict']}, {high:.2f}", flush=True)
        return
    print(
        f"{found['id']}  {which}: measured {found['gib']:.4f} ({found['measured']}), predicted "
        f"{answer['peak_allocated_gib']:.4f} ({answer['peak_allocated_gib'] / found['gib'] - 1:+.3%}), reserved "
        f"{low:.2f} to {high:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
