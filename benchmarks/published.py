"""Predicted beside measured: trainings that others ran on real GPUs, and what memkit says of them.

    python benchmarks/published.py                      # all rows; results/published.json, row by row
    python benchmarks/published.py --new                # rows that the results don't have yet; same versions needed
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
libraries of that day it is the same. Nothing is left out because of its error. Rows whose `code` is `own` were trained
with torchtune, not with transformers: a Trainer does the same (`compile`: what it compiles); `why` says what differs.

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
import threading
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
from benchmarks.provenance import RESULTS  # noqa: E402
from benchmarks.published_models import FOLDER, Row  # noqa: E402

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
    parser.add_argument("--new", action="store_true", help="only rows that the results do not have yet")
    parser.add_argument("--today", action="store_true", help="today's libraries only")
    options = parser.parse_args()
    every = models.read_rows(*options.rows)
    rows = {name: row for name, row in every.items() if name.startswith(options.only)}
    expressed = {name: row for name, row in rows.items() if why_not(row) is None}
    os.environ[models.ROWS] = os.pathsep.join(str(path.resolve()) for path in options.rows)
    nothing_kept = options.only or options.today or options.rows != _ROWS
    evidence = Evidence(None if nothing_kept else RESULTS / "published.json", goes_on=options.new)
    with ThreadPoolExecutor(max_workers=1) as pool:  # beside today's libraries, what runs in processes of its own
        beside = [] if options.today else [pool.submit(way, expressed, evidence) for way in (_then, _peers)]
        length = _fitted_length(every.get(FITTED_ON), evidence) if _of_peft(expressed) else None
        for row in expressed.values():
            if not evidence.has(row, "today"):
                evidence.put(row, "today", _today(row, length))
        for each in beside:
            each.result()
    evidence.complete(rows)
    return 0


class Evidence:
    """What has been found, by row; kept in a file after each answer, so that a run that was stopped goes on.

    Args:
        path: the file; None: nothing is kept.
        goes_on: whether a complete file is added to, if it was made with the same versions.
    """

    def __init__(self, path: Path | None, *, goes_on: bool = False) -> None:
        from benchmarks.provenance import provenance

        self._path = path
        self._lock = threading.Lock()
        self._about: Found = {"command": "python benchmarks/published.py", **provenance(), "fitted_on": FITTED_ON}
        self._rows: dict[str, Found] = {}
        if path is not None and path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            if old["versions"] == self._about["versions"] and (goes_on or not old["complete"]):  # else all anew
                self._about |= {key: old[key] for key in ("fitted_length",) if key in old}
                self._rows = {row["id"]: row for row in old["rows"]}

    def put(self, row: Row, which: str, answer: Found) -> None:
        """Keeps an answer to a row, and shows it."""
        with self._lock:
            found = self._rows.setdefault(row["id"], _facts(row))
            found[which] = answer
            if which != "peers":
                _say(found, which)
            self._write()

    def has(self, row: Row, which: str) -> bool:
        return which in self._rows.get(row["id"], {})

    @property
    def length(self) -> int | None:
        """Of PEFT's longest batch, once it is fitted."""
        return self._about.get("fitted_length")

    def fitted(self, length: int) -> None:
        with self._lock:
            self._about["fitted_length"] = length
            self._write()

    def complete(self, rows: Mapping[str, Row]) -> None:
        """All rows in their order, with those that were not predicted."""
        with self._lock:
            self._rows = {name: self._rows.get(name) or _facts(row) for name, row in rows.items()}
            self._write(complete=True)

    def _write(self, *, complete: bool = False) -> None:
        if self._path is not None:
            content = {**self._about, "complete": complete, "rows": list(self._rows.values())}
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self._path)


def why_not(row: Row) -> str | None:
    """Why a row cannot be predicted: its settings are none of a Trainer's, or memkit does not model them."""
    if row["gpus"] != 1 and "deepspeed" not in row:
        return f"{row['sharding'].split(',')[0]} on {row['gpus']} GPUs: FSDP1 is not modelled"
    if "no optimizer" in row["method"] or row["optimizer"].startswith("none"):
        return "no optimizer step and no labels: no training with Trainer"
    if "no_equivalent" in row:
        return str(row["no_equivalent"])
    if not row["vanilla_hf"] and models.kind_of(row) != "PEFT" and row.get("code") != "own":
        return "custom kernels (FOAK, GPTQ, Liger of that day)"
    return None


