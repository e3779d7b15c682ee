"""Published rows beside those of `plan_speed.py`: made as today's libraries make them, traced, and timed.

Three kinds. BERT-large with and without checkpointing, accumulation, fp16 and small optimizers (published_rows/
further.jsonl), on one V100 and one RTX 3090. Qwen1.5-0.5B on an RTX 3090 and Llama-3-8B on eight A100, with and
without checkpointing and the optimizer in RAM, under DeepSpeed's ZeRO (further.jsonl). And Llama-2-7B with LoRA and
QLoRA on two RTX 3090 (memory.jsonl), with FSDP's full shard or with whole copies. Hosts and buses are not told, of the
RTX 3090 but "slow PCIe lanes": they are what memkit assumes where nobody says more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks import published_models as models
from benchmarks.plan_speed import fsdp_of
from benchmarks.published_models import FOLDER, Row
from hf_memkit.catalog.gpu_rates import RATES
from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
from hf_memkit.catalog.host_rates import assumed_host
from hf_memkit.catalog.models import ModelFacts, describe
from hf_memkit.common.range import Range
from hf_memkit.common.units import GB
from hf_memkit.deepspeed.traffic import StepTraffic, zero_traffic
from hf_memkit.deepspeed.transfer_time import EngineHooks, TracedSeconds, engine_hooks, step_cost
from hf_memkit.prediction import wire
from hf_memkit.prediction.time.step_time import step_time
from hf_memkit.prediction.trace.work import Work

_ROOT: Final = Path(__file__).resolve().parents[1]
_LINEARS: Final = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
_CORES: Final = {1: 32, 2: 32, 8: 128}
"""Of a machine with so many GPUs; not told. Only Adam in RAM runs on them. Eight A100: as NVIDIA's DGX A100 has."""
_ADAM_BYTES: Final = 30
"""As `hf_memkit/plan/candidate_time.py` has it: of a parameter, in a step of Adam over fp32 master weights on the
GPU."""

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
    if name.startswith("gpjt-") and row["seq_len"] == 2048:
        # Half precision takes the same time in bf16; what the engine does beside the model is added in `seconds_of`.
        said = {key: value for key, value in row.items() if key != "deepspeed"}
        return {
            **said, "card": row["gpu"], "zero": row["deepspeed"], "optimizer": "adamw_torch", "attention": "sdpa",
            "weights_dtype": "bfloat16", "mixed_precision": "none",
        }  # fmt: skip
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
    """What these rows compute, by id: `{"work"}` of one step, or `{"error"}` (`plan_speed_child.py`). Of rows with
    DeepSpeed that differ in the engine alone one is traced."""
    by_name = {row["id"]: row for row in rows}
    first: dict[tuple[Any, ...], str] = {}
    of = {name: first.setdefault(_computes(row), name) for name, row in by_name.items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in by_name.values()), encoding="utf-8")
        script = [sys.executable, str(_ROOT / "benchmarks" / "plan_speed_child.py"), folder]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", models.ROWS: str(file)}
        subprocess.run([*script, *first.values()], env=environment, check=True, capture_output=True)
        found = {name: json.loads((Path(folder) / f"{name}.json").read_text(encoding="utf-8")) for name in of.values()}
    return {name: found[each] for name, each in of.items()}


def _computes(row: Row) -> tuple[Any, ...]:
    return (row["model"], row["micro_batch"], row["checkpointing"]) if "zero" in row else (row["id"],)


def seconds_of(row: Row, found: Mapping[str, Any]) -> tuple[float, float, float]:
    """(low, middle, high) of one optimizer step.

    Args:
        row: of `further`.
        found: its trace, with `work`.
    """
    model, zero = describe(row["model"], models.config_of(row), use_hub=False), row.get("zero")
    hooks = EngineHooks()
    if zero is not None:
        hooks = engine_hooks(zero["zero_optimization"]["stage"], len(model.sizes), gpus=row["gpus"])
    work = wire.loads(Work, found["work"])
    step = step_time(
        work, RATES[row["card"]], capability=KNOWN_GPUS[row["card"]].capability, span=(0, len(work.calls)),
        micro_batches=row["accumulation"], hooks_s=hooks.beside,
    )  # fmt: skip
    if row["gpus"] == 1 and zero is None:
        return step.seconds
    rates, optimizer_s = RATES[row["card"]], step.optimizer_s
    if zero is not None:
        optimizer_s = _ADAM_BYTES * model.parameters / (rates.achievable_memory_gb_per_s.value * GB)
    traffic, unit_hooks = _traffic(row, model)
    exposed = step_cost(
        traffic, TracedSeconds(step.forward_s, step.backward_s, optimizer_s), rates,
        assumed_host(_CORES[row["gpus"]]),
    ).exposed + unit_hooks  # fmt: skip
    low, middle, high = (
        each - step.optimizer_s + row["accumulation"] * alone + of_step
        for each, alone, of_step in zip(step.seconds, hooks.alone, hooks.of_step, strict=True)
    )
    return low + exposed.low, middle + exposed.middle, high + exposed.high


def _traffic(row: Row, model: ModelFacts) -> tuple[StepTraffic, Range]:
    """Transfers of a row, and seconds of the hooks of FSDP's units."""
    if "zero" in row:
        found = zero_traffic(
            row["zero"], model, gpus=row["gpus"], accumulation=row["accumulation"], recomputes=row["checkpointing"]
        )
        assert found is not None
        return found, Range(0, 0, 0)
    if "FULL_SHARD" not in row["sharding"]:  # whole copies: the gradients of adapters are a hundredth of the model's
        return StepTraffic(gpus=row["gpus"]), Range(0, 0, 0)
    return fsdp_of(row, model)
