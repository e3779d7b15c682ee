"""Published rows beside those of `plan_speed.py`: made as today's libraries make them, traced, and timed.

Two kinds. BERT-large with and without checkpointing, accumulation, fp16 and small optimizers (published_rows/
further.jsonl), on one V100 and one RTX 3090. And Llama-2-7B with LoRA and QLoRA on two RTX 3090 (memory.jsonl), with
FSDP's full shard or with whole copies; what lies between the GPUs is not told ("slow PCIe lanes"), so that it is what
memkit assumes of a GPU that nobody says more of.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks import published_models as models
from benchmarks.published_models import FOLDER, Row

__all__ = ["further", "seconds_of", "traced"]

_ROOT: Final = Path(__file__).resolve().parents[1]
_LINEARS: Final = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
_CORES: Final = 32
"""Of the machine with two GPUs; not told, and nothing of what is timed runs on them."""

Found = dict[str, Any]


def further() -> dict[str, Row]:
    """By id, those that can be expressed and have a speed."""
    rows = models.read_rows(FOLDER / "memory.jsonl", FOLDER / "further.jsonl")
    return {name: found for name, row in rows.items() if (found := _expressed(row)) is not None}


def _expressed(row: Row) -> Row | None:
    name = row["id"]
    if name.startswith(("hfdoc-v100-", "exp13-3090-")) and "samples_per_second" in row["also"]:
        # `adamw_hf` went with transformers 5; what is nearest is torch's, which takes all parameters at once.
        of_today = {"optimizer": "adamw_torch"} if row["optimizer"].startswith("adamw_hf") else {}
        return {**row, "card": row["gpu"], **of_today}
    if name.startswith("fsdpqlora-") and row["seq_len"] == 2048 and row["model"] == "meta-llama/Llama-2-7b-hf":
        if row["measured"] != "max_reserved" or "offload" in row["sharding"].lower():
            return None
        in_4_bits = row["method"].startswith("QLoRA")
        return {
            **row,
            "gpu": "RTX 3090", "card": "RTX 3090",
            "method": row["method"].replace("all linear", _LINEARS),
            "weights_dtype": "4-bit (NF4) + bf16 LoRA" if in_4_bits else "bfloat16 + bf16 LoRA",
            "attention": "sdpa",
            "versions": {},
        }  # fmt: skip
    return None


def traced(rows: Iterable[Row]) -> dict[str, Found]:
    """What these rows compute, by id: `{"work"}` of one step, or `{"error"}` (`plan_speed_child.py`)."""
    by_name = {row["id"]: row for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in by_name.values()), encoding="utf-8")
        script = [sys.executable, str(_ROOT / "benchmarks" / "plan_speed_child.py"), folder]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", models.ROWS: str(file)}
        subprocess.run([*script, *by_name], env=environment, check=True, capture_output=True)
        return {name: json.loads((Path(folder) / f"{name}.json").read_text(encoding="utf-8")) for name in by_name}


def seconds_of(row: Row, found: Mapping[str, Any]) -> tuple[float, float, float]:
    """(low, middle, high) of one optimizer step.

    Args:
        row: of `further`.
        found: its trace, with `work`.
    """
    from hf_memkit.cards import CARDS
    from hf_memkit.gpu_rates import RATES
    from hf_memkit.prediction.step_time import step_time
    from hf_memkit.prediction.work import Work

    step = step_time(
        Work.from_json(found["work"]), RATES[row["card"]], capability=CARDS[row["card"]].capability,
        span=(0, len(found["work"]["calls"])), micro_batches=row["accumulation"],
    )  # fmt: skip
    if row["gpus"] == 1:
        return step.seconds
    from hf_memkit.host_rates import assumed_host
    from hf_memkit.models import describe
    from hf_memkit.zero.step_time import TracedSeconds, step_cost
    from hf_memkit.zero.traffic import StepTraffic, fsdp_traffic

    traffic = StepTraffic((), row["gpus"])  # whole copies: the gradients of adapters are a hundredth of the model's
    if "FULL_SHARD" in row["sharding"]:
        model = describe(row["model"], models.config_of(row), use_hub=False)
        gathered = model.parameters * (0.5 if row["weights_dtype"].startswith("4-bit") else 2)
        traffic = fsdp_traffic(
            replace(model, parameters=0), gpus=row["gpus"], accumulation=row["accumulation"], element_bytes=2,
            frozen_bytes=round(gathered), reentrant=row["checkpointing"],
        )  # fmt: skip
    parts = TracedSeconds(step.forward_s, step.backward_s, step.optimizer_s)
    exposed = step_cost(traffic, parts, RATES[row["card"]], assumed_host(_CORES)).exposed
    low, middle, high = (each - step.optimizer_s for each in step.seconds)
    return low + exposed.low, middle + exposed.middle, high + exposed.high