def _facts(row: Row) -> Found:
    """What stands beside the prediction."""
    kept = (
        "id", "source", "model", "task", "method", "micro_batch", "seq_len", "gpus", "gpu", "measured",
        "measured_detail", "gib", "outcome", "also", "missing", "versions", "technique", "compile", "code",
        "why",
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


def _deepspeed(row: Row) -> Row:
    """The row's JSON. Before 0.19.4 DeepSpeed put its own linear layers into models made under `zero.Init` alone
    (deepspeedai/DeepSpeed#8189)."""
    config: Row = row["deepspeed"]
    version = tuple(map(int, row["versions"]["deepspeed"].split(".")))
    if "outside zero.Init" not in row["note"] or version >= (0, 19, 4):
        return config
    return {**config, "zero_optimization": {**config["zero_optimization"], "memory_efficient_linear": False}}


def _today(row: Row, length: int | None) -> Found:
    """What the public API predicts."""
    from hf_memkit import predict_trainer
    from hf_memkit.common.errors import MemkitError

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
        arguments["deepspeed"] = _deepspeed(row)
        rate = row["deepspeed"]["optimizer"]["params"]["lr"]
        if rate != "auto":  # Trainer wants both to agree
            arguments["learning_rate"] = rate
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


def _fitted_length(row: Row | None, evidence: Evidence) -> int | None:
    """The length at which the middle of the predicted range meets the row's reserved memory: found by halving."""
    if row is None or evidence.length is not None:
        return evidence.length
    low, high = _LENGTHS[0], _LENGTHS[-1]
    while low < high:
        middle = (low + high) // 2
        reserved = _today(row, middle)["peak_reserved_gib"]
        low, high = (middle + 1, high) if sum(reserved) / 2 < row["gib"] else (low, middle)
    print(f"{FITTED_ON}: its reserved memory is that of {low} tokens", flush=True)
    evidence.fitted(low)
    return low


def _then(rows: Mapping[str, Row], evidence: Evidence) -> None:
    """What the tracer finds with the libraries of the rows' own day."""
    old = [
        row
        for row in rows.values()
        if row.get("versions", {}).get("transformers", "5").startswith("4.")
        and "deepspeed" not in row
        and not evidence.has(row, "then")
    ]
    for versions, group in groupby(old, key=lambda row: _packages(row["versions"])):
        folder = _environment(versions)
        script = [sys.executable, str(ROOT / "benchmarks" / "published_then.py")]
        environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        asked = {row["id"]: row for row in group}
        with subprocess.Popen(
            [*script, *asked], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                answer = json.loads(line)
                evidence.put(asked.pop(answer.pop("id")), "then", answer)
        for row in asked.values():
            evidence.put(row, "then", {"error": f"the process ended with {child.returncode}"})


def _peers(rows: Mapping[str, Row], evidence: Evidence) -> None:
    """What else a user would go by, of the rows that measured allocated memory and whose model's config is kept."""
    answers: dict[tuple[str, str], Found] = {}
    for row in rows.values():
        config = models.config_of(row)
        if row["measured"] != "max_allocated" or row.get("task") or config is None or evidence.has(row, "peers"):
            continue
        kind, found = models.kind_of(row), Found()
        asked = {"config": config, "dtype": "bfloat16"}
        for peer in PEERS:
            request = asked
            if peer == "torch MemTracker":  # the only one that knows a batch; its step is written by hand, no adapters
                if kind != "full":
                    continue
                request = {**asked, "batch": row["micro_batch"], "length": row["seq_len"]}
            key = peer, json.dumps(request)
            if key not in answers:
                command = [sys.executable, str(ROOT / "benchmarks" / "predict_peers.py"), *key]
                ran = subprocess.run(command, capture_output=True, text=True)
                last = (ran.stderr.strip().splitlines() or [""])[-1]
                answers[key] = json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else {"error": last}
            found[peer] = answers[key]
        evidence.put(row, "peers", found)


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
