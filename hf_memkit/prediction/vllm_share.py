"""Adds the memory of a vLLM in the training's process to a prediction, by formula.

vLLM takes `gpu_memory_utilization` of the whole GPU when it starts, in addition to memory that is in use: its copy of
the weights, the activations of its largest batch, and the rest for keys and values (vLLM 0.22, the oldest that TRL
1.16 supports: v1/worker/utils.py, `request_memory`; v1/worker/gpu_worker.py, `determine_available_memory`). Asleep it
holds neither weights nor keys and values (https://docs.vllm.ai/en/latest/features/sleep_mode/, level 2).
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Final

from hf_memkit.catalog.hardware import Machine
from hf_memkit.common.terms import Phase
from hf_memkit.common.units import format_size
from hf_memkit.prediction.prediction import Prediction
from hf_memkit.prediction.traced_training import Vllm

_AWAKE: Final[tuple[Phase, ...]] = ("load", "generate", "evaluate")
"""Phases in which a vLLM that sleeps is awake: it starts, and generates (TRL 1.16: generation/vllm_generation.py,
`_init_vllm`, `generate`). TRL empties the allocator's cache before it wakes vLLM (`sync_weights`)."""


def with_vllm(prediction: Prediction, vllm: Vllm | None, machine: Machine) -> Prediction:
    """Prediction of a training with its vLLM, and verdict for the machine; without a GPU vLLM's size is unknown."""
    if vllm is None:
        return prediction
    if vllm.mode == "server":
        return prediction.with_notes(
            "vLLM runs on other GPUs (vllm_mode=server); the buffers through which it gets the weights (NCCL) lie "
            "outside the allocator and are not included"
        )
    share, weights, gpu = vllm.share, vllm.weights_bytes, machine.gpu
    if gpu is None:
        return prediction.with_notes(f"vLLM takes {share:g} of the GPU, which is not included: no GPU is named")
    size = int(share * gpu.capacity_bytes)
    sizes = f"vLLM: {share:g} × {format_size(gpu.capacity_bytes)} = {format_size(size)}, by formula, "
    extra = size
    if vllm.sleeps:
        phases = prediction.phases.items()
        awake = max((allocated for phase, (allocated, _) in phases if phase in _AWAKE), default=0)
        extra = max(0, awake + size - prediction.smallest_cap_bytes)
        sizes += f"on top of {format_size(awake)} while it is awake (start, generation); nothing while asleep"
    else:
        sizes += "on top of the training in every phase; vllm_enable_sleep_mode frees it while the model trains"
    outside = prediction.outside_allocator_bytes + extra
    result = replace(prediction, outside_allocator_bytes=outside).with_verdict(machine)
    result = replace(result, why=f"{result.why}; {sizes}")
    if weights > size:
        needed = ceil(100 * weights / gpu.capacity_bytes) / 100
        why = (
            f"vLLM cannot start: its own copy of the weights takes {format_size(weights)}, and "
            f"vllm_gpu_memory_utilization={share:g} is {format_size(size)}; give more than {needed:g}"
        )
        result = replace(result, verdict="does not fit", why=f"{why}; without vLLM: {prediction.why}")
    return result
