"""The optimizer in host RAM without DeepSpeed. What DeepSpeed offloads is in `hf_memkit.deepspeed.techniques`."""

from __future__ import annotations

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import technique


@technique(
    "cpu-offload-optimizer",
    family="offload",
    slot="optimizers",
    saves="both moments of AdamW on the GPU, and without accumulation the gradients: 12 bytes a parameter in fp32",
    costs="16 bytes a parameter of RAM (half of it page-locked), an AdamW step on the CPU, two transfers a step",
    not_when="there are several GPUs, or the weights are 16-bit (use zero2-offload: it keeps an fp32 master copy)",
    proof="gpu",
    packages=("torchao",),
    gpu_only="torchao's optimizer copies between a GPU and pinned host memory",
)
def cpu_offload_optimizer(setup: Setup) -> Setup:
    """torchao's CPUOffloadOptimizer around torch's fused AdamW, on one GPU.

    Gradients are clipped on the host: Trainer would clip what has been copied already, so that its own `max_grad_norm`
    is set to 0. Accumulated ones stay on the GPU: torchao keeps only the last micro-batch's otherwise."""
    job = setup.resolved_for
    accumulated = job.accumulation > 1
    gradients = (
        f"they are accumulated on the GPU over {job.accumulation} micro-batches: torchao keeps only the last one's"
        if accumulated
        else "freed on the GPU as soon as they are on the host: nothing is accumulated"
    )
    if job.processes > 1:
        setup = setup.with_problems(
            [f"cpu-offload-optimizer supports one GPU, and there are {job.processes}; use zero2-offload"]
        )
    return setup.put(
        "trainer_parts.cpu_offload_optimizer",
        {"max_grad_norm": 1.0},
        f"AdamW steps in RAM (torchao); gradients: {gradients}; clipped there to Trainer's default norm",
    ).put("arguments.max_grad_norm", 0.0, "Trainer would clip gradients that were copied already; the optimizer clips")
