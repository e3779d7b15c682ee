"""What FSDP adds to a step, against published steps of one and of two A100 80GB with the same micro-batch.

    python -m benchmarks.published_two_gpus

foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv @ 24bdadb: full fine-tuning in bf16,
micro-batch 4, reentrant checkpointing, FSDP1's full shard, 100 steps, the first with the start of NCCL in it. Of one
GPU's step the optimizer is computed, and the rest is what each of two takes before anything is moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from hf_memkit.catalog.architectures import ARCHITECTURES
from hf_memkit.catalog.host_rates import assumed_host
from hf_memkit.catalog.models import describe
from hf_memkit.catalog.rates import Figure, GpuRates
from hf_memkit.deepspeed.traffic import fsdp_traffic
from hf_memkit.deepspeed.transfer_time import TracedSeconds, step_cost

_SHEET: Final = "NVIDIA A100 80GB data sheet (SXM)"
_A100: Final = GpuRates(
    dense_tflops={},
    achievable_tflops={},
    memory_gb_per_s=Figure(2039, _SHEET),
    achievable_memory_gb_per_s=Figure(1700, "assumed: 83 % of the data sheet"),
    pcie_gb_per_s=Figure(25, "assumed: 80 % of PCIe 4"),
    nvlink_gb_per_s=Figure(300, _SHEET),
    multiprocessors=Figure(108, _SHEET),
)
"""NVLink is assumed: the source does not say how its GPUs are connected."""

_ADAM_BYTES: Final = 32
"""A parameter: 16 passes of torch's foreach AdamW over bf16."""

_MISTRAL: Final = "mistralai/Mistral-7B-v0.1"
_SANTACODER: Final[dict[str, Any]] = {
    "model_type": "gpt_bigcode", "vocab_size": 49280, "n_positions": 2048, "n_embd": 2048, "n_layer": 24, "n_head": 16,
    "multi_query": True,
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Rows of the source with one GPU and with two, seconds a step."""

    name: str
    model: str
    config: dict[str, Any]
    one_s: float
    two_s: float


PAIRS: Final = (
    Pair("santacoder", "bigcode/gpt_bigcode-santacoder", _SANTACODER, 0.476604, 0.513528),
    Pair("santacoder, fused kernels", "bigcode/gpt_bigcode-santacoder", _SANTACODER, 0.482564, 0.515096),
    Pair("Mistral 7B", _MISTRAL, dict(ARCHITECTURES[_MISTRAL].config), 5.34954, 5.44512),
    Pair("Mistral 7B, fused kernels", _MISTRAL, dict(ARCHITECTURES[_MISTRAL].config), 4.75303, 4.85708),
)


def main() -> None:
    for pair in PAIRS:
        model = describe(pair.model, pair.config, use_hub=False)
        optimizer_s = _ADAM_BYTES * model.parameters / 1e9 / _A100.achievable_memory_gb_per_s.value
        computing_s = pair.one_s - optimizer_s
        traced = TracedSeconds(computing_s / 4, 3 * computing_s / 4, optimizer_s)  # recomputed: 1 to 3
        traffic = fsdp_traffic(model, gpus=2, accumulation=1, element_bytes=2, reentrant=True)
        cost = step_cost(traffic, traced, _A100, assumed_host(32)).exposed
        low, middle, high = (computing_s + each for each in (cost.low, cost.middle, cost.high))
        print(
            f"{pair.name}: two GPUs {pair.two_s:.3f} s measured, {middle:.3f} ({low:.3f} to {high:.3f}) predicted, "
            f"{100 * (middle / pair.two_s - 1):+.1f} %; more than one GPU: {1000 * (pair.two_s - pair.one_s):+.0f} ms "
            f"measured, {1000 * (middle - pair.one_s):+.0f} ms predicted"
        )


if __name__ == "__main__":
    main()
